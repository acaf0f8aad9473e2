"""Commands of `hybrid-kv` that need a checkout; `hybrid_kv.cli.checkout` finds them by name."""
