"""`python -m hybrid_kv.cli`."""

from hybrid_kv.cli import main

main()
