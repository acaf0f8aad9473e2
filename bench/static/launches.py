"""The launches of our kernels that are compiled: each wrapper at the shapes of real models.

Adding a kernel is a function that calls its wrapper, and a line of `launches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from bench._shapes import DELTA_MODELS, MODELS, NANO
from bench.kernel_blocks import BLOCKS_PER_KV_BLOCK, by_kernel
from bench.static.record import AotCase, Bytes, recorded
from bench.static.state_bytes import step_bytes
from hybrid_kv.kernels.block_tables import (
    DeviceTables,
    StagedBlocks,
    StepBatch,
    TableLayout,
    update_block_tables,
)
from hybrid_kv.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update
from hybrid_kv.kernels.common.rounding import StateRounding
from hybrid_kv.kernels.common.spans import TILE, Spans
from hybrid_kv.kernels.gated_delta import (
    gated_delta_flush,
    gated_delta_prefill,
    gated_delta_recompute,
    gated_delta_update_slots,
)
from hybrid_kv.kernels.gated_norm import gated_rms_norm
from hybrid_kv.kernels.paged_attention import paged_attention_varlen, store_kv
from hybrid_kv.kernels.recompute import (
    RecomputeCursors,
    RecomputeRing,
    RecomputeStep,
    commit,
    default_ring_len,
    recompute_flush,
    recompute_update,
)
from hybrid_kv.kernels.ssd import chunk_scan_prefill, selective_state_update_slots
from hybrid_kv.kernels.state_codec import encode_states

DEVICE = torch.device("meta")
_STATES = {
    "state",
    "conv_state",
    "chunk_states",
}  # arguments of kernels that access recurrent states
BF16, FP32 = torch.bfloat16, torch.float32
NUM_REQS, NUM_TOKENS = 24, 2048
NANO_SHAPE = MODELS[NANO]


@dataclass(frozen=True)
class Launch:
    """One call of a wrapper.

    Attributes:
        kernel, shape, dtype: as in `AotCase`; a wrapper that launches several kernels has their
            names behind its own.
    """

    kernel: str
    shape: str
    call: Callable[[], object]
    dtype: str = "bfloat16"
    bytes_per_program: Bytes | None = None


_meta = partial(torch.empty, dtype=BF16, device=DEVICE)
_ids = partial(torch.empty, dtype=torch.int64, device=DEVICE)


def _heads(model: str, dtype: torch.dtype, *outer: int) -> torch.Tensor:
    """Return the states of a layer."""
    heads, head_dim, size, _ = MODELS[model].state
    return _meta(NUM_REQS, *outer, heads, head_dim, size, dtype=dtype)


def _scan_inputs(model: str, tokens: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    """Return x, dt, dt_bias, A_log, B, C, D of a Mamba-2 layer."""
    heads, head_dim, size, groups = MODELS[model].state
    x, dt = _meta(tokens, heads, head_dim, dtype=dtype), _meta(tokens, heads, dtype=dtype)
    B, C = (_meta(tokens, groups, size, dtype=dtype) for _ in range(2))
    dt_bias, A_log, D = (_meta(heads, dtype=FP32) for _ in range(3))
    return x, dt, dt_bias, A_log, B, C, D


def _spans(chunk_size: int = 128) -> Spans:
    return Spans(torch.tensor([NUM_TOKENS]), _ids(1), chunk_size=chunk_size)


def _slots(model: str, dtype: torch.dtype, k: int) -> None:
    tokens = NUM_REQS * (1 + k)
    indices = _ids(NUM_REQS + 1), _ids(NUM_REQS), _ids(NUM_REQS, 1 + k)
    selective_state_update_slots(_heads(model, dtype), *_scan_inputs(model, tokens), *indices)


def _slots_bytes(rows: str, columns: str, dtype: torch.dtype, k: int) -> Bytes:
    return lambda c: c[rows] * ((2 + k) * c[columns] * dtype.itemsize + (1 + k) * 2 * 2)


def _chunk_scan(dtype: torch.dtype, chunk_size: int) -> None:
    inputs = _scan_inputs(NANO, NUM_TOKENS, dtype)
    has_initial_state = _ids(1, dtype=torch.bool)
    chunk_scan_prefill(_heads(NANO, FP32), *inputs, _spans(chunk_size), _ids(1), has_initial_state)


def _delta_inputs(model: str, tokens: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    """Return q, k, v, dt, dt_bias, A_log, beta of a layer with a delta rule."""
    shape = DELTA_MODELS[model]
    keys, gates = (
        (shape.key_heads, shape.key_dim),
        (shape.heads, *[shape.key_dim] * shape.per_channel),
    )
    q, k = (_meta(tokens, *keys, dtype=dtype) for _ in range(2))
    v = _meta(tokens, shape.heads, shape.value_dim, dtype=dtype)
    dt, beta = _meta(tokens, *gates, dtype=dtype), _meta(tokens, shape.heads, dtype=dtype)
    return q, k, v, dt, _meta(*gates, dtype=FP32), _meta(shape.heads, dtype=FP32), beta


def _delta_states(model: str, dtype: torch.dtype) -> torch.Tensor:
    shape = DELTA_MODELS[model]
    return _meta(NUM_REQS, shape.heads, shape.value_dim, shape.key_dim, dtype=dtype)


def _delta_slots(model: str, dtype: torch.dtype, k: int) -> None:
    indices = _ids(NUM_REQS + 1), _ids(NUM_REQS), _ids(NUM_REQS, 1 + k)
    gated_delta_update_slots(
        _delta_states(model, dtype), *_delta_inputs(model, NUM_REQS * (1 + k)), *indices
    )


def _delta_prefill(model: str, dtype: torch.dtype, chunk_size: int) -> None:
    inputs, initial = _delta_inputs(model, NUM_TOKENS, dtype), _ids(1, dtype=torch.bool)
    gated_delta_prefill(_delta_states(model, FP32), *inputs, _spans(chunk_size), _ids(1), initial)


def _delta_recompute(model: str, dtype: torch.dtype, k: int, update: bool) -> None:
    shape = DELTA_MODELS[model]
    x, B = (shape.heads, shape.value_dim), (shape.key_heads, shape.key_dim)
    dt = (shape.heads, *[shape.key_dim] * shape.per_channel)
    state = _meta(
        NUM_REQS,
        *([2] if dtype == FP32 else []),
        *x,
        shape.key_dim,
        dtype=torch.int16 if dtype == FP32 else dtype,
    )
    ring = RecomputeRing.allocate(NUM_REQS, default_ring_len(1 + k), x, B, BF16, DEVICE, dt)
    step = RecomputeStep(*(_ids(NUM_REQS) for _ in range(6)), max_query_len=1 + k)
    if update:
        gated_delta_recompute(
            state, ring, step, *_delta_inputs(model, NUM_REQS * (1 + k)), _ids(NUM_REQS + 1)
        )
    else:
        gated_delta_flush(state, ring, step)


def _recompute(model: str, dtype: torch.dtype, k: int, num_reqs: int, update: bool) -> None:
    heads, head_dim, size, groups = MODELS[model].state
    state = _heads(model, torch.int16, 2) if dtype == FP32 else _heads(model, dtype)
    ring = RecomputeRing.allocate(
        NUM_REQS, default_ring_len(1 + k), (heads, head_dim), (groups, size), BF16, DEVICE
    )
    step = RecomputeStep(*(_ids(num_reqs) for _ in range(6)), max_query_len=1 + k)
    inputs = _scan_inputs(model, num_reqs * (1 + k))
    if update:
        recompute_update(state, ring, step, *inputs, _ids(num_reqs + 1))
    else:
        recompute_flush(state, ring, step, inputs[3])


def _recompute_bytes(model: str, dtype: torch.dtype, k: int) -> Bytes:
    n_hist = default_ring_len(1 + k) - 1 - k
    moved = step_bytes(MODELS[model].state, dtype, 1 + k, n_hist, flush=False)
    return lambda c: round(c["HEADS_PER_PROGRAM"] / c["HEADS"] * sum(moved.values()))


def _commit() -> None:
    cursors = RecomputeCursors.allocate(NUM_REQS, default_ring_len(4), 4, DEVICE)
    table = _ids(NUM_REQS, 256, dtype=torch.int32)
    commit(cursors, _ids(NUM_REQS), _ids(NUM_REQS), _ids(NUM_REQS + 1), table, 528)


def _conv_inputs(model: str, tokens: int, k: int) -> tuple[torch.Tensor, ...]:
    """Return conv_state, x, the weight tap by tap, and bias."""
    channels, kernel = MODELS[model].channels, MODELS[model].kernel
    conv_state = _meta(NUM_REQS, kernel - 1 + k, channels)
    return conv_state, _meta(tokens, channels), _meta(kernel, channels).t(), _meta(channels)


def _conv_update(model: str, k: int) -> None:
    inputs = _conv_inputs(model, NUM_REQS * (1 + k), k)
    causal_conv1d_update(
        *inputs, _ids(NUM_REQS + 1), _ids(NUM_REQS), _ids(NUM_REQS), _ids(NUM_REQS, 1 + k)
    )


def _conv_update_bytes(k: int) -> Bytes:
    """Read the window and the tokens, write the tokens and all inputs but the oldest."""
    return lambda c: (3 + (1 + k) + (1 + k) + (3 + k)) * c["BLOCK"] * 2


def _conv_prefill() -> None:
    inputs = _conv_inputs(NANO, NUM_TOKENS, 0)
    causal_conv1d_prefill(*inputs, _spans(), _ids(1), _ids(1), _ids(1, dtype=torch.bool))


def _gated_norm(model: str) -> None:
    channels = MODELS[model].inner
    gated_rms_norm(
        *(_meta(NUM_TOKENS, channels) for _ in range(2)),
        _meta(channels),
        MODELS[model].groups,
        1e-5,
    )


def _encode(dtype: torch.dtype, rounds: int) -> None:
    """Encode the states of a step of decodes, at the sizes of a model."""
    rounding = StateRounding(0, rounds) if rounds else None
    encode_states(_heads(NANO, FP32), _ids(NUM_REQS), dtype, rounding, 0)


def _pages(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in kernel blocks of 16 tokens, as `cache.layout` hands them out: side by side."""
    key, value = _meta(NUM_REQS, 2, 16, MODELS[model].kv_heads, MODELS[model].head_size).unbind(1)
    return key, value


def _attention(model: str, length: int, has_window: bool = False) -> None:
    query = _meta(NUM_REQS * length, MODELS[model].query_heads, MODELS[model].head_size)
    table, starts, lens = (
        _ids(*size, dtype=torch.int32) for size in ((NUM_REQS, 256), (NUM_REQS + 1,), (NUM_REQS,))
    )
    # As in Granite-SWA: a window and sinks.
    options = {"window": 128, "sinks": _meta(query.shape[1])} if has_window else {}
    paged_attention_varlen(query, *_pages(model), table, starts, lens, length, 1.0, **options)


def _store() -> None:
    key, value = (_meta(NUM_REQS, NANO_SHAPE.kv_heads, NANO_SHAPE.head_size) for _ in range(2))
    store_kv(key, value, *_pages(NANO), _ids(NUM_REQS))


def _block_tables(layouts: list[TableLayout], cp_size: int) -> None:
    tables = DeviceTables(layouts, 256, 8192, DEVICE, cp_size)
    int32 = partial(_ids, dtype=torch.int32)
    staged = StagedBlocks(
        int32(NUM_REQS), int32(NUM_REQS), int32(NUM_REQS, len(layouts)), _ids(NUM_REQS).bool()
    )
    batch = StepBatch(_ids(NUM_REQS), int32(NUM_REQS + 1), _ids(NUM_TOKENS), NUM_REQS, NUM_TOKENS)
    update_block_tables(tables, staged, batch)


def _expand(bpk: int) -> None:
    by_kernel(_ids(1024, dtype=torch.int32), _ids(bpk, dtype=torch.int32))


def _expand_bytes(bpk: int) -> Bytes:
    """Read each block's id once, write its kernel blocks."""
    return lambda c: 4 * (c["BLOCK"] + c["BLOCK"] // bpk)


# A model whose attention groups agree, and one where every size has to be loaded, under context
# parallelism.
_AGREEING = [*[TableLayout(64, 2096, 1, 1, has_slots=False)] * 4, TableLayout(64, 2096, 131, 131)]
_DIFFERING = [TableLayout(64, 64 * count, count, count) for count in (2, 4, 2, 4)]
_STATE_UPDATES = [(NANO, FP32, k) for k in (0, 1, 3, 5)] + [
    (model, FP32, 3) for model in MODELS if model != NANO
]
_STATE_UPDATES += [(NANO, BF16, 3), (NANO, torch.float16, 3)]
# One tile of tokens serves up to seven drafts, so K moves only the length of the ring.
_RECOMPUTES = (
    (NANO, FP32, 3, 256, True),
    (NANO, FP32, 3, 1, True),
    (NANO, BF16, 3, 256, True),
    (NANO, FP32, 3, 1, False),
    ("Nemotron-H-8B", FP32, 5, 256, True),
)
# 16 heads of Nano share one of K and V: 4 tokens fill the largest tile, and a prefill compiles the
# same.
_QUERIES = (
    (NANO, 1, "K=0"),
    (NANO, 4, "K=3"),
    ("Granite-4-H-small", 4, "K=3"),
    ("Granite-4-H-small", 2048, "prefill"),
)


_DELTA_UPDATES = [(model, FP32, k) for model in DELTA_MODELS for k in (0, 3)] + [
    ("Qwen3-Next", BF16, 3)
]
_DELTA_RECOMPUTES = [(model, FP32, update) for model in DELTA_MODELS for update in (True, False)]
_DELTA_RECOMPUTES += [("Qwen3-Next", BF16, True)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def launches() -> Iterator[Launch]:
    """Yield all of them, by the names of their kernels."""
    yield from _table_launches()
    yield from _conv_launches()
    yield from _delta_launches()
    yield from _block_and_norm_launches()
    yield from _attention_launches()
    yield from _recompute_launches()
    yield from _ssd_launches()
    yield from _codec_launches()


def _table_launches() -> Iterator[Launch]:
    tables = "block_tables.update_block_tables"
    yield Launch(tables, f"{NANO}, 256 rows", partial(_block_tables, _AGREEING, 1), "int32")
    yield Launch(
        tables, "two block sizes, 256 rows, cp 2", partial(_block_tables, _DIFFERING, 2), "int32"
    )


def _conv_launches() -> Iterator[Launch]:
    yield Launch(
        "conv_prefill.causal_conv1d_prefill",
        NANO,
        _conv_prefill,
        # The inputs and the three before them, and the outputs.
        bytes_per_program=lambda c: (TILE + 3 + TILE) * c["BLOCK"] * 2,
    )
    for model, dtype, k in _STATE_UPDATES:
        if dtype == FP32:
            call, moved = partial(_conv_update, model, k), _conv_update_bytes(k)
            yield Launch(
                "conv_update.causal_conv1d_update", f"{model}, K={k}", call, bytes_per_program=moved
            )


def _delta_launches() -> Iterator[Launch]:
    for model, (dtype, size) in product(DELTA_MODELS, ((BF16, 128), (FP32, 64))):
        call = partial(_delta_prefill, model, dtype, size)
        yield Launch("delta_prefill.gated_delta_prefill", model, call, _name(dtype))
    for model, dtype, update in _DELTA_RECOMPUTES:
        kernel = f"delta_recompute.gated_delta_{'recompute' if update else 'flush'}"
        call = partial(_delta_recompute, model, dtype, 3, update)
        yield Launch(kernel, f"{model}, K=3", call, _name(dtype))
    for model, dtype, k in _DELTA_UPDATES:
        call = partial(_delta_slots, model, dtype, k)
        moved = _slots_bytes("BLOCK_V", "KEY", dtype, k)
        yield Launch(
            "delta_update.gated_delta_update_slots", f"{model}, K={k}", call, _name(dtype), moved
        )


def _block_and_norm_launches() -> Iterator[Launch]:
    for bpk in BLOCKS_PER_KV_BLOCK:
        call, moved = partial(_expand, bpk), _expand_bytes(bpk)
        yield Launch("kernel_blocks.expand", f"{bpk} per block", call, "int32", moved)
    for model in MODELS:
        call = partial(_gated_norm, model)
        yield Launch(
            "gated_norm.gated_rms_norm", model, call, bytes_per_program=lambda c: 3 * c["SIZE"] * 2
        )


def _attention_launches() -> Iterator[Launch]:
    for model, length, kind in _QUERIES:
        call = partial(_attention, model, length)
        yield Launch("paged_attention.paged_attention_varlen", f"{model}, {kind}", call)
    yield Launch(
        "paged_attention.paged_attention_varlen",
        f"{NANO}, K=0, window, sinks",
        partial(_attention, NANO, 1, has_window=True),
    )
    yield Launch(
        "paged_attention.store_kv", NANO, _store, bytes_per_program=lambda c: 4 * c["WIDTH"] * 2
    )


def _recompute_launches() -> Iterator[Launch]:
    for model, dtype, k, num_reqs, update in _RECOMPUTES:
        kernel = f"recompute.recompute_{'update' if update else 'flush'}"
        call = partial(_recompute, model, dtype, k, num_reqs, update)
        moved = _recompute_bytes(model, dtype, k) if update else None
        yield Launch(kernel, f"{model}, K={k}, {num_reqs} rows", call, _name(dtype), moved)
    yield Launch("recompute.commit", "K=3, blocks of 528", _commit, "int64")


def _ssd_launches() -> Iterator[Launch]:
    for dtype, size in ((BF16, 128), (FP32, 64)):
        call = partial(_chunk_scan, dtype, size)
        yield Launch("ssd_prefill", f"{NANO}, chunks of {size}", call, _name(dtype))
    for model, dtype, k in _STATE_UPDATES:
        call, moved = partial(_slots, model, dtype, k), _slots_bytes("BLOCK_P", "STATE", dtype, k)
        kernel = "state_update.selective_state_update_slots"
        yield Launch(kernel, f"{model}, K={k}", call, _name(dtype), moved)


def _codec_launches() -> Iterator[Launch]:
    for dtype, rounds in (
        (torch.float16, 5),
        (torch.int8, 0),
        (torch.int8, 10),
        (torch.float8_e4m3fn, 10),
    ):
        call, size = partial(_encode, dtype, rounds), dtype.itemsize
        yield Launch(
            "state_codec.encode_states",
            f"{NANO}, {rounds} rounds",
            call,
            _name(dtype),
            partial(_codec_bytes, size),
        )


def _codec_bytes(size: int, c: Mapping[str, int]) -> int:
    """Read a row in float32, write its values."""
    return (4 + size) * c["SIZE"]


def aot_cases(lanes: int = 32) -> list[AotCase]:
    """Return what `launches` compile on GPUs with warps of `lanes`."""
    found = []
    for one in launches():
        with recorded(lanes) as cases:
            one.call()
        for case in cases:
            found.append(
                replace(
                    case,
                    kernel=one.kernel if len(cases) == 1 else f"{one.kernel}.{case.kernel}",
                    shape=one.shape,
                    dtype=one.dtype,
                    bytes_per_program=one.bytes_per_program
                    and one.bytes_per_program(case.constexprs),
                    state_access=not _STATES.isdisjoint(case.fn.arg_names),
                )
            )
    return found
