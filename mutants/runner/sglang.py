"""Known bugs as patches of SGLang's own source, `mutants/sglang/*.patch`, and what finds them.

    python -m mutants.runner.sglang --python PYTHON [--out FILE.csv] [NAME ...]
    python -m mutants.runner.sglang --table

The exact model inside its scheduler. `--table` writes the tables of `mutants/sglang/README.md` from
`mutants/sglang/found.csv`.
"""

from __future__ import annotations

from mutants.runner.patched import PatchedEngine, main

# A tree of the shipped Rust core runs none of the lines that are patched in the Python one.
SGLANG = PatchedEngine(
    "sglang",
    "SGLang",
    model="gdn",
    levels={"tree": "python"},
    variants={"Rust core": {"tree": "rust"}},
)

if __name__ == "__main__":
    main(SGLANG)
