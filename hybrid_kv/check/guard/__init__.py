"""The guard, which answers whether a change is still right, and still fast."""
