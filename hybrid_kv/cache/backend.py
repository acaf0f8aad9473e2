"""The contract between the cache and an attention backend, and nothing more.

A backend defines how its K/V view of a page is laid out, which kernel block sizes it takes, which
block size it prefers, and what computes it on a device (`attention.paged` does). A state-space
backend returns True from `is_ssm()` and is never queried for a block size (vllm!37467). Several
layouts run on the CPU with the same torch arithmetic, because `cache.layout` hands every backend a
strided view of the same pages.
"""

from __future__ import annotations

import enum
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec
from hybrid_kv.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULT_BLOCK_SIZE = 16
_PACKAGES = {"flash_attn": "vllm", "flashinfer": "flashinfer"}


@dataclass(frozen=True)
class MultipleOf:
    """A kernel that takes any block size divisible by `base`."""

    base: int


@dataclass(frozen=True)
class BackendContext:
    """The facts on which the choices of a backend may depend."""

    platform: str
    float32_ssm_state: bool

    @classmethod
    def for_layers(cls, platform: str, layers: dict[str, KVCacheSpec]) -> BackendContext:
        """Return the context of a model whose layers are `layers`."""
        states = [spec for spec in layers.values() if isinstance(spec, MambaSpec)]
        dtypes = {
            str(state_part.dtype)
            for spec in states
            for state_part in spec.parts
            if state_part.role != "scale"
        }
        return cls(platform, "torch.float32" in dtypes)


class CUDAGraphSupport(enum.IntEnum):
    """The steps that a metadata builder can recompute from a captured graph.

    A larger member includes the smaller ones.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2


class AttentionBackend(ABC):
    """The contract between the cache and one kind of attention kernel.

    All methods are class methods: no instances.
    """

    name: str
    gpu_compute: str = "triton"
    cudagraph_support: CUDAGraphSupport = CUDAGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @classmethod
    def is_ssm(cls) -> bool:
        """Return True if the cache holds one recurrent state per block instead of tokens."""
        return False

    @classmethod
    @abstractmethod
    def get_supported_kernel_block_sizes(
        cls, context: BackendContext
    ) -> Sequence[int | MultipleOf]:
        """Kernel block sizes, in tokens."""

    @classmethod
    def get_preferred_block_size(cls, default: int, context: BackendContext) -> int:
        """Return the manager block size to use when the user gave none.

        It is `default` if a kernel block divides it.
        """
        supported = cls.get_supported_kernel_block_sizes(context)
        if any(default % smallest(size) == 0 for size in supported):
            return default
        return min(map(smallest, supported))

    @classmethod
    @abstractmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the logical shape of one layer's K and V, in kernel blocks."""

    @classmethod
    def get_kv_cache_block_dim(cls, block_size: int, num_kv_heads: int, head_size: int) -> int:
        """Which dimension of the logical shape counts blocks.

        It is the place of a number of blocks that no other dimension can have, so that two blocks
        need no special case (vllm!37236: `(2, num_blocks, …)` and `(num_blocks, 2, …)` are the same
        shape when `num_blocks == 2`).
        """
        sentinel = 1 + 2 * block_size * num_kv_heads * head_size
        return cls.get_kv_cache_shape(sentinel, block_size, num_kv_heads, head_size).index(sentinel)

    @classmethod
    def get_kv_dim(cls) -> int:
        """Which dimension of the logical shape separates K from V."""
        raise NotImplementedError

    @classmethod
    def get_compute(cls, device_type: str, kernels: str, dtypes: Collection[torch.dtype]) -> str:
        """Return the compute of this layout, a name for `attention.paged.compute_of`.

        Args:
            device_type: a CPU has no kernels but Triton's, in its interpreter. A GPU has
                `gpu_compute`, or Triton's where the package of that is missing.
            kernels: the engine's, `torch` or `triton`.
            dtypes: of K and V; what no kernel takes is left to torch.
        """
        from hybrid_kv.kernels.common.launch import FLOATS

        if kernels == "torch" or not set(dtypes) <= set(FLOATS):
            return "torch"
        if device_type == "cpu":
            return "triton"
        package = _PACKAGES.get(cls.gpu_compute)
        return cls.gpu_compute if package is None or importlib.util.find_spec(package) else "triton"


def smallest(size: int | MultipleOf) -> int:
    """Return the smallest block size that an entry of the supported sizes allows."""
    return size.base if isinstance(size, MultipleOf) else size


class TorchBackend(AttentionBackend):
    """Pages laid out `(num_blocks, 2, …)`, any kernel block size: the CPU's own backend."""

    name = "TORCH"

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, context: BackendContext
    ) -> Sequence[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_dim(cls) -> int:
        return 1


class FlashInferBackend(TorchBackend):
    """FlashInfer's layout `(num_blocks, 2, …)` with its fixed page sizes."""

    name = "FLASHINFER"
    gpu_compute = "flashinfer"

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, context: BackendContext
    ) -> Sequence[int | MultipleOf]:
        return [16, 32, 64]


class FlashAttentionBackend(AttentionBackend):
    """FlashAttention's layout `(2, num_blocks, …)`.

    With a float32 SSM state it takes only 16, 32 or 64 tokens, because other multiples of 16 let
    NaNs of unused page bytes through (Dao-AILab/flash-attention#1974). On XPU it prefers 64
    (vllm!37467).
    """

    name = "FLASH_ATTN"
    gpu_compute = "flash_attn"

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, context: BackendContext
    ) -> Sequence[int | MultipleOf]:
        return [16, 32, 64] if context.float32_ssm_state else [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default: int, context: BackendContext) -> int:
        if context.platform == "xpu":
            return max(default, 64)
        return super().get_preferred_block_size(default, context)

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_dim(cls) -> int:
        return 0


class CPUAttentionBackend(TorchBackend):
    """The block sizes of vLLM's CPU attention with the layout of `TorchBackend`.

    They are multiples of 16, 128 preferred.
    """

    name = "CPU_ATTN"

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, context: BackendContext
    ) -> Sequence[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default: int, context: BackendContext) -> int:
        return max(default, 128)


class _SSMBackend(AttentionBackend):
    @classmethod
    def is_ssm(cls) -> bool:
        return True

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, context: BackendContext
    ) -> Sequence[int | MultipleOf]:
        raise NotImplementedError(
            f"{cls.name} keeps one state per block; it has no kernel block size"
        )

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        raise NotImplementedError(f"{cls.name} has no K/V; its views come from MambaSpec.parts")


class Mamba2Backend(_SSMBackend):
    """Mamba-2 layers: convolution window and SSM state."""

    name = "MAMBA2_ATTN"


class GDNBackend(_SSMBackend):
    """Gated delta net layers (Qwen3-Next). On XPU its kernel needs block sizes divisible by 64."""

    name = "GDN_ATTN"


class Mamba1Backend(_SSMBackend):
    """Mamba-1 layers: convolution window and SSM state."""

    name = "MAMBA1_ATTN"


class ShortConvBackend(_SSMBackend):
    """Short convolutions (LFM2): a window alone."""

    name = "SHORT_CONV_ATTN"


_BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (
        TorchBackend,
        FlashInferBackend,
        FlashAttentionBackend,
        CPUAttentionBackend,
        Mamba2Backend,
        GDNBackend,
        Mamba1Backend,
        ShortConvBackend,
    )
}
_SSM_BY_TYPE = {
    "mamba1": Mamba1Backend,
    "mamba2": Mamba2Backend,
    "gdn_attention": GDNBackend,
    "short_conv": ShortConvBackend,
}
_DEFAULT_BY_PLATFORM = {
    "cuda": FlashAttentionBackend,
    "xpu": FlashAttentionBackend,
    "cpu": TorchBackend,
}


def register_backend(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Make a backend selectable by its name (usable as a decorator)."""
    _BACKENDS[backend.name] = backend
    return backend


def get_backend(name: str, platform: str) -> type[AttentionBackend]:
    """Return the attention backend called `name`; `auto` takes the platform's default."""
    if platform not in _DEFAULT_BY_PLATFORM:
        raise ConfigError(
            f"platform={platform!r} is unknown; use one of {', '.join(_DEFAULT_BY_PLATFORM)}"
        )
    if name == "auto":
        return _DEFAULT_BY_PLATFORM[platform]
    attention = {key: backend for key, backend in _BACKENDS.items() if not backend.is_ssm()}
    if name not in attention:
        raise ConfigError(
            f"attention backend {name!r} is unknown; use one of auto, {', '.join(attention)}"
        )
    return attention[name]


def backend_of(spec: KVCacheSpec, attention: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return the backend that reads a layer with this spec."""
    if isinstance(spec, FullAttentionSpec):
        return attention
    if not isinstance(spec, MambaSpec) or spec.mamba_type not in _SSM_BY_TYPE:
        kind = spec.mamba_type if isinstance(spec, MambaSpec) else type(spec).__name__
        raise ConfigError(
            f"no backend reads layers of type {kind!r}; use one of {', '.join(_SSM_BY_TYPE)}"
        )
    return _SSM_BY_TYPE[spec.mamba_type]


def select_kernel_block_size(
    block_size: int, backends: Sequence[type[AttentionBackend]], context: BackendContext
) -> int:
    """Return the largest kernel block size that divides `block_size` and that every backend takes.

    Raises:
        ConfigError: no common size exists.
    """

    def accepts(backend: type[AttentionBackend], size: int) -> bool:
        return any(
            size % entry.base == 0 if isinstance(entry, MultipleOf) else size == entry
            for entry in backend.get_supported_kernel_block_sizes(context)
        )

    fixed = {
        size
        for b in backends
        for size in b.get_supported_kernel_block_sizes(context)
        if isinstance(size, int)
    }
    # If every backend takes multiples, a common divisor of the block is found only if the block
    # itself fits all of them; otherwise it is one of the fixed sizes.
    for size in [block_size, *sorted(fixed, reverse=True)]:
        if block_size % size == 0 and all(accepts(backend, size) for backend in backends):
            return size
    names = ", ".join(backend.name for backend in backends)
    raise ConfigError(
        f"no kernel block size of {names} divides the block size {block_size}; choose another "
        "--block-size"
    )


@dataclass(frozen=True)
class AttentionGroup:
    """The layers of one cache group that one backend reads, and its kernel block size."""

    group_id: int
    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    backend: type[AttentionBackend]
    kernel_block_size: int


def init_attn_backend(
    config: KVCacheConfig, attention: type[AttentionBackend], context: BackendContext
) -> list[AttentionGroup]:
    """Find the attention groups of a cache: the backend and kernel block size of each layer.

    A list, not a generator: the layout pass and the metadata builders both iterate over it (review
    of vllm!38831). A Mamba group's kernel block is its block: a state is never split. The layers of
    a group are of one type.
    """
    groups = []
    for group_id, group in enumerate(config.groups):
        backend = backend_of(group.layer_specs[0], attention)
        size = group.spec.block_size
        if not backend.is_ssm():
            size = select_kernel_block_size(size, [backend], context)
        groups.append(AttentionGroup(group_id, group.layer_names, group.spec, backend, size))
    return groups


def get_attention_cg_support_info(groups: Sequence[AttentionGroup]) -> CUDAGraphSupport:
    """Return the weakest captured-graph support of any group: a step's padding may rely on it."""
    return min(group.backend.cudagraph_support for group in groups)
