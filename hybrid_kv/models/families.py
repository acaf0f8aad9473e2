"""The families that come with this package: the caches of their layers, and their modules.

Importing this module registers them, and needs no torch: the modules that run them are imported
when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, MLAAttentionSpec, SlotsSpec, StatePart
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.registry import AS_A_WHOLE, Family, HeadFamily, register, register_head
from hybrid_kv.models.specs import (
    ATTENTION,
    HYBRID,
    HYBRID_WINDOW,
    MAMBA,
    MLP,
    WINDOW,
    Mamba1Spec,
    Mamba2Spec,
    SpecOptions,
    SpecReader,
    all_mamba,
    attention_spec,
    caches,
    delta_rule_spec,
    gdn_spec,
    hybrid_kinds,
    indexed_kinds,
    latent_spec,
    layer_kinds,
    mamba_spec,
    window_spec,
)

MTP_PREFIX = "mtp."  # of a head's tensors and layers


def _later(name: str) -> Callable[..., Any]:
    """Return a function of a family's module, which needs torch: imported when it is called."""
    module, _, function = name.partition(".")

    def call(*arguments: Any) -> Any:
        return getattr(import_module(call.__module__), function)(*arguments)

    call.__module__ = f"hybrid_kv.models.{module}"
    return call


def _register(module: str, kinds: Any, caches: Any, *model_types: str, **more: Any) -> None:
    """Register the family of a module that has `build` and `convert`, by default under its name."""
    family = Family(kinds, caches, _later(f"{module}.build"), _later(f"{module}.convert"), **more)
    register(family, *(model_types or (module,)))


def _register_head(module: str, num_layers: Callable[[ConfigFile], int], *types: str) -> None:
    build, convert, shapes = (_later(f"{module}.{name}") for name in ("build", "convert", "shapes"))
    register_head(HeadFamily(MTP_PREFIX, build, convert, shapes, num_layers), *types)


def _all_hybrid(file: ConfigFile) -> list[str]:
    return [HYBRID] * file.size("num_hidden_layers")


def _granite_swa_kinds(file: ConfigFile) -> list[str]:
    if file.get("layer_types"):
        return layer_kinds(file)
    return [WINDOW if i % 4 else ATTENTION for i in range(file.size("num_hidden_layers"))]


def _granite_kinds(file: ConfigFile) -> list[str]:
    return layer_kinds(file) if file.get("layer_types") else all_mamba(file)


def is_every(file: ConfigFile, prefix: str, period: int, offset: int) -> list[bool]:
    """Return, per layer, whether it is an every-N-th layer.

    Args:
        prefix: of the keys `<prefix>_period` and `<prefix>_offset`.
        period, offset: where the file names none.
    """
    period = file.size(f"{prefix}_period", default=period)
    offset = file.count(f"{prefix}_offset", offset)
    if offset >= period:
        raise file.fail(
            f"{prefix}_offset={offset} must be below {prefix}_period={period}; correct the file"
        )
    return [i % period == offset for i in range(file.size("num_hidden_layers"))]


def _jamba_kinds(file: ConfigFile) -> list[str]:
    return [ATTENTION if here else MAMBA for here in is_every(file, "attn_layer", 8, 4)]


def _kimi_linear(file: ConfigFile) -> ConfigFile:
    """Return the keys of the recurrent layers, without `linear_`.

    The hub keeps them in an object.
    """
    keys = file.get("linear_attn_config")
    if keys is None:
        keys = {
            key.removeprefix("linear_"): value
            for key, value in file.values.items()
            if key.startswith("linear_")
        }
    if not isinstance(keys, dict):
        raise file.fail(f"linear_attn_config={keys!r} must be an object; correct the file")
    return ConfigFile(keys, file.source)


def _kimi_kinds(file: ConfigFile) -> list[str]:
    keys = _kimi_linear(file).values
    if keys.get("full_attn_layers") is None or file.get("layer_types") is not None:
        return layer_kinds(file)
    return indexed_kinds(
        ConfigFile({**file.values, **keys}, file.source), "full_attn_layers", first=1
    )


def _kimi_state(file: ConfigFile, options: SpecOptions) -> MambaSpec:
    linear = _kimi_linear(file)
    heads = options.share(
        file, "linear_attn_config.num_heads", linear.size("num_heads", default=32)
    )
    size = linear.size("head_dim", default=128)
    kernel = linear.size("conv_kernel_dim", "short_conv_kernel_size", default=4)
    return delta_rule_spec(options, kernel, heads, (heads, size, size), per_channel=True)


def _bailing_kinds(file: ConfigFile) -> list[str]:
    if file.get("layer_types") is not None:
        return layer_kinds(file)
    num_layers = file.size("num_hidden_layers")
    group = file.size("layer_group_size", default=6)
    if num_layers % group:
        # vLLM 0.32 has attention in the rest of a group, transformers 5.24 has none.
        raise file.fail(
            f"num_hidden_layers={num_layers} is not a multiple of layer_group_size={group}; list "
            "layer_types"
        )
    return [MAMBA if (i + 1) % group else ATTENTION for i in range(num_layers)]


def _bailing_state(file: ConfigFile, options: SpecOptions) -> MambaSpec:
    heads = file.size("linear_num_heads", "num_attention_heads")
    heads = options.share(file, "num_attention_heads", heads)
    # transformers' `head_dim` is that of attention's rotated channels, once it wrote the file.
    size = file.size("linear_head_dim", "head_dim", default=128)
    kernel = file.size("linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    return delta_rule_spec(options, kernel, heads, (heads, size, size), per_channel=True)


def dory_entries(file: ConfigFile) -> int:
    """Return the entries that a layer has in `layer_types` and in the numbers of layers.

    They are two, attention and an MLP, in published files.
    """
    types = file.get("layer_types")
    return 2 if isinstance(types, list) and "mlp" in types else 1


def _dory_kinds(file: ConfigFile) -> list[str]:
    if file.get("layer_types") is None:
        num_layers = file.size("num_hidden_layers")
        return [WINDOW if (i + 1) % 4 else ATTENTION for i in range(num_layers)]
    kinds = layer_kinds(file)
    if MLP in kinds and (MLP in kinds[::2] or set(kinds[1::2]) != {MLP}):
        raise file.fail("layer_types must have an mlp after each attention layer, or none")
    return kinds


def dory_loop(file: ConfigFile) -> tuple[range, int]:
    """Return the layers that run several times, by `layer_types`, and how often they do."""
    num_layers = file.size("num_hidden_layers")
    entries = dory_entries(file)
    begin = file.count("n_input_layers", 8 * entries)
    end = num_layers - file.count("n_output_layers", 8 * entries)
    loop = file.count("n_recurrent_layers", end - begin)
    if begin > end or end - begin != loop or any(place % entries for place in (begin, end)):
        raise file.fail(
            f"n_input_layers={begin}, n_recurrent_layers={loop} and "
            f"n_output_layers={num_layers - end} are not the {num_layers} layers; correct the file"
        )
    return range(begin, end), file.size("n_recurrent_loops", default=2)


def _dory_passes(file: ConfigFile) -> list[int]:
    looped, loops = dory_loop(file)
    mode = file.text("recurrent_kv_cache_mode", default="per_loop")
    kept = loops if mode == "per_loop" else 1
    return [kept if i in looped else 1 for i in range(file.size("num_hidden_layers"))]


def _glm5_next_kinds(file: ConfigFile) -> list[str]:
    if file.get("layer_types") is not None:
        return layer_kinds(file)
    return [ATTENTION if i % 4 == 3 else MAMBA for i in range(file.size("num_hidden_layers"))]


def _glm5_next_latent(file: ConfigFile, options: SpecOptions) -> MLAAttentionSpec:
    options.share(file, "num_attention_heads", file.size("num_attention_heads"))
    width = file.size("kv_lora_rank") + file.count("qk_rope_head_dim", 0)
    return MLAAttentionSpec(1, width, options.kv_dtype)


def _inkling_kinds(file: ConfigFile) -> list[str]:
    if file.get("layer_types") is not None:
        return layer_kinds(file)
    num_layers = file.size("num_hidden_layers")
    listed = file.get("local_layer_ids")
    if listed is not None and not isinstance(listed, list):
        raise file.fail(f"local_layer_ids={listed!r} must list layers")
    return [
        HYBRID_WINDOW if ((i + 1) % 6 if listed is None else i in listed) else HYBRID
        for i in range(num_layers)
    ]


def inkling_attention(file: ConfigFile, is_window: bool) -> ConfigFile:
    """Return the keys of the layers with or without a window, under the names of others."""
    start = "swa_" * is_window
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    values = {name: file.size(start + name) for name in names}
    if is_window:
        values["sliding_window"] = file.size("sliding_window_size", "sliding_window")
    return ConfigFile({**file.values, **values}, file.source)


def _inkling_kv(file: ConfigFile, options: SpecOptions, is_window: bool) -> KVCacheSpec:
    read = window_spec if is_window else attention_spec
    return read(inkling_attention(file, is_window), options)


def _inkling_convs(file: ConfigFile, options: SpecOptions, is_window: bool) -> MambaSpec:
    """Read the inputs of the four convolutions of a layer: K, V, and what two branches give."""
    of_rank = attention_spec(inkling_attention(file, is_window), options)
    width = of_rank.num_kv_heads * of_rank.head_size
    hidden = options.share(file, "hidden_size", file.size("hidden_size"))
    kernel = file.size("conv_kernel_size", "sconv_kernel_size", default=4)
    if kernel < 2:
        raise file.fail(f"conv_kernel_size={kernel} leaves a convolution nothing to keep")
    rows = kernel - 1 + options.num_speculative_tokens
    channels = {
        "key_conv": width,
        "value_conv": width,
        "attention_conv": hidden,
        "mlp_conv": hidden,
    }
    parts = tuple(
        StatePart(name, (rows, count), options.dtype, role="window")
        for name, count in channels.items()
    )
    rollback = SlotsSpec(options.num_speculative_tokens)
    return MambaSpec(1, parts, rollback=rollback, mamba_type="short_conv")


def _inkling_passes(file: ConfigFile) -> list[int]:
    loop = file.get("loop_config") or {}
    if not isinstance(loop, dict):
        raise file.fail(f"loop_config={loop!r} must be an object; correct the file")
    keys = ConfigFile({**file.values, **loop}, file.source)
    begin = keys.size("core_start", "loop_layer_index_start", default=6)
    end = keys.size("core_end", "loop_layer_index_end", default=18)
    loops = keys.size("num_passes", "loop_num_passes", default=3)
    num_layers = file.size("num_hidden_layers")
    return [loops if begin <= i < end else 1 for i in range(num_layers)]


def _lara_mini_kinds(file: ConfigFile) -> list[str]:
    if file.get("layer_types") is not None:
        return layer_kinds(file)
    period = MAMBA, WINDOW, MAMBA, ATTENTION, WINDOW
    return [period[i % len(period)] for i in range(file.size("num_hidden_layers"))]


def _lfm2_kinds(file: ConfigFile) -> list[str]:
    return (
        indexed_kinds(file, "full_attn_idxs")
        if file.get("layer_types") is None
        else layer_kinds(file)
    )


def _lfm3_kinds(file: ConfigFile) -> list[str]:
    if file.get("layer_types") is not None:
        return layer_kinds(file)
    period = WINDOW, MAMBA, ATTENTION, MAMBA
    return [MAMBA, *(period[i % 4] for i in range(1, file.size("num_hidden_layers")))]


def _short_conv(file: ConfigFile, options: SpecOptions) -> MambaSpec:
    kernel = file.size("conv_L_cache", default=7 if file.model_type == "lfm3" else 3)
    if kernel < 2:
        raise file.fail(
            f"conv_L_cache={kernel} leaves a convolution nothing to keep; it must be at least 2"
        )
    channels = options.share(file, "hidden_size", file.size("hidden_size"))
    return mamba_spec(options, kernel, channels, mamba_type="short_conv")


def qwen_kinds(file: ConfigFile) -> list[str]:
    """Return `layer_types`, or attention in each `full_attention_interval`-th layer."""
    if file.get("layer_types") is not None:
        return layer_kinds(file)
    interval = file.size("full_attention_interval", default=4)
    return [
        MAMBA if (i + 1) % interval else ATTENTION for i in range(file.size("num_hidden_layers"))
    ]


def _planned_kinds(file: ConfigFile) -> list[str]:
    """Return `layer_types`, or windows from layer `max_window_layers` on if the file has them.

    Qwen files that do not use theirs name it all the same.
    """
    if file.get("layer_types"):
        return layer_kinds(file)
    num_layers = file.size("num_hidden_layers")
    if not file.get("sliding_window") or not file.flag("use_sliding_window", default=True):
        return [ATTENTION] * num_layers
    num_full = file.count("max_window_layers", 28 if "qwen" in file.model_type else 0)
    return [WINDOW if i >= num_full else ATTENTION for i in range(num_layers)]


_MAMBA2 = caches(
    Mamba2Spec("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
)
_DELTA_NETS = {ATTENTION: {"": attention_spec}, MAMBA: {"": gdn_spec}}
_SKIPS = ("model.visual.",)  # the vision tower

_register(
    "bailing_hybrid",
    _bailing_kinds,
    caches(_bailing_state, latent_spec),
    default_ssm_dtype="float32",
)
_register("bamba", partial(indexed_kinds, key="attn_layer_indices"), _MAMBA2)
_register(
    "dory",
    _dory_kinds,
    {ATTENTION: {"": attention_spec}, WINDOW: {"": window_spec}, MLP: {}},
    passes=_dory_passes,
)
_register("falcon_h1", _all_hybrid, _MAMBA2)
_register(
    "falcon_mamba",
    all_mamba,
    {MAMBA: {"": Mamba1Spec("state_size", "conv_kernel", "expand", "intermediate_size")}},
    checked_against=AS_A_WHOLE,
)
_register(
    "granite_swa",
    _granite_swa_kinds,
    {ATTENTION: {"": attention_spec}, WINDOW: {"": window_spec}},
    "granite_swa",
    "granitemoe_swa",
)
_register("granitemoehybrid", _granite_kinds, _MAMBA2)
_INKLING: Mapping[str, Mapping[str, SpecReader]] = {
    kind: {
        ".attention": partial(_inkling_kv, is_window=is_window),
        ".conv": partial(_inkling_convs, is_window=is_window),
    }
    for kind, is_window in ((HYBRID, False), (HYBRID_WINDOW, True))
}
_register("inkling", _inkling_kinds, _INKLING, "inkling_text")
_register(
    "jamba",
    _jamba_kinds,
    caches(Mamba1Spec("mamba_d_state", "mamba_d_conv", "mamba_expand")),
    checked_against=AS_A_WHOLE,
)
_register("kimi_linear", _kimi_kinds, caches(_kimi_state, latent_spec), default_ssm_dtype="float32")
_register("lara_mini", _lara_mini_kinds, {**_DELTA_NETS, WINDOW: {"": window_spec}})
_register("lfm2", _lfm2_kinds, caches(_short_conv), "lfm2", "lfm2_moe")
_register("lfm3", _lfm3_kinds, {**caches(_short_conv), WINDOW: {"": window_spec}})
_register(
    "mamba2",
    all_mamba,
    {MAMBA: {"": Mamba2Spec("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")}},
)
_register(
    "nemotron_h",
    layer_kinds,
    # Its `expand` is not used: Nemotron-3-Nano has 64 * 64 channels at hidden size 2688.
    caches(
        Mamba2Spec(
            "mamba_num_heads",
            "mamba_head_dim",
            "ssm_state_size",
            "n_groups",
            "conv_kernel",
            has_expand=False,
        )
    ),
    default_ssm_dtype="float32",
)
_QWEN3_5 = "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"
_register("qwen3_5", qwen_kinds, _DELTA_NETS, *_QWEN3_5, skips=_SKIPS)
_register("olmo_hybrid", layer_kinds, _DELTA_NETS)
# These can be planned, not run.
register(
    Family(_glm5_next_kinds, caches(_kimi_state, _glm5_next_latent), default_ssm_dtype="float32"),
    "glm5_next_text",
)
register(Family(_inkling_kinds, _INKLING), "inkling2_text")
register(Family(_inkling_kinds, _INKLING, passes=_inkling_passes), "inkling2_loop_text")
register(
    Family(_planned_kinds, {ATTENTION: {"": attention_spec}, WINDOW: {"": window_spec}}),
    *(
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "granite",
        "granitemoe",
    ),
)
_register("qwen3_next", qwen_kinds, _DELTA_NETS)
_register(
    "zamba2",
    hybrid_kinds,
    caches(
        Mamba2Spec(
            "n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"
        ),
        partial(attention_spec, num_inputs=2),
    ),
)

_NEXTN = "num_nextn_predict_layers"
_register_head("nemotron_h_mtp", lambda file: file.count(_NEXTN, default=0), "nemotron_h")
_register_head("qwen3_mtp", lambda file: file.count(_NEXTN, default=1), "qwen3_next")
_register_head("qwen3_mtp", lambda file: file.count("mtp_num_hidden_layers", default=1), *_QWEN3_5)
