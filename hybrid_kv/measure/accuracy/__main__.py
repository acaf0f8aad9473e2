"""`python -m hybrid_kv.measure.accuracy …`: `lm_eval …` with our model and tasks."""

from __future__ import annotations

import sys
from pathlib import Path

from hybrid_kv.errors import run_command


def main() -> None:
    """Run lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    import hybrid_kv.measure.accuracy.lm_eval_model  # noqa: F401 - registers the model

    if len(sys.argv) > 2 and not any(
        argument.startswith("--include_path") for argument in sys.argv
    ):
        sys.argv += ["--include_path", str(Path(__file__).parent / "tasks")]
    cli_evaluate()


if __name__ == "__main__":
    run_command(main)
