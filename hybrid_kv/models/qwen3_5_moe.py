"""Qwen3.5 and Qwen3.6 with a mixture of experts behind each layer; a multimodal one is run as its language model."""

from __future__ import annotations

from functools import partial

from hybrid_kv.models import qwen3_5
from hybrid_kv.models.qwen3_next import experts

build = partial(qwen3_5.build, mlp=experts)
convert = qwen3_5.convert
