"""The guard model's answers in every cell, and that each fault of a cell is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybrid_kv.check.guard.checks import answers
from hybrid_kv.check.guard.checks.answers import AnsweredCell, check_answers
from hybrid_kv.check.guard.registry import CheckResult, Run
from hybrid_kv.check.guard.trained import TRAINED
from hybrid_kv.engine.llm import RequestOutput


def output(
    tokens: Sequence[int] = (1, 2), cached: int = 64, drafted: int = 10, accepted: int = 10
) -> RequestOutput:
    return RequestOutput(
        "0",
        None,
        [0] * 100,
        list(tokens),
        "",
        "stop",
        cached_tokens=cached,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
    )


def cell(
    mode: str = "none",
    method: str | None = None,
    k: int = 0,
    loads: int | None = None,
    scheme: str = "slots",
    **metrics: Any,
) -> AnsweredCell:
    return AnsweredCell(mode, method, k, [output(**metrics)], loads, scheme)


def checked(monkeypatch: pytest.MonkeyPatch, *cells: AnsweredCell) -> list[CheckResult]:
    monkeypatch.setattr(answers, "cells", lambda *arguments: iter(cells))
    return check_answers(Run(1))


PLAIN = cell(cached=0, drafted=0, accepted=0)
MTP = cell(method="mtp", k=1, cached=0)


def test_a_clean_slice_passes_with_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TRIED", ("none", "all"))
    monkeypatch.setattr(answers, "DRAFTS", ((None, 0), ("mtp", 1)))
    monkeypatch.setattr(answers, "RECOMPUTED", (("all", "mtp", 1),))
    monkeypatch.setattr(answers, "FORGET_EVERY", 4)
    monkeypatch.setattr(answers, "TRAINED", {"nemotron_h": TRAINED["nemotron_h"]})
    results = check_answers(Run(9))  # one more than run at once
    assert [result.name.split(":")[0] for result in results] == [
        "none, no drafts",
        "none, mtp 1",
        "all, no drafts",
        "all, mtp 1",
        "all, mtp 1, recompute",
        "all, mtp 3, offload",
        "align, no drafts, offload",
    ]
    assert [result.detail for result in results] == [""] * 7
    assert [result.params["scheme"] for result in results] == [
        *["slots"] * 4,
        "recompute",
        "slots",
        "slots",
    ]
    assert results[3].metrics["hit_rate"] == results[2].metrics["hit_rate"] > 0
    assert results[4].metrics["hit_rate"] == results[3].metrics["hit_rate"]
    assert (
        results[4].metrics["accepted"]
        == results[3].metrics["accepted"]
        == results[1].metrics["accepted"]
        > 0
    )


def test_the_lines_of_the_second_model_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    other = TRAINED["qwen3_5_moe_text"]
    (line,) = checked(monkeypatch, replace(PLAIN, model=other))[1:]
    assert (
        line.passed
        and line.name == "none, no drafts, qwen3.5 moe"
        and line.params["model"] == "guard_model_qwen3_5"
    )


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (cell("all", tokens=(1, 3), drafted=0, accepted=0), "question 0 has another answer"),
        (cell("all", cached=0, drafted=0, accepted=0), "void: no prompt token came from the cache"),
        (cell("all", loads=0, drafted=0, accepted=0), "void: no block came from the offload tier"),
        (cell("none", "ngram", 3, accepted=0), "void: no draft was accepted"),
        (cell("none", "mtp", 1, accepted=8), r"8 of 10 drafts accepted, 98\.4% are due"),
        (cell("none", "mtp", 3, accepted=5), r"5 of 10 drafts accepted, 56\.8% are due"),
        (cell("none", "mtp", 5, accepted=2), r"2 of 10 drafts accepted, 24\.2% are due"),
        (
            cell("none", "mtp", 1, cached=0, scheme="recompute", tokens=(2, 2)),
            "question 0 has another answer",
        ),
        (
            cell("none", "mtp", 1, scheme="recompute", drafted=1000, accepted=990),
            r"\(990, 1000\) drafts accepted and verified, \(10, 10\)",
        ),
        (
            cell("align", "mtp", 1, drafted=1000, accepted=990),
            r"\(990, 1000\) drafts accepted and verified, \(10, 10\) without a cache",
        ),
    ],
)
def test_each_fault_is_named(
    monkeypatch: pytest.MonkeyPatch, wrong: AnsweredCell, fault: str
) -> None:
    align = cell("align", drafted=0, accepted=0)
    result = checked(monkeypatch, PLAIN, MTP, align, wrong)[-1]
    assert not result.passed
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(result.detail)


def test_drafts_must_not_cost_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = (
        PLAIN,
        MTP,
        cell("all", cached=96, drafted=0, accepted=0),
        cell("all", "mtp", 1, cached=64),
    )
    assert checked(monkeypatch, *cells)[-1].detail == "64 cached tokens, 96 without drafts"
