"""Bricks of a family: the caches that its layers keep, read from config.json under the names that it uses.

State shapes and dtypes are those of vLLM 0.22 (`model_executor/layers/mamba/mamba_utils.py`). A reader gives one tensor
parallel rank's: `SpecOptions.share` gives every number of heads or channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_kv.cache.ranks import Ranks
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RollbackSpec,
    StatePart,
    window_and_states,
)
from hybrid_kv.models.config_file import ConfigFile

if TYPE_CHECKING:
    import torch

# Kinds of layers: what each keeps of earlier tokens, or for an MLP and a mixture of experts that it keeps nothing.
ATTENTION, MAMBA, HYBRID, MLP, MOE = "attention", "mamba", "hybrid", "mlp", "moe"

_DEFAULT_CHUNK_SIZE = 2048  # vLLM 0.22's `get_mamba_chunk_size` for a config that names none

_KINDS = {
    **dict.fromkeys(("attention", "full_attention", "*"), ATTENTION),
    **dict.fromkeys(("mamba", "mamba2", "linear_attention", "conv", "M"), MAMBA),
    **dict.fromkeys(("mlp", "-"), MLP),
    **dict.fromkeys(("moe", "E"), MOE),
    "hybrid": HYBRID,
}


@dataclass(frozen=True)
class SpecOptions:
    """What the user and the family decide about every layer: K, dtypes, and how many ranks share it.

    `wide_dtype` is float64 where `dtype` is, else float32.
    """

    num_speculative_tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    ssm_dtype: torch.dtype
    wide_dtype: torch.dtype
    ranks: Ranks

    def share(self, config: ConfigFile, name: str, count: int) -> int:
        """Of `count` heads or channels, those of one tensor parallel rank.

        Raises:
            ConfigError: they can't be divided.
        """
        ranks = self.ranks.tensor_parallel_size
        if count % ranks:
            raise config.fail(f"{name}={count} can't be divided over --tensor-parallel-size {ranks}; use a divisor")
        return count // ranks

    def share_repeated(self, config: ConfigFile, name: str, count: int) -> int:
        """The same where fewer than ranks are repeated.

        Raises:
            ConfigError: they can't be divided, and not be repeated equally often.
        """
        ranks = self.ranks.tensor_parallel_size
        if max(count, ranks) % min(count, ranks):
            raise config.fail(
                f"{name}={count} can't be divided over --tensor-parallel-size {ranks}, nor repeated equally often; "
                "use a divisor or a multiple of it"
            )
        return max(1, count // ranks)


SpecReader = Callable[[ConfigFile, SpecOptions], KVCacheSpec]


def chunk_size(config: ConfigFile) -> int:
    """Tokens of which the Mamba blocks of mode `all` are multiples, where the user names no size."""
    return config.size("mamba_chunk_size", "chunk_size", default=_DEFAULT_CHUNK_SIZE)


def layer_kinds(config: ConfigFile, prefix: str = "") -> list[str]:
    """The kind of every layer, from whichever list or pattern the file has; `prefix` is that of the keys."""
    keys = [prefix + key for key in ("layers_block_type", "layer_types", "hybrid_override_pattern")]
    found = {key: kinds for key in keys if (kinds := _kinds_of(config, key)) is not None}
    if not found:
        raise config.fail(f"{' or '.join(keys)} is missing; it must name the layers one by one")
    if any(kinds != next(iter(found.values())) for kinds in found.values()):
        raise config.fail(f"{' and '.join(found)} name different layers; keep one of them")
    return next(iter(found.values()))


def _kinds_of(config: ConfigFile, key: str) -> list[str] | None:
    listed = config.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list | str) or not listed:
        raise config.fail(f"{key}={listed!r} must name the layers one by one")
    if unknown := sorted({str(name) for name in listed if str(name) not in _KINDS}):
        raise config.fail(f"{key} has layers of type {', '.join(unknown)}; supported are {', '.join(_KINDS)}")
    return [_KINDS[str(name)] for name in listed]


def indexed_kinds(config: ConfigFile, key: str, first: int = 0, kind: str = ATTENTION) -> list[str]:
    """The kind of every layer where `key` lists those of one kind, counted from `first`; all others keep a state."""
    layers, listed = range(first, first + config.size("num_hidden_layers")), config.get(key) or []
    if not isinstance(listed, list) or any(number not in layers for number in listed):
        raise config.fail(f"{key}={listed!r} must list layers from {first} to {layers[-1]}")
    return [kind if number in listed else MAMBA for number in layers]


def hybrid_kinds(config: ConfigFile) -> list[str]:
    """The kind of every layer: listed one by one or, as in files of the hub, by the numbers of the hybrid ones."""
    is_listed = config.get("layers_block_type") is not None
    if is_listed or config.get("hybrid_layer_ids") is None:
        return layer_kinds(config)
    return indexed_kinds(config, "hybrid_layer_ids", kind=HYBRID)


def all_mamba(config: ConfigFile) -> list[str]:
    """Of a model without attention."""
    return [MAMBA] * config.size("num_hidden_layers")


def caches(mamba: SpecReader, attention: SpecReader | None = None) -> Mapping[str, Mapping[str, SpecReader]]:
    """The caches of each kind of layer in a hybrid model whose states are `mamba`'s; K and V as usual by default."""
    attention = attention or attention_spec
    return {
        ATTENTION: {"": attention},
        MAMBA: {"": mamba},
        HYBRID: {".attention": attention, ".mamba": mamba},
        MLP: {},
        MOE: {},
    }


def attention_spec(config: ConfigFile, options: SpecOptions, num_inputs: int = 1) -> FullAttentionSpec:
    """K and V of a layer that reads `num_inputs` hidden states side by side."""
    num_heads = config.size("num_attention_heads")
    head_size = config.maybe_size("head_dim", "attention_head_dim")
    if head_size is None:
        width = config.size("hidden_size") * num_inputs
        if width % num_heads:
            raise config.fail(f"{num_heads} attention heads do not divide {width} channels; give head_dim")
        head_size = width // num_heads
    num_kv_heads = config.maybe_size("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise config.fail(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    options.share(config, "num_attention_heads", num_heads)
    own = options.share_repeated(config, "num_key_value_heads", num_kv_heads)
    tensor, context = options.ranks.tensor_parallel_size, options.ranks.decode_context_parallel_size
    copies = own * tensor // num_kv_heads
    if copies % context:
        raise config.fail(
            f"num_key_value_heads={num_kv_heads} are kept {copies} times by --tensor-parallel-size {tensor}: only "
            f"these copies can divide the tokens; use a --decode-context-parallel-size that divides {copies}, not "
            f"{context}, or more tensor parallel ranks"
        )
    return FullAttentionSpec(block_size=1, num_kv_heads=own, head_size=head_size, dtype=options.kv_dtype)


def latent_spec(file: ConfigFile, options: SpecOptions) -> MLAAttentionSpec:
    """Latent attention, by the names that DeepSeek-V2 gave the sizes; all heads of every rank read the whole of it."""
    options.share(file, "num_attention_heads", file.size("num_attention_heads"))
    return MLAAttentionSpec(1, file.size("kv_lora_rank") + file.size("qk_rope_head_dim"), options.kv_dtype)


@dataclass(frozen=True)
class Mamba2Spec:
    """Window and state of a Mamba-2 layer, by the names that the family's config.json has for its sizes.

    `has_expand`: the inner size follows from the hidden size, so that the head size may be left out.
    """

    heads: str
    head_dim: str
    state: str
    groups: str
    kernel: str
    has_expand: bool = True

    def __call__(self, config: ConfigFile, options: SpecOptions) -> MambaSpec:
        num_heads, head_dim = options.share(config, self.heads, config.size(self.heads)), self._head_dim(config)
        state_size, num_groups = config.size(self.state), config.size(self.groups, "mamba_n_groups")
        # vLLM repeats a single group for the heads of every rank, and no other number of them (`MambaMixer2`).
        num_groups = 1 if num_groups == 1 else options.share(config, self.groups, num_groups)
        kernel = config.size(self.kernel, "mamba_d_conv")
        conv_dim = num_heads * head_dim + 2 * num_groups * state_size
        return mamba_spec(
            options,
            kernel,
            conv_dim,
            (num_heads, head_dim, state_size),
            # As `kernels.recompute.RecomputeRing` keeps them.
            inputs=(
                StatePart("x", (num_heads, head_dim), options.dtype),
                StatePart("B", (num_groups, state_size), options.dtype),
                StatePart("dt", (num_heads,), options.wide_dtype),
            ),
        )

    def _head_dim(self, config: ConfigFile) -> int:
        expand = config.maybe_size("mamba_expand", "expand") if self.has_expand else None
        inner = config.maybe_size("mamba_d_ssm") if self.has_expand else None
        if inner is None and expand is None:
            return config.size(self.head_dim)
        inner = inner or (expand or 1) * config.size("hidden_size")
        num_heads = config.size(self.heads)
        derived = config.get(self.head_dim) in (None, "auto")
        head_dim = inner // num_heads if derived else config.size(self.head_dim)
        if num_heads * head_dim != inner:
            raise config.fail(
                f"{self.heads}={num_heads} times {self.head_dim}={head_dim} is not the inner size {inner}; correct the "
                "file"
            )
        return head_dim


@dataclass(frozen=True)
class Mamba1Spec:
    """Window and state of a Mamba-1 layer, by the names that the family's config.json has for its sizes.

    `inner`: of the channels, where a file names their number beside `expand`, how many times the hidden size they are.
    """

    state: str
    kernel: str
    expand: str
    inner: str | None = None

    def __call__(self, config: ConfigFile, options: SpecOptions) -> MambaSpec:
        channels = None if self.inner is None else config.maybe_size(self.inner)
        if channels is None:
            channels = config.size(self.expand, default=2) * config.size("hidden_size")
        channels = options.share(config, "Mamba channels", channels)
        kernel, state = config.size(self.kernel, default=4), (channels, config.size(self.state, default=16))
        return mamba_spec(options, kernel, channels, state, mamba_type="mamba1")


def gdn_spec(config: ConfigFile, options: SpecOptions) -> MambaSpec:
    """Window and state of a gated-delta-net layer (Qwen3-Next, Qwen3.5)."""
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    key_dim, value_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    if value_heads % key_heads:
        raise config.fail(f"linear_num_value_heads={value_heads} is not a multiple of {key_heads} key heads")
    key_heads = options.share(config, "linear_num_key_heads", key_heads)
    value_heads = options.share(config, "linear_num_value_heads", value_heads)
    return delta_rule_spec(options, config.size("linear_conv_kernel_dim"), key_heads, (value_heads, value_dim, key_dim))


def delta_rule_spec(
    options: SpecOptions, kernel: int, key_heads: int, state: tuple[int, int, int], per_channel: bool = False
) -> MambaSpec:
    """Window and state [heads, value, key] of a layer with a delta rule, whose decays are per head or key channel."""
    heads, value_dim, key_dim = state
    return mamba_spec(
        options,
        kernel,
        2 * key_heads * key_dim + heads * value_dim,
        state,
        mamba_type="gdn_attention",
        # As `kernels.recompute.RecomputeRing` keeps them.
        inputs=(
            StatePart("u", (heads, value_dim), options.dtype),
            StatePart("k", (key_heads, key_dim), options.dtype),
            StatePart("g", (heads, *[key_dim] * per_channel), options.wide_dtype),
        ),
    )


def mamba_spec(
    options: SpecOptions, kernel: int, channels: int, state: tuple[int, ...] | None = None, **other: Any
) -> MambaSpec:
    """Of a layer with a convolution and a recurrent state, None: without one; `other`: fields of `MambaSpec`.

    The window has K rows more than the kernel needs, so that a rejected draft can be rolled back.
    """
    window = (kernel - 1 + options.num_speculative_tokens, channels), options.dtype
    parts = window_and_states(window, None if state is None else (state, options.ssm_dtype))
    return MambaSpec(block_size=1, parts=parts, rollback=RollbackSpec(options.num_speculative_tokens), **other)
