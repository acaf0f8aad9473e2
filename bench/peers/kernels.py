"""The metrics for the Triton kernels of vLLM and mamba_ssm, installed or on PYTHONPATH.

A peer's own wrapper is called with tensors of Nemotron-3-Nano, and what it would launch is recorded
(`static.record`). Where it tunes on the device, its first configuration is taken, and the shape
says so. A kernel's file is loaded without the rest of its package, which needs compiled extensions.

Nothing here is gated or goes into a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from bench._shapes import MODELS, NANO
from bench.harness.contest import bound_update
from bench.peers.stand_ins import loaded_kernels, root_of
from bench.static.record import AotCase, Bytes, recorded
from hybrid_kv.config import HybridKVError

PACKAGES = {"vllm": "vllm", "mamba_ssm": "mamba-ssm"}  # how they are imported and installed
SHAPE = MODELS[NANO]
HEADS, HEAD_DIM, SIZE, GROUPS = SHAPE.state
CHANNELS, CHUNK = SHAPE.channels, SHAPE.chunk_size
QUERY_HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = (
    SHAPE.query_heads,
    SHAPE.kv_heads,
    SHAPE.head_size,
    16,
)
NUM_REQS, NUM_TOKENS = 24, 2048


@dataclass(frozen=True)
class Peer:
    """One call of a peer's wrapper.

    Attributes:
        module: with the wrapper.
        shape, dtype: as in `AotCase`.
        call: of the wrapper, for its loaded module.
        bytes_per_program: of the kernels whose name contains the key; the others' depend on data.
    """

    module: str
    shape: str
    dtype: str
    call: Callable[[Any], object]
    bytes_per_program: Mapping[str, Bytes]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


_bf16, _int32 = (partial(torch.empty, dtype=dtype) for dtype in (torch.bfloat16, torch.int32))


def _scan_inputs(num_tokens: int) -> list[torch.Tensor]:
    """Return x, B and C as the convolution leaves them, next to each other."""
    heads = ((HEADS, HEAD_DIM), (GROUPS, SIZE), (GROUPS, SIZE))
    parts = _bf16(num_tokens, CHANNELS).split([a * b for a, b in heads], dim=-1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, heads, strict=True)]


def _state_update(peer: Any, k: int, **options: Any) -> None:
    tokens = NUM_REQS * (1 + k)
    x, B, C = _scan_inputs(tokens)
    dt_bias, A_log, D = (torch.empty(HEADS) for _ in range(3))
    operands = (
        torch.empty(NUM_REQS, HEADS, HEAD_DIM, SIZE),
        x,
        _bf16(tokens, HEADS),
        dt_bias,
        A_log,
        B,
        C,
        D,
    )
    bound_update(peer.selective_state_update, operands, **options)()


def _vllm_state_update(peer: Any, k: int) -> None:
    options: dict[str, Any] = {"out": _bf16(NUM_REQS * (1 + k), HEADS, HEAD_DIM)}
    if k:
        table = _int32(NUM_REQS, 1 + k)
        options |= {"state_batch_indices": table, "dst_state_batch_indices": table}
        options |= {"num_accepted_tokens": _int32(NUM_REQS), "cu_seqlens": _int32(NUM_REQS + 1)}
    else:
        options["state_batch_indices"] = _int32(NUM_REQS)
    _state_update(peer, k, **options)


def _conv_states(k: int) -> torch.Tensor:
    return _bf16(NUM_REQS, 3 + k, CHANNELS).transpose(1, 2)


def _vllm_conv_update(peer: Any, k: int) -> None:
    options: dict[str, Any] = {"conv_state_indices": _int32(NUM_REQS)}
    if k:
        options |= {
            "num_accepted_tokens": _int32(NUM_REQS),
            "query_start_loc": _int32(NUM_REQS + 1),
        }
        options["max_query_len"] = 1 + k
    x, weight, bias = _bf16(NUM_REQS * (1 + k), CHANNELS), _bf16(CHANNELS, 4), _bf16(CHANNELS)
    peer.causal_conv1d_update(x, _conv_states(k), weight, bias, "silu", null_block_id=0, **options)


def _vllm_conv_prefill(peer: Any) -> None:
    programs = _int32(NUM_TOKENS)
    peer.causal_conv1d_fn(
        _bf16(NUM_TOKENS, CHANNELS).t(),
        _bf16(CHANNELS, 4),
        _bf16(CHANNELS),
        _conv_states(0),
        _int32(NUM_REQS + 1),
        cache_indices=_int32(NUM_REQS),
        has_initial_state=torch.empty(NUM_REQS, dtype=torch.bool),
        pad_slot_id=-1,
        null_block_id=0,
        metadata=SimpleNamespace(
            nums_dict=None, batch_ptr=programs, token_chunk_offset_ptr=programs
        ),
    )


def _vllm_chunk_scan(peer: Any) -> None:
    x, B, C = _scan_inputs(NUM_TOKENS)
    chunks = _int32(NUM_TOKENS // CHUNK + 1)
    peer.mamba_chunk_scan_combined_varlen(
        x,
        _bf16(NUM_TOKENS, HEADS),
        torch.empty(HEADS),
        B,
        C,
        CHUNK,
        cu_seqlens=_int32(2),
        cu_chunk_seqlens=chunks,
        last_chunk_indices=torch.zeros(1, dtype=torch.int32),
        seq_idx=chunks[1:],
        out=torch.empty_like(x),
        D=torch.empty(HEADS),
        dt_bias=torch.empty(HEADS),
        initial_states=torch.empty(1, HEADS, HEAD_DIM, SIZE),
        dt_softplus=True,
        state_dtype=torch.float32,
    )


def _mamba_chunk_scan(peer: Any) -> None:
    x, B, C = (part[None] for part in _scan_inputs(NUM_TOKENS))
    peer._mamba_chunk_scan_combined_fwd(
        x,
        _bf16(1, NUM_TOKENS, HEADS),
        torch.empty(HEADS),
        B,
        C,
        CHUNK,
        D=torch.empty(HEADS),
        dt_bias=torch.empty(HEADS),
        initial_states=torch.empty(1, HEADS, HEAD_DIM, SIZE),
        dt_softplus=True,
    )


def _gated_norm(peer: Any) -> None:
    x, gate, weight = (
        _bf16(NUM_REQS, HEADS * HEAD_DIM),
        _bf16(NUM_REQS, HEADS * HEAD_DIM),
        _bf16(HEADS * HEAD_DIM),
    )
    options = {
        "group_size": HEADS * HEAD_DIM // GROUPS,
        "norm_before_gate": False,
        "is_rms_norm": True,
    }
    peer._layer_norm_fwd(x, weight, None, 1e-5, z=gate, **options)


def _kv_caches() -> tuple[torch.Tensor, ...]:
    return _bf16(NUM_REQS, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE).unbind(1)


def _vllm_attention(peer: Any, query_len: int, segments: int) -> None:
    """With `segments` each row's K and V are split between programs, as for few requests."""
    tokens = NUM_REQS * query_len
    query = _bf16(tokens, QUERY_HEADS, HEAD_SIZE)
    options: dict[str, Any] = {}
    if segments:
        parts = torch.empty(tokens, QUERY_HEADS, segments)
        options = {"seq_threshold_3D": NUM_REQS, "num_par_softmax_segments": segments}
        options |= {"softmax_segm_max": parts, "softmax_segm_expsum": parts}
        options["softmax_segm_output"] = torch.empty(tokens, QUERY_HEADS, segments, HEAD_SIZE)
    peer.unified_attention(
        query,
        *_kv_caches(),
        torch.empty_like(query),
        cu_seqlens_q=_int32(NUM_REQS + 1),
        max_seqlen_q=query_len,
        seqused_k=_int32(NUM_REQS),
        max_seqlen_k=4096,
        softmax_scale=HEAD_SIZE**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=_int32(NUM_REQS, 256),
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        **options,
    )


def _vllm_store(peer: Any) -> None:
    key, value = (_bf16(NUM_REQS, KV_HEADS, HEAD_SIZE) for _ in range(2))
    slots, scale = torch.empty(NUM_REQS, dtype=torch.int64), torch.empty(1)
    peer.triton_reshape_and_cache_flash(key, value, *_kv_caches(), slots, "auto", scale, scale)


# The formulas are those of our own cases.
def _state_bytes(k: int) -> dict[str, Bytes]:
    return {"update": lambda c: c["BLOCK_SIZE_M"] * ((2 + k) * SIZE * 4 + (1 + k) * 2 * 2)}


def _conv_bytes(k: int) -> dict[str, Bytes]:
    return {"update": lambda c: (3 + (1 + k) + (1 + k) + (3 + k)) * c["BLOCK_N"] * 2}


_NORM_BYTES: dict[str, Bytes] = {"norm": lambda c: 3 * c["BLOCK_N"] * 2}
_OPS, _ATTENTION = "vllm.model_executor.layers.mamba.ops", "vllm.v1.attention.ops"
_MAMBA, _UNIFIED = "mamba_ssm.ops.triton", f"{_ATTENTION}.triton_unified_attention"
_CHUNKS = f"{NANO}, chunks of {CHUNK}"
PEERS: tuple[Peer, ...] = (
    *(
        Peer(f"{_OPS}.{module}", f"{NANO}, K={k}", dtype, partial(call, k=k), num_bytes(k))
        for module, dtype, call, num_bytes in (
            ("mamba_ssm", "float32", _vllm_state_update, _state_bytes),
            ("causal_conv1d", "bfloat16", _vllm_conv_update, _conv_bytes),
        )
        for k in (0, 3)
    ),
    Peer(
        f"{_OPS}.causal_conv1d",
        NANO,
        "bfloat16",
        _vllm_conv_prefill,
        {"fwd": lambda c: (c["BLOCK_M"] + 3 + c["BLOCK_M"]) * c["BLOCK_N"] * 2},
    ),
    Peer(f"{_OPS}.ssd_combined", _CHUNKS, "bfloat16", _vllm_chunk_scan, {}),
    Peer(f"{_OPS}.layernorm_gated", NANO, "bfloat16", _gated_norm, _NORM_BYTES),
    Peer(
        _UNIFIED,
        f"{NANO}, K=0, split",
        "bfloat16",
        partial(_vllm_attention, query_len=1, segments=16),
        {},
    ),
    Peer(
        _UNIFIED, f"{NANO}, K=3", "bfloat16", partial(_vllm_attention, query_len=4, segments=0), {}
    ),
    Peer(
        f"{_ATTENTION}.triton_reshape_and_cache_flash",
        NANO,
        "bfloat16",
        _vllm_store,
        {"cache": lambda c: 4 * min(c["TILE_SIZE"], KV_HEADS * HEAD_SIZE) * 2},
    ),
    Peer(
        f"{_MAMBA}.selective_state_update",
        f"{NANO}, K=0",
        "float32",
        lambda p: _state_update(p, 0),
        _state_bytes(0),
    ),
    Peer(f"{_MAMBA}.ssd_combined", _CHUNKS, "bfloat16", _mamba_chunk_scan, {}),
    Peer(f"{_MAMBA}.layernorm_gated", NANO, "bfloat16", _gated_norm, _NORM_BYTES),
)


def _cases_of(peer: Peer) -> list[AotCase]:
    with loaded_kernels(peer.module) as module, recorded() as launches:
        peer.call(module)
    cases = []
    for launch in launches:
        of_kernel = (size for part, size in peer.bytes_per_program.items() if part in launch.kernel)
        size = next(of_kernel, None)
        cases.append(
            replace(
                launch,
                kernel=f"{peer.package}.{launch.kernel}",
                shape=peer.shape + launch.shape,
                dtype=peer.dtype,
                bytes_per_program=None if size is None else size(launch.constexprs),
            )
        )
    return cases


@cache
def find() -> tuple[list[AotCase], list[str]]:
    """Return the cases of all peers that are there, and a line for each that is not.

    A line names a package or a call.

    Raises:
        HybridKVError: neither package is there.
    """
    if not any(map(root_of, PACKAGES)):
        names = " nor ".join(PACKAGES)
        raise HybridKVError(
            f"--peers compiles the kernels of other packages, and neither {names} can be imported; "
            f"run: pip install --no-deps {' '.join(PACKAGES.values())} einops, "
            "or put their sources on PYTHONPATH"
        )
    cases: dict[tuple[str, str, str], AotCase] = {}
    absent = [f"{package} is not installed" for package in PACKAGES if root_of(package) is None]
    for peer in PEERS:
        if root_of(peer.package) is None:
            continue
        try:
            for case in _cases_of(peer):
                cases.setdefault((case.kernel, case.shape, case.dtype), case)
        except Exception as error:  # Another version may lack a kernel, or call it otherwise.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if (
                isinstance(error, ModuleNotFoundError)
                and (error.name or "").partition(".")[0] != peer.package
            ):
                reason = f"skipped, it needs the package {error.name}"
            absent.append(f"{peer.module} ({peer.shape}): {reason}")
    return list(cases.values()), absent


def aot_cases(lanes: int) -> list[AotCase]:
    """Return the cases of all peers that are there.

    Their wrappers know no other warps than those of 32 lanes.
    """
    return find()[0]
