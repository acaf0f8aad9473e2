"""The cache: one block pool, one raw memory, block tables per group. Knows no model and no kernel."""
