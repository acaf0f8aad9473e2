"""Engines on Triton's kernels are seen to be wrong, and to launch nothing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from hybrid_kv.check.guard.cases import replay
from hybrid_kv.check.guard.checks import triton
from hybrid_kv.check.guard.registry import Run
from hybrid_kv.check.guard.replay import to_json
from hybrid_kv.check.guard.scenario import Scenario
from hybrid_kv.sampling import SamplingParams

pytest.importorskip("triton")


def test_what_launches_nothing_is_void() -> None:
    result = triton.launch_result({*triton.KERNELS} - {"_states"})
    assert not result.passed and result.detail == "void: never launched: _states"


def test_without_triton_the_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        triton,
        "find_spec",
        lambda name: None if name == "triton" else importlib.util.find_spec(name),
    )
    (result,) = triton.check_triton(Run(1))
    assert result.passed and result.n == 0 and result.name == "not run: Triton is not installed"


def test_a_case_of_it_is_played_in_the_interpreter(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere the engine would refuse: it needs a GPU."""
    options = {
        "device": "cpu",
        "max_model_len": 16,
        "num_blocks": 9,
        "block_size": 8,
        "kernels": "triton",
    }
    file = tmp_path / "case.json"
    file.write_text(
        to_json(Scenario(0, "M*", options, [[1, 2, 3]], [SamplingParams(max_tokens=2)]))
    )
    assert replay(file) == 0 and "no rule is broken" in capfd.readouterr().out
