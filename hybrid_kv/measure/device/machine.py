"""The machine around the pretend device: `torch.cuda`, its device guard, Triton's launches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from hybrid_kv.kernels.common.interpreter import is_interpreter
from hybrid_kv.measure.device.pretend import PretendGPU, PretendTensor

_TABLE = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
# Places in it.
_CUDA = 1
_PRIVATE_USE = 20
_MEMORY = 8 << 30
_DATA: Any = torch.Tensor.data
_SHIMS = (
    "is_available",
    "_lazy_init",
    "empty_cache",
    "mem_get_info",
    "current_device",
    "device_count",
    "Stream",
    "stream",
    "current_stream",
    "synchronize",
)


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.CUDA


@cache
def _guard() -> _Guard:
    """Register what switches CUDA devices, which a build for the CPU lacks.

    Without it `x[:3]` of a tensor on one fails. A guard in Python can be registered for PrivateUse1
    alone, so its entry in the table is copied.

    A guard in Python can be registered for PrivateUse1 alone, so its entry in the table is copied.
    """
    guard = _Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * (_PRIVATE_USE + 1)).in_dll(library, _TABLE)
    table[_CUDA] = table[_CUDA] or table[_PRIVATE_USE]
    return guard


class _PretendStream:
    """A stream: all of them are one."""

    gpu: ClassVar[PretendGPU]

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        self.gpu.wait("stream.synchronize")


class _Cuda:
    """The functions of `torch.cuda` on the pretended machine."""

    def __init__(self, gpu: PretendGPU, stream: type[_PretendStream]) -> None:
        self._gpu = gpu
        self.Stream = stream

    def is_available(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return _MEMORY, _MEMORY

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def stream(self, _: Any) -> Any:
        return nullcontext()

    def current_stream(self, *_: Any) -> _PretendStream:
        return self.Stream()

    def synchronize(self, *_: Any) -> None:
        self._gpu.wait("cuda.synchronize")


@contextmanager
def pretend_gpu() -> Iterator[PretendGPU]:
    """Give the code inside a machine with a GPU, as far as it can see; the device is `cuda:0`.

    Raises:
        DeviceError: inside, where a GPU would refuse what is done, or read what is not there yet.
        RuntimeError: this machine has a GPU.
    """
    if torch.version.cuda is not None:
        raise RuntimeError("torch is built for CUDA; the pretend device needs a build for the CPU")
    _guard()
    pretended = PretendGPU()

    class CudaStream(_PretendStream):  # a class, since annotations name it
        gpu = pretended

    cuda = _Cuda(pretended, CudaStream)
    with ExitStack() as stack:
        for name in _SHIMS:
            stack.enter_context(patch.object(torch.cuda, name, getattr(cuda, name)))
        stack.enter_context(
            patch.object(torch.nn.Parameter, "data", property(_DATA.__get__, _set_data))
        )
        if is_interpreter():
            from triton.runtime.interpreter import GridExecutor

            run = GridExecutor.__call__

            def launch(self: Any, *args: Any, **kwargs: Any) -> None:
                pretended.launch(self.fn.__name__, partial(run, self), args, kwargs)

            stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        # Or `torch.tensor(…, device="cuda:0")` passes by every mode.
        lift_only_cpu = torch._C._set_only_lift_cpu_tensors
        lift_only_cpu(True)  # noqa: FBT003 - torch names no argument
        stack.callback(lift_only_cpu, False)  # noqa: FBT003 - as above
        stack.enter_context(pretended)
        yield pretended


def _set_data(parameter: Any, value: torch.Tensor) -> None:
    """Assign `parameter.data = value`: torch would take all of such a tensor but its values."""
    if not isinstance(value, PretendTensor):
        _DATA.__set__(parameter, value)
        return
    tensor: Any = PretendTensor(value.value)
    tensor._is_param = True
    torch.utils.swap_tensors(parameter, tensor)
