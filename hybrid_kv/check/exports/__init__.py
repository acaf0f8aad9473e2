"""Tests of an engine's cache that the engine's own repository can hold."""
