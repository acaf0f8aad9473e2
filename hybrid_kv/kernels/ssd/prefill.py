"""The scan of a prefill in two launches per Mamba-2 layer: states before all chunks, then outputs.

Mamba-2's algorithm (Dao and Gu, 2024, arXiv:2405.21060) over the chunks of `Spans`. The first
launch has a program per row, head and slice of it, which keeps its state in registers in float32
while it walks along the row: it adds up a chunk as one product of matrices, leaves the state before
each chunk for the second launch and that after each span in its block. The second has a program per
chunk, head and tile of tokens and knows no order: `y = C S` of the state before the chunk plus the
quadratic form within it.

Shapes considered, in states (S, float32) through memory per chunk. (a) Five launches (mamba_ssm,
vLLM: time steps, chunk states, passing, C B^T, outputs): 4 S, as each chunk's own state is written,
read, passed on and read again. (b) One launch, a program walks along a row and puts everything out:
no S, but one sequence has no more programs than heads, with all of the arithmetic on its chain. (c)
Two launches: what must be serial is one product per chunk, and S passes memory twice, in the 16
bits that the tensor cores take anyway. This is (c): per token 48 KB at the shape of Nemotron-3-Nano
instead of (a)'s 104, of which 20 are inputs and outputs. C B^T is computed again for every head
instead of being stored: a third more arithmetic.

bfloat16 and float16 inputs are multiplied as they are, with what weighs them rounded to the same
type, and summed in float32; float32 inputs are multiplied in float32 (on NVIDIA's tensor cores as
three products in tf32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.functions import softplus
from hybrid_kv.kernels.common.integers import cdiv, next_power_of_2
from hybrid_kv.kernels.common.launch import FLOATS, check, jit, register_limit, strides, warp_size
from hybrid_kv.kernels.common.spans import Spans, check_scan
from hybrid_kv.kernels.ssd.slots import check_inputs

if TYPE_CHECKING:
    import triton.language as tl

# Differs from step to step: specialised on, it would compile the kernels again.
_COUNTS = ("num_tokens",)
BLOCK_P = 64  # of the states; with 128 of B a chunk of CHUNK_BYTES is 48 KB of shared memory
CHUNK_BYTES = 256  # of one channel
REGISTERS = 192  # of the states, for float32: shared memory leaves an SM one program anyway
TILE_BYTES = 128  # of one channel, tokens of a program of the outputs


def _states(
    state: tl.tensor,
    x: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    A_log: tl.tensor,
    B: tl.tensor,
    chunk_states: tl.tensor,
    times: tl.tensor,
    row_spans: tl.tensor,
    cu_spans: tl.tensor,
    cu_chunks: tl.tensor,
    span_blocks: tl.tensor,
    source_indices: tl.tensor,
    has_initial_state: tl.tensor,
    state_stride: tl.tensor,
    x_stride: tl.tensor,
    dt_stride: tl.tensor,
    B_stride: tl.tensor,
    num_tokens: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Store the states before all chunks, in the type of x, and those after all spans.

    `times` [3, heads, num_tokens] float32 gets what the outputs need of time, per head and token:
    the step and its summed log2 of decay from the chunk's start, integers and rest apart.
    """
    slices: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1)
    head = tl.program_id(0) // slices
    start_p = (tl.program_id(0) % slices) * BLOCK_P
    p = start_p + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, CHUNK)
    # True where the sizes divide, so that no mask is left.
    in_p = (p < HEAD_DIM) | (HEAD_DIM % BLOCK_P == 0)
    in_n = (n < STATE) | (STATE == BLOCK_N)
    in_slice = in_p[:, None] & in_n[None, :]
    cells = head * (HEAD_DIM * STATE) + p[:, None] * STATE + n[None, :]
    x_cells = t[None, :] * x_stride + p[:, None]
    b_cells = t[:, None] * B_stride + n[None, :]
    B += head // (HEADS // GROUPS) * STATE
    x += head * HEAD_DIM
    plane = num_tokens.to(tl.int64) * HEADS
    times += head.to(tl.int64) * num_tokens

    # Block ids are widened before they are multiplied: a pool passes 2^31 elements.
    source = tl.load(source_indices + row).to(tl.int64)
    readable = (source > 0) & (tl.load(has_initial_state + row) != 0)
    s = tl.load(state + source * state_stride + cells, mask=in_slice & readable, other=0.0).to(
        tl.float32
    )
    a = -tl.exp(tl.load(A_log + head).to(tl.float32)) * 1.4426950408889634
    bias = tl.load(dt_bias + head).to(tl.float32)
    for span in range(tl.load(row_spans + row), tl.load(row_spans + row + 1)):
        chunk = tl.load(cu_chunks + span).to(tl.int64)
        end = tl.load(cu_spans + span + 1)
        for start in range(tl.load(cu_spans + span), end, CHUNK):
            before = s.to(chunk_states.dtype.element_ty)
            tl.store(
                chunk_states + chunk * (HEADS * HEAD_DIM * STATE) + cells, before, mask=in_slice
            )
            chunk += 1
            inside = t < end - start
            first = tl.cast(start, tl.int64)
            v = (
                tl.load(dt + first * dt_stride + t * dt_stride + head, mask=inside, other=0.0).to(
                    tl.float32
                )
                + bias
            )
            step = tl.where(inside, softplus(v), 0.0)
            # Strong decay followed by weak: at a sum of 2000 one unit in the last place is 1e-4,
            # and so would be the error of each product between the tokens after. Sums of integers
            # are exact up to 2^24, the rest stays small. 2^-1000 is zero.
            decay = tl.maximum(step * a, -1000.0)
            whole = tl.floor(decay + 0.5)
            rest = tl.cumsum(decay - whole, axis=0)
            whole = tl.cumsum(whole, axis=0)
            if start_p == 0:
                tl.store(times + first + t, step, mask=inside)
                tl.store(times + plane + first + t, whole, mask=inside)
                tl.store(times + plane * 2 + first + t, rest, mask=inside)
            whole_end = tl.sum(tl.where(t == CHUNK - 1, whole, 0.0), axis=0)
            rest_end = tl.sum(tl.where(t == CHUNK - 1, rest, 0.0), axis=0)
            weight = step * tl.exp2((whole_end - whole) + (rest_end - rest))
            xt = tl.load(
                x + first * x_stride + x_cells, mask=in_p[:, None] & inside[None, :], other=0.0
            )
            b = tl.load(
                B + first * B_stride + b_cells, mask=inside[:, None] & in_n[None, :], other=0.0
            )
            weighted = (xt.to(tl.float32) * weight[None, :]).to(b.dtype)
            s = tl.dot(weighted, b, s * tl.exp2(whole_end + rest_end), input_precision="ieee")
        target = tl.load(span_blocks + span)
        # A program has read its slice before it writes one, and no other touches that slice of
        # these blocks.
        if target > 0:
            tl.store(
                state + target * state_stride + cells, s.to(state.dtype.element_ty), mask=in_slice
            )


def _outputs(
    x: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    D: tl.tensor,
    y: tl.tensor,
    chunk_states: tl.tensor,
    times: tl.tensor,
    chunks: tl.tensor,
    x_stride: tl.tensor,
    B_stride: tl.tensor,
    C_stride: tl.tensor,
    num_tokens: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    # The programs of a chunk are neighbours, so that they share its B and C in the caches.
    tiles: tl.constexpr = CHUNK // BLOCK_T
    chunk = tl.program_id(1)
    head = tl.program_id(0) // tiles
    begin = tl.load(chunks + chunk * 2).to(tl.int64)
    length = (tl.load(chunks + chunk * 2 + 1) - begin).to(tl.int32)
    first = (tl.program_id(0) % tiles) * BLOCK_T
    if first >= length:
        return
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    t = first + tl.arange(0, BLOCK_T)
    in_p = (p < HEAD_DIM) | (HEAD_DIM == BLOCK_P)
    in_n = (n < STATE) | (STATE == BLOCK_N)
    in_t = t < length
    group = head // (HEADS // GROUPS)
    x += begin * x_stride + head * HEAD_DIM
    B += begin * B_stride + group * STATE
    C += begin * C_stride + group * STATE
    times += head.to(tl.int64) * num_tokens + begin
    plane = num_tokens.to(tl.int64) * HEADS

    whole = tl.load(times + plane + t, mask=in_t, other=0.0)
    rest = tl.load(times + plane * 2 + t, mask=in_t, other=0.0)
    c = tl.load(
        C + (t[:, None] * C_stride + n[None, :]), mask=in_t[:, None] & in_n[None, :], other=0.0
    )
    chunk_states += (chunk.to(tl.int64) * HEADS + head) * (HEAD_DIM * STATE)
    in_state = in_p[None, :] & in_n[:, None]
    s = tl.load(chunk_states + (p[None, :] * STATE + n[:, None]), mask=in_state, other=0.0)
    acc = tl.dot(c, s, input_precision="ieee") * tl.exp2(whole + rest)[:, None]
    for earlier in range(0, first + BLOCK_T, BLOCK_T):
        u = earlier + tl.arange(0, BLOCK_T)
        in_u = u < length
        step_u = tl.load(times + u, mask=in_u, other=0.0)
        whole_u = tl.load(times + plane + u, mask=in_u, other=0.0)
        rest_u = tl.load(times + plane * 2 + u, mask=in_u, other=0.0)
        b = tl.load(
            B + (u[None, :] * B_stride + n[:, None]), mask=in_u[None, :] & in_n[:, None], other=0.0
        )
        xu = tl.load(
            x + (u[:, None] * x_stride + p[None, :]), mask=in_u[:, None] & in_p[None, :], other=0.0
        )
        # Above the diagonal powers may be infinite: selected away, as a product with a mask of
        # zeros would be NaN.
        decay = (whole[:, None] - whole_u[None, :]) + (rest[:, None] - rest_u[None, :])
        weight = tl.where(u[None, :] <= t[:, None], tl.exp2(decay) * step_u[None, :], 0.0)
        scores = tl.dot(c, b, input_precision="ieee") * weight
        acc = tl.dot(scores.to(xu.dtype), xu, acc, input_precision="ieee")
    inside = in_t[:, None] & in_p[None, :]
    xt = tl.load(x + (t[:, None] * x_stride + p[None, :]), mask=inside, other=0.0).to(tl.float32)
    out = acc + tl.load(D + head).to(tl.float32) * xt
    y += (begin * HEADS + head) * HEAD_DIM
    tl.store(
        y + (t[:, None] * (HEADS * HEAD_DIM) + p[None, :]), out.to(y.dtype.element_ty), mask=inside
    )


def chunk_scan_prefill(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    spans: Spans,
    source_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
) -> torch.Tensor:
    """Run every row's tokens from the row's state, and store the state at the end of each span.

    A row's initial state is zero, and not read, where `has_initial_state` is False, and for the
    null block 0 and negative ids, which are never written either. A row may write the block that it
    starts from. No block may be written twice, nor by one row and read by another.

    Args:
        state: [num_blocks, heads, head_dim, state] float32, bfloat16 or float16, blocks at any
            stride; written.
        x: [num_tokens, heads, head_dim]; B, C: [num_tokens, groups, state], all of one dtype.
        dt: [num_tokens, heads] before bias and softplus. Of all four, tokens lie at any stride
            below 2^24.
        dt_bias, A_log, D: [heads].
        spans: of the rows, on the device of x; in chunks of at most 128 tokens, with float32 inputs
            of 64.
        source_indices: [num_rows] int32 or int64, the block that a row starts from.
        has_initial_state: [num_rows] bool.

    Returns:
        y like x, contiguous; tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    device = x.device
    heads, head_dim, size, groups = check_inputs(x, dt, dt_bias, A_log, B, C, D, shared=(x.dtype,))
    check_scan(spans, source_indices, has_initial_state, x=x, dt=dt, B=B, C=C)
    if spans.chunk_size * x.element_size() > CHUNK_BYTES:
        most = CHUNK_BYTES // x.element_size()
        raise ValueError(f"chunk_size is {spans.chunk_size}; it must be at most {most}")
    check("state", state, (*state.shape[:1], heads, head_dim, size), FLOATS, device, free=1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_chunks = len(spans.chunks)
    if not num_chunks:
        return y
    lanes = warp_size()
    itemsize = x.element_size()
    # Tiles are at least as wide as the narrowest matrix instruction.
    whole_p, block_n = (max(16, next_power_of_2(extent)) for extent in (head_dim, size))
    block_p = min(BLOCK_P, whole_p)
    block_t = min(TILE_BYTES // itemsize, spans.chunk_size)
    shared = {"HEADS": heads, "HEAD_DIM": head_dim, "STATE": size, "GROUPS": groups}
    chunk_states = torch.empty(num_chunks, heads, head_dim, size, dtype=x.dtype, device=device)
    times = torch.empty(3, heads, spans.num_tokens, dtype=torch.float32, device=device)
    # The states are a chain, so what counts is how soon a link is done: many warps, and the next
    # chunk on its way. The outputs need more than one program on an SM; on AMD, where a stage more
    # is held in registers, that takes one.
    jit(_states, _COUNTS)[(heads * cdiv(head_dim, block_p), spans.num_rows)](
        *(state, x, dt, dt_bias, A_log, B, chunk_states, times),
        *(spans.row_spans, spans.cu_spans, spans.cu_chunks, spans.span_blocks),
        *(source_indices, has_initial_state.view(torch.int8)),
        *strides(state, x, dt, B),
        spans.num_tokens,
        **shared,
        CHUNK=spans.chunk_size,
        BLOCK_N=block_n,
        BLOCK_P=block_p,
        num_warps=8,
        num_stages=2,
        **(register_limit(REGISTERS, lanes) if itemsize == 4 else {}),
    )
    jit(_outputs, _COUNTS)[(heads * spans.chunk_size // block_t, num_chunks)](
        *(x, B, C, D, y, chunk_states, times, spans.chunks, *strides(x, B, C), spans.num_tokens),
        **shared,
        CHUNK=spans.chunk_size,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        BLOCK_P=whole_p,
        num_warps=2 * itemsize,
        num_stages=2 if lanes == 32 else 1,
    )
    return y
