"""What asv finds, what it knows of it, and that it measures what is right or nothing."""

import inspect
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from bench.harness import asv_classes, history, registry
from bench.harness import cells as cases
from bench.harness.cells import Case, Cell, WrongResultError
from hybrid_kv.errors import HybridKVError
from tests.bench.harness.test_measurement import failing_after

ROOT = Path(asv_classes.__file__).resolve().parents[2]
CLASSES = asv_classes.classes()


def everything():
    """Names of all that asv runs but the peaks, parameters included."""
    return [
        asv_classes.asv_name(cell, method) for cell in registry.cells() for method in asv_classes.method_names(cell)
    ]


@pytest.fixture
def registered(monkeypatch):
    """Make asv classes of other cells."""
    monkeypatch.setattr(asv_classes, "_made", {})

    def use(make, tier="cpu"):
        units = {"blocks": "blocks"} if tier == "count" else {}
        return asv_classes._class([Cell("offload", "some_thing", {"x": 1}, tier, make, True, None, units)])()

    return use


def test_a_call_is_a_sample_and_building_and_checking_do_not_count(registered, monkeypatch):
    calls = []

    def make():
        calls.append("make")
        return Case(lambda: None, lambda: calls.append("check") or 0.0, lambda: calls.append("reset"), 5)

    one = registered(make)
    monkeypatch.setattr(asv_classes.Subject, "sample", lambda self, repeats: 0.5)
    before = one.timer()
    one.time_some_thing(1)
    one.time_some_thing(1)
    assert one.timer() - before == 1.0
    assert calls == ["make", "check"]
    one.teardown(1)
    assert calls == ["make", "check", "check"]


def test_a_wrong_result_fails_before_and_after(registered):
    one = registered(lambda: failing_after(0))
    with pytest.raises(WrongResultError, match="injected"):
        one.time_some_thing(1)
    one.teardown(1)  # nothing was made
    one = registered(lambda: failing_after(1))
    one.time_some_thing(1)
    with pytest.raises(WrongResultError, match="injected"):
        one.teardown(1)


def test_what_an_older_version_lacks_is_skipped(registered, monkeypatch):
    from asv_runner.benchmarks.mark import SkipNotImplemented

    def make():
        raise ImportError("no such kernel")

    with pytest.raises(SkipNotImplemented, match="no such kernel"):
        registered(make).time_some_thing(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one = registered(make, "gpu")
    for method in (one.time_launch_some_thing, one.time_some_thing_sync):
        with pytest.raises(SkipNotImplemented, match="GPU"):
            method(1)


def test_tracked_numbers_have_units(registered):
    one = registered(lambda: {"blocks": cases.Count(7, "blocks")}, "count")
    assert one.track_blocks(1) == 7
    assert type(one).track_blocks.unit == "blocks"
    missing = registered(dict, "count").track_blocks(1)
    assert missing != missing


def test_an_edited_suite_starts_a_new_history(monkeypatch):
    cell = next(cell for cell in registry.cells() if cell.suite == "ssd")
    before = asv_classes._class([cell]).version
    assert before == CLASSES["ssd_chunk_scan"].version != CLASSES["offload_store"].version
    source = inspect.getsource
    monkeypatch.setattr(asv_classes.inspect, "getsource", lambda module: source(module) + "#")
    assert asv_classes._class([cell]).version != before


def test_asv_finds_the_benchmarks():
    """asv's own discovery, which imports every module of the folder, as it would in an environment of its own."""
    code = (
        "import json, sys; from asv_runner.discovery import disc_benchmarks, update_sys_path\n"
        "update_sys_path('bench/asv_suite'); sys.path.pop(0)\n"
        "print(json.dumps([(one.name, one.params) for one in disc_benchmarks('bench/asv_suite')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    given = {f"{name}({', '.join(values)})" for name, params in found for values in product(*params)}
    peaks = {f"end_to_end.peakmem_generate({mode!r})" for mode in ("reference", "none", "align", "all")}
    assert given == {*everything()} | peaks
    assert "scheduler.time_decode('all', 3, 16)" in given
    assert "state_update.time_launch_slots_kernel" in {name for name, _ in found}


# ---- history ----


def test_history_takes_one_quick_cell_of_every_suite_and_tier():
    chosen = history.chosen()
    assert {cell.suite for cell in chosen} == set(registry.suites())
    assert all(cell.quick and cell.promise is None for cell in chosen)
    assert len({(cell.suite, cell.tier) for cell in chosen}) == len(chosen) < 25


def test_the_pattern_matches_the_chosen_and_nothing_else():
    chosen = history.chosen()
    pattern = re.compile(history.pattern(chosen))
    found = [name for name in everything() if pattern.search(name)]
    assert len(found) == sum(len(asv_classes.method_names(cell)) if cell.tier == "gpu" else 1 for cell in chosen)
    assert "engine_step.time_decode_block('all', 3, 4)" in found
    assert pattern.search("end_to_end.peakmem_generate('reference')")


@pytest.mark.parametrize(("codes", "expected"), [((0, 0, 0), 0), ((0, 2, 0), 0), ((0, 1), 2), ((1,), 2)])
def test_history_runs_asv(monkeypatch, codes, expected, capsys):
    ran = []

    def asv(*arguments, given=""):
        ran.append((arguments, given))
        return codes[len(ran) - 1]

    monkeypatch.setattr(history, "_asv", asv)
    monkeypatch.setattr(history, "machine_name", lambda: "here")
    log = subprocess.CompletedProcess((), 0, stdout="b\na\n")
    monkeypatch.setattr(history.subprocess, "run", lambda command, **k: log if "-n2" in command else pytest.fail("git"))
    assert history.main(["2"]) == expected
    assert len(ran) == len(codes)
    if len(ran) > 1:
        arguments, given = ran[1]
        assert arguments[0] == "run" and arguments[-1] == "HASHFILE:-"
        assert given == "b\na\n"
        assert arguments[arguments.index("--machine") + 1] == ran[0][0][-1] == "here"


@pytest.mark.parametrize("given", [["abc"], ["0"], ["-1"], ["1", "2"], ["2.5"]])
def test_history_of_no_number_is_refused(given):
    with pytest.raises(HybridKVError, match=f"'{' '.join(given)}' is no number of commits; give one of 1 or more"):
        history.main(given)


def test_thresholds_know_every_benchmark_once():
    config = json.loads((ROOT / "asv.conf.json").read_text())
    names = set(everything())
    names.add("end_to_end.peakmem_generate('reference')")
    for name in names:
        found = [pattern for pattern in config["regressions_thresholds"] if re.match(pattern, name)]
        assert len(found) == 1, (name, found)
    assert config["regressions_thresholds"][r".*\.track_"] == 0.0
