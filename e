Usage: python -m hybrid_kv.cli compare [OPTIONS] [base] [head]
Try 'python -m hybrid_kv.cli compare --help' for help.
╭─ Error ──────────────────────────────────────────────────────────────────────╮
│ Got unexpected extra argument(s) (--out /tmp/review/x/cmp.csv)               │
╰──────────────────────────────────────────────────────────────────────────────╯
