"""Known bugs as patches of SGLang's own source, `mutants/sglang/*.patch`, and what finds them.

    python -m mutants.runner.sglang --python PYTHON [--out FILE.csv] [NAME ...]
    python -m mutants.runner.sglang --table

The exact model inside its scheduler. `--table` writes the tables of `mutants/sglang/README.md` from
`mutants/sglang/found.csv`.
"""

from __future__ import annotations

from mutants.runner.patched import PatchedEngine, main

# A tree of the shipped Rust core would run none of the patched lines.
SGLANG = PatchedEngine("sglang", "SGLang", model="gdn", levels={"tree": "python"})

if __name__ == "__main__":
    main(SGLANG)
