"""What asv finds, what it is told of it, and that it measures what is right or nothing."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from bench.harness import asv_classes, history, registry
from hybrid_kv.timing import cases
from hybrid_kv.timing.cases import Case, Cell, WrongResultError

ROOT = Path(asv_classes.__file__).resolve().parents[2]
CLASSES = asv_classes.classes()


def everything():
    """Names of all that asv runs but the peaks, parameters included."""
    return [
        asv_classes.asv_name(cell, method) for cell in registry.cells() for method in asv_classes.method_names(cell)
    ]


def methods():
    """Suite and method of each of asv's benchmarks but the peaks."""
    found = {
        (cell.suite, cell.benchmark, method): None
        for cell in registry.cells()
        for method in asv_classes.method_names(cell)
    }
    return [(suite, name) for suite, _, name in found]


@pytest.fixture
def registered(monkeypatch):
    """Make asv classes of other cells."""
    monkeypatch.setattr(asv_classes, "_made", {})

    def use(make, tier="cpu"):
        units = {"blocks": "blocks"} if tier == "count" else {}
        return asv_classes._class([Cell("offload", "some_thing", {"x": 1}, tier, make, True, None, units)])()

    return use


def test_every_cell_is_a_parameter_combination_of_one_benchmark():
    asked = set(everything())
    given = set()
    for name, one in CLASSES.items():
        if name == "PeakMemory":
            continue
        methods = [method for method in vars(one) if re.match("time_|track_|peakmem_", method)]
        assert methods and len(one.params) == len(one.param_names)
        for method in methods:
            name = vars(one)[method].benchmark_name
            given |= {f"{name}({', '.join(map(repr, values))})" for values in product(*one.params)}
    assert given == asked
    assert "scheduler.time_decode('all', 3, 16)" in given


def test_names_say_the_suite_once_and_are_unique():
    """What stands before the dot is a group of asv's pages."""
    names = [f"{suite}.{method}" for suite, method in methods()]
    assert len(set(names)) == len(names)
    assert {"kernel_metrics.track_registers", "engine_step.track_operations"} <= set(names)
    assert "block_tables.time_step" in names


def test_no_setup_no_wall_clock():
    for name, one in CLASSES.items():
        assert not hasattr(one, "setup"), name
        if name != "PeakMemory" and any(method.startswith("time_") for method in vars(one)):
            assert one.timer() == asv_classes._WATCH.read()
            assert inspect.signature(one.teardown).parameters.keys() == {"self", "values"}


def test_gpu_cells_have_a_launch_and_a_synchronised_time():
    names = {method for cell in registry.cells() if cell.tier == "gpu" for method in asv_classes.method_names(cell)}
    assert {"time_launch_slots_kernel", "time_slots_kernel_sync"} <= names
    assert all(re.fullmatch("time_launch_.*|time_.*_sync", name) for name in names)


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
    errors = iter([0.0, None])

    def check():
        if next(errors) is None:
            raise WrongResultError("planted")
        return 0.0

    one = registered(lambda: Case(lambda: None, check))
    one.time_some_thing(1)
    with pytest.raises(WrongResultError, match="planted"):
        one.teardown(1)

    def wrong():
        raise WrongResultError("planted")

    one = asv_classes._class([Cell("offload", "other", {"x": 1}, "cpu", lambda: Case(lambda: None, wrong))])()
    with pytest.raises(WrongResultError, match="planted"):
        one.time_other(1)
    one.teardown(1)  # nothing was made


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


def test_peak_memory_runs_an_engine(monkeypatch):
    ran = []
    monkeypatch.setattr(
        asv_classes.registry,
        "cells",
        lambda: [
            Cell("end_to_end", "nemotron", {"mode": mode, "num_reqs": 4}, "cpu", lambda mode=mode: ran_case(mode))
            for mode in ("none", "align", "all")
        ],
    )

    def ran_case(mode):
        return Case(lambda: ran.append(mode), lambda: 0.0)

    for what in asv_classes.PeakMemory.params[0]:
        asv_classes.PeakMemory().peakmem_generate(what)
    assert ran == ["none", "align", "all"]


def test_asv_finds_the_benchmarks():
    """asv's own discovery, which imports every module of the folder, as it would in an environment of its own."""
    code = (
        "import json, sys; from asv_runner.discovery import disc_benchmarks, update_sys_path\n"
        "update_sys_path('bench/asv_suite'); sys.path.pop(0)\n"
        "print(json.dumps([one.name for one in disc_benchmarks('bench/asv_suite')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted = {f"{suite}.{method}" for suite, method in methods()}
    assert set(json.loads(done.stdout.splitlines()[-1])) == wanted | {"end_to_end.peakmem_generate"}
    assert "state_update.time_launch_slots_kernel" in wanted


# ---- history ----


def test_history_takes_one_quick_cell_of_every_suite_and_tier():
    chosen = history.chosen()
    assert {cell.suite for cell in chosen} == set(registry.suites())
    assert all(cell.quick and cell.promise is None for cell in chosen)
    assert len({(cell.suite, cell.tier) for cell in chosen}) == len(chosen) < 25


def test_history_takes_no_rivals(monkeypatch):
    first = next(
        cell for cell in registry.cells() if cell.suite == "kernel_blocks" and cell.params["subject"] == "engine"
    )
    rival = replace(first, promise=1.0)
    monkeypatch.setattr(history, "cells", lambda quick: [first, rival])
    assert history.chosen() == [first]
    assert history.chosen()[0].promise is None


def test_the_pattern_matches_the_chosen_and_nothing_else():
    chosen = history.chosen()
    pattern = re.compile(history.pattern(chosen))
    found = [name for name in everything() if pattern.search(name)]
    assert len(found) == sum(len(asv_classes.method_names(cell)) if cell.tier == "gpu" else 1 for cell in chosen)
    assert "engine_step.time_decode_block('all', 3, 4)" in found
    assert pattern.search("end_to_end.peakmem_generate('reference')")


def test_the_machine_name_tells_what_runs_on_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name = history.machine_name()
    assert re.fullmatch(r"[a-z0-9.+-]+", name)
    assert f"torch-{torch.__version__}" in name and "triton-" in name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    here = history.provenance()
    monkeypatch.setattr(history, "provenance", lambda: replace(here, device="NVIDIA H200", triton="3.6.0"))
    done = subprocess.CompletedProcess((), 0, stdout="580.65.06\n580.65.06\n")
    monkeypatch.setattr(history.subprocess, "run", lambda *a, **k: done)
    assert history.machine_name() == f"nvidia-h200-driver-580.65.06-torch-{torch.__version__}-triton-3.6.0"


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
def test_history_of_no_number_is_one_line(capsys, given):
    assert history.main(given) == 2
    assert capsys.readouterr().err == f"error: {' '.join(given)!r} is no number of commits; give one of 1 or more\n"


def test_history_outside_a_checkout_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(history, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert history.main(["1"]) == 2
    printed = capsys.readouterr().err
    assert "is no git checkout" in printed and printed.count("\n") == 1


def test_thresholds_know_every_benchmark_once():
    config = json.loads((ROOT / "asv.conf.json").read_text())
    names = set(everything())
    names.add("end_to_end.peakmem_generate('reference')")
    for name in names:
        found = [pattern for pattern in config["regressions_thresholds"] if re.match(pattern, name)]
        assert len(found) == 1, (name, found)
    assert config["regressions_thresholds"][r".*\.track_"] == 0.0
    assert set(config["matrix"]["req"]) == {"asv_runner", "numba", "numpy", "torch", "tqdm", "triton"}
    assert config["environment_type"] == "virtualenv"
