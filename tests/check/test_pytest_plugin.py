"""The plugin in another repository: each probe is an item; without its option, no import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from hybrid_kv.check.probes import guarded
from hybrid_kv.check.targets import kinds
from hybrid_kv.config import ConfigError
from tests.check.probes.toy import ToyKind, ToyOracle

pytest_plugins = ["pytester"]
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def probed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest, in an empty folder, on the toy engine with a bug or a lack of something."""
    monkeypatch.setattr(kinds, "model_folder", lambda model: nullcontext(str(pytester.path)))
    monkeypatch.setattr(guarded, "Oracle", lambda folder, dtype: ToyOracle())
    (pytester.path / "config.json").write_text('{"model_type": "toy", "vocab_size": 50}')

    def run(*options: str, **how: object) -> pytest.RunResult:
        monkeypatch.setattr(kinds, "kind_of", lambda name, python: ToyKind(**how))
        target = ("--hybrid-kv-target", "toy", "--hybrid-kv-model", "toy")
        return pytester.runpytest_inprocess(
            "-p", "hybrid_kv.pytest_plugin", "-p", "no:benchmark", *target, *options
        )

    return run


def test_each_probe_of_each_setting_is_an_item(probed: Run) -> None:
    probed("-k", "repeat or salts").assert_outcomes(passed=4)
    probed("-k", "salts", can=frozenset({"batch", "logprobs"})).assert_outcomes(skipped=2)


def test_a_wrong_answer_fails_its_item_alone(probed: Run) -> None:
    found = probed("-k", "alone or repeat", bug="hit")
    found.assert_outcomes(passed=3, failed=1)
    found.stdout.fnmatch_lines(
        ["*hybrid-kv[[]prefix=on[]]::repeat*", "wrong: *", "reduce it: hybrid-kv check *"]
    )
    assert "Traceback" not in found.stdout.str()


def test_an_engine_that_does_not_start_is_an_error_in_one_line(
    probed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(model: str) -> None:
        raise ConfigError(f"{model}: there is no such folder")

    monkeypatch.setattr(kinds, "model_folder", missing)
    found = probed("-k", "alone")
    found.assert_outcomes(errors=2)
    assert (
        "toy: there is no such folder" in found.outlines and "Traceback" not in found.stdout.str()
    )


def test_a_target_without_its_model_is_wrong_usage(pytester: pytest.Pytester) -> None:
    found = pytester.runpytest_inprocess(
        "-p", "hybrid_kv.pytest_plugin", "--hybrid-kv-target", "ours"
    )
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["ERROR: --hybrid-kv-target needs --hybrid-kv-model: *"])


def test_a_python_that_is_none_is_wrong_usage(pytester: pytest.Pytester) -> None:
    found = pytester.runpytest_inprocess("--hybrid-kv-target=vllm", "--hybrid-kv-python=no/python")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(
        ["ERROR: no/python: No such file or directory; give the Python of an environment"]
    )


def test_without_the_option_pytest_starts_as_fast_as_ever() -> None:
    code = (
        "import sys, pytest; n = len(sys.modules); import "
        "hybrid_kv.check.pytest_plugin; print(len(sys.modules) - n)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"
