"""A Mamba-2 layer's operands for flat tokens, and the recurrence over a row in float64."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from tests.kernels import definitions
from tests.kernels.harness import (
    FLOATS,
    GAPS,
    INTS,
    Pool,
    Shape,
    defined,
    flat_tokens,
    spread_time_steps,
)

# that any operand may have
LAYOUTS = {
    "gap": GAPS,
    "dtype": FLOATS,
    "state_dtype": FLOATS,
    "index_dtype": INTS,
    "initial": [0.0, 1.0],
}

mamba2 = partial(defined, definitions.mamba2)


class Layer:
    """`arguments` from state to D; of the pool nothing but NaN is in a block."""

    def __init__(
        self, shape: Shape, tokens: int, num_blocks: int, g: torch.Generator, device: str
    ) -> None:
        heads = shape.groups * shape.per_group
        sizes = ((heads, shape.head_dim), (shape.groups, shape.size), (shape.groups, shape.size))
        x, B, C = flat_tokens(tokens + 2, sizes, shape.gap, shape.dtype, g)
        dt = spread_time_steps(tokens + 2, heads, shape.dtype, g)
        dt_bias = torch.rand(heads, generator=g).sub(0.5).to(shape.dtype)
        A_log, D = (torch.randn(heads, generator=g) for _ in range(2))
        pool = Pool(
            num_blocks, (heads, shape.head_dim, shape.size), shape.gap, shape.state_dtype, device
        )
        operands = {"x": x, "dt": dt, "dt_bias": dt_bias, "A_log": A_log, "B": B, "C": C, "D": D}
        self.arguments = {"state": pool.blocks} | {
            name: part.to(device) for name, part in operands.items()
        }
        self.pools = {"state": pool}

    def row(
        self, span: slice, source: int
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        """Return a row's outputs, its states, and the sums of the magnitudes of their terms."""
        named = {
            name: part.cpu().double()
            for name, part in self.arguments.items()
            if isinstance(part, torch.Tensor)
        }
        x, dt, B, C = (named[name][span] for name in ("x", "dt", "B", "C"))
        step, A, D = F.softplus(dt + named["dt_bias"]), -named["A_log"].exp(), named["D"]
        initial = named["state"][source] if source > 0 else torch.zeros_like(named["state"][0])
        return *mamba2(initial, x, step, A, B, C, D), *mamba2(
            initial.abs(), x.abs(), step, A, B.abs(), C.abs(), D.abs()
        )
