"""Qwen3.5 and Qwen3.6 with a mixture of experts behind each layer; a multimodal one is run as its language model."""

from __future__ import annotations

from functools import partial

from torch import nn

from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.qwen3_5 import CACHES, SKIPS, build, convert, kinds
from hybrid_kv.models.qwen3_next import experts
from hybrid_kv.models.registry import Family, register


def mlp(file: ConfigFile, layer: int) -> nn.Module:
    """Experts, in every layer."""
    return experts(file)


register(Family(kinds, CACHES, partial(build, mlp=mlp), convert, SKIPS), "qwen3_5_moe_text", "qwen3_5_moe")
