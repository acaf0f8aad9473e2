"""Runs checks of Triton kernels in Triton's interpreter, in a process of its own.

Triton decides when it is imported whether its own library is interpreted or compiled, so one
process can do only one of the two; the pytest process stays able to compile. A check and its
arguments must pickle; tensors are made inside it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from bench.peers.stand_ins import loaded_kernels
from hybrid_kv.kernels.common.interpreter import start_interpreter
from tests.kernels.races import watch

T = TypeVar("T")
Counts = tuple[int, ...]


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start)


def _start() -> None:
    start_interpreter()
    watch()


def interpreted(check: Callable[..., T], *args: Any) -> T:
    """`check(*args)` where wrappers run on CPU tensors."""
    try:
        return _process().submit(check, *args).result()
    except BrokenProcessPool:
        _process.cache_clear()
        raise AssertionError(
            f"{check.__name__}{args} killed the interpreter: an address out of bounds"
        ) from None


def share_memory_with_the_interpreter() -> None:
    """Keep launches from copying storages onto themselves, which would commit sparse ones."""
    from triton.runtime.interpreter import GridExecutor

    GridExecutor._restore_args_dev = lambda *_: None


def count_bytes(
    tensors: dict[str, torch.Tensor], call: Callable[..., torch.Tensor], *args: Any
) -> tuple[dict[str, Counts], Counts, int]:
    """What the programs of a wrapper's launches load and store, by tensor.

    Returns:
        {name: counts}, counts of the tensor that `call(*args)` returns, and the number of launches.
        Counts are distinct
        bytes loaded, distinct bytes stored, bytes loaded, bytes stored: distinct bytes are the
            memory traffic where
        caches serve repeated accesses, the others what programs ask for.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    accesses = {"load": [], "store": []}
    launches = 0
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    launch = GridExecutor.__call__

    def record(kind: str, pointers: TensorHandle, mask: TensorHandle) -> None:
        addresses, active = np.broadcast_arrays(pointers.data, mask.data.astype(bool))
        accesses[kind].append(addresses[active].astype(np.int64))

    def counting_load(
        self: InterpreterBuilder, pointers: TensorHandle, mask: TensorHandle, *rest: object
    ) -> object:
        record("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(
        self: InterpreterBuilder,
        pointers: TensorHandle,
        value: TensorHandle,
        mask: TensorHandle,
        *rest: object,
    ) -> object:
        record("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counting_launch(self: GridExecutor, *args: object, **kwargs: object) -> object:
        nonlocal launches
        launches += 1
        return launch(self, *args, **kwargs)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = (
        counting_load,
        counting_store,
    )
    GridExecutor.__call__ = counting_launch
    try:
        result = call(*args)
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        GridExecutor.__call__ = launch
    found = {}
    flat = [np.concatenate([np.empty(0, np.int64), *parts]) for parts in accesses.values()]
    for name, tensor in {**tensors, "": result}.items():
        elements = [_elements(tensor, addresses) for addresses in flat]
        counts = [len(np.unique(part)) for part in elements] + [len(part) for part in elements]
        found[name] = tuple(tensor.itemsize * count for count in counts)
    return found, found.pop(""), launches


def _elements(tensor: torch.Tensor, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the elements of `tensor`'s storage at `addresses`, without those of other tensors."""
    storage = tensor.untyped_storage()
    offsets = addresses - storage.data_ptr()
    elements = offsets[(offsets >= 0) & (offsets < storage.nbytes())] // tensor.itemsize
    own = torch.zeros(storage.nbytes() // tensor.itemsize, dtype=torch.bool)
    own.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(1)
    return elements[own.numpy()[elements]]


def backwards(grid: tuple[int, int]) -> list[tuple[int, int]]:
    return [(x, y) for x in reversed(range(grid[0])) for y in reversed(range(grid[1]))]


@contextlib.contextmanager
def programs(
    select: Callable[[tuple[int, int]], list[tuple[int, int]]],
) -> Iterator[list[tuple[int, ...]]]:
    """Run only the programs `select((x, y))` of each grid, in that order; yield all grids."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    set_index, launch, grids = InterpreterBuilder.set_grid_idx, GridExecutor.__call__, []

    def launch_selected(self: GridExecutor, *args: object, **kwargs: object) -> object:
        x, y = (*self.grid, 1)[:2]
        grids.append(self.grid)
        chosen = select((x, y))
        self.grid, remaining = (len(chosen),), iter(chosen)

        def set_chosen(builder: InterpreterBuilder, *_: object) -> None:
            builder.grid_dim = (x, y, 1)
            set_index(builder, *next(remaining), 0)

        with patch.object(InterpreterBuilder, "set_grid_idx", set_chosen):
            return launch(self, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", launch_selected):
        yield grids


_peers = contextlib.ExitStack()


def load_peer(name: str) -> ModuleType:
    """Load a module with Triton kernels out of an installed package, for the whole process."""
    torch.cuda.device = torch.accelerator.device_index = lambda _: contextlib.nullcontext()
    return _peers.enter_context(loaded_kernels(name, interpreted=True))
