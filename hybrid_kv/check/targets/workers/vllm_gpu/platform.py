"""A GPU of a kind of its own for vLLM: its device is called `cpu`, all else is asked as of a GPU.

No branch for CPUs of vLLM runs. What answers here are constants about a device.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from . import streams

TOTAL_MEMORY, FREE_MEMORY = 80 << 30, 64 << 30  # bytes
NUM_PROCESSORS = 8


class PretendPlatform(Platform):
    """The device that vLLM finds."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    current_stream = staticmethod(lambda *_: streams.current())
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012  (vLLM's)
    worker = ""  # the class that runs it, as a module's and its own name

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        vllm_config.parallel_config.worker_cls = cls.worker

    @classmethod
    def import_kernels(cls) -> None:
        """Import none: those of the wheel need a driver."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return TOTAL_MEMORY

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return 0.0

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Do nothing: there is one device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Do nothing: the host's generator was seeded."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def check_if_supports_dtype(cls, dtype: Any) -> None:
        """Take any."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def graph_pool_handle(cls) -> int:
        return 0

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return NUM_PROCESSORS

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Do nothing: the exact model has its caches by itself."""
