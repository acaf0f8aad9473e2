"""Copies between a host and a device that share their memory here, and come when they come.

What is copied to the host without a wait is noise until the host has waited for it. Then it is what
the device held when the copy was queued, or what it holds now: the earliest and the latest that a
real device may bring. What is copied from pinned memory should not change until then. Where it does
is counted and not judged: nobody may read those values.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import graphs
from .streams import HOST, current

ORDERS = ("late", "early")
_GARBAGE = 0x5A  # a byte that no buffer holds by itself

order = ORDERS[0]
late_copies = 0  # to the host, so far
# By file and line: the host changed the memory of uploads before they were waited for.
changed_uploads: Counter[str] = Counter()
_pinned: dict[int, StorageWeakRef] = {}  # by address
_read_in_place: dict[int, StorageWeakRef] = {}
_move, _to_host, _copy = torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.copy_


def choose_order(name: str) -> None:
    """Choose the content that copies to the host bring.

    It is what the device held when they were queued (`early`), or what it holds (`late`).
    """
    global order
    order = name


class TooEarlyError(RuntimeError):
    """The host changed memory that the device may still have had to read."""


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def _note(tensor: torch.Tensor, where: dict[int, StorageWeakRef]) -> torch.Tensor:
    where[address(tensor)] = StorageWeakRef(tensor.untyped_storage())
    return tensor


def _is_noted(tensor: torch.Tensor, where: dict[int, StorageWeakRef]) -> bool:
    begin = address(tensor)
    if begin in where and where[begin].expired():
        del where[begin]
    return begin in where


def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
    """Return whether a tensor is pinned memory of the host."""
    return _is_noted(tensor, _pinned)


def view_in_place(host: torch.Tensor) -> torch.Tensor:
    """Return pinned memory as the device reads and writes it in place (UVA)."""
    return _note(host, _read_in_place)


def place_of_call(through: str = "/") -> str:
    """Return the file and line of the code that called into this folder.

    The call came through a file whose name ends in `through`.
    """
    frame = sys._getframe(1)
    folder = __file__.rpartition("/")[0]
    while frame.f_back and frame.f_code.co_filename.startswith((folder, torch.__path__[0])):
        frame = frame.f_back
    while frame.f_back and frame.f_code.co_filename.endswith(through):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"


def _fill_with_noise(host: torch.Tensor) -> None:
    noise = torch.full((host.numel() * host.element_size(),), _GARBAGE, dtype=torch.uint8)
    _copy(host, noise.view(host.dtype).view(host.shape))


def to_host(device: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Begin to copy, and return the host's memory, which is noise until the host has waited."""
    global late_copies
    late_copies += 1
    source = device.clone() if order == "early" else device.detach()

    def land() -> None:
        with torch.inference_mode():
            _copy(host, source)

    with torch.inference_mode():
        _fill_with_noise(host)
    current().give()
    HOST.when_done(current(), land)
    return host


def watch_upload(host: torch.Tensor) -> None:
    """Compare pinned memory, once the host has waited, with what was to be uploaded."""
    sent, where = host.clone(), place_of_call()

    def check() -> None:
        if not torch.equal(host, sent):
            changed_uploads[where] += 1

    current().give()
    HOST.when_done(current(), check)


def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand in for `Tensor.to`.

    Both sides are called `cpu`, where torch would hand out the same memory.
    """
    if graphs.recording() or not kwargs.get("non_blocking"):
        return _move(self, *args, **kwargs)
    device = args[0] if args else kwargs.get("device")
    # vLLM writes the host as a word, and the device as an object.
    if isinstance(device, str) and device == "cpu":
        made = _move(self, *args, **kwargs | {"copy": True})
        return to_host(made if made.dtype != self.dtype else self, made)
    if is_pinned(self):
        watch_upload(self)
    return _move(self, *args, **kwargs | {"copy": True})


def cpu(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Stand in for `Tensor.cpu`, which waits."""
    current().synchronize()
    return _to_host(self).clone()


def copy_(self: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
    """Stand in for `Tensor.copy_`."""
    if non_blocking and isinstance(source, torch.Tensor) and not graphs.recording():
        is_host = is_pinned(self) and not _is_noted(self, _read_in_place)
        if (
            is_host
            and not is_pinned(source)
            and self.dtype == source.dtype
            and self.shape == source.shape
        ):
            return to_host(source, self)
        if not is_host and is_pinned(source):
            watch_upload(source)
    return _copy(self, source, non_blocking)


def _making_pinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return _note(tensor, _pinned) if pin_memory else tensor

    return made


def install() -> None:
    """Let torch copy so, and pin memory without a driver."""
    for name in (
        "empty",
        "zeros",
        "ones",
        "full",
        "tensor",
        "empty_like",
        "zeros_like",
        "empty_strided",
        "arange",
    ):
        setattr(torch, name, _making_pinned(getattr(torch, name)))
    named = {
        "to": to,
        "cpu": cpu,
        "copy_": copy_,
        "is_pinned": is_pinned,
        "pin_memory": lambda self, *_: _note(self.clone(), _pinned),
    }
    for name, value in named.items():
        setattr(torch.Tensor, name, value)
