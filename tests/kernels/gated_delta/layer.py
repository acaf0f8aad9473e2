"""A delta-rule layer's operands for flat tokens, and the rule over a row in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

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

Floats = npt.NDArray[np.float64]

# that any operand may have
LAYOUTS = {
    "per_channel": [False, True],
    "beta_scale": [1.0, 2.0],
    "gap": GAPS,
    "dtype": FLOATS,
    "state_dtype": FLOATS,
    "index_dtype": INTS,
    "initial": [0.0, 1.0],
}


def operands(
    q: Floats,
    k: Floats,
    v: Floats,
    dt: Floats,
    dt_bias: Floats,
    A_log: Floats,
    beta: Floats,
    scale: Floats | np.float64,
) -> tuple[Floats, ...]:
    """Of the rule: unit queries, scaled, and keys, as the papers have it; of each value head.

    Arrays of numpy.
    """
    shared = v.shape[1] // k.shape[1]
    q, k = (
        np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), shared, 1) for x in (q, k)
    )
    rates = -np.exp(A_log).reshape(-1, *[1] * (dt.ndim - 2))
    return (
        q / k.shape[2] ** 0.5,
        k,
        v,
        rates * definitions.softplus(dt + dt_bias),
        scale * definitions.sigmoid(beta),
    )


def rule(state: Floats, *raw: Floats) -> tuple[Floats, Floats]:
    return definitions.gated_delta(state, *operands(*raw))


class Layer:
    """`arguments` from state to beta; of the pool nothing but NaN is in a block."""

    def __init__(
        self, shape: Shape, tokens: int, num_blocks: int, g: torch.Generator, device: str
    ) -> None:
        heads, keys = shape.key_heads * shape.shared, (shape.key_heads, shape.key)
        gates = (heads, shape.key) if shape.per_channel else (heads,)
        q, k, v = flat_tokens(
            tokens + 2, (keys, keys, (heads, shape.value)), shape.gap, shape.dtype, g
        )
        for part in (q, k):
            part[1::3] *= 1e-3  # so short that what is added under the root counts
        (beta,) = flat_tokens(tokens + 2, ((heads,),), shape.gap, shape.dtype, g, scale=2.0)
        dt = spread_time_steps(
            tokens + 2, gates[-1] * (heads if shape.per_channel else 1), shape.dtype, g
        )
        dt_bias = torch.rand(gates, generator=g).sub(0.5).to(shape.dtype)
        # of some heads the largest time steps leave something
        A_log = 2 * torch.randn(heads, generator=g) - 1
        pool = Pool(
            num_blocks, (heads, shape.value, shape.key), shape.gap, shape.state_dtype, device
        )
        parts = {
            "q": q,
            "k": k,
            "v": v,
            "dt": dt.unflatten(1, gates),
            "dt_bias": dt_bias,
            "A_log": A_log,
            "beta": beta,
        }
        self.arguments = {"state": pool.blocks} | {
            name: part.to(device) for name, part in parts.items()
        }
        self.arguments |= {"beta_scale": shape.beta_scale} if shape.beta_scale != 1.0 else {}
        self.pools = {"state": pool}

    def row(self, span: slice, source: int) -> tuple[torch.Tensor, list[torch.Tensor], float]:
        """Return a row's outputs, its states, and the largest number that they are made of.

        A token with beta near 1 cancels what the state held for its key.
        """
        named = {
            name: part.cpu().double()
            for name, part in self.arguments.items()
            if isinstance(part, torch.Tensor)
        }
        q, k, v, dt, beta = (named[name][span] for name in ("q", "k", "v", "dt", "beta"))
        initial = named["state"][source] if source > 0 else torch.zeros_like(named["state"][0])
        scale = torch.tensor(self.shape.beta_scale)
        y, states = defined(
            rule, initial, q, k, v, dt, named["dt_bias"], named["A_log"], beta, scale
        )
        largest = max(float(part.norm(dim=-1).max()) for part in (initial, *states))
        largest = max(largest, float(v.abs().max()))
        return y, states, largest
