"""The cache: one block pool, one raw memory, block tables per group; it knows no model."""
