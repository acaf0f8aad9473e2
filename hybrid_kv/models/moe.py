"""A mixture of experts in the place of an MLP: each token runs through a few of many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.kernels.moe import apply_experts, route_sigmoid
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import ForwardContext, Linear, empty, upcast

# Router logits [num_tokens, experts] in float32, and biases where there are any, to weights and ids
# [num_tokens, k] of the chosen experts.
Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def gated_silu(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` [..., size] of [..., 2 * size], gate first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Return the squared ReLU."""
    return F.relu(x).square()


def sigmoid_route(
    file: ConfigFile,
    epsilon: float,
    top_k: int,
    num_groups: int = 1,
    top_k_groups: int = 1,
    renormalise: bool = True,
) -> Route:
    """Return DeepSeek-V3's router for a file with its names.

    Args:
        renormalise: where the file does not say.
    """
    return partial(
        route_sigmoid,
        top_k=top_k,
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        renormalise=file.flag("norm_topk_prob", renormalise),
        scale=file.number("routed_scaling_factor", 1.0),
        epsilon=epsilon,
    )


class Experts(nn.Module):
    """Weights of all experts.

    `up_proj` [experts, size, hidden_size], of a gated expert twice as many rows, the gate's first;
    `down_proj` [experts, hidden_size, size].
    """

    def __init__(
        self, num_experts: int, hidden_size: int, size: int, activation: Callable[..., torch.Tensor]
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = empty(
            num_experts, size * (2 if activation is gated_silu else 1), hidden_size
        )
        self.down_proj = empty(num_experts, hidden_size, size)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return apply_experts(x, ids, weights, self.up_proj, self.down_proj, self.activation)


class MixtureOfExperts(nn.Module):
    """`sum_k weights_k * expert_k(x)`, and a shared expert that sees every token.

    Args:
        size: of an expert.
        route: see `kernels.moe`.
        shared: an MLP, called with (x, context); `shared_gate`: its output is multiplied by a
            sigmoid of x.
        correction_bias: the router has one bias for each expert, which only counts for the choice;
            `route` gets it.
        wide_gate: the router multiplies in float32 at least; else in the dtype of x.
        latent_size: the experts' input is a projection of x to this size, and their output one
            back; `latent_bias`: of these.
    """

    as_stored = ("correction_bias",)  # in half precision neighbouring scores would become one

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        size: int,
        route: Route,
        activation: Callable[[torch.Tensor], torch.Tensor] = gated_silu,
        shared: nn.Module | None = None,
        shared_gate: bool = False,
        correction_bias: bool = False,
        wide_gate: bool = False,
        latent_size: int | None = None,
        latent_bias: bool = False,
    ) -> None:
        super().__init__()
        self.route = route
        self.wide_gate = wide_gate
        self.gate = Linear(hidden_size, num_experts)
        self.correction_bias = empty(num_experts) if correction_bias else None
        self.experts = Experts(num_experts, latent_size or hidden_size, size, activation)
        self.latent_in = Linear(hidden_size, latent_size, latent_bias) if latent_size else None
        self.latent_out = Linear(latent_size, hidden_size, latent_bias) if latent_size else None
        self.shared_expert = shared
        self.shared_expert_gate = Linear(hidden_size, 1) if shared_gate else None

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        bias = () if self.correction_bias is None else (upcast(self.correction_bias),)
        logits = (
            F.linear(upcast(x), upcast(self.gate.weight))
            if self.wide_gate
            else upcast(self.gate(x))
        )
        weights, ids = self.route(logits, *bias)
        y = self.experts(
            x if self.latent_in is None else self.latent_in(x), weights.to(x.dtype), ids
        )
        y = y if self.latent_out is None else self.latent_out(y)
        if self.shared_expert is None:
            return y
        shared = self.shared_expert(x, context)
        return y + (
            shared
            if self.shared_expert_gate is None
            else shared * self.shared_expert_gate(x).sigmoid()
        )
