"""The check of block ids against a clock: what an unfit machine says carries the mark."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybrid_kv.guard.checks.block_ids import check_expansion
from hybrid_kv.guard.registry import Run
from hybrid_kv.guard.report import document, print_results, result_rows
from hybrid_kv.timing import block_ids, fitness

PARAMS = {"num_blocks": 1, "blocks_per_kv_block": 8}


@pytest.mark.parametrize("why", ["", "others took 33% of a core"])
def test_a_verdict_from_an_unfit_machine_carries_the_mark(
    why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(block_ids, "quick_ratios", lambda: [("expand", PARAMS, 900.0, 800.0, 1000.0)])
    monkeypatch.setattr(fitness, "examine", lambda _: SimpleNamespace(unfit=why))
    results = check_expansion(Run(1))
    marks = {row.params.get("unfit", "") for row in result_rows(results)}
    assert marks == {why} and document(results, 0)["unfit"] == why
    print_results(results)
    end = f"1 of 1 checks passed; unfit machine: {why}\n" if why else "1 of 1 checks passed\n"
    assert capsys.readouterr().out.endswith(end)
    assert (results[0].value, results[0].interval) == (900.0, (800.0, 1000.0))
