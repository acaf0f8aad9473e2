"""The families that come with this package and their draft heads: importing this module registers them."""

from hybrid_kv.models import (
    bamba,  # noqa: F401
    falcon_h1,  # noqa: F401
    falcon_mamba,  # noqa: F401
    granitemoehybrid,  # noqa: F401
    jamba,  # noqa: F401
    kimi_linear,  # noqa: F401
    lfm2,  # noqa: F401
    mamba2,  # noqa: F401
    nemotron_h,  # noqa: F401
    nemotron_h_mtp,  # noqa: F401
    olmo_hybrid,  # noqa: F401
    planned,  # noqa: F401
    qwen3_5,  # noqa: F401
    qwen3_5_moe,  # noqa: F401
    qwen3_mtp,  # noqa: F401
    qwen3_next,  # noqa: F401
    zamba2,  # noqa: F401
)
