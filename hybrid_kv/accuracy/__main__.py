"""`python -m hybrid_kv.accuracy …` is `lm_eval …` that knows the model hybrid_kv and the tasks of this package."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run lm-eval's command line. Exit code 2, with one line, when the engine cannot run the request."""
    from lm_eval.__main__ import cli_evaluate

    import hybrid_kv.accuracy.lm_eval_model  # noqa: F401 - registers the model
    from hybrid_kv.config import HybridKVError

    if len(sys.argv) > 2 and not any(argument.startswith("--include_path") for argument in sys.argv):
        sys.argv += ["--include_path", str(Path(__file__).parent / "tasks")]
    try:
        cli_evaluate()
    except HybridKVError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
