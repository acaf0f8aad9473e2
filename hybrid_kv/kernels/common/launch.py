"""Checks and options that the wrappers of Triton kernels share.

A kernel is a plain function until its first launch, so that its module imports without Triton:
`jit` makes it one. Kernels do their arithmetic in float32 whatever the tensors hold; in the
interpreter bfloat16 arithmetic works on raw bits and is silently wrong (triton#4972).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch

from hybrid_kv.errors import ConfigError
from hybrid_kv.kernels.common import functions
from hybrid_kv.kernels.common.interpreter import is_interpreter

if TYPE_CHECKING:
    from hybrid_kv.config import Kernels

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
VECTOR_BYTES = 16  # the widest access of one lane


def choose(name: Kernels, device: torch.device) -> Literal["torch", "triton"]:
    """Return the implementation that `kernels=name` selects on a device.

    Raises:
        ConfigError: Triton is requested, and it is missing, or the machine has no GPU. Its
            interpreter runs on a CPU.
    """
    if name == "torch" or (
        name == "auto" and (device.type == "cpu" or find_spec("triton") is None)
    ):
        return "torch"
    if find_spec("triton") is None:
        raise ConfigError("kernels='triton' needs the package triton; install it, or use torch")
    if device.type == "cpu" and not is_interpreter():
        raise ConfigError(
            "kernels='triton' needs a GPU; use torch, or TRITON_INTERPRET=1 to interpret them, "
            "slowly"
        )
    return "triton"


@cache
def jit(kernel: Callable[..., None], do_not_specialize: tuple[str, ...] = ()) -> Any:
    """Return the `triton.jit` function of a kernel that calls Triton's language `tl`.

    Args:
        do_not_specialize: integer arguments that change from step to step, for whose values no
            kernel is compiled.
    """
    import triton
    import triton.language as tl

    # Of its module, not of a closure: the interpreter looks nowhere else.
    kernel.__globals__["tl"] = tl
    for name in set(kernel.__code__.co_names) & set(functions.__all__):
        kernel.__globals__[name] = jit(getattr(functions, name))
    return triton.jit(kernel, do_not_specialize=list(do_not_specialize))


def warp_size() -> int:
    """Return the lanes of a warp of this machine's GPUs."""
    return 64 if torch.version.hip else 32


def per_warp(itemsize: int, lanes: int) -> int:
    """Return how many elements of `itemsize` bytes `lanes` lanes cover in their widest access."""
    return lanes * VECTOR_BYTES // itemsize


def register_limit(registers: int, lanes: int) -> dict[str, int]:
    """Return the launch options that limit a thread to `registers`, for warps of `lanes`.

    Left alone, NVIDIA's assembler spills a few bytes where that lets one more block onto an SM.
    AMD's compiler takes no such option.
    """
    return {"maxnreg": registers} if lanes == 32 else {}


def check(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    free: int = 0,
) -> None:
    """Check that a kernel may read `tensor` as it assumes to.

    Args:
        name: of the tensor, for the message.
        shape, dtypes, device: those that it must have.
        free: dimensions, from the first, whose strides are free; the rest must be contiguous.

    Raises:
        ValueError: the device, dtype, shape or strides are others.
    """
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the others are on {device}")
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} is {tensor.dtype}; it must be one of {', '.join(map(str, dtypes))}"
        )
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}")
    if not tensor[(slice(1),) * free].is_contiguous():
        raise ValueError(
            f"{name} has strides {tensor.stride()}; from dimension {free} on it must be contiguous"
        )


def check_dims(**tensors: tuple[torch.Tensor, int]) -> None:
    """Check that each tensor has as many dimensions as the number that is given with it.

    Raises:
        ValueError: one has more or fewer.
    """
    for name, (tensor, dims) in tensors.items():
        if tensor.dim() != dims:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimensions"
            )


def strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return of each tensor how many elements lie between entries of its first dimension."""
    return tuple(tensor.stride(0) for tensor in tensors)
