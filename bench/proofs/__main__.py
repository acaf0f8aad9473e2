"""`python -m bench.proofs`: kernel × property, each proven, refuted by a witness, or not proven."""

from __future__ import annotations

import sys

from bench.proofs.kernels import cases
from bench.proofs.prove import PROPERTIES, prove


def main() -> int:
    """Print a table in Markdown, a row as it comes; return 1 if a witness was found."""
    print(f"| kernel | {' | '.join(PROPERTIES)} | questions | s |")
    print(f"|---|{'---|' * len(PROPERTIES)}--:|--:|")
    refuted = 0
    for case in cases():
        found = [*prove(case)]
        words = " | ".join(one.word if one.num_queries else "–" for one in found)
        num, seconds = sum(one.num_queries for one in found), sum(one.seconds for one in found)
        print(f"| {case.name} | {words} | {num:,} | {seconds:.0f} |", flush=True)
        for one in found:
            if one.word != "proven":
                refuted += one.word == "witness"
                print(f"{one.case}, {one.property}: {one.said}", file=sys.stderr)
    return int(refuted > 0)


if __name__ == "__main__":
    raise SystemExit(main())
