"""Measure the benchmarks of all suites, or of some.

python -m bench [--quick] [--suite NAME] [-k PART] [--tier gpu] [--peers FOLDER …] [--json]
    [--out FILE.csv]
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_kv.errors import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `bench.harness.command`, whose imports take seconds: Ctrl-C is one line in them, too."""
    from bench.harness import command

    return command.main(arguments)


if __name__ == "__main__":
    run_command(main)
