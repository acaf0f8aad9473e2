"""Modules that operations share: launches, rows of different lengths, strided blocks, uploads."""
