"""Tensors that say `cuda:0` with values in host memory, and the mode that notes their use.

Shapes considered. (a) A backend of its own (`PrivateUse1`): no branch for `cuda` runs, in Python or
in C++. (b) Fake tensors: they have no values, so a step ends with the first sampled token, and an
index on the CPU passes. (c) Wrapper tensors under a mode that sees every operation, those of the
host too. This is (c).

A storage's marks are written onto it (`allocation`, `is_page_locked`): torch keeps one Python
object for each storage while that lives.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

GPU = torch.device("cuda", 0)
KINDS = ("launch", "wait", "upload", "download", "allocation")

_PACKAGES = Path(torch.__file__).parents[1]
_NOT_CALLERS: tuple[str, ...] = (
    str(Path(__file__).parent),
    str(_PACKAGES / "torch"),
    str(_PACKAGES / "triton"),
)
_NOT_CALLERS += (functools.__file__, contextlib.__file__, "<")
# Operations whose result has a size or a value that the host must know.
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"}
_READS |= {"_unique2", "unique_dim", "unique_consecutive"}
_INDEXED = {
    "index",
    "_unsafe_index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index_put",
}
# Neither launched nor views.
_FREE = {
    "empty",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_like",
    "lift_fresh",
    "set_",
    "detach_",
}
# One kernel of CUDA; a build for the CPU knows the composite alone.
_FUSED = {"_fused_rms_norm", "_grouped_mm"}
_MEMORY_EFFICIENT = 2  # torch's number of the attention kernel that takes any mask


class DeviceError(RuntimeError):
    """An operation that a GPU would refuse, or compute with wrong values."""


class DeviceEvent(NamedTuple):
    """An event: its kind, of `KINDS`, and the operation, file and line.

    `nbytes` is of copies and allocations; `is_pinned` says that the host's end of a copy is
    page-locked.
    """

    kind: str
    operation: str
    where: str
    nbytes: int = 0
    is_pinned: bool = False


class PretendTensor(torch.Tensor):
    """A tensor on `cuda:0`; `value` on the CPU has its numbers, with the same strides."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> PretendTensor:
        # Or no view of it could be taken outside of inference mode.
        with torch.inference_mode(mode=False):
            self: PretendTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                value.shape,
                value.stride(),
                value.storage_offset(),
                dtype=value.dtype,
                device=GPU,
            )
        self.value = value
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise DeviceError(f"{func}: the pretend device is gone, a tensor of it is used")

    def tolist(self) -> Any:
        """Return the values; torch refuses its own method to a subclass."""
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise DeviceError(f"{caller()}: .numpy() of a tensor on {GPU}; use .cpu() first")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.value.data_ptr()

    def record_stream(self, stream: Any) -> None:
        pass


def bare(x: Any) -> Any:
    """Return the value of a tensor of the device; anything else as it is."""
    return x.value if isinstance(x, PretendTensor) else x


def caller(depth: int = 2) -> str:
    """Return file and line that called torch, then those of its own callers, `depth` of them."""
    frame = sys._getframe(1)
    lines = list[str]()
    while frame is not None and len(lines) < depth:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_CALLERS):
            lines.append(f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


class _Copy(NamedTuple):
    """A copy that the host has not waited for: `host` is its page-locked end."""

    host: torch.Tensor
    content: torch.Tensor  # what a source held, or what a target will hold
    is_target: bool


class PretendGPU(TorchDispatchMode):
    """The dispatch mode that runs and counts what is done on the device.

    Attributes:
        events: all that happened, in order.
        in_flight: copies that the host has not waited for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[DeviceEvent] = []
        self.in_flight: list[_Copy] = []
        self._num_allocations = 0
        self._graph: list[tuple[Any, ...]] | None = None
        self._first_of_graph = 0  # the number of the first allocation after the capture began

    def counts(self, since: int = 0) -> dict[str, int]:
        """Count launches, waits, uploads and their bytes, downloads, allocations of `events`."""
        events = self.events[since:]
        counts = {kind: sum(event.kind == kind for event in events) for kind in KINDS}
        return counts | {
            "upload_bytes": sum(event.nbytes for event in events if event.kind == "upload")
        }

    def wait(self, operation: str) -> None:
        """Let the host wait for the device: copies arrive."""
        self._note("wait", operation)
        self._arrive()

    @contextlib.contextmanager
    def captured(self) -> Iterator[list[tuple[Any, ...]]]:
        """Collect what a CUDA graph would keep of the launches inside; see `why_not_replayed`."""
        self._graph = []
        self._first_of_graph = self._num_allocations
        try:
            yield self._graph
        finally:
            self._graph = None

    def launch(self, name: str, run: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Launch a Triton kernel, `run` by the interpreter.

        That is full of torch operations, so it runs outside of this mode.
        """
        for place, argument in enumerate((*args, *kwargs.values())):
            if isinstance(argument, torch.Tensor) and not isinstance(argument, PretendTensor):
                raise DeviceError(
                    f"{caller()}: {name}: argument {place} {tuple(argument.shape)} is on the CPU"
                )
        self._launched(name, args, kwargs, is_triton=True)
        with _disable_current_modes():
            run(*tree_map(bare, args), **tree_map(bare, kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        mine = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
        device = next(
            (
                GPU if leaf.type == "cuda" else leaf
                for leaf in leaves
                if isinstance(leaf, torch.device)
            ),
            None,
        )
        if not mine and device != GPU:
            return self._on_host(func, name, args, kwargs)
        if name == "_fused_sdp_choice":
            return _MEMORY_EFFICIENT
        composite = "CompositeImplicitAutograd"
        if name not in _FUSED and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), composite
        ):
            with self:  # in inference mode these come here whole
                return func.decompose(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source = args[name == "copy_"]
            to = args[0].device if name == "copy_" else device or source.device
            if source.device.type != to.type:
                return self._copy(name, source, args, kwargs)
        self._check(name, tensors, args)
        if name in _READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(name)
        if device == GPU:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        known = {id(tensor.value): tensor for tensor in mine}
        values = _EMULATED.get(name, func)(*tree_map(bare, args), **tree_map(bare, kwargs))

        def wrapped(tensor: torch.Tensor) -> PretendTensor:
            return known[id(tensor)] if id(tensor) in known else self._wrap(tensor)

        made = tree_map_only(torch.Tensor, wrapped, values)
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        if (
            not func.is_view
            and name not in _FREE
            and (not results or any(tensor.numel() for tensor in results))
        ):
            self._launched(name, args, kwargs)
        return made

    def _on_host(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "is_pinned":
            return _is_pinned(args[0])
        if name in ("pin_memory", "_pin_memory"):
            return _pinned(args[0].clone())
        pin = kwargs.pop("pin_memory", False)
        out = func(*args, **kwargs)
        return _pinned(out) if pin else out

    def _check(self, name: str, tensors: Sequence[torch.Tensor], args: Any) -> None:
        """Refuse tensors of both devices in one operation.

        Numbers may be the CPU's, as may indices of a tensor of the device; these are copied, and
        waited for.
        """
        if name in _INDEXED and isinstance(args[0], PretendTensor):
            indices = [index for index in args[1] if index is not None]
            for index in indices:
                if not isinstance(index, PretendTensor):
                    self._note("upload", "index on the CPU", index.nbytes)
                    self.wait("index on the CPU")
            tensors = [args[0], *args[2:3]]
            # By one number: no index is made.
            is_filled = len(args) > 2 and not isinstance(args[2], PretendTensor)
            if not is_filled and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.wait("index by a mask")
        if name.startswith("new_") or name.endswith("_like"):  # they read no values
            return
        other = [tuple(t.shape) for t in tensors if not isinstance(t, PretendTensor) and t.dim()]
        if other:
            raise DeviceError(
                f"{caller()}: {name}: tensors of {GPU} together with some of the CPU, {other}"
            )

    def _copy(
        self, name: str, source: torch.Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Copy between host and device.

        Without `non_blocking` torch waits for it, and a driver for memory not pinned.
        """
        up = not isinstance(source, PretendTensor)
        target = args[0] if name == "copy_" else None
        goes_on = bool(kwargs.get("non_blocking") or (target is not None and args[2:3] == (True,)))
        value = bare(source)
        dtype = kwargs.get("dtype") or (source if target is None else target).dtype
        if target is None:
            copied = value.to(dtype, copy=True)
            target = self._wrap(copied) if up else _pinned(copied) if goes_on else copied
        else:
            copied = bare(target).copy_(value)
        host = source if up else target
        # Otherwise it is converted into other memory of the host first.
        is_pinned = (
            _is_pinned(host)
            and source.dtype == dtype
            and source.shape == target.shape
            and host.is_contiguous()
        )
        self._note(
            "upload" if up else "download", str(tuple(source.shape)), copied.nbytes, is_pinned
        )
        if not (goes_on and is_pinned):
            self.wait("copy" if not goes_on else "copy of memory that is not pinned")
        elif up:
            self._arrive(host)  # the device reads it after what it wrote there
            copied.copy_(value)
            self.in_flight.append(_Copy(host, value.clone(), is_target=False))
        else:
            self.in_flight.append(_Copy(target, copied.clone(), is_target=True))
            _bytes(target).fill_(0x5A)
            if target.is_floating_point():
                target.fill_(torch.nan)
        return target

    def _arrive(self, written: torch.Tensor | None = None) -> None:
        """End the copies in flight; of `written` only those into its memory."""
        due = list[_Copy]()
        left = list[_Copy]()
        for copy in self.in_flight:
            is_due = written is None or (
                copy.is_target and _storage(copy.host) is _storage(written)
            )
            (due if is_due else left).append(copy)
        self.in_flight = left
        for host, content, is_target in due:
            if is_target:
                host.copy_(content)
            elif not torch.equal(_bytes(host), _bytes(content)):
                raise DeviceError(
                    f"{caller()}: a pinned source {tuple(host.shape)} changed before its copy was "
                    "done"
                )

    def _launched(self, name: str, args: Any, kwargs: Any, is_triton: bool = False) -> None:
        self._note("launch", name)
        if self._graph is not None:
            kept = (self._kept(argument, is_triton) for argument in tree_leaves((args, kwargs)))
            self._graph.append((self.events[-1].where, name, *kept))

    def _kept(self, argument: Any, is_address: bool) -> str:
        """Return an argument as a graph keeps it: a number as it is, a tensor by its address.

        The address may be an earlier launch's. `is_address`: and by nothing else, for a kernel of
        Triton gets strides as numbers.

        `is_address`: and by nothing else, for a kernel of Triton gets strides as numbers.
        """
        if not isinstance(argument, torch.Tensor):
            return repr(argument)
        value = bare(argument)
        number = getattr(_storage(value), "allocation", 0)
        place = (
            f"own allocation {number - self._first_of_graph}"
            if number > self._first_of_graph
            else f"{number}"
        )
        place = place if isinstance(argument, PretendTensor) else repr(value)
        shape = "" if is_address else f" {tuple(value.shape)} {value.stride()}"
        return f"{place} + {value.storage_offset()}{shape}"

    def _wrap(self, value: torch.Tensor) -> PretendTensor:
        storage: Any = _storage(value)
        if not hasattr(storage, "allocation"):
            self._num_allocations += 1
            storage.allocation = self._num_allocations
            if storage.nbytes():
                self._note("allocation", str(tuple(value.shape)), storage.nbytes())
        return PretendTensor(value)

    def _note(self, kind: str, operation: str, nbytes: int = 0, is_pinned: bool = False) -> None:
        self.events.append(DeviceEvent(kind, operation, caller(), nbytes, is_pinned))
        if self._graph is not None and kind in ("wait", "upload", "download"):
            self._graph.append((self.events[-1].where, kind, operation))


def why_not_replayed(first: Sequence[tuple[Any, ...]], second: Sequence[tuple[Any, ...]]) -> str:
    """Return why a graph of the first step's launches would not do the second; empty: it would.

    Args:
        first, second: what `PretendGPU.captured` gave, of two steps of one captured size.
    """
    for place, (entry, other) in enumerate(zip(first, second, strict=False)):
        if entry[1] in ("wait", "upload", "download"):
            return f"{entry[0]}: {entry[1]} ({entry[2]}) while a graph is captured"
        if entry[1:] != other[1:]:
            changed = [
                pair for pair in zip(entry[1:], other[1:], strict=False) if pair[0] != pair[1]
            ]
            return f"{entry[0]}: launch {place}, {entry[1]}: " + (
                f"{changed[0][0]}, then {changed[0][1]}" if changed else ""
            )
    return "" if len(first) == len(second) else f"{len(first)} launches, then {len(second)}"


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    storage: Any = _storage(tensor)
    storage.is_page_locked = True
    return tensor


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(_storage(tensor), "is_page_locked", False)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    needs_lse: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, key, value, bias, dropout, is_causal, scale=scale)
    return out, *(torch.empty(0) for _ in range(3))


_EMULATED = {"_scaled_dot_product_efficient_attention": _efficient_attention}
