"""What checks an engine, this one or another: the guard, probes and their targets, the server."""
