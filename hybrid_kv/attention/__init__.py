"""Per-step metadata of attention and Mamba layers, in persistent buffers."""
