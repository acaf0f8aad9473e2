"""The machine around the pretend device: `torch.cuda`, the guard of its devices, and launches of Triton kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hybrid_kv.device.pretend import PretendGPU, PretendTensor
from hybrid_kv.kernels.common.interpreter import is_interpreter

_TABLE = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_CUDA, _PRIVATE_USE = 1, 20  # places in it
_MEMORY = 8 << 30
_DATA: Any = torch.Tensor.data


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.CUDA


@cache
def _guard() -> _Guard:
    """What switches CUDA devices, which a build for the CPU lacks; without it `x[:3]` of a tensor on one fails.

    A guard in Python can be registered for PrivateUse1 alone, so its entry in the table is copied.
    """
    guard = _Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * (_PRIVATE_USE + 1)).in_dll(library, _TABLE)
    table[_CUDA] = table[_CUDA] or table[_PRIVATE_USE]
    return guard


@contextmanager
def pretend_gpu() -> Iterator[PretendGPU]:
    """A machine with a GPU, as far as the code inside can see; the device is `cuda:0`.

    Raises:
        DeviceError: inside, where a GPU would refuse what is done, or read what is not there yet.
        RuntimeError: this machine has a GPU.
    """
    if torch.version.cuda is not None:
        raise RuntimeError("torch is built for CUDA; the pretend device needs a build for the CPU")
    _guard()
    gpu = PretendGPU()

    class Stream:  # a class, since annotations name it
        def __init__(self, *_: Any) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            pass

        def synchronize(self) -> None:
            gpu.wait("stream.synchronize")

    shims = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (_MEMORY, _MEMORY),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "Stream": Stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: Stream(),
        "synchronize": lambda *_: gpu.wait("cuda.synchronize"),
    }
    with ExitStack() as stack:
        for name, shim in shims.items():
            stack.enter_context(patch.object(torch.cuda, name, shim))
        stack.enter_context(patch.object(torch.nn.Parameter, "data", property(_DATA.__get__, _set_data)))
        if is_interpreter():
            from triton.runtime.interpreter import GridExecutor

            run = GridExecutor.__call__

            def launch(self: Any, *args: Any, **kwargs: Any) -> None:
                gpu.launch(self.fn.__name__, lambda *a, **k: run(self, *a, **k), args, kwargs)

            stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        torch._C._set_only_lift_cpu_tensors(True)  # or `torch.tensor(…, device="cuda:0")` passes by every mode
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(gpu)
        yield gpu


def _set_data(parameter: Any, value: torch.Tensor) -> None:
    """`parameter.data = value`: torch would take all of a tensor of the device but its values."""
    if not isinstance(value, PretendTensor):
        _DATA.__set__(parameter, value)
        return
    own: Any = PretendTensor(value.value)
    own._is_param = True
    torch.utils.swap_tensors(parameter, own)
