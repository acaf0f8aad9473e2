"""The checks of an engine, this one or another: the guard, probes, their targets, the server."""
