"""What a wrong command line of a module says."""

from __future__ import annotations

import pytest

from bench.harness.arguments import ArgumentParser
from hybrid_kv.errors import run_command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--qui"], "unrecognized arguments: --qui"),
        (["--tier", "x"], "argument --tier: invalid choice: 'x'"),
    ],
)
def test_an_error_is_one_line_and_names_the_way_out(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser("python -m bench", "Measures.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tier", choices=["cpu", "gpu"])
    with pytest.raises(SystemExit) as caught:
        run_command(lambda: parser.parse_args(arguments))
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and not out
    assert err.startswith(f"error: {message}") and err.endswith("; see python -m bench --help\n")
    assert err.count("\n") == 1
