"""Scripts that run in an engine's own environment.

They import that engine and `pipe`, and nothing of ours.
"""
