"""What a checkpoint's config.json says about its cache: one `KVCacheSpec` per layer, without loading a weight.

Reads the raw JSON, so that a plan needs neither the model's code nor a transformers version that knows it.
State shapes and dtypes are those of vLLM 0.22 for one rank (`model_executor/layers/mamba/mamba_utils.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec
from hybrid_kv.config import CacheConfig, ConfigError, parse_dtype

ATTENTION, RECURRENT, BOTH, STATELESS = "attention", "recurrent", "both", "stateless"

_LAYER_KINDS = {
    **dict.fromkeys(("attention", "full_attention", "*"), ATTENTION),
    **dict.fromkeys(("mamba", "mamba2", "linear_attention", "M"), RECURRENT),
    **dict.fromkeys(("mlp", "moe", "-", "E"), STATELESS),
    "hybrid": BOTH,
}
# vLLM 0.22's `get_mamba_chunk_size` for a config that names none.
_DEFAULT_CHUNK_SIZE = 2048


@dataclass(frozen=True)
class ModelShape:
    """The cache-relevant shape of a model; the specs' block sizes are placeholders until a plan decides them."""

    model_type: str
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    max_position_embeddings: int | None
    mamba_chunk_size: int | None
    num_hidden_layers: int
    layers: dict[str, KVCacheSpec]

    @property
    def counts(self) -> dict[str, int]:
        """Layers per kind of cache (`attention`, `mamba2`, `gdn_attention`)."""
        kinds = (spec.mamba_type if isinstance(spec, MambaSpec) else ATTENTION for spec in self.layers.values())
        return dict(Counter(kinds))


@dataclass(frozen=True)
class _Config:
    """A config.json whose values are checked where they are read."""

    values: dict[str, Any]
    source: str

    def fail(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: {problem}")

    def get(self, *names: str) -> Any:
        """The first of `names` that is there and not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def maybe_size(self, *names: str) -> int | None:
        value = self.get(*names)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self.fail(f"{names[0]}={value!r} must be an integer >= 1; correct the file")
        return value

    def size(self, *names: str) -> int:
        value = self.maybe_size(*names)
        if value is None:
            raise self.fail(f"{' or '.join(names)} is missing; a {self.get('model_type')} config must give it")
        return value


@dataclass(frozen=True)
class _Options:
    num_speculative_tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    ssm_dtype: torch.dtype


@dataclass(frozen=True)
class _Family:
    """How one family's config.json names things. Mamba-2 keys: heads, head size, state size, groups, kernel."""

    mamba_keys: tuple[str, str, str, str, str] | None = None
    default_ssm_dtype: str | None = None
    layer_kinds: Callable[[_Config], list[str]] = field(default=lambda config: _listed_kinds(config))


def _conv_rows(kernel: int, options: _Options) -> int:
    # K more rows than the kernel needs, so that a rejected draft can be undone.
    return kernel - 1 + options.num_speculative_tokens


def _mamba2_spec(config: _Config, family: _Family, options: _Options) -> MambaSpec:
    assert family.mamba_keys is not None
    heads_key, head_dim_key, state_key, groups_key, kernel_key = family.mamba_keys
    num_heads = config.size(heads_key)
    inner = _inner_size(config)
    derived = config.get(head_dim_key) in (None, "auto") and inner is not None
    head_dim = inner // num_heads if derived and inner else config.size(head_dim_key)
    if inner is not None and num_heads * head_dim != inner:
        raise config.fail(
            f"{heads_key}={num_heads} times {head_dim_key}={head_dim} is not the inner size {inner}; correct the file"
        )
    state_size, num_groups = config.size(state_key), config.size(groups_key, "mamba_n_groups")
    kernel = config.size(kernel_key, "mamba_d_conv")
    conv_dim = num_heads * head_dim + 2 * num_groups * state_size
    return MambaSpec(
        block_size=1,
        shapes=((_conv_rows(kernel, options), conv_dim), (num_heads, head_dim, state_size)),
        dtypes=(options.dtype, options.ssm_dtype),
        num_speculative_blocks=options.num_speculative_tokens,
        # x, B and dt, as `kernels.replay.ReplayRing` keeps them.
        input_shapes=((num_heads, head_dim), (num_groups, state_size), (num_heads,)),
        input_dtypes=(options.dtype, options.dtype, torch.promote_types(options.dtype, torch.float32)),
    )


def _inner_size(config: _Config) -> int | None:
    if config.get("model_type") == "nemotron_h":
        return None  # Its `expand` is not used: Nemotron-3-Nano has 64 * 64 channels at hidden size 2688.
    if (inner := config.maybe_size("mamba_d_ssm")) is not None:
        return inner
    expand = config.maybe_size("mamba_expand", "expand")
    return None if expand is None else expand * config.size("hidden_size")


def _gdn_spec(config: _Config, options: _Options) -> MambaSpec:
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    key_dim, value_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    if value_heads % key_heads:
        raise config.fail(f"linear_num_value_heads={value_heads} is not a multiple of {key_heads} key heads")
    conv_dim = 2 * key_heads * key_dim + value_heads * value_dim
    return MambaSpec(
        block_size=1,
        shapes=(
            (_conv_rows(config.size("linear_conv_kernel_dim"), options), conv_dim),
            (value_heads, value_dim, key_dim),
        ),
        dtypes=(options.dtype, options.ssm_dtype),
        mamba_type="gdn_attention",
        num_speculative_blocks=options.num_speculative_tokens,
    )


def _attention_spec(config: _Config, options: _Options) -> FullAttentionSpec:
    num_heads = config.size("num_attention_heads")
    head_size = config.maybe_size("head_dim", "attention_head_dim")
    if head_size is None:
        # Zamba2's shared attention reads the hidden state and the embedding side by side.
        width = config.size("hidden_size") * (2 if config.get("model_type") == "zamba2" else 1)
        if width % num_heads:
            raise config.fail(f"{num_heads} attention heads do not divide {width} channels; give head_dim")
        head_size = width // num_heads
    num_kv_heads = config.maybe_size("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise config.fail(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    return FullAttentionSpec(block_size=1, num_kv_heads=num_kv_heads, head_size=head_size, dtype=options.kv_dtype)


def _kinds_of(config: _Config, key: str) -> list[str] | None:
    listed = config.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list | str) or not listed:
        raise config.fail(f"{key}={listed!r} must name the layers one by one")
    if unknown := sorted({str(name) for name in listed if str(name) not in _LAYER_KINDS}):
        raise config.fail(f"{key} has layers of type {', '.join(unknown)}; supported are {', '.join(_LAYER_KINDS)}")
    return [_LAYER_KINDS[name] for name in listed]


def _listed_kinds(config: _Config) -> list[str]:
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    found = {key: kinds for key in keys if (kinds := _kinds_of(config, key)) is not None}
    if not found:
        raise config.fail(f"{' or '.join(keys)} is missing; it must name the layers one by one")
    if any(kinds != next(iter(found.values())) for kinds in found.values()):
        raise config.fail(f"{' and '.join(found)} name different layers; keep one of them")
    return next(iter(found.values()))


def _indexed_kinds(config: _Config) -> list[str]:
    num_layers = config.size("num_hidden_layers")
    indices = config.get("attn_layer_indices")
    if not isinstance(indices, list) or not set(indices) <= set(range(num_layers)):
        raise config.fail(f"attn_layer_indices={indices!r} must list layers below {num_layers}")
    return [ATTENTION if index in indices else RECURRENT for index in range(num_layers)]


def _interval_kinds(config: _Config) -> list[str]:
    if config.get("layer_types") is not None:
        return _listed_kinds(config)
    interval = config.size("full_attention_interval")
    return [RECURRENT if (i + 1) % interval else ATTENTION for i in range(config.size("num_hidden_layers"))]


def _uniform(kind: str) -> Callable[[_Config], list[str]]:
    return lambda config: [kind] * config.size("num_hidden_layers")


def _full_attention_kinds(config: _Config) -> list[str]:
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise config.fail(f"sliding_window={config.get('sliding_window')} is not supported; only full attention is")
    return _listed_kinds(config) if config.get("layer_types") else _uniform(ATTENTION)(config)


_MAMBA_KEYS = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
_ZAMBA_KEYS = ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv")
_NEMOTRON_KEYS = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
_MAMBA2_KEYS = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")

FAMILIES: dict[str, _Family] = {
    "nemotron_h": _Family(_NEMOTRON_KEYS, default_ssm_dtype="float32"),
    "granitemoehybrid": _Family(_MAMBA_KEYS),
    "bamba": _Family(_MAMBA_KEYS, layer_kinds=_indexed_kinds),
    "falcon_h1": _Family(_MAMBA_KEYS, layer_kinds=_uniform(BOTH)),
    "zamba2": _Family(_ZAMBA_KEYS),
    "mamba2": _Family(_MAMBA2_KEYS, layer_kinds=_uniform(RECURRENT)),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        _Family(layer_kinds=_interval_kinds),
    ),
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granite", "granitemoe"),
        _Family(layer_kinds=_full_attention_kinds),
    ),
}


def read_config(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The JSON object in a config.json, in the folder that holds one, or as given.

    Raises:
        ConfigError: no such file, or no JSON object in it.
    """
    if isinstance(source, dict):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a config.json or the folder that holds it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a readable config.json") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not a JSON object; give a model's config.json")
    return values


def model_shape(
    source: str | Path | dict[str, Any],
    *,
    cache: CacheConfig | None = None,
    num_speculative_tokens: int = 0,
    dtype: str = "auto",
) -> ModelShape:
    """The shape of the model that `source` (file, folder or parsed config) describes.

    Args:
        cache: its `cache_dtype` is that of K and V, `auto` takes the model's; its `mamba_ssm_cache_dtype` is that of
            the SSM state, `auto` takes the config's, else the family's default in vLLM 0.22 (float32 for nemotron_h,
            the model's for the others).
        num_speculative_tokens: K; widens each convolution window by K rows.
        dtype: model dtype; `auto` takes the config's.

    Raises:
        ConfigError: an unknown family, a missing key, or keys that contradict each other.
    """
    if num_speculative_tokens < 0:
        raise ConfigError(f"num_speculative_tokens={num_speculative_tokens} must be >= 0")
    values = read_config(source)
    if isinstance(values.get("text_config"), dict):
        values = {**values, **values["text_config"]}
    config = _Config(values, "config.json" if isinstance(source, dict) else str(source))
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise config.fail(f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    kinds = family.layer_kinds(config)
    if (num_layers := config.maybe_size("num_hidden_layers") or len(kinds)) != len(kinds):
        raise config.fail(f"num_hidden_layers={num_layers}, but {len(kinds)} layers are named; correct one of them")
    options = _options(config, family, cache or CacheConfig(), num_speculative_tokens, dtype)
    chunk_size = config.maybe_size("mamba_chunk_size", "chunk_size") or _DEFAULT_CHUNK_SIZE
    return ModelShape(
        model_type=model_type,
        hidden_size=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        dtype=options.dtype,
        max_position_embeddings=config.maybe_size("max_position_embeddings"),
        mamba_chunk_size=chunk_size if {RECURRENT, BOTH} & set(kinds) else None,
        num_hidden_layers=len(kinds),
        layers=_layers(kinds, config, family, options),
    )


def _options(config: _Config, family: _Family, cache: CacheConfig, num_speculative_tokens: int, dtype: str) -> _Options:
    named = dtype if dtype != "auto" else config.get("dtype", "torch_dtype")
    if named is None:
        raise config.fail("dtype is missing; give --dtype")
    model_dtype = parse_dtype(str(named).removeprefix("torch."), "dtype")
    ssm_dtype = cache.mamba_ssm_cache_dtype
    if ssm_dtype == "auto":
        ssm_dtype = config.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype") or family.default_ssm_dtype or "auto"
    return _Options(
        num_speculative_tokens=num_speculative_tokens,
        dtype=model_dtype,
        kv_dtype=model_dtype if cache.cache_dtype == "auto" else parse_dtype(cache.cache_dtype, "cache_dtype"),
        ssm_dtype=model_dtype if ssm_dtype == "auto" else parse_dtype(ssm_dtype, "mamba_ssm_cache_dtype"),
    )


def _layers(kinds: list[str], config: _Config, family: _Family, options: _Options) -> dict[str, KVCacheSpec]:
    layers: dict[str, KVCacheSpec] = {}
    attention = _attention_spec(config, options) if {ATTENTION, BOTH} & set(kinds) else None
    recurrent: MambaSpec | None = None
    if {RECURRENT, BOTH} & set(kinds):
        recurrent = _mamba2_spec(config, family, options) if family.mamba_keys else _gdn_spec(config, options)
    for index, kind in enumerate(kinds):
        suffix = {BOTH: (".attention", ".mamba")}.get(kind, ("", ""))
        if kind in (ATTENTION, BOTH) and attention:
            layers[f"layers.{index}{suffix[0]}"] = attention
        if kind in (RECURRENT, BOTH) and recurrent:
            layers[f"layers.{index}{suffix[1]}"] = recurrent
    return layers
