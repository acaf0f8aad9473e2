"""Qwen3.5 and Qwen3.6 with a mixture of experts behind each layer; a multimodal one is run as its language model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.qwen3_5 import CACHES, SKIPS, SMALL, TINY, build, convert, kinds
from hybrid_kv.models.qwen3_next import SMALL_EXPERTS, TINY_EXPERTS, experts
from hybrid_kv.models.registry import Family, register


def mlp(file: ConfigFile, layer: int) -> nn.Module:
    """Experts, in every layer."""
    return experts(file)


_SIZES = {"tiny": TINY | TINY_EXPERTS, "small": SMALL | SMALL_EXPERTS}
_FAMILY = Family(kinds, CACHES, partial(build, mlp=mlp), convert, SKIPS, sizes=_SIZES)
register(_FAMILY, "qwen3_5_moe_text")
register(replace(_FAMILY, sizes={}), "qwen3_5_moe")
