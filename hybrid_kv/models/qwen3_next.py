"""Qwen3-Next: as Qwen3.5 with a mixture of experts in each layer, or in some; draft head.

Source: Qwen3-Next (2025) and its implementation in transformers, which is the oracle of the tests.
Its delta nets have two projections, in which what belongs to one key head lies together.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.models import qwen3_5
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.mixers.conv import Projected
from hybrid_kv.models.mixers.gated_delta import GatedDeltaMixer
from hybrid_kv.models.qwen3_5 import dense_mlp, experts


class ByKeyHead(GatedDeltaMixer):
    """A delta net whose `in_proj` gives query, key, values and gates key head by key head.

    Betas and time steps come after them.
    """

    def project(self, x: torch.Tensor) -> Projected:
        shared = self.value_heads // self.key_heads
        widths = (self.key_dim, self.key_dim, shared * self.value_dim, shared * self.value_dim)
        both = self.in_proj(x)
        qkvz, rest = both.split((self.key_heads * sum(widths), 2 * self.value_heads), dim=-1)
        *qkv, gate = (
            heads.flatten(1)
            for heads in qkvz.unflatten(1, (self.key_heads, -1)).split(widths, dim=-1)
        )
        beta, dt = (
            heads.flatten(1) for heads in rest.unflatten(1, (self.key_heads, 2, -1)).unbind(2)
        )
        return Projected(torch.cat(qkv, 1), (dt, beta), (gate,))


def mlp(file: ConfigFile, layer: int) -> nn.Module:
    """Build a layer's MLP.

    Experts are in each `decoder_sparse_step`-th layer, but not in `mlp_only_layers`.
    """
    dense = file.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise file.fail(
            f"mlp_only_layers={dense!r} must list layers by their number; correct the file"
        )
    if (
        layer in dense
        or (layer + 1) % file.size("decoder_sparse_step", default=1)
        or file.get("num_experts") == 0
    ):
        return dense_mlp(file)
    return experts(file, renormalise=file.flag("norm_topk_prob", default=True))


def build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    return qwen3_5.build(file, layer_specs, mlp, ByKeyHead)


convert = partial(qwen3_5.convert, projections=("in_proj_qkvz", "in_proj_ba"))
