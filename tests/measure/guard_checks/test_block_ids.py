"""The check of block ids against a clock: what an unfit machine says carries the mark."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybrid_kv.check.guard.registry import Run
from hybrid_kv.check.guard.report import document, print_closing
from hybrid_kv.measure.guard_checks.block_ids import check_expansion
from hybrid_kv.measure.results.guard_rows import result_rows
from hybrid_kv.measure.timing import block_ids, fitness
from hybrid_kv.measure.timing.clock import Interval


@pytest.mark.parametrize("why", ["", "others took 33% of a core"])
def test_a_verdict_from_an_unfit_machine_carries_the_mark(
    why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios = {("8 prefills x 64", "vllm 0.32 V2"): Interval(900.0, 800.0, 1000.0)}
    monkeypatch.setattr(block_ids, "guarded_ratios", lambda: ratios)
    monkeypatch.setattr(fitness, "examine", lambda _: SimpleNamespace(unfit=why))
    results = check_expansion(Run(1))
    marks = {row.params.get("unfit", "") for row in result_rows(results)}
    assert marks == {why} and document(results, 0, {})["unfit"] == why
    print_closing(results)
    end = f"1 of 1 checks passed; unfit machine: {why}\n" if why else "1 of 1 checks passed\n"
    assert capsys.readouterr().out.endswith(end)
    assert (results[0].value, results[0].interval) == (900.0, (800.0, 1000.0))
