"""What a step moves, held against what the interpreter counted, and what that costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.static.gate import read_baseline
from bench.static.state_bytes import slots_bytes
from hybrid_kv.attention.rollback import rollback_spec
from hybrid_kv.cache.spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec, with_rollback
from hybrid_kv.config import CacheConfig, planned_dtype
from hybrid_kv.measure.predict.gpu import (
    CHIPS,
    FITTED_ON,
    GPUS,
    GRAPH_NODE,
    INTERVALS,
    LAUNCH,
    UPDATE,
    WAIT,
)
from hybrid_kv.measure.predict.step import (
    Kernel,
    cache_kernels,
    other_kernels,
    priced,
    step_time,
    update_bytes,
    window_bytes,
)
from hybrid_kv.measure.results import read_rows
from hybrid_kv.models.shapes import model_shape

ROOT = Path(__file__).resolve().parents[3]
COLD = float("inf")
H100 = GPUS["h100"]
COUNTS = read_baseline(ROOT / "results" / "kernels.csv", "3.7.1")


def nano_layer(scheme: str, K: int, mode: str = "none") -> MambaSpec:
    """A Mamba-2 layer of Nemotron-3-Nano, float32 states, as `bench.static.counts` has it."""
    config = json.loads((ROOT / "examples" / "nemotron-3-nano" / "config.json").read_text())
    cache = CacheConfig(state_scheme=scheme, mamba_ssm_cache_dtype="float32")
    layers = model_shape(config, cache=cache, make_dtype=planned_dtype).layers.values()
    spec = next(layer for layer in layers if isinstance(layer, MambaSpec))
    spec = replace(spec, block_size=528, mamba_cache_mode=mode)
    found = with_rollback(spec, rollback_spec(cache, K, is_async=False, specs=[spec]))
    assert isinstance(found, MambaSpec)
    return found


@pytest.mark.parametrize("K", [3, 5])
@pytest.mark.parametrize("scheme", ["slots", "recompute"])
def test_the_bytes_are_those_that_the_interpreter_counted(scheme: str, K: int) -> None:
    counted = COUNTS[f"bytes.{scheme}", f"Nemotron-3-Nano, K={K}", "float32", "any"]["bytes"]
    mode = "none" if scheme == "slots" else "all"  # the count has boundaries
    assert update_bytes(nano_layer(scheme, K, mode), 0.75) == pytest.approx(counted, rel=0.01)


def test_states_at_boundaries_are_copied_where_a_mode_keeps_them() -> None:
    """An eighth or less of 2 states, once in 528 tokens, at 2.73 accepted of a step of 4."""
    plain, kept = (update_bytes(nano_layer("slots", 3, mode), 0.75) for mode in ("none", "align"))
    state = 64 * 64 * 128 * 4
    assert kept - plain == pytest.approx(2 * state * (1 + 0.75 + 0.75**2 + 0.75**3) / 528)


def test_a_convolution_reads_its_window_and_writes_what_drafts_may_start_from() -> None:
    channels = 64 * 64 + 2 * 8 * 128
    for K in (0, 3):
        assert window_bytes(nano_layer("slots", K)) == 2 * channels * (3 + 2 * (1 + K) + 3 + K)


def test_a_window_reads_no_more_than_its_tokens() -> None:
    full = FullAttentionSpec(16, 4, 128, planned_dtype("bfloat16"))
    window = SlidingWindowSpec(16, 4, 128, full.dtype, sliding_window=512)
    token = 2 * 4 * 128 * 2

    def moved(spec: FullAttentionSpec, context: int) -> float:
        (attention,) = (x for x in cache_kernels([spec], 3, context, 1.0) if x.name == "attention")
        return attention.num_bytes

    assert moved(full, 9000) == 3 * 9001 * token
    assert moved(window, 9000) == 3 * 512 * token
    assert moved(window, 100) == moved(full, 100) == 3 * 101 * token


def test_a_step_has_the_launches_that_were_counted() -> None:
    rows = read_rows(ROOT / "results" / "microbench.csv").query(
        "suite == 'device' and benchmark == 'steps'"
    )
    of_layers = (
        set(rows["value"][rows["metric"] == f"launches_per_{one}_layer"])
        for one in ("mamba", "attention")
    )
    (mamba,), (attention,) = of_layers  # the same in every mode and scheme
    spec = nano_layer("slots", 0)
    kernels = {kernel.name: kernel for kernel in cache_kernels([spec, spec], 2, 100, 1.0)}
    assert [kernels[name].launches for name in ("conv", "update", "tables")] == [2, 2, 1] and len(
        kernels
    ) == 3
    assert other_kernels(1, 1, 0.0)[0].launches == mamba - 2
    shape = model_shape(
        json.loads((ROOT / "examples" / "nemotron-3-nano" / "config.json").read_text())
    )
    kernels = {kernel.name: kernel for kernel in cache_kernels(shape.layers.values(), 8, 100, 1.0)}
    assert kernels["attention"].launches == 6 * (attention - 2)  # without its projections
    assert kernels["attention"].num_bytes == 8 * 101 * 6 * 2 * 2 * 128 * 2
    assert kernels["update"].num_bytes == pytest.approx(
        8 * 23 * sum(slots_bytes((64, 64, 128, 8), planned_dtype("float32"), 1).values()), rel=0.01
    )


def test_a_kernel_is_bound_by_floor_cache_or_memory() -> None:
    chip, (floor, rate) = CHIPS["hopper"], CHIPS["hopper"].kernels[UPDATE]
    small = priced(Kernel("update", 3, 3.0, UPDATE), H100, COLD)
    assert (small.bound, small.us) == ("floor", pytest.approx(3 * floor, rel=1e-4))
    cached = priced(Kernel("update", 1, 40e6, UPDATE), H100, 20e6)
    assert (cached.bound, cached.us) == ("L2", pytest.approx(floor + 40 / rate))
    cold = priced(Kernel("update", 1, 4e9, UPDATE, 4), H100, COLD)
    assert cold.bound == "memory"
    assert cold.us == pytest.approx(floor + 3 * chip.serial + 4000 / (chip.reached * 3.35))
    assert (cold.low / cold.us, cold.high / cold.us) == pytest.approx(INTERVALS["memory"])
    half_way = priced(Kernel("update", 1, 40e6, UPDATE), H100, 50e6 * (chip.fits + chip.spills) / 2)
    assert cached.us < half_way.us < priced(Kernel("update", 1, 40e6, UPDATE), H100, COLD).us


def test_the_host_bounds_a_step_of_small_kernels() -> None:
    kernels = [Kernel("conv", 100, 0.0)]
    device = priced(kernels[0], H100, 0.0).us
    graph, _ = step_time(kernels, H100, 0, eager=False)
    eager, _ = step_time(kernels, H100, 2, eager=True)
    assert 100 * GRAPH_NODE < device < 100 * LAUNCH
    assert (graph.us, graph.bound) == (pytest.approx(device), "floor")
    assert (eager.us, eager.bound) == (pytest.approx(100 * LAUNCH + 2 * WAIT), "host")


def test_many_tokens_make_the_weights_a_matter_of_compute() -> None:
    few, many = (priced(*other_kernels(10, tokens, 8e9), H100, COLD) for tokens in (1, 4096))
    assert (few.bound, many.bound) == ("memory", "compute")
    assert many.us == pytest.approx(8e9 * 4096 / (CHIPS["hopper"].matmul * 989e6))


def test_each_gpu_has_a_chip_that_was_fitted() -> None:
    assert {gpu.chip for gpu in GPUS.values()} == set(CHIPS) == set(FITTED_ON)
    assert all(GPUS[gpu].chip == chip for chip, gpu in FITTED_ON.items())
