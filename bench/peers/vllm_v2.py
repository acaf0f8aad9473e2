"""What the host does with a step's block ids in vLLM's V2 runner: the real code of an install, up to its launch.

The runner keeps its tables on a device, and Triton kernels write, gather and map slots there: none of them runs on a
CPU, where it is handed its arguments instead. Pinned memory, which needs a device, is plain memory here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.peers import Install, loaded

_TABLES, _BUFFERS = "vllm.v1.worker.gpu.block_table", "vllm.v1.worker.gpu.buffer_utils"
REAL = {_TABLES, _BUFFERS, "vllm.triton_utils", "vllm.triton_utils.importing"}
CPU = torch.device("cpu")


def _to_device(data: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype).to(device)


VALUES = {
    "vllm.v1.attention.backends.utils.PAD_SLOT_ID": -1,
    "vllm.utils.platform_utils.is_uva_available": lambda: True,
    "vllm.utils.torch_utils.async_tensor_h2d": _to_device,
}


class _Launches:
    """In the place of a kernel: keeps the ids that each launch is handed."""

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **_: Any) -> None:
            self.ids.append(arguments[4])

        return launch


@cache
def _modules(install: Install) -> tuple[ModuleType, ModuleType]:
    """The files of block tables and of their buffers."""
    with loaded(install.folder / "vllm", REAL, VALUES):
        tables, buffers = import_module(_TABLES), import_module(_BUFFERS)

    class Plain(buffers.UvaBuffer):  # type: ignore[misc, name-defined]
        def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np = self.cpu.numpy()
            # What the device sees: an attribute in 0.22, what a method returns in 0.32.
            self.__dict__["_uva" if hasattr(buffers.UvaBuffer, "uva") else "uva"] = self.cpu

    buffers.__dict__.update(UvaBuffer=Plain, _apply_write_kernel=_Launches())
    return tables, buffers


class V2Staging:
    """Tables of some equal groups, as far as the host has to do with them."""

    def __init__(
        self, install: Install, num_groups: int, block_size: int, kernel_block_size: int, width: int, rows: int
    ) -> None:
        module, buffers = _modules(install)
        self._launches: _Launches = buffers._apply_write_kernel
        sizes, widths = [block_size] * num_groups, [width] * num_groups
        self.expands = "kernel_block_sizes" in signature(module.BlockTables).parameters  # until 0.22
        kernel_sizes = ([kernel_block_size] * num_groups,) if self.expands else ()
        self._tables = module.BlockTables(sizes, rows, 1, widths, CPU, *kernel_sizes)
        self._per_block = block_size // kernel_block_size if self.expands else 1
        self._num_groups = num_groups

    def rewind(self, held: int) -> None:
        """Every row has as many blocks."""
        self._tables.num_blocks.np[:] = held * self._per_block

    def append(self, row: int, ids: tuple[list[int], ...], is_new: bool) -> None:
        """Stage a request's new ids."""
        self._tables.append_block_ids(row, ids, is_new)

    def finish(self) -> None:
        """Hand over what was staged."""
        self._launches.ids.clear()
        self._tables.apply_staged_writes()

    def handed_over(self) -> npt.NDArray[np.int32]:
        """[num_groups, ids]: of the last step, in kernel blocks where the host expands."""
        found: npt.NDArray[np.int32] = torch.cat(self._launches.ids).reshape(self._num_groups, -1).numpy()
        return found
