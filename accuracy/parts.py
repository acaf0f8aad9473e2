"""What the guard models share as trainable modules in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class PathDropout:
    """What one training batch may not use, to leave the recurrent state as the only path.

    attention: (b, 1, t, t) bool, True where a query may read a key.
    """

    attention: Tensor

    @cached_property
    def bias(self) -> Tensor:
        """The same as numbers to add to scores: else every attention layer would make them anew."""
        return torch.zeros(self.attention.shape, device=self.attention.device).masked_fill_(~self.attention, -math.inf)


class GuardModel(nn.Module):
    """A decoder and its draft head. Parameters carry published names: ``state_dict()`` is the checkpoint."""

    config: Any  # sizes; ``to_hf()`` gives config.json, ``from_hf()`` reads it
    lm_head: nn.Linear

    def hidden(self, ids: Tensor, dropout: PathDropout | None = None) -> Tensor:
        """ids (b, t) -> hidden states after the final norm (b, t, d)."""
        raise NotImplementedError

    def draft_hidden(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """One pass of the draft head: hidden (b, t, d) of token i and the ids of i+1 (b, t) -> (b, t, d) for i+2."""
        raise NotImplementedError

    def auxiliary_loss(self) -> Tensor:
        """What training adds to the loss of the last forward pass."""
        return self.lm_head.weight.new_zeros(())

    def forward(self, ids: Tensor) -> Tensor:
        """ids (b, t) -> logits (b, t, vocab)."""
        logits: Tensor = self.lm_head(self.hidden(ids))
        return logits


class _DepthwiseConv(torch.autograd.Function):
    """Causal depthwise convolution as shifted multiply-adds.

    torch's grouped ``conv1d`` takes 15 to 40 ms a call on a CPU at these sizes; this takes one
    pass over the data per tap.
    """

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """padded (b, k-1+t, c), weight (c, k), bias (c) -> (b, t, c)."""
        taps = weight.shape[1]
        t = padded.shape[1] - taps + 1
        out = torch.addcmul(bias, padded[:, :t], weight[:, 0])
        for i in range(1, taps):
            out.addcmul_(padded[:, i : i + t], weight[:, i])
        ctx.save_for_backward(padded, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        padded, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        t = grad.shape[1]
        d_padded = torch.zeros_like(padded)
        d_weight = torch.empty_like(weight)
        product = torch.empty_like(grad)
        for i in range(weight.shape[1]):
            d_padded[:, i : i + t].addcmul_(grad, weight[:, i])
            torch.mul(grad, padded[:, i : i + t], out=product)
            d_weight[:, i] = product.sum((0, 1))
        return d_padded, d_weight, grad.sum((0, 1))


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Causal: x (b, t, c), weight (c, 1, k) as a ``Conv1d`` keeps it, bias (c) -> (b, t, c)."""
    padded = F.pad(x, (0, 0, weight.shape[2] - 1, 0))
    out: Tensor = _DepthwiseConv.apply(padded, weight[:, 0], bias)  # type: ignore[no-untyped-call]
    return out


def conv_weight(channels: int, taps: int) -> nn.Parameter:
    """(channels, 1, taps), at the start near "pass the current token on"."""
    weight = torch.randn(channels, 1, taps) * 0.3
    weight[:, :, -1] += 0.5
    return nn.Parameter(weight)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: PathDropout | None) -> Tensor:
    """Causal attention, each (b, heads, t, size) -> (b, t, heads * size); k and v may have fewer heads."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    if dropout is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=dropout.bias)
    return y.transpose(1, 2).flatten(2)
