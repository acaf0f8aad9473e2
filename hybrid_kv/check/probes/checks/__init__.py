"""Probes by what they disturb.

A file here that registers some is a new part of the guard of every engine.
"""
