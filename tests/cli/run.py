"""The command line in this process."""

from __future__ import annotations

import pytest

from hybrid_kv.cli import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        main(list(args))
    out, err = capsys.readouterr()
    return left.value.code, out, err  # type: ignore[return-value]
