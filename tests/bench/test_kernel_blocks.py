"""The benchmark's subjects are right, and its verdicts say what they must. Timed only with `--benchmark-enable`."""

import ast
import dataclasses
from pathlib import Path

import pytest

from bench import kernel_blocks
from bench.__main__ import main
from bench._timing import Interval
from hybrid_kv import results
from hybrid_kv.results import Receipt, read_rows, timing_row

EXPANSION = ["list", "numpy", "torch", kernel_blocks.ENGINE]
STEP = [
    "vllm 0.22 V1",
    "vllm 0.22 V2",
    "vllm 0.32 V2",
    kernel_blocks.ENGINE,
]


@pytest.mark.parametrize("subject", EXPANSION)
@pytest.mark.parametrize(("num_blocks", "bpk"), kernel_blocks.QUICK_CELLS)
def test_expansion(benchmark, num_blocks, bpk, subject):
    one, check = kernel_blocks.expansion_subjects(num_blocks, bpk)[subject]
    assert check()
    benchmark.pedantic(one.run, setup=one.reset, rounds=20)
    assert check()


@pytest.mark.parametrize("subject", STEP)
@pytest.mark.parametrize("scenario", kernel_blocks.SCENARIOS)
def test_step(benchmark, scenario, subject):
    one, check = kernel_blocks.step(scenario, 2).subjects[subject]
    assert check()
    benchmark.pedantic(one.run, setup=one.reset, rounds=20)
    assert check()


def test_a_wrong_result_is_not_timed(monkeypatch, tmp_path, capsys):
    right = kernel_blocks.expand_torch
    monkeypatch.setattr(kernel_blocks, "expand_torch", lambda ids, offsets: right(ids, offsets) + 1)
    out = tmp_path / "r.csv"
    assert main(["--quick", "--out", str(out)]) == 1
    assert "wrong result of torch; nothing was timed" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("subject", "high", "verdict"),
    [("vllm 0.32 V2", 2.4, "fail"), ("vllm 0.32 V2", 2.6, "pass"), ("vllm 0.22 V2", 0.9, "fail"), ("engine", 0.5, "")],
)
def test_verdicts(subject, high, verdict):
    where = {"scenario": "decode, 16 of 256 append 1", "subject": subject}
    interval = Interval(high - 0.1, high - 0.2, high)
    assert kernel_blocks.Measurement("step", where, interval, interval, 9).verdict == verdict


def test_rows_carry_receipts(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_blocks, "QUICK_CELLS", ((1, 2),))
    monkeypatch.setattr(kernel_blocks, "QUICK_SCENARIOS", ())
    out = tmp_path / "r.csv"
    assert main(["--quick", "--out", str(out)]) in (0, 1)  # a verdict on this machine's speed is no test's business
    frame = read_rows(out)
    assert len(frame) == 2 * len(EXPANSION) - 1
    assert frame["params"].str.contains('"checked_after":true').all()


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
    assert kernel_blocks.recorded_ratios(file) == {}
    here = results.provenance()
    for dirty, machine, value in [
        (False, here.machine, 3.0),
        (False, here.machine, 2.0),
        (True, here.machine, 9.0),
        (False, "x", 9.0),
    ]:
        changed = dataclasses.replace(here, dirty=dirty, machine=machine)
        with monkeypatch.context() as patch:
            patch.setattr(results, "provenance", lambda changed=changed: changed)
            results.append_rows(file, [row(value)])
    assert kernel_blocks.recorded_ratios(file) == {("expand", '{"num_blocks": 1, "subject": "list"}'): 3.0}


def test_an_unwritable_file_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(kernel_blocks, "run", lambda quick: pytest.fail("ran"))
    assert main(["--out", str(tmp_path / "file" / "r.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_only_the_timing_module_reads_a_clock():
    clocks = {"time", "timeit", "perf_counter", "thread_time", "process_time", "do_bench"}
    for path in sorted(Path(kernel_blocks.__file__).parent.glob("**/*.py")):
        if path.name == "_timing.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                imported.append(node.module)
            assert not clocks & set(imported), f"{path} reads a clock of its own"
