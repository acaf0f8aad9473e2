"""The rivals of kernel blocks, what they must take, and what the guard asks. Timed only with `--benchmark-enable`."""

import dataclasses
import json

import pytest

from hybrid_kv import results
from hybrid_kv.results import Receipt, timing_row
from hybrid_kv.timing import block_ids
from hybrid_kv.timing.cases import WrongResultError
from hybrid_kv.timing.clock import Interval
from hybrid_kv.timing.measurement import Measurement

CELLS = block_ids.cells()
STEPS = [cell for cell in CELLS if cell.benchmark == "step" and cell.params["blocks_per_kv_block"] == 8]


@pytest.mark.parametrize("cell", STEPS, ids=lambda cell: cell.key)
def test_step(benchmark, cell):
    case = cell.make()
    assert case.check() == 0
    benchmark.pedantic(case.run, setup=case.reset, rounds=20)
    assert case.check() == 0


@pytest.mark.parametrize(
    ("subject", "high", "verdict"),
    [("vllm 0.32 V2", 2.4, "fail"), ("vllm 0.32 V2", 2.6, "pass"), ("vllm 0.22 V2", 0.9, "fail"), ("engine", 0.5, "")],
)
def test_verdicts(subject, high, verdict):
    where = {"scenario": "decode, 16 of 256 append 1", "blocks_per_kv_block": 8, "num_groups": 2, "subject": subject}
    (cell,) = [cell for cell in CELLS if cell.params == where]
    interval = Interval(high - 0.1, high - 0.2, high)
    assert Measurement(cell, interval, interval, 9, Receipt(True, True, 0.0)).verdict == verdict


def test_the_guard_gets_every_rival_of_the_quick_cells(monkeypatch):
    monkeypatch.setattr(block_ids, "QUICK_CELLS", ((16, 8),))
    monkeypatch.setattr(block_ids, "QUICK_SCENARIOS", ("decode, 16 of 256 append 1",))
    found = block_ids.quick_ratios()
    assert [(benchmark, params["subject"]) for benchmark, params, *_ in found] == [
        *(("expand", name) for name in ("list", "numpy", "torch")),
        *(("step", name) for name in ("vllm 0.22 V1", "vllm 0.22 V2", "vllm 0.32 V2")),
    ]
    assert all(0 < low <= ratio <= high for _, _, ratio, low, high in found)
    assert [block_ids.required_ratio(benchmark, params) for benchmark, params, *_ in found] == [1, 1, 1, 1, 1, 2.5]


def test_a_wrong_rival_stops_the_guard(monkeypatch):
    right = block_ids.expand_torch
    monkeypatch.setattr(block_ids, "QUICK_CELLS", ((16, 8),))
    monkeypatch.setattr(block_ids, "expand_torch", lambda ids, offsets: right(ids, offsets) + 1)
    with pytest.raises(WrongResultError, match=r"kernel_blocks/expand\[.*subject=torch\]"):
        block_ids.quick_ratios()


def test_recorded_ratios_are_the_best_of_clean_rows(tmp_path, monkeypatch):
    def row(value):
        return timing_row(
            receipt=Receipt(True, True, 0.0),
            params={"num_blocks": 1, "subject": "list"},
            suite="s",
            benchmark="expand",
            metric="ratio_to_engine",
            value=value,
            unit="time ratio",
        )

    file = tmp_path / "r.csv"
    assert block_ids.recorded_ratios(file) == {}
    here = results.provenance()
    for dirty, machine, value in [
        (False, here.machine, 3.0),
        (False, here.machine, 2.0),
        (True, here.machine, 9.0),
        (False, "x", 9.0),
    ]:
        changed = dataclasses.replace(here, dirty=dirty, machine=machine)
        with monkeypatch.context() as patch:
            patch.setattr("hybrid_kv.results.append.provenance", lambda changed=changed: changed)
            results.append_rows(file, [row(value)])
    assert block_ids.recorded_ratios(file) == {("expand", '{"num_blocks": 1, "subject": "list"}'): 3.0}


def test_recorded_ratios_know_the_cells_of_today():
    """The rows in `results/` are looked up by parameters: renamed ones would silently ask for less."""
    recorded = {key[0:2] for key in map(tuple, _recorded_params())}
    today = {(cell.benchmark, json.dumps(dict(cell.params), sort_keys=True)) for cell in CELLS if cell.promise}
    assert recorded & today == recorded
    assert len(recorded) > 100


def _recorded_params():
    frame = results.read_rows(block_ids.RESULTS)
    frame = frame[(frame["suite"] == "kernel_blocks") & (frame["metric"] == "ratio_to_engine")]
    for row in frame.itertuples():
        params = {key: value for key, value in json.loads(row.params).items() if key != "receipt"}
        if params["subject"] != "device":
            yield row.benchmark, json.dumps(params, sort_keys=True)
