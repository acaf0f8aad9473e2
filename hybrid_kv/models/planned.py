"""Families that can be planned, not run: their config.json says what their layers keep. One line each."""

from __future__ import annotations

from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.registry import Family, register
from hybrid_kv.models.specs import ATTENTION, attention_spec, layer_kinds


def _all_attention(config: ConfigFile) -> list[str]:
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise config.fail(f"sliding_window={config.get('sliding_window')!r} is not supported; only full attention is")
    return layer_kinds(config) if config.get("layer_types") else [ATTENTION] * config.size("num_hidden_layers")


register(
    Family(_all_attention, {ATTENTION: {"": attention_spec}}),
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granite", "granitemoe"),
)
