"""Arrays of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.launch import VECTOR_BYTES

Fill = tuple[torch.Tensor, npt.NDArray[Any]]  # a tensor, and what the host writes there


def upload(device: torch.device, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
    """Arrays on a device, of their dtypes and shapes: by one copy for which the host does not wait.

    They lie behind each other in page-locked memory that no later step writes to before the copy is done: torch sees to
    that. On a CPU they share their memory with the arrays.
    """
    if device.type == "cpu":
        return list(map(torch.from_numpy, arrays))
    sizes = [VECTOR_BYTES * cdiv(array.nbytes, VECTOR_BYTES) for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, array in zip(staged.split(sizes), arrays, strict=True):
        part.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = staged.to(device, non_blocking=True).split(sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for part, array in zip(moved, arrays, strict=True)
    ]


def fill(device: torch.device, pairs: Sequence[Fill]) -> None:
    """Write arrays into tensors of a device, of their shapes, by one upload; each to its place in the device."""
    for (target, _), values in zip(pairs, upload(device, *[array for _, array in pairs]), strict=True):
        target.copy_(values)
