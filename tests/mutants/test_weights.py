"""Exact weights pass a sound copy, and name the first answer that differs from the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_kv.check.probes import guarded
from hybrid_kv.check.probes.registry import Probe, load_probes
from hybrid_kv.check.targets.ours import LEVELS
from hybrid_kv.check.targets.target import Answer, Ask
from mutants.runner import weights

PROMPT = (5, 6, 7)


def test_each_cell_is_one_of_our_target() -> None:
    names = {probe.name for probe in load_probes()}
    for cell in weights.CELLS:
        assert all(level in LEVELS[factor] for factor, level in cell.settings.items())
        assert names >= {*cell.probes}


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (Answer((1, 2), logprobs=({1: 0.0}, {2: 0.0})), "right"),
        (Answer((1, 3)), "wrong"),
        (Answer((1,)), "wrong"),
        (Answer((1, 2), logprobs=({1: 0.0}, {2: -1e-9})), "wrong"),
    ],
)
def test_an_answer_is_the_recorded_one_or_wrong(
    answer: Answer, verdict: str, tmp_path: Path
) -> None:
    judge = weights.judge_of(tmp_path, {PROMPT: (1, 2, 3)})
    assert judge.judge(Ask(PROMPT, max_tokens=2), answer, None).verdict == verdict


def alone() -> list[Probe]:
    return load_probes()[:1]


def test_a_recorded_answer_that_differs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CELLS", (weights.Cell("lfm2", {}, ("alone",)),))
    monkeypatch.setattr(guarded, "load_probes", alone)
    weights.write_checkpoints(tmp_path)
    task = {"folder": str(tmp_path)}
    assert not weights.run({**task, "record": True}, tmp_path / "case")["section"]
    assert not weights.run(task, tmp_path / "case")["section"]
    file = tmp_path / weights.ANSWERS
    answers = json.loads(file.read_text())
    last = [*answers["lfm2"]][-1]
    answers["lfm2"][last][-1] += 1
    file.write_text(json.dumps(answers))
    row = weights.run(task, tmp_path / "case")
    assert (row["section"], row["rule"], row["cell"]) == ("probes", "alone", "lfm2")
