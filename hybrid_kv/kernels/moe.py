"""A mixture of experts: routers of today's families, and the experts of each token.

| family | router |
|---|---|
| Qwen3-Next, Qwen3.5 | `route_softmax`, renormalised |
| Jamba | `route_softmax`, as it is |
| Granite-4-H | `route_topk_softmax` |
| DeepSeek-V3, Kimi-Linear, Nemotron-3 | `route_sigmoid` with bias, groups and scale |
| LFM2-MoE | `route_sigmoid` with bias or without, one group, `epsilon=1e-6` |

Routers take logits in any dtype and work in float32, or float64 if the logits are. A shared expert
is no part of this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F


def route_softmax(
    logits: torch.Tensor, top_k: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route each token to its `top_k` most probable experts, weighted by their probability.

    Args:
        logits: [num_tokens, num_experts].
        renormalise: to weights that add up to 1.

    Returns:
        Weights [num_tokens, top_k] and expert ids of that shape, int64.
    """
    if renormalise:
        # The same quotient; the sum over all experts cancels.
        return route_topk_softmax(logits, top_k)
    weights, ids = _wide(logits).softmax(-1).topk(top_k)
    return weights, ids


def route_topk_softmax(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Route to the experts of the `top_k` largest logits, weighted by a softmax over those.

    Arguments and results are as of `route_softmax`.
    """
    largest, ids = _wide(logits).topk(top_k)
    return largest.softmax(-1), ids


def route_sigmoid(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    renormalise: bool,
    scale: float,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as DeepSeek-V3 does (arXiv 2412.19437).

    Scores are sigmoids, and a bias that balances load only chooses.

    Args:
        logits: [num_tokens, num_experts].
        bias: [num_experts], added to the scores for the choice alone; None for none.
        num_groups: of neighbouring experts, equally large. Only those in the `top_k_groups` best
            ones can be chosen; a group is as good as the sum of its best two.
        renormalise: to weights that add up to `scale`.
        epsilon: added to the sum that is divided by; it shows where all scores are small.

    Returns:
        Weights [num_tokens, top_k] and expert ids of that shape, int64.
    """
    scores = _wide(logits).sigmoid()
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if top_k_groups < num_groups:
        groups = choice.unflatten(-1, (num_groups, -1))
        merits = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        best = merits.topk(top_k_groups, sorted=False).indices
        # Not 0, below which a bias can bring every expert of a group that is allowed.
        out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, value=False)
        choice = groups.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = choice.topk(top_k).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        weights /= weights.sum(-1, keepdim=True) + epsilon
    return weights.mul_(scale), ids


def apply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, `down(activation(up(x)))` each.

    No expert is read that no token chose. A token's outputs are added in the order of its ids,
    whatever the batch.

    A GPU's host does not wait to know how many tokens an expert has, except for many tokens in a
    dtype that `grouped_mm` does not take there: few tokens are multiplied with copies of their
    experts.

    Args:
        x: [num_tokens, in].
        ids: [num_tokens, top_k] int64, distinct in a row; weights: the same shape, in the dtype to
            add up in.
        up: [num_experts, up_out, in]; down: [num_experts, out, down_in].
        activation: [n, up_out] to [n, down_in], row by row: of a gated expert it halves the size.

    Returns:
        [num_tokens, out] in the dtype of `x`.
    """
    tokens, top_k = ids.shape
    if tokens == 1 and not x.is_cuda:
        # Weights are not gathered for one product: to copy them takes longer than to multiply with
        # them.
        outputs = torch.cat(
            [F.linear(activation(F.linear(x, up[e])), down[e]) for e in ids[0].tolist()]
        )
    elif x.is_cuda and ids.numel() <= len(up) and not (_takes_groups(up) and _takes_groups(down)):
        chosen = ids.flatten()
        inputs = x.repeat_interleave(top_k, dim=0)
        hidden = activation(torch.bmm(up[chosen], inputs.unsqueeze(-1)).squeeze(-1))
        outputs = torch.bmm(down[chosen], hidden.unsqueeze(-1)).squeeze(-1)
    else:
        chosen, order = ids.flatten().sort(stable=True)
        inputs = x.index_select(0, order // top_k)
        ends = torch.searchsorted(chosen, _experts(len(up), x.device), right=True, out_int32=True)
        # Not for few tokens on a CPU: a grouped product takes 2.5 us for an expert without any.
        if (x.is_cuda or len(chosen) >= len(up)) and _takes_groups(up) and _takes_groups(down):
            hidden = activation(F.grouped_mm(inputs, up.mT, offs=ends))
            by_expert = F.grouped_mm(hidden, down.mT, offs=ends)
        else:
            groups = enumerate(inputs.tensor_split(ends.tolist()[:-1]))
            by_expert = torch.cat(
                [
                    F.linear(activation(F.linear(group, up[e])), down[e])
                    for e, group in groups
                    if len(group)
                ]
            )
        outputs = torch.empty_like(by_expert).index_copy_(0, order, by_expert)
    shares = outputs.to(weights.dtype).unflatten(0, (tokens, top_k))
    return torch.matmul(weights.unsqueeze(1), shares).squeeze(1).to(x.dtype)


@lru_cache(64)
def _experts(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)


def _takes_groups(weight: torch.Tensor) -> bool:
    """Return whether `grouped_mm` multiplies with `weight` [num_experts, out, in].

    It depends on the dtype, and rows must be whole 16 bytes.
    """
    dtypes = (torch.bfloat16,) if weight.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    return weight.dtype in dtypes and not any(
        size * weight.element_size() % 16 for size in weight.shape[1:]
    )


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
