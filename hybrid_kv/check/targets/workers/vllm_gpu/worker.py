"""vLLM's own GPU worker.

Only code that asks a driver about a device is replaced, and each replacement is in this file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from vllm.utils import torch_utils
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import gpu_worker, mamba_utils
from vllm.v1.worker.gpu import buffer_utils

from . import copies, uva
from .platform import FREE_MEMORY, TOTAL_MEMORY


class PretendWorker(gpu_worker.Worker):
    """The worker, with a device that was found and measured."""

    def init_device(self) -> None:
        """Find the device."""
        self.device = torch.device("cpu")
        gpu_worker.init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        set_random_seed(self.model_config.seed)
        self.init_snapshot = SimpleNamespace(free_memory=FREE_MEMORY, total_memory=TOTAL_MEMORY)
        self.requested_memory = FREE_MEMORY
        self._init_workspace_and_model_runner()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Iterator[None]:
        yield


def _replace_everywhere(name: str, original: Any, replacement: Any) -> None:
    """Replace what modules imported by name."""
    for module in [*sys.modules.values()]:
        if module is not None and vars(module).get(name) is original:
            setattr(module, name, replacement)


def install() -> None:
    """Replace what the wheel's compiled operators do; once vLLM's modules are imported."""
    view = torch_utils.get_accelerator_view_from_cpu_tensor
    _replace_everywhere("get_accelerator_view_from_cpu_tensor", view, copies.view_in_place)
    # A graph's outputs stay alive here.
    _replace_everywhere("weak_ref_tensor", torch_utils.weak_ref_tensor, lambda tensor: tensor)
    # The interpreter cannot run that kernel; vLLM's own fallback is in torch.
    topk_topp_sampler.HAS_TRITON = False
    # Programs that copy a state at once; here one after another.
    mamba_utils._TEMPORAL_TILES = 1
    uva.install(buffer_utils)
