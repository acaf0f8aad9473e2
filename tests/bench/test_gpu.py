"""The race on a GPU, as far as a CPU can go: results are right, rows follow from times."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
import torch

from bench import (
    block_tables,
    causal_conv1d,
    gated_delta,
    gated_norm,
    gpu,
    kernel_blocks,
    paged_attention,
    ssd,
    state_update,
)
from bench._shapes import DELTA_SHAPES, SHAPES, DeltaShape, LayerShape
from bench.gpu import COPY, Cuda, contests, main, race, rows
from bench.harness.cells import Case, WrongResultError
from bench.harness.contest import VLLM, Contest, Rival
from bench.static import state_bytes
from bench.static.counts import mean_traffic
from hybrid_kv.errors import CheckFailedError, HybridKVError, VoidError
from hybrid_kv.measure.results import TIME_UNITS, check_file, read_rows
from hybrid_kv.measure.timing.clock import EndToEnd
from tests.kernels.harness import multiply_bfloat16
from tests.kernels.interpreter import interpreted, load_peer
from tests.measure.timing.events import log_events

TINY = LayerShape(4, 16, 16, 2, 4, 2, 32)
FINE = {
    "state_update": lambda: state_update.state_updates("cpu", "tiny", 3, 1),
    "single token": lambda: state_update.state_updates("cpu", "tiny", 2, 0),
    "conv_update": lambda: causal_conv1d.conv_updates("cpu", "tiny", 3, 2),
    "conv_prefill": lambda: causal_conv1d.conv_prefills("cpu", "tiny", 40, 2),
    "chunk_scan": lambda: ssd.chunk_scans("cpu", "tiny", 80, 2),
    "block_tables": lambda: block_tables.table_updates("cpu", "nemotron-3-nano", "prefill 4"),
    "kernel_blocks": lambda: kernel_blocks.contest("cpu", 5, 34),
    "paged_attention": lambda: paged_attention.attentions("cpu", "tiny", 2, 3, 48),
    "gated_norm": lambda: gated_norm.norms("cpu", "tiny", 5),
    "delta_update": lambda: gated_delta.updates("cpu", "tiny", 3, 1),
    "delta_prefill": lambda: gated_delta.prefills("cpu", "tiny", 40, 2),
    "delta_prefill by channel": lambda: gated_delta.prefills("cpu", "tiny by channel", 40, 2),
    "delta_update by channel": lambda: gated_delta.updates("cpu", "tiny by channel", 3, 0),
}


def check_contest(name: str) -> tuple[dict[str, float], list[str]]:
    """The largest error of each rival, after a run that came before."""
    SHAPES["tiny"], DELTA_SHAPES["tiny"] = TINY, DeltaShape(2, 4, 16, 16, per_channel=False)
    DELTA_SHAPES["tiny by channel"] = DeltaShape(2, 2, 16, 16, per_channel=True)
    for module in ("vllm", "mamba_ssm"):
        sys.modules[module] = None  # type: ignore[assignment]  # their own test has them
    found, missing = {}, []
    for rival, entry in FINE[name]().rivals.items():
        try:
            case = entry.make()
        except ImportError:
            missing.append(rival)
            continue
        with multiply_bfloat16():
            case.run()
            case.reset()
            found[rival] = case.check()
    return found, missing


@pytest.mark.parametrize("name", FINE)
def test_contests_are_right_in_the_interpreter(name: str) -> None:
    pytest.importorskip("triton")
    found, missing = interpreted(check_contest, name)
    wanted = {
        "state_update": {"slots", "recompute_step", "recompute_flush", "torch"},
        "single token": {"slots", "recompute_step", "recompute_flush", "torch"},
        "block_tables": {"triton"},
        "kernel_blocks": {*kernel_blocks.WAYS},
    }
    assert set(found) == wanted.get(name, {"triton", "torch"})
    wanted = {
        "state_update": ["vllm"],
        "single token": ["vllm", "mamba_ssm"],
        "conv_update": ["vllm"],
    }
    assert missing == wanted.get(name, [])
    assert all(0 <= error < 0.02 for error in found.values())


def check_peer(package: str) -> list[float]:
    SHAPES["tiny"] = TINY
    if package == "vllm":
        load_peer(f"{VLLM}.mamba_ssm").try_get_optimal_ssm_config = lambda *_: (4, 4)
    else:
        load_peer("mamba_ssm.ops.triton.selective_state_update")
    single = state_update.state_updates("cpu", "tiny", 2, 0)
    drafts = state_update.state_updates("cpu", "tiny", 2, 3)
    # Its arithmetic is that of its inputs, which the interpreter would do on the raw bits of
    # bfloat16.
    conv = causal_conv1d.conv_updates("cpu", "tiny", 2, 3, torch.float32)
    raced = (single, drafts, conv) if package == "vllm" else (single,)
    cases = [contest.rivals[package].make() for contest in raced]
    errors = []
    for case in cases:
        case.check()
        case.run()
        errors.append(case.check())
    return errors


@pytest.mark.parametrize("package", ["vllm", "mamba_ssm"])
def test_peers_behind_the_arguments_of_ours(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert max(interpreted(check_peer, package)) < 0.02


# ---- which contests ----


@pytest.fixture(scope="module")
def everything() -> list[Contest]:
    return list(contests(device="cpu"))


def test_all_kinds_in_both_runs(everything: list[Contest]) -> None:
    wanted = {name for name in FINE if not name.endswith("by channel")} - {"single token"}
    quick = list(contests(quick=True, device="cpu"))
    assert {one.benchmark for one in everything} == {one.benchmark for one in quick} == wanted
    assert len(quick) < 15 < len(everything)
    keys = [(one.benchmark, *one.params.items()) for one in everything]
    assert len(set(keys)) == len(keys)
    updates = {one.params["K"] for one in everything if one.benchmark == "state_update"}
    assert updates == {0, 1, 3, 5, 7}
    # What waits for the device cannot be captured.
    eager = {
        (one.benchmark, name)
        for one in everything
        for name, rival in one.rivals.items()
        if not rival.graph
    }
    expansions = {("kernel_blocks", name) for name in kernel_blocks.WAYS}  # they start on the host
    assert {name for _, name in eager - expansions} == {"torch"} and expansions <= eager
    assert ("gated_norm", "torch") not in eager


def test_bytes_are_those_of_the_model(everything: list[Contest]) -> None:
    def one(benchmark: str, **params: object) -> Contest:
        return next(
            c for c in everything if c.benchmark == benchmark and params.items() <= c.params.items()
        )

    nano = SHAPES["nemotron-3-nano"].state
    step = one("state_update", model="nemotron-3-nano", num_reqs=16, K=3)
    assert step.rivals["slots"].num_bytes == 16 * sum(
        state_bytes.slots_bytes(nano, torch.float32, 4).values()
    )
    assert step.rivals["vllm"].num_bytes == step.rivals["slots"].num_bytes
    # A flush reads the lower plane as well and writes both.
    states = 64 * 64 * 128
    assert (
        step.rivals["recompute_flush"].num_bytes - step.rivals["recompute_step"].num_bytes
        == 16 * 6 * states
    )
    (weights,) = step.means.values()
    traffic = mean_traffic(nano, torch.float32, 3)
    assert weights == {
        "recompute_step": 1 - traffic.flush_rate,
        "recompute_flush": traffic.flush_rate,
    }
    assert 0 < traffic.flush_rate < 0.5
    conv = one("conv_update", model="nemotron-3-nano", num_reqs=16, K=3)
    assert conv.rivals["triton"].num_bytes == 16 * 6144 * 2 * (3 + 4 + 4 + 6)
    prefill = one("conv_prefill", model="nemotron-3-nano", num_tokens=2048)
    assert prefill.rivals["triton"].num_bytes == 2048 * 6144 * 2 * 2
    scan = one("chunk_scan", model="nemotron-3-nano", num_tokens=2048)
    assert (
        scan.rivals["triton"].num_bytes
        == 2048 * 2 * (4096 + 4096 + 1024 + 1024 + 64) + 4 * 2 * 4 * states
    )
    delta = one("delta_update", model="kimi-linear", num_reqs=16, K=3)
    assert delta.rivals["triton"].num_bytes == 16 * (
        5 * 4 * 32 * 128 * 128 + 4 * 2 * 32 * (5 * 128 + 1)
    )
    delta = one("delta_prefill", model="qwen3-next", num_tokens=2048)
    assert (
        delta.rivals["triton"].num_bytes
        == 2048 * 2 * 128 * (16 + 16 + 32 + 32 + 0.5) + 4 * 2 * 4 * 32 * 128 * 128
    )
    decode = one("paged_attention", model="nemotron-3-nano", num_reqs=128, length=4)
    assert decode.rivals["triton"].num_bytes == 128 * 128 * 2 * (2 * 2048 * 2 + 2 * 4 * 32)
    assert one("gated_norm", num_tokens=2048).rivals["triton"].num_bytes == 3 * 2048 * 4096 * 2
    assert one("block_tables").rivals["triton"].num_bytes == 0


# ---- the race ----


class Fake:
    """A device on which a call takes what it returns; a copy moves 1000 bytes in 1 ns."""

    gpu = None

    def __init__(self) -> None:
        self.batches, self.captured, self.log = [], 0, []
        self.wholes = iter(range(1, 100))

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        self.captured += 1
        return run

    def copy(self) -> Rival:
        return Rival(lambda: Case(lambda: 1e-9, lambda: 0.0), 1000)

    def time(
        self, calls: Sequence[tuple[Callable[[], object], Callable[[], float]]]
    ) -> list[float]:
        self.batches.append(len(calls))
        taken = []
        for before, call in calls:
            before()
            taken.append(call())
        return taken

    def whole(self, case: Case) -> EndToEnd:
        case.reset()
        seconds = next(self.wholes) * 1e-6
        return EndToEnd(seconds / 2, seconds)


def rival(
    seconds: float | tuple[float, ...],
    num_bytes: int = 0,
    graph: bool = True,
    error: float | tuple[float, ...] = 0.0,
    log: list[str] | None = None,
    name: str = "",
) -> Rival:
    errors = iter(error) if isinstance(error, tuple) else None
    taken = iter(seconds) if isinstance(seconds, tuple) else None
    log = [] if log is None else log

    def run() -> float:
        log.append(name)
        return next(taken) if taken else seconds

    def check() -> float:
        log.append(f"check {name}")
        return next(errors) if errors else error

    return Rival(lambda: Case(run, check, lambda: log.append(f"reset {name}")), num_bytes, graph)


def test_a_round_has_everyone_once_in_random_order_between_two_checks() -> None:
    log = []
    names = "abc"
    contest = Contest("x", {}, {name: rival(1e-9, log=log, name=name) for name in names})
    device = Fake()
    results, missing = race(contest, device, 12, random.Random(0))
    assert device.batches == [4] * 13 and not missing
    assert log[:3] == log[-3:] == [f"check {name}" for name in names]
    timed = log[3:-3]
    assert all(timed[i] == f"reset {timed[i + 1]}" for i in range(0, len(timed), 2))
    orders = ["".join(timed[1::2][i : i + 3]) for i in range(3, 39, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in orders) and len(set(orders)) > 3
    assert [one.name for one in results] == ["a", "b", "c", COPY]
    assert all(len(one.seconds) == 12 for one in results)


def test_what_cannot_be_captured_runs_as_it_is_and_says_so() -> None:
    contest = Contest("x", {}, {"a": rival(1e-9), "b": rival(1e-9, graph=False)})
    device = Fake()
    results, _ = race(contest, device, 3, random.Random(0))
    assert device.captured == 2  # a, and the copy
    launches = {row.params["subject"]: row.params["launch"] for row in rows(contest, results)}
    assert launches == {"a": "graph", "b": "eager", COPY: "graph"}


def test_rows() -> None:
    contest = Contest(
        "x",
        {"K": 3},
        {
            "a": rival(4e-9, 2000, error=0.25),
            "b": rival(2e-9, 500, error=(0.5, 0.75)),
            "c": rival(1e-9),
        },
        {"mean": {"a": 0.75, "b": 0.25}},
    )
    results, _ = race(contest, Fake(), 5, random.Random(0))
    found = {(row.params["subject"], row.metric): row for row in rows(contest, results)}
    value = {key: row.value for key, row in found.items()}
    assert {key[1] for key in value if key[0] == "a"} == {"gpu_time", "bandwidth", "share_of_copy"}
    assert {key[1] for key in value if key[0] == COPY} == {"gpu_time", "bandwidth"}
    assert {key[1] for key in value if key[0] == "c"} == {"gpu_time", "ratio_to_a"}
    assert value["a", "gpu_time"] == pytest.approx(4) and found["a", "gpu_time"].unit == "ns"
    assert value["a", "bandwidth"] == pytest.approx(500) and found["a", "bandwidth"].unit == "GB/s"
    assert value[COPY, "bandwidth"] == pytest.approx(1000)
    assert value["a", "share_of_copy"] == pytest.approx(0.5)
    assert value["b", "ratio_to_a"] == pytest.approx(0.5)
    assert value["mean", "gpu_time"] == pytest.approx(3.5)
    assert value["mean", "bandwidth"] == pytest.approx((1500 + 125) / 3.5)
    assert value["mean", "ratio_to_a"] == pytest.approx(3.5 / 4)
    assert found["b", "gpu_time"].params["receipt"]["max_error"] == 0.75
    assert found["mean", "gpu_time"].params["receipt"]["max_error"] == 0.75
    better = {row.metric: row.better for row in found.values()}
    assert better == {
        "gpu_time": "lower",
        "bandwidth": "higher",
        "share_of_copy": "higher",
        "ratio_to_a": "lower",
    }
    for row in found.values():
        assert row.suite == "gpu" and row.benchmark == "x" and row.params["K"] == 3 and row.n == 5
        assert row.unit in TIME_UNITS and row.ci_low <= row.value <= row.ci_high


def test_an_end_to_end_contest_is_compared_by_the_wall_with_the_hosts_part() -> None:
    contest = Contest("x", {}, {"a": rival(4e-9), "b": rival(1e-9)}, end_to_end=True)
    results, _ = race(contest, Fake(), 3, random.Random(0))
    found = {(row.params["subject"], row.metric): row for row in rows(contest, results)}
    metrics = {"gpu_time", "host_time", "end_to_end_time"}
    assert {metric for name, metric in found if name == "a"} == metrics
    assert {metric for name, metric in found if name == COPY} == {"gpu_time", "bandwidth"}
    wholes = {one.name: [whole.wall for whole in one.whole] for one in results if one.name != COPY}
    # one of each rival in each round
    assert sorted(wholes["a"] + wholes["b"]) == [n * 1e-6 for n in range(1, 7)]
    for name, walls in wholes.items():
        assert found[name, "end_to_end_time"].value == pytest.approx(1e9 * sorted(walls)[1])
        assert found[name, "host_time"].value == pytest.approx(1e9 * sorted(walls)[1] / 2)
    ratios = sorted(b / a for a, b in zip(wholes["a"], wholes["b"], strict=True))
    assert found["b", "ratio_to_a"].value == pytest.approx(ratios[1])


@pytest.mark.parametrize(("us", "verdict"), [(11.0, "pass"), (16.0, "fail"), (8.0, "fail")])
def test_a_time_outside_of_the_interval_of_its_prediction_fails(
    us: float, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # 4.12 µs a launch, 20 MB at 0.866 of 3.35 TB/s; memory bounds it: 0.805 to 1.33 times as long.
    contest = Contest(
        "state_update", {"K": 0}, {name: rival(us / 1e6, 20_000_000) for name in ("slots", "vllm")}
    )
    results, _ = race(contest, Fake(), 3, random.Random(0))
    (found,) = [
        one
        for one in rows(contest, results, gpu.GPUS["h100"])
        if one.metric == "ratio_to_predicted"
    ]
    assert (found.params["subject"], found.verdict) == ("slots", verdict)
    assert found.value == pytest.approx(us / 11.014, rel=1e-3)
    gpu.print_contest(contest, results, {}, gpu.GPUS["h100"])
    assert capsys.readouterr().out.count("predicted 11.0 us (8.9 to 14.6)") == 1


def test_a_data_sheet_is_found_by_the_name_of_a_device() -> None:
    names = (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA GB200",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "Tesla T4",
    )
    assert [*map(gpu.known_gpu, names)] == [
        gpu.GPUS.get(name) for name in ("h100", "gb200", "rtx_pro_6000", "t4")
    ]


def test_a_share_is_that_of_its_own_rounds() -> None:
    """A machine that slows down slows the copy as well."""
    slowing = (1e-9, 1e-9, 2e-9, 4e-9)

    class Slowing(Fake):
        def copy(self) -> Rival:
            return Rival(lambda: Case(iter(slowing).__next__, lambda: 0.0), 1000)

    contest = Contest("x", {}, {"a": rival(slowing, 1000)})
    results, _ = race(contest, Slowing(), 3, random.Random(0))
    found = {(row.params["subject"], row.metric): row for row in rows(contest, results)}
    share = found["a", "share_of_copy"]
    assert share.value == share.ci_low == share.ci_high == 1


# ---- the command ----


def test_without_cuda_it_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(HybridKVError, match="no CUDA device"):
        main(["--quick", "--out", str(tmp_path / "gpu.csv")])
    assert not list(tmp_path.iterdir())


def test_rows_are_appended_and_pass_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def two(quick: bool, **where: str) -> Iterator[Contest]:
        assert quick and where == {"device": "cpu"}
        yield Contest("x", {"K": 1}, {"a": rival(1e-6, 1000), "b": rival(2e-6, 1000)})
        yield Contest("y", {}, {"a": rival(1e-6), "b": Rival(lambda: importlib_error(), 0)})

    def importlib_error() -> NoReturn:
        raise ImportError("no such package")

    monkeypatch.setattr(gpu, "contests", two)
    out = tmp_path / "gpu.csv"
    main(["--quick", "--out", str(out)], Fake, device="cpu")
    found = read_rows(out)
    assert len(found) == (3 + 4 + 2) + (1 + 2) and set(found["suite"]) == {"gpu"}
    assert not list(check_file(out))
    text = capsys.readouterr().out
    assert "x: K=1" in text and "left out: no such package" in text and "1 GB/s" in text


def test_without_a_kernel_of_ours_nothing_is_proven(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent() -> NoReturn:
        raise ImportError("no Triton")

    def contests(quick: bool, **where: str) -> Iterator[Contest]:
        yield Contest("x", {}, {"torch": rival(1e-6), "triton": Rival(absent, 0)})

    monkeypatch.setattr(gpu, "contests", contests)
    with pytest.raises(VoidError, match="kernels of ours did not run: x triton"):
        main(["--out", str(tmp_path / "gpu.csv")], Fake)
    assert len(read_rows(tmp_path / "gpu.csv")) == 3


def test_a_wrong_result_leaves_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong() -> NoReturn:
        raise WrongResultError("y: off by one")

    def one(quick: bool, **where: str) -> Iterator[Contest]:
        yield Contest("x", {}, {"a": Rival(lambda: Case(lambda: 1e-9, wrong), 0)})

    monkeypatch.setattr(gpu, "contests", one)
    with pytest.raises(CheckFailedError, match=r"x \{\}, a: y: off by one"):
        main(["--out", str(tmp_path / "gpu.csv")], Fake)
    assert not (tmp_path / "gpu.csv").exists()


def test_a_call_is_timed_alone_behind_other_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    log = []
    log_events(monkeypatch, log, 2000.0)
    device = object.__new__(Cuda)
    device.evict = lambda: log.append("evict")
    calls = [(lambda n=n: log.append(f"before {n}"), lambda n=n: log.append(n)) for n in "ab"]
    assert device.time(calls) == [2.0, 2.0]
    parts = [[f"before {n}", "evict", "event", n, "event"] for n in "ab"]
    assert log == [*parts[0], *parts[1], "wait"]


def test_what_passes_through_the_cache_is_larger_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="A GPU", L2_cache_size=4096)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    for name in ("ones", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda size, dtype, device, make=make: make(size, dtype=dtype)
        )
    monkeypatch.setattr(Cuda, "capture", lambda self, run: run)
    device = Cuda()
    ring = device.ring
    assert all(part.nbytes >= 4 * 4096 for part in ring)
    ring[0].fill_(7)
    device.evict()
    # written, then another one is read
    assert bool((ring[1] == 7).all()) and int(device.ring_sum) == ring[2].numel()
    entry = device.copy()
    assert entry.num_bytes == 2 * ring[0].nbytes
    case = entry.make()
    assert case.check() == 0
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)
    with pytest.raises(WrongResultError, match="copy"):
        case.check()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = Cuda()
    contest = gated_norm.norms("cuda", "nemotron-3-nano", 512)
    results, _ = race(contest, device, 5, random.Random(0))
    assert all((one.seconds > 0).all() for one in results)
    assert {row.metric for row in rows(contest, results)} >= {
        "gpu_time",
        "bandwidth",
        "share_of_copy",
    }
    assert np.isfinite(results[-1].seconds).all()
