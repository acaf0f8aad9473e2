"""Arrays of the host on their way to the device, and values on their way back.

A step has one upload. What prepares it is *staged*: the arrays that the host knows, and the
function that makes the result of as many tensors once they are on the device. `together` joins
several into one; a `StepUpload` takes them in one after the other and gives each its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.launch import VECTOR_BYTES

T = TypeVar("T")
Array = npt.NDArray[Any]
Staged = tuple[Sequence[Array], Callable[..., T]]  # arrays, and what is made of as many tensors


def upload(device: torch.device, *arrays: Array) -> list[torch.Tensor]:
    """Copy arrays to a device, with their dtypes and shapes.

    There is one copy, for which the host does not wait.

    They lie one after the other in page-locked memory that no later step writes to before the copy
    is done: torch sees to that. On a CPU they share their memory with the arrays.
    """
    if device.type == "cpu":
        return list(map(torch.from_numpy, arrays))
    sizes = [VECTOR_BYTES * cdiv(array.nbytes, VECTOR_BYTES) for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for room, array in zip(staged.split(sizes), arrays, strict=True):
        room.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = staged.to(device, non_blocking=True).split(sizes)
    return [
        data[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for data, array in zip(moved, arrays, strict=True)
    ]


def download(*tensors: torch.Tensor | None) -> list[Any]:
    """Return the values of tensors of one device and dtype as lists; None stays.

    There is one copy, which the host waits for.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    if len(there) > 1 and there[0].device.type != "cpu":
        flat = torch.cat([tensor.flatten() for tensor in there]).cpu()
        pieces = flat.split([tensor.numel() for tensor in there])
        there = [piece.view(tensor.shape) for piece, tensor in zip(pieces, there, strict=True)]
    values = iter(there)
    return [None if tensor is None else next(values).tolist() for tensor in tensors]


def now(device: torch.device, staged: Staged[T]) -> T:
    """Upload what is staged by itself, and return what is made of it."""
    arrays, make = staged
    return make(*upload(device, *arrays)) if arrays else make()


def move(*arrays: Array) -> Staged[tuple[torch.Tensor, ...]]:
    """Stage arrays that are needed on the device as they are."""

    def make(*moved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return moved

    return arrays, make


def together(*parts: Staged[Any]) -> Staged[list[Any]]:
    """Stage several as one; their results are made in their order."""
    arrays, makes = zip(*parts, strict=True)
    counts = [*map(len, arrays)]

    def make(*moved: torch.Tensor) -> list[Any]:
        rest = iter(moved)
        return [make(*islice(rest, count)) for make, count in zip(makes, counts, strict=True)]

    return [*chain.from_iterable(arrays)], make


def fill(*pairs: tuple[torch.Tensor, Array]) -> Staged[None]:
    """Stage writing arrays into tensors of the device, of their shapes."""

    def make(*moved: torch.Tensor) -> None:
        for (target, _), values in zip(pairs, moved, strict=True):
            target.copy_(values)

    return [array for _, array in pairs], make


def stage_fields(host: T) -> Staged[T]:
    """Stage a dataclass all of whose fields are arrays; the result has tensors in their places."""
    return list(vars(host).values()), type(host)


class Pending(Generic[T]):
    """The result of something staged, there once its `StepUpload` has been sent."""

    __slots__ = ("_make", "_num_arrays", "result")
    result: T

    def __init__(self, staged: Staged[T]) -> None:
        arrays, self._make = staged
        self._num_arrays = len(arrays)

    def make(self, moved: Iterator[torch.Tensor]) -> None:
        """Make the result of the next tensors."""
        self.result = self._make(*islice(moved, self._num_arrays))


class StepUpload:
    """All that a step brings to the device, by one copy."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._pending: list[Pending[Any]] = []

    def add(self, staged: Staged[T]) -> Pending[T]:
        """Take in what is staged; results are made in the order in which they were added."""
        pending = Pending(staged)
        self._arrays += staged[0]
        self._pending.append(pending)
        return pending

    def send(self, device: torch.device) -> None:
        """Upload all arrays, and make all results."""
        moved = iter(upload(device, *self._arrays) if self._arrays else ())
        for pending in self._pending:
            pending.make(moved)
