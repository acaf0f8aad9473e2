"""What the guard models share as trainable modules in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Keys of config.json that both have.
SHARED_KEYS = {
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "use_cache": True,
}


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

    def init_matrices(self) -> None:
        """What training starts from; other parameters keep what their module gave them."""
        for name, weight in self.named_parameters():
            scale = 1 / math.sqrt(weight.shape[-1])
            if weight.dim() < 2 or "conv1d" in name:
                continue
            if "embed" in name:
                nn.init.normal_(weight, std=0.5)
            elif "lm_head" in name:
                nn.init.zeros_(weight)
            elif any(part in name for part in ("out_proj", "o_proj", "down_proj")):
                nn.init.normal_(weight, std=0.3 * scale)  # a quiet residual at the start
            else:
                nn.init.normal_(weight, std=scale)

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


class DepthwiseConv(nn.Module):
    """Causal: (b, t, c) -> (b, t, c). Weight (c, 1, k) and bias (c), if any, are named as in a ``Conv1d``."""

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        weight = torch.randn(channels, 1, taps) * 0.3
        weight[:, :, -1] += 0.5  # near "pass the current token on"
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = x.new_zeros(x.shape[-1]) if self.bias is None else self.bias
        padded = F.pad(x, (0, 0, self.weight.shape[2] - 1, 0))
        out: Tensor = _DepthwiseConv.apply(padded, self.weight[:, 0], bias)  # type: ignore[no-untyped-call]
        return out


class Projections(nn.Module):
    """Those of attention with grouped query heads.

    Args:
        per_query: channels of a query head, in sizes of a head.
    """

    def __init__(self, config: Any, per_query: int = 1) -> None:
        super().__init__()
        d, self.size = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.parts = [per_query * self.heads, self.kv_heads, self.kv_heads]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, part * self.size, bias=False) for part in self.parts)
        self.o_proj = nn.Linear(self.heads * self.size, d, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(b, t, d) to queries, keys and values, each (b, t, heads, size)."""
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        return F.linear(x, weight).unflatten(-1, (-1, self.size)).split(self.parts, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: PathDropout | None) -> Tensor:
    """Causal attention, each (b, t, heads, size) -> (b, t, heads * size); k and v may have fewer heads."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    if dropout is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=dropout.bias)
    return y.transpose(1, 2).flatten(2)
