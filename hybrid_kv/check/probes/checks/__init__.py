"""Probes by what they disturb: a file here that registers some is a new part of the guard of every engine."""
