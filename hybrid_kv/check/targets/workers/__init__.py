"""What runs in an engine's own environment: scripts that import that engine and `pipe`, and nothing of ours."""
