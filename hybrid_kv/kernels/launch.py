"""What the wrappers of Triton kernels share.

A kernel is a plain function until its first launch, so that its module imports without Triton: `jit` makes it one.
Kernels do their arithmetic in float32 whatever the tensors hold; in the interpreter bfloat16 arithmetic works on raw
bits and is silently wrong (triton#4972).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch

from hybrid_kv.config import ConfigError, Kernels

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
VECTOR_BYTES = 16  # the widest access of one lane


def choose(name: Kernels, device: torch.device) -> Literal["torch", "triton"]:
    """What `kernels=name` means on a device.

    Raises:
        ConfigError: Triton was asked for, and it is missing, or there is no GPU. Its interpreter runs on a CPU.
    """
    if name == "torch" or (name == "auto" and (device.type == "cpu" or find_spec("triton") is None)):
        return "torch"
    if find_spec("triton") is None:
        raise ConfigError("kernels='triton' needs the package triton; install it, or use torch")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("kernels='triton' needs a GPU; use torch, or TRITON_INTERPRET=1 to interpret them, slowly")
    return "triton"


@cache
def jit(kernel: Callable[..., None], do_not_specialize: tuple[str, ...] = ()) -> Any:
    """The `triton.jit` function of a kernel that calls Triton's language `tl`."""
    import triton
    import triton.language as tl

    # Of its module, not of a closure: the interpreter looks nowhere else.
    kernel.__globals__["tl"] = tl
    return triton.jit(kernel, do_not_specialize=list(do_not_specialize))


def warp_size() -> int:
    """Lanes of a warp of this machine's GPUs."""
    return 64 if torch.version.hip else 32


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()


def check(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    free: int = 0,
) -> None:
    """Whether a kernel may read `tensor` as it assumes to: contiguous but for its first `free` dimensions.

    Raises:
        ValueError: it may not.
    """
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the others are on {device}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; it must be one of {', '.join(map(str, dtypes))}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}")
    if not tensor[(slice(1),) * free].is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; from dimension {free} on it must be contiguous")
