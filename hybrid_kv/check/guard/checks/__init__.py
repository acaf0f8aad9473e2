"""The checks of `hybrid-kv guard`, one module each; docs/adding-a-check.md says how to add one."""
