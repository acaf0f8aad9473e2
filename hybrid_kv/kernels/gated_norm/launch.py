"""The gated norm in one launch, in one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.common.integers import next_power_of_2
from hybrid_kv.kernels.common.launch import FLOATS, check, check_dims, jit, warp_size

if TYPE_CHECKING:
    import triton.language as tl


def _gated_norm(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A program owns one group of one token, all of it in registers: nothing is read twice. Groups
    # are 512 to 8192 wide, at 16 elements a lane one warp or, with the only barrier of the kernel,
    # a few. One axis, since a prefill has more tokens than the others may have.
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    start = (tl.program_id(0) % GROUPS) * SIZE
    c = tl.arange(0, BLOCK)
    inside = (c < SIZE) | (SIZE == BLOCK)
    value = tl.load(x + token * x_stride + start + c, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_stride + start + c, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + start + c, mask=inside, other=0.0).to(tl.float32)
    gated = value * (z / (1.0 + tl.exp(-z)))
    scale = tl.rsqrt(tl.sum(gated * gated, axis=0) / SIZE + eps)
    out = (gated * scale * w).to(y.dtype.element_ty)
    tl.store(y + token * (GROUPS * SIZE) + start + c, out, mask=inside)


def _options(block: int, lanes: int) -> dict[str, int]:
    return {"num_warps": max(1, min(8, block // (16 * lanes))), "num_stages": 1}


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """Return `weight * g / sqrt(mean(g ** 2) + eps)` with `g = x * silu(gate)`.

    The mean is over each of `groups` slices of the channels.

    Args:
        x, gate: [num_tokens, channels] float32, bfloat16 or float16, tokens at any stride.
        weight: [channels].

    Returns:
        [num_tokens, channels] in the dtype of the gate, contiguous.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these, or `groups` does not divide
            the channels.
    """
    check_dims(x=(x, 2))
    tokens, channels = x.shape
    if groups < 1 or channels % groups or not channels:
        raise ValueError(f"{groups} groups do not divide {channels} channels")
    for name, tensor in (("x", x), ("gate", gate)):
        check(name, tensor, (tokens, channels), FLOATS, x.device, free=1)
    check("weight", weight, (channels,), FLOATS, x.device)
    size = channels // groups
    block = next_power_of_2(size)
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    jit(_gated_norm)[(tokens * groups,)](
        *(x, gate, weight, y, x.stride(0), gate.stride(0), eps),
        GROUPS=groups,
        SIZE=size,
        BLOCK=block,
        **_options(block, warp_size()),
    )
    return y


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """Run `gated_rms_norm` in plain torch."""
    gated = x.float() * F.silu(gate.float())
    grouped = gated.unflatten(-1, (groups, -1))
    normed = F.rms_norm(grouped, grouped.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight.float()).to(gate.dtype)
