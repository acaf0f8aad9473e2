"""Which backend reads a layer, in which blocks, and what computes it on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from hybrid_kv.attention.paged import Compute, compute_of
from hybrid_kv.cache.backend import BackendContext, backend_of, get_backend, select_kernel_block_size
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, StatePart
from hybrid_kv.config import ConfigError
from hybrid_kv.guard import block_sizes
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw, longs
from hybrid_kv.guard.kernel_cases.packages import installed
from hybrid_kv.kernels.common.launch import FLOATS

# On a GPU, with the packages and without them.
COMPUTES = {
    "TORCH": ("triton", "triton"),
    "CPU_ATTN": ("triton", "triton"),
    "FLASH_ATTN": ("flash_attn", "triton"),
    "FLASHINFER": ("flashinfer", "triton"),
}
DEFAULTS = {"cuda": "FLASH_ATTN", "xpu": "FLASH_ATTN", "cpu": "TORCH"}  # by platform
READERS = {
    "mamba1": "MAMBA1_ATTN",
    "mamba2": "MAMBA2_ATTN",
    "gdn_attention": "GDN_ATTN",
    "short_conv": "SHORT_CONV_ATTN",
}
new_compute: Callable[[str], Compute] = compute_of.__wrapped__  # what is made for a stand-in stays with nobody


def readers(draw: Draw) -> Iterator[Compared]:
    """A layer's spec names its backend; what no backend reads is refused."""
    attention = get_backend(draw.one_of(*COMPUTES), "cuda")
    parts = (StatePart("conv", (1,), torch.float32),)
    for spec in (FullAttentionSpec(1, 1, 2, torch.float32), MLAAttentionSpec(1, 2, torch.float32)):
        yield "backend_of, attention", _same(backend_of(spec, attention), attention), np.array(True)
    for kind, name in READERS.items():
        found = backend_of(MambaSpec(1, parts, mamba_type=kind), attention).name
        yield f"backend_of, {kind}", _same(found, name), np.array(True)
    for strange in (KVCacheSpec(1), MambaSpec(1, parts, mamba_type="mamba9")):
        yield "backend_of, a strange layer", _is_refused(lambda: backend_of(strange, attention)), np.array(True)  # noqa: B023


def names(draw: Draw) -> Iterator[Compared]:
    """A platform has a default; a name that is no attention backend's, in capital letters, is refused."""
    for platform, default in DEFAULTS.items():
        yield "get_backend, auto", _same(get_backend("auto", platform).name, default), np.array(True)
    name = draw.one_of(*COMPUTES)
    for strange in (name.lower(), name[:-1], f"{name}_", "AUTO", "auto2", draw.one_of(*READERS.values())):
        asked = [(strange, draw.one_of(*DEFAULTS)), ("auto", strange)]
        for one in asked:
            yield f"get_backend{one}", _is_refused(lambda: get_backend(*one)), np.array(True)  # noqa: B023


def sizes(draw: Draw) -> Iterator[Compared]:
    """The block size that a backend prefers, and the kernel's: the largest that divides it."""
    for name in COMPUTES:
        platform, has_float32, default = draw.one_of(*DEFAULTS), draw.chance(), draw.number(1, 12) * draw.one_of(2, 16)
        backend, context = get_backend(name, platform), BackendContext(platform, has_float32)
        best = backend.get_preferred_block_size(default, context)
        yield (
            f"preferred, {name} on {platform}",
            longs([best]),
            np.array([block_sizes.preferred(name, platform, default)]),
        )
        block = draw.number(1, 12) * draw.one_of(1, 8, 16)
        due, what = block_sizes.kernel_block(name, has_float32, block), f"kernel block of {block}, {name}"
        if due is None:
            refused = _is_refused(lambda: select_kernel_block_size(block, [backend], context))  # noqa: B023
            yield what, refused, np.array(True)
        else:
            yield what, longs([select_kernel_block_size(block, [backend], context)]), np.array([due])
        shape = draw.one_of(1, draw.number(1, 20)), draw.one_of(1, draw.number(1, 64)), draw.number(1, 3)
        yield f"block dim, {name}", longs([backend.get_kv_cache_block_dim(*shape)]), np.array([name == "FLASH_ATTN"])


def computes(draw: Draw) -> Iterator[Compared]:
    """A GPU has what the backend is named after, and Triton where the package is missing; a CPU has Triton alone."""
    refused = torch.float64, torch.int64
    for name, on_gpu in COMPUTES.items():
        backend = get_backend(name, draw.one_of("cuda", "xpu", "cpu"))
        for is_there, compute in zip((True, False), on_gpu, strict=True):
            with installed(is_there):
                for device, due in (("cuda", compute), ("cpu", "triton")):
                    taken = draw.some(FLOATS)
                    mixed = [*taken, draw.one_of(*refused)]
                    asked = (("triton", taken, due), ("torch", taken, "torch"), ("triton", mixed, "torch"))
                    for kernels, dtypes, named in asked:
                        got = backend.get_compute(device, kernels, dtypes)
                        yield f"get_compute, {name}", _same(got, named), np.array(True)
                missing = not is_there and on_gpu[0] != compute
                yield "compute_of", _is_refused(lambda: new_compute(on_gpu[0])), np.array(missing)  # noqa: B023


def _same(got: object, expected: object) -> torch.Tensor:
    return torch.tensor(got == expected)


def _is_refused(ask: Callable[[], object]) -> torch.Tensor:
    try:
        ask()
    except ConfigError:
        return torch.tensor(True)
    return torch.tensor(False)


CASES = (readers, names, sizes, computes)
