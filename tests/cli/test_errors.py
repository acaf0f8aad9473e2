"""Where an error becomes one line and an exit code, in whichever command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybrid_kv.cli import main
from tests.cli.run import run


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("guard --quik", ["--quik", "--quick", "; see hybrid-kv guard --help"]),
        ("plan --foo", ["--foo", "; see hybrid-kv plan --help"]),
        ("plan", ["Missing argument 'config'", "; see hybrid-kv plan --help"]),
        ("plan x --platform tpu", ["--platform': 'tpu'", "'cuda', 'xpu', 'cpu'"]),
        ("plan x --block-size big", ["--block-size", "integer", "'big'"]),
        ("plan x y z", ["y z", "; see hybrid-kv plan --help"]),
        ("compare --seed -1", ["--seed", "0", "'-1'"]),
        ("results --last", ["--last", "; see hybrid-kv"]),
        ("results --since x", ["--since x is no moment"]),
        ("accuracy compare one.jsonl", ["'candidate'", "; see hybrid-kv accuracy compare --help"]),
        ("guerd", ["'guerd'", "'guard'", "; see hybrid-kv --help"]),
    ],
)
def test_wrong_usage_is_one_line_on_stderr_and_exit_2(
    capsys: pytest.CaptureFixture[str], line: str, parts: list[str]
) -> None:
    code, out, err = run(capsys, *line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert not [part for part in parts if part not in err]


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (2, "")
    assert "guard" in out and "--help" in out


def test_a_bug_is_not_dressed_up_as_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("hybrid_kv.models.shapes.model_shape", broken)
    with pytest.raises(ZeroDivisionError):
        main(["plan", "config.json", "--num-blocks", "9"])


def test_a_file_that_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr("hybrid_kv.models.shapes.model_shape", refused)
    assert run(capsys, "plan", "config.json", "--num-blocks", "9") == (2, "", "error: some/file: Permission denied\n")


def test_a_sanitizers_report_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hybrid_kv.sanitizer import SanitizerError

    def broken(*_: object, **__: object) -> None:
        raise SanitizerError("owner", "block 3 has two owners\n  step 1: request 0\n  step 2: request 1")

    monkeypatch.setattr("hybrid_kv.models.shapes.model_shape", broken)
    code, out, err = run(capsys, "plan", "config.json", "--num-blocks", "9")
    assert (code, out) == (1, "")
    assert err == "block 3 has two owners\n  step 1: request 0\n  step 2: request 1\n"


def test_help_needs_no_torch() -> None:
    code = "import sys; from hybrid_kv import cli\ntry: cli.main(['plan', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--gpu-memory" in done.stdout
