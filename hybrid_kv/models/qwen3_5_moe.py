"""Qwen3.5 and Qwen3.6 with a mixture of experts behind each layer; a multimodal one is run as its language model."""

from __future__ import annotations

from functools import partial

from hybrid_kv.models.qwen3_5 import CACHES, SKIPS, build, convert, kinds
from hybrid_kv.models.qwen3_next import experts
from hybrid_kv.models.registry import Family, register

register(Family(kinds, CACHES, partial(build, mlp=experts), convert, SKIPS), "qwen3_5_moe_text", "qwen3_5_moe")
