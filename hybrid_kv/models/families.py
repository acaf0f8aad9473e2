"""The families that come with this package and their draft heads: importing this module registers them."""

from importlib import import_module

MODULES = (
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 mamba2 nemotron_h nemotron_h_mtp olmo_hybrid "
    "planned qwen3_5 qwen3_5_moe qwen3_mtp qwen3_next zamba2"
)

for name in MODULES.split():
    import_module(f"hybrid_kv.models.{name}")
