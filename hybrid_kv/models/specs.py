"""Bricks of a family: the caches of its layers, read from config.json under the family's names.

State shapes and dtypes are those of vLLM 0.22 (`model_executor/layers/mamba/mamba_utils.py`). A
reader gives one tensor parallel rank's: `SpecOptions.share` gives every number of heads or
channels.
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
    SlidingWindowSpec,
    SlotsSpec,
    StatePart,
    window_and_states,
)
from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import ConfigFile

if TYPE_CHECKING:
    import torch

# Kinds of layers: what each keeps of earlier tokens, or for an MLP and a mixture of experts that it
# keeps nothing.
ATTENTION = "attention"
WINDOW = "sliding_attention"
MAMBA = "mamba"
HYBRID = "hybrid"
HYBRID_WINDOW = "hybrid_sliding"
MLP = "mlp"
MOE = "moe"

LOOP = ".loop."  # before the number of a pass in the name of a cache, but for the first one

_DEFAULT_CHUNK_SIZE = 2048  # vLLM 0.22's `get_mamba_chunk_size` for a config that names none

_KINDS = {
    **dict.fromkeys(("attention", "full_attention", "indexed_attention", "*"), ATTENTION),
    **dict.fromkeys(("mamba", "mamba2", "linear_attention", "conv", "M"), MAMBA),
    WINDOW: WINDOW,
    **dict.fromkeys(("mlp", "-"), MLP),
    **dict.fromkeys(("moe", "E"), MOE),
    HYBRID: HYBRID,
    HYBRID_WINDOW: HYBRID_WINDOW,
}


@dataclass(frozen=True)
class SpecOptions:
    """The decisions of the user and the family about every layer: K, dtypes, and ranks.

    `wide_dtype` is float64 where `dtype` is, else float32. `scale_dtype` is that of the scales of
    states of 8 bits.
    """

    num_speculative_tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    ssm_dtype: torch.dtype
    wide_dtype: torch.dtype
    scale_dtype: torch.dtype
    ranks: Ranks

    def share(self, config: ConfigFile, name: str, count: int) -> int:
        """Return how many of `count` heads or channels one tensor parallel rank has.

        Raises:
            ConfigError: they can't be divided.
        """
        ranks = self.ranks.tensor_parallel_size
        if count % ranks:
            raise config.fail(
                f"{name}={count} can't be divided over --tensor-parallel-size {ranks}; use a "
                "divisor"
            )
        return count // ranks

    def share_repeated(self, config: ConfigFile, name: str, count: int) -> int:
        """Return the share of a rank where fewer than ranks are repeated.

        Raises:
            ConfigError: they can't be divided, and not be repeated equally often.
        """
        ranks = self.ranks.tensor_parallel_size
        if max(count, ranks) % min(count, ranks):
            raise config.fail(
                f"{name}={count} can't be divided over --tensor-parallel-size {ranks}, nor "
                "repeated equally often; "
                "use a divisor or a multiple of it"
            )
        return max(1, count // ranks)


SpecReader = Callable[[ConfigFile, SpecOptions], KVCacheSpec]


def cache_name(layer: int, end: str = "", loop: int = 0) -> str:
    """Return the name of a cache of a layer in its pass number `loop`.

    Args:
        end: of its name, where a layer keeps several (`Family.caches`).
    """
    return f"layers.{layer}{end}" + (f"{LOOP}{loop}" if loop else "")


def chunk_size(config: ConfigFile) -> int:
    """Return the tokens of which Mamba blocks of mode `all` are multiples by default."""
    return config.size("mamba_chunk_size", "chunk_size", default=_DEFAULT_CHUNK_SIZE)


def layer_kinds(config: ConfigFile, prefix: str = "") -> list[str]:
    """Return the kind of every layer, from whichever list or pattern the file has.

    Args:
        prefix: of the keys.
    """
    keys = [prefix + key for key in ("layers_block_type", "layer_types", "hybrid_override_pattern")]
    named = {key: _kinds_of(config, key) for key in keys if config.get(key) is not None}
    if not named:
        raise config.fail(f"{' or '.join(keys)} is missing; it must name the layers one by one")
    if any(kinds != next(iter(named.values())) for kinds in named.values()):
        raise config.fail(f"{' and '.join(named)} name different layers; keep one of them")
    return next(iter(named.values()))


def _kinds_of(config: ConfigFile, key: str) -> list[str]:
    listed = config.get(key)
    if not isinstance(listed, list | str) or not listed:
        raise config.fail(f"{key}={listed!r} must name the layers one by one")
    unknown = sorted({str(name) for name in listed if str(name) not in _KINDS})
    if unknown:
        raise config.fail(
            f"{key} has layers of type {', '.join(unknown)}; supported are {', '.join(_KINDS)}"
        )
    return [_KINDS[str(name)] for name in listed]


def indexed_kinds(config: ConfigFile, key: str, first: int = 0, kind: str = ATTENTION) -> list[str]:
    """Return the kind of every layer where `key` lists those of one kind, counted from `first`.

    All others keep a state.
    """
    layers = range(first, first + config.size("num_hidden_layers"))
    listed = config.get(key) or []
    if not isinstance(listed, list) or any(number not in layers for number in listed):
        raise config.fail(f"{key}={listed!r} must list layers from {first} to {layers[-1]}")
    return [kind if number in listed else MAMBA for number in layers]


def hybrid_kinds(config: ConfigFile) -> list[str]:
    """Return the kind of every layer, listed one by one or by the numbers of the hybrid ones.

    Files of the hub list numbers.
    """
    is_listed = config.get("layers_block_type") is not None
    if is_listed or config.get("hybrid_layer_ids") is None:
        return layer_kinds(config)
    return indexed_kinds(config, "hybrid_layer_ids", kind=HYBRID)


def all_mamba(config: ConfigFile) -> list[str]:
    """Return the kinds of a model without attention."""
    return [MAMBA] * config.size("num_hidden_layers")


def caches(
    mamba: SpecReader, attention: SpecReader | None = None
) -> Mapping[str, Mapping[str, SpecReader]]:
    """Return the caches of each kind of layer in a hybrid model whose states are `mamba`'s.

    K and V are as usual by default.
    """
    attention = attention or attention_spec
    return {
        ATTENTION: {"": attention},
        MAMBA: {"": mamba},
        HYBRID: {".attention": attention, ".mamba": mamba},
        MLP: {},
        MOE: {},
    }


def attention_spec(
    config: ConfigFile, options: SpecOptions, num_inputs: int = 1
) -> FullAttentionSpec:
    """Read the K and V of a layer that reads `num_inputs` hidden states next to each other."""
    num_heads = config.size("num_attention_heads")
    head_size = config.maybe_size("head_dim", "attention_head_dim")
    if head_size is None:
        width = config.size("hidden_size") * num_inputs
        if width % num_heads:
            raise config.fail(
                f"{num_heads} attention heads do not divide {width} channels; give head_dim"
            )
        head_size = width // num_heads
    num_kv_heads = config.maybe_size("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise config.fail(
            f"num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    options.share(config, "num_attention_heads", num_heads)
    kv_heads_of_rank = options.share_repeated(config, "num_key_value_heads", num_kv_heads)
    tensor = options.ranks.tensor_parallel_size
    context = options.ranks.decode_context_parallel_size
    copies = kv_heads_of_rank * tensor // num_kv_heads
    if copies % context:
        raise config.fail(
            f"num_key_value_heads={num_kv_heads} are kept {copies} times by --tensor-parallel-size "
            f"{tensor}: only "
            "these copies can divide the tokens; use a --decode-context-parallel-size that "
            f"divides {copies}, not "
            f"{context}, or more tensor parallel ranks"
        )
    return FullAttentionSpec(
        block_size=1, num_kv_heads=kv_heads_of_rank, head_size=head_size, dtype=options.kv_dtype
    )


def window_spec(config: ConfigFile, options: SpecOptions) -> SlidingWindowSpec:
    """Read the K and V of a layer whose queries see `sliding_window` tokens, their own included.

    Heads are those of full attention.
    """
    full = attention_spec(config, options)
    window = config.size("sliding_window")
    return SlidingWindowSpec(1, full.num_kv_heads, full.head_size, full.dtype, window)


def latent_spec(file: ConfigFile, options: SpecOptions) -> MLAAttentionSpec:
    """Read latent attention, under the names that DeepSeek-V2 gave the sizes.

    All heads of every rank read the whole of it.
    """
    options.share(file, "num_attention_heads", file.size("num_attention_heads"))
    return MLAAttentionSpec(
        1, file.size("kv_lora_rank") + file.size("qk_rope_head_dim"), options.kv_dtype
    )


def head_spec(layers: Mapping[str, KVCacheSpec]) -> FullAttentionSpec:
    """Return the spec of the target's layers whose groups a draft head's layer joins.

    Raises:
        ConfigError: none of them has attention.
    """
    spec = next((spec for spec in layers.values() if isinstance(spec, FullAttentionSpec)), None)
    if spec is None:
        raise ConfigError(
            "the model has no attention layer whose cache groups an MTP head could join"
        )
    return spec


@dataclass(frozen=True)
class Mamba2Spec:
    """Window and state of a Mamba-2 layer, under the names that the family's config.json has.

    `has_expand`: the inner size follows from the hidden size, so that the head size may be left
        out.
    """

    heads: str
    head_dim: str
    state: str
    groups: str
    kernel: str
    has_expand: bool = True

    def __call__(self, config: ConfigFile, options: SpecOptions) -> MambaSpec:
        num_heads = options.share(config, self.heads, config.size(self.heads))
        head_dim = self._head_dim(config)
        state_size = config.size(self.state)
        num_groups = config.size(self.groups, "mamba_n_groups")
        # vLLM repeats a single group for the heads of every rank, and no other number of them
        # (`MambaMixer2`).
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
                f"{self.heads}={num_heads} times {self.head_dim}={head_dim} is not the inner size "
                f"{inner}; correct the "
                "file"
            )
        return head_dim


@dataclass(frozen=True)
class Mamba1Spec:
    """Window and state of a Mamba-1 layer, under the names that the family's config.json has.

    `inner`: of the channels, where a file names their number next to `expand`, how many times the
        hidden size they are.
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
        kernel = config.size(self.kernel, default=4)
        state = (channels, config.size(self.state, default=16))
        return mamba_spec(options, kernel, channels, state, mamba_type="mamba1")


def gdn_spec(config: ConfigFile, options: SpecOptions) -> MambaSpec:
    """Read window and state of a gated-delta-net layer (Qwen3-Next, Qwen3.5)."""
    key_heads = config.size("linear_num_key_heads")
    value_heads = config.size("linear_num_value_heads")
    key_dim = config.size("linear_key_head_dim")
    value_dim = config.size("linear_value_head_dim")
    if value_heads % key_heads:
        raise config.fail(
            f"linear_num_value_heads={value_heads} is not a multiple of {key_heads} key heads"
        )
    key_heads = options.share(config, "linear_num_key_heads", key_heads)
    value_heads = options.share(config, "linear_num_value_heads", value_heads)
    return delta_rule_spec(
        options, config.size("linear_conv_kernel_dim"), key_heads, (value_heads, value_dim, key_dim)
    )


def delta_rule_spec(
    options: SpecOptions,
    kernel: int,
    key_heads: int,
    state: tuple[int, int, int],
    per_channel: bool = False,
) -> MambaSpec:
    """Return window and state [heads, value, key] of a layer with a delta rule.

    Its decays are per head or key channel.
    """
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
    options: SpecOptions,
    kernel: int,
    channels: int,
    state: tuple[int, ...] | None = None,
    **other: Any,
) -> MambaSpec:
    """Return the spec of a layer with a convolution and, unless `state` is None, a recurrent state.

    `other`: fields of `MambaSpec`.

    The window has K rows more than the kernel needs, so that a rejected draft can be rolled back.
    """
    window = (kernel - 1 + options.num_speculative_tokens, channels), options.dtype
    ssm = None if state is None else (state, options.ssm_dtype)
    parts = window_and_states(window, ssm, options.scale_dtype)
    return MambaSpec(
        block_size=1, parts=parts, rollback=SlotsSpec(options.num_speculative_tokens), **other
    )
