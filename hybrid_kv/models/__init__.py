"""Model families, and what their configuration files say about the cache."""
