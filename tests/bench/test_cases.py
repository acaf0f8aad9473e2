"""The registry is complete, every quick case is right and timed, a wrong result has no time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import bench
from bench import _reference, causal_conv1d, gated_norm, paged_attention, ssd
from bench.harness import cells as cases
from bench.harness import registry
from bench.harness.cells import Case, Cell, WrongResultError
from hybrid_kv.measure.timing.case import checked

Function = Callable[..., Any]

FOLDER = Path(bench.__file__).parent
ALL = registry.cells()
QUICK = [cell for cell in ALL if cell.quick and cell.tier != "gpu"]


def named(words: str, cells: Sequence[Cell] = ALL) -> Cell:
    """The first cell on a CPU, of the quick ones if there is one, whose key has all these words."""
    found = [
        cell
        for cell in cells
        if cell.tier != "gpu" and all(word in cell.key for word in words.split())
    ]
    return max(found, key=lambda cell: cell.quick)


# ---- the registry ----


def test_every_suite_has_cells() -> None:
    # the pretend device needs a build for the CPU
    missing = {"device"} if torch.version.cuda else set()
    assert set(registry.unavailable()) == missing
    wanted = [suite for suite in registry.suites() if suite not in missing]
    assert list(dict.fromkeys(cell.suite for cell in ALL)) == wanted
    assert {cell.suite for cell in QUICK} == set(wanted)


def test_what_needs_the_pretend_device_is_left_out_with_a_build_for_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "build of torch for the CPU" in registry.unavailable()["device"]
    names = {(cell.suite, cell.benchmark) for cell in registry.cells()}
    assert ("kernel_blocks", "expand") in names and ("kernel_blocks", "expand_counts") not in names


def test_keys_are_unique_and_stable() -> None:
    keys = [cell.key for cell in ALL]
    assert len(set(keys)) == len(keys)
    assert "state_update/slots[model=nemotron-3-nano-tp8,num_reqs=2,K=3]" in keys
    assert "kernel_blocks/expand[num_ids=1,blocks_per_kv_block=2,subject=engine]" in keys


def test_every_benchmark_is_a_full_grid_of_scalars() -> None:
    for name in {(cell.suite, cell.benchmark) for cell in ALL}:
        own = [cell for cell in ALL if (cell.suite, cell.benchmark) == name]
        assert len({(tuple(cell.params), cell.tier) for cell in own}) == 1, name
        axes = [list(dict.fromkeys(cell.params[param] for cell in own)) for param in own[0].params]
        assert [tuple(cell.params.values()) for cell in own] == list(product(*axes))
        assert all(isinstance(value, str | int | float) for axis in axes for value in axis)
        assert own[0].tier in cases.TIERS
        assert bool(own[0].units) == (own[0].tier == "count")


def test_seeds_follow_from_the_cell_alone() -> None:
    assert cases.seed("slots", {"model": "m", "K": 3}) == 1851495371
    assert cases.seed("slots", {"K": 3, "model": "m"}) == 1851495371
    assert cases.seed("slots", {"K": 3, "model": "m", "subject": "engine"}) == 1851495371
    others = [("slots", {"K": 4, "model": "m"}), ("recompute", {"K": 3, "model": "m"})]
    assert 1851495371 not in [cases.seed(*other) for other in others]


def test_grid_says_what_is_quick_and_passes_the_seed() -> None:
    seen = []

    def build(seed: int, **params: Any) -> None:
        seen.append((seed, params))

    made = list(
        cases.grid("s", "b", "cpu", build, {"x": (1, 2), "y": ("a", "b")}, [(2,), (1, "b")])
    )
    assert [cell.quick for cell in made] == [False, True, True, True]
    made[1].make()
    assert seen == [(cases.seed("b", {"x": 1, "y": "b"}), {"x": 1, "y": "b"})]


def test_a_suite_that_cannot_be_imported_loses_its_own_cells_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bench.offload", None)
    monkeypatch.delattr(sys.modules["bench.ssd"], "cells")
    assert set(registry.unavailable()) == {"offload", "ssd"}
    assert "offload" in registry.unavailable()["offload"]
    assert [cell.key for cell in registry.cells()] == [
        c.key for c in ALL if c.suite not in ("offload", "ssd")
    ]


def test_kernels_and_listing_need_neither_triton_nor_data() -> None:
    names = [
        path.name
        for path in (FOLDER.parent / "hybrid_kv" / "kernels").iterdir()
        if (path / "__init__.py").exists()
    ]
    code = "import sys, bench.harness.registry as r; r.cells()"
    code = "; ".join(
        [
            code,
            *(f"import hybrid_kv.kernels.{name}" for name in names),
            "print('triton' in sys.modules)",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER.parent, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("False", 0) and len(names) == 9, done.stderr


def test_only_the_timing_module_reads_a_clock() -> None:
    modules = {"time", "timeit"}
    host = {
        "perf_counter",
        "perf_counter_ns",
        "thread_time",
        "process_time",
        "monotonic",
        "do_bench",
    }
    for path in sorted([*FOLDER.glob("**/*.py"), *Path(cases.__file__).parent.glob("*.py")]):
        # vllm_worker.py runs where vLLM is installed, and nothing of ours: it brings the same
        # clock.
        if path.name in ("clock.py", "vllm_worker.py"):
            continue
        # A race on a GPU reads the events of many launches that are in flight at once.
        names = host if path.name == "gpu.py" else host | {"elapsed_time"}
        for node in ast.walk(ast.parse(path.read_text())):
            imported = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            if isinstance(node, ast.ImportFrom):
                imported.append(node.module)
            assert not (modules | names) & set(imported), f"{path} imports a clock"
            used = (
                node.attr
                if isinstance(node, ast.Attribute)
                else node.id
                if isinstance(node, ast.Name)
                else ""
            )
            assert used not in names, f"{path} reads a clock of its own"


# ---- the cells ----


@pytest.mark.parametrize(
    "cell", [cell for cell in QUICK if cell.tier == "cpu"], ids=lambda cell: cell.key
)
def test_a_quick_cell_is_right_before_and_after_it_is_timed(
    benchmark: BenchmarkFixture, cell: Cell
) -> None:
    case = cell.make()
    assert checked(cell.key, case) >= 0
    benchmark.pedantic(case.run, setup=case.reset, rounds=20)
    case.reset()
    for _ in range(min(case.max_repeats, 4)):
        case.run()
    assert checked(cell.key, case) >= 0


# Those of the suite `device` are read off one run of 10 seconds, see tests/measure/device.
COUNTS = [cell for cell in QUICK if cell.tier == "count" and cell.suite != "device"]


@pytest.mark.parametrize("cell", COUNTS, ids=lambda cell: cell.key)
def test_a_quick_count_is_exact(cell: Cell) -> None:
    counts = cell.make()
    assert counts == cell.make()
    assert {name: count.unit for name, count in counts.items()} == dict(cell.units)
    for count in counts.values():
        assert isinstance(count.value, int) and count.better in ("lower", "higher", "equal")


def test_as_many_calls_as_a_case_allows() -> None:
    """`max_repeats` calls after a reset are right, and that is the number the case documents."""
    for words in (
        "block_tables/step decode",
        "kernel_blocks/expand engine num_ids=32",
        "scheduler/decode all K=3",
    ):
        case = named(words).make()
        for _ in range(2):
            case.reset()
            for _ in range(case.max_repeats):
                case.run()
        assert case.check() == 0


def test_a_made_case_shares_nothing_with_another() -> None:
    cell = named("block_tables/step prefill")
    one, other = cell.make(), cell.make()
    one.run()
    assert other.check() == one.check() == 0


def held_blocks(mode: str, K: int) -> dict[str, int]:
    return {
        name: count.value for name, count in named(f"memory/held mode={mode} K={K}").make().items()
    }


@pytest.mark.parametrize("K", [0, 3])
def test_held_blocks_follow_the_formulas(K: int) -> None:
    """1,000 tokens of prompt, then 128 or more; blocks of 16, four Mamba groups, attention."""
    # cached before the last step's tokens; that step runs 1 + K
    end = 1000 + 128 // (1 + K) * (1 + K)
    columns = -(-(end + (1 + K if 128 % (1 + K) else 0)) // 16)
    none, everything = held_blocks("none", K), held_blocks("all", K)
    assert none["prompt"] == 63 + 4 * (1 + K)
    assert none["mamba"] == 4 * (1 + K)
    assert everything["attention"] == none["attention"] in (columns, columns - 1, columns + 1)
    assert everything["mamba"] == 4 * (everything["attention"] + K)
    assert everything["most"] == everything["mamba"] + everything["attention"]
    assert none["published"] == 0
    assert everything["published"] == 5 * ((1000 + 127) // 16)
    assert held_blocks("align", K)["mamba"] <= 4 * (2 + K)


# ---- what is wrong has no time ----


def shifted(function: Function) -> Function:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, tuple):
            return (result[0] + 1, *result[1:])
        return result + 1

    return wrong


def second_shifted(function: Function) -> Function:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        first, second = function(*args, **kwargs)
        return first, second * 1.001

    return wrong


def idle(function: Function) -> Function:
    return lambda *args, **kwargs: None


def short_hit(function: Function) -> Function:
    return lambda *args, **kwargs: replace(function(*args, **kwargs), num_tokens=16)


def gate_first(function: Function) -> Function:
    return lambda self, x, gate: function(self, gate, x)


def other_hidden(function: Function) -> Function:
    return lambda self, hidden: function(self, hidden + 1)


def flipped_table(function: Function) -> Function:
    return lambda cache, table, *rest: function(cache, table.flip(1), *rest)


def flipped_blocks(function: Function) -> Function:
    return lambda self, blocks: {key: data.flip(0) for key, data in function(self, blocks).items()}


def no_window(function: Function) -> Function:
    return lambda self, common, table, current, prev, rows, *rest: function(
        self, common, table, current, prev, np.zeros_like(rows), *rest
    )


def stale(function: Function) -> Function:
    """The first call's result for ever."""
    results = []

    def wrong(*args: Any, **kwargs: Any) -> Any:
        results.append(results[0] if results else function(*args, **kwargs))
        return results[-1]

    return wrong


PLANTS = [
    ("bench.kernel_blocks.ListWay.prepare", idle, "kernel_blocks/expand list"),
    ("bench.kernel_blocks.NumpyWay.prepare", idle, "kernel_blocks/expand numpy"),
    ("bench.kernel_blocks.TorchWay.prepare", idle, "kernel_blocks/expand torch"),
    ("bench.kernel_blocks.TorchWay.prepare", idle, "kernel_blocks/expand triton"),
    (
        "hybrid_kv.cache.block_table.BlockTables.append_block_ids",
        idle,
        "kernel_blocks/expand engine",
    ),
    ("hybrid_kv.cache.block_table.BlockTables._apply_staged", idle, "block_tables/step decode"),
    ("hybrid_kv.kernels.block_tables.host.HostTables.map_slots", idle, "block_tables/step prefill"),
    ("bench.slot_mapping.slot_mapping", shifted, "slot_mapping/tokens cp_size=2"),
    (
        "hybrid_kv.cache.manager.KVCacheManager.find_longest_cache_hit",
        short_hit,
        "prefix_lookup/hit shared=all",
    ),
    ("hybrid_kv.cache.block_hash.BlockHashes.chain", stale, "prefix_lookup/hash"),
    ("hybrid_kv.cache.manager.KVCacheManager._give_back", idle, "scheduler/decode align K=3"),
    ("bench.causal_conv1d.causal_conv1d", second_shifted, "causal_conv1d/prefill"),
    ("bench.causal_conv1d.causal_conv1d_update_reference", shifted, "causal_conv1d/update K=3"),
    ("bench.state_update.selective_state_update_slots_reference", stale, "state_update/slots K=3"),
    (
        "hybrid_kv.kernels.recompute.reference.recompute_flush_reference",
        idle,
        "state_update/recompute flush=True",
    ),
    ("hybrid_kv.models.layers.GatedRMSNorm.forward", gate_first, "gated_norm/norm"),
    ("bench.ssd.chunk_scan", second_shifted, "ssd/chunk_scan"),
    ("bench.paged_attention.token_index", flipped_table, "paged_attention/decode length=4"),
    (
        "hybrid_kv.kernels.paged_attention.slot_cells",
        lambda f: lambda slots, size: f(slots.abs(), size),
        "write_kv",
    ),
    ("hybrid_kv.cache.offload.KVOffload.load", idle, "offload/load host"),
    ("hybrid_kv.cache.offload.KVOffload._to_host", flipped_blocks, "offload/store host"),
    ("hybrid_kv.models.exact.ExactModel.logits", other_hidden, "end_to_end/exact"),
    (
        "hybrid_kv.attention.mamba.MambaMetadataBuilder.build",
        no_window,
        "engine_step/decode_block all K=3",
    ),
]


@pytest.mark.parametrize(
    ("target", "inject", "words"), PLANTS, ids=[inject[0] for inject in PLANTS]
)
def test_a_injected_mistake_is_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, target: str, inject: Callable[[Function], Function], words: str
) -> None:
    cell = named(words)
    assert checked(cell.key, cell.make()) >= 0
    monkeypatch.setattr(target, inject(resolve_name(target)))
    case = named(
        words, registry.cells()
    ).make()  # listed anew: an implementation may be bound in a cell
    with pytest.raises(AssertionError):
        checked(cell.key, case)
        checked(cell.key, case)  # what was right once


def test_references_are_right() -> None:
    """Against torch's own."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, heads, 8, generator=g).double()
        for length, heads in ((3, 4), (7, 2), (7, 2))
    )
    mask = torch.ones(3, 7, dtype=torch.bool).tril(4)
    parts = [q.transpose(0, 1), *(part.repeat_interleave(2, 1).transpose(0, 1) for part in (k, v))]
    wanted = torch.nn.functional.scaled_dot_product_attention(*parts, mask, scale=0.3).transpose(
        0, 1
    )
    assert np.allclose(
        _reference.attention(*(part.numpy() for part in (q, k, v)), 0.3), wanted, atol=1e-12
    )
    window, x = (
        torch.randn(2, 3, 5, generator=g).double(),
        torch.randn(2, 6, 5, generator=g).double(),
    )
    weight, bias = torch.randn(5, 4, generator=g).double(), torch.randn(5, generator=g).double()
    inputs = torch.cat([window, x], 1).transpose(1, 2)
    wanted = torch.nn.functional.silu(
        torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=5)
    )
    made = _reference.convolution(*(part.numpy() for part in (window, x, weight, bias)))
    assert np.allclose(made, wanted.transpose(1, 2), atol=1e-12)
    # One head, one state element: a scalar recurrence by hand.
    one = np.ones((1, 2, 1, 1))
    y, states = _reference.recurrence(
        one[:, 0] * 4,
        one * 3,
        one[..., 0] * 0.5,
        np.array([-2 * np.log(2)]),
        one * 2,
        one * 5,
        np.array([7.0]),
    )
    assert np.allclose(states.ravel(), [2 + 3, 2.5 + 3])
    assert np.allclose(y.ravel(), [25 + 21, 27.5 + 21])


def test_near_and_equal_refuse() -> None:
    assert _reference.near("x", [1.0, 2.0], [1.0, 2.2], 0.1) == pytest.approx(0.2 / 2.2)
    for wrong in ([1.0, 2.0], [1.0, float("nan")], [1.0]):
        with pytest.raises(WrongResultError, match="x"):
            _reference.near("x", wrong, [1.0, 2.2], 0.05)
    assert _reference.equal("x", [1, 2], [1, 2]) == 0
    for wrong in ([1, 3], [1]):
        with pytest.raises(WrongResultError, match="x"):
            _reference.equal("x", wrong, [1, 2])


# ---- GPU cells, as far as a CPU can go ----


def wrong_by_a_tenth(function: Function) -> Function:
    return lambda *arguments: function(*arguments) * 1.1


NANO = "nemotron-3-nano-tp8"
KERNELS = {
    causal_conv1d.causal_conv1d_prefill_reference: lambda f: causal_conv1d.prompts(
        0, NANO, 40, 2, f, "cpu"
    ),
    ssd.chunk_scan_prefill_reference: lambda f: ssd.prompts(0, NANO, 40, 2, f, "cpu"),
    gated_norm.gated_rms_norm_reference: lambda f: gated_norm.norm(
        0, NANO, 3, f, "cpu", torch.bfloat16
    ),
    paged_attention.by_torch: lambda f: paged_attention.pages(0, NANO, 2, 3, 48, f, "cpu"),
}


@pytest.mark.parametrize(("plain", "build"), KERNELS.items(), ids=[one.__name__ for one in KERNELS])
def test_a_wrong_kernel_is_a_wrong_result(
    plain: Function, build: Callable[[Function], Case]
) -> None:
    assert build(plain).check() >= 0
    with pytest.raises(WrongResultError):
        build(wrong_by_a_tenth(plain)).check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cell", [cell for cell in ALL if cell.tier == "gpu" and cell.quick], ids=lambda cell: cell.key
)
def test_gpu_cells_are_right(cell: Cell) -> None:
    case = cell.make()
    assert checked(cell.key, case) >= 0
    case.reset()
    case.run()
    assert checked(cell.key, case) >= 0
