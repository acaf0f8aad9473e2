"""What Triton's interpreter hides: it runs one program behind the other, and reads any address.

On a GPU programs run in any order, and so do the threads of one. So in every launch of a test no
program may store an element that another one stores or loads, nor load what it has stored before,
nor touch an address outside of the arguments. `watch` makes each launch of this process fail
otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:  # Importing it decides whether kernels are interpreted.
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

Ints = npt.NDArray[np.int64]


class Launch:
    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self.name, self.programs = name, {}
        # by whether it is a store: program, line, number, addresses
        self.accesses = {True: [], False: []}
        self.number = 0
        tensors = [tensor for tensor in tensors if tensor.numel()]
        last = [
            sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            for x in tensors
        ]
        self.begin = np.array([x.data_ptr() for x in tensors], dtype=np.int64)
        self.end = self.begin + [
            x.element_size() * (1 + i) for x, i in zip(tensors, last, strict=True)
        ]

    def access(
        self, program: Sequence[int], pointers: TensorHandle, mask: TensorHandle, is_store: bool
    ) -> None:
        where, active = np.broadcast_arrays(pointers.data, mask.data.astype(bool))
        at = where[active].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        frame = inspect.currentframe()
        while frame.f_back is not None and frame.f_code.co_name != self.name:
            frame = frame.f_back
        inside = ((at[:, None] >= self.begin) & (at[:, None] + size <= self.end)).any(1)
        what = "store" if is_store else "load"
        assert inside.all(), (
            f"{self.name}, line {frame.f_lineno}: a {what} outside of all arguments"
        )
        number = self.programs.setdefault(tuple(program), len(self.programs))
        self.number += 1
        self.accesses[is_store].append((number, frame.f_lineno, self.number, at))

    def check(self) -> None:
        program, line, time, at = self._by_address(is_store=True)
        twice = (at[1:] == at[:-1]) & (program[1:] != program[:-1])
        assert not twice.any(), (
            f"{self.name}, lines {self._lines(line[1:], line[:-1], twice)}: two programs store it"
        )
        reader, where, when, read = self._by_address(is_store=False)
        if len(at):
            i = np.minimum(np.searchsorted(at, read), len(at) - 1)  # the first store there
            again = (at[i] == read) & (program[i] == reader) & (time[i] < when)
            said = (
                f"{self.name}, lines {self._lines(where, line[i], again)}: a load of "
                "what its program has stored"
            )
            assert not again.any(), said
            shared = (at[i] == read) & (program[i] != reader)
            said = (
                f"{self.name}, lines {self._lines(where, line[i], shared)}: a load of "
                "what another program stores"
            )
            assert not shared.any(), said

    def _by_address(self, is_store: bool) -> tuple[Ints, Ints, Ints, Ints]:
        rows = self.accesses[is_store]
        lengths = [len(at) for *_, at in rows]
        at = np.concatenate([np.empty(0, np.int64), *(at for *_, at in rows)])
        parts = (
            np.repeat(np.array([row[i] for row in rows], dtype=np.int64), lengths) for i in range(3)
        )
        order = np.argsort(at, kind="stable")
        return *(part[order] for part in parts), at[order]

    def _lines(self, one: Ints, other: Ints, where: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
        return sorted({*zip(one[where].tolist(), other[where].tolist(), strict=True)})[:3]


def watch() -> None:
    """For good: this process runs nothing but checks."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    launches, run = [], GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def launched(self: GridExecutor, *args: object, **kwargs: object) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        launches.append(Launch(self.fn.__name__, tensors))
        try:
            run(self, *args, **kwargs)
            launches[-1].check()
        finally:
            launches.pop()

    def loaded(
        self: InterpreterBuilder, pointers: TensorHandle, mask: TensorHandle, *rest: object
    ) -> object:
        launches[-1].access(self.grid_idx, pointers, mask, is_store=False)
        return load(self, pointers, mask, *rest)

    def stored(
        self: InterpreterBuilder,
        pointers: TensorHandle,
        value: TensorHandle,
        mask: TensorHandle,
        *rest: object,
    ) -> object:
        launches[-1].access(self.grid_idx, pointers, mask, is_store=True)
        return store(self, pointers, value, mask, *rest)

    GridExecutor.__call__ = launched
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loaded, stored
