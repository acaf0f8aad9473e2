"""CUDA graphs by their rules.

A capture keeps each operation, with the tensors and numbers that it got. A replay runs these on the
same memory. What Python decided during the capture, a length, a branch or a slice, stays what it
was then; an operation that must wait for the device raises, as it does on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# Operations whose result the host must know.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "bincount",
    "_unique2",
    "unique_dim",
}
# Operations with nothing to replay.
FRESH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach"}

replays = 0  # so far
_captures: list[Capture] = []  # under way, the innermost last


class CaptureError(RuntimeError):
    """An operation that a stream cannot capture."""


class Graph:
    """A captured graph: steps that take nothing and return nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.steps: list[Callable[[], object]] = []
        self._capture: Capture | None = None

    def replay(self) -> None:
        """Run all steps on the memory that they had."""
        global replays
        replays += 1
        for step in self.steps:
            step()

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Capture from here on."""
        self._capture = Capture(self)
        self._capture.__enter__()

    def capture_end(self) -> None:
        """End the capture."""
        assert self._capture is not None
        self._capture.__exit__(None, None, None)

    def reset(self) -> None:
        """Forget all steps."""
        self.steps = []

    def pool(self) -> int:
        """Return the only pool's handle: no memory is shared between graphs here."""
        return 0


class Capture(TorchDispatchMode):
    """A context whose operations a graph keeps: `torch.cuda.graph`."""

    def __init__(self, graph: Graph, *_: Any, **__: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.graph = graph

    def __enter__(self) -> Any:
        _captures.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        _captures.pop()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in WAITS:
            raise CaptureError(
                f"operation not permitted when stream is capturing: {name} waits for the device"
            )
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode these come here whole
                return func.decompose(*args, **kwargs)
        made = func(*args, **kwargs)
        if not func.is_view and name not in FRESH:
            self.graph.steps.append(_step(func, args, kwargs, made))
        return made


def recording() -> Capture | None:
    """Return the capture that is under way."""
    return _captures[-1] if _captures else None


def _step(func: Any, args: Any, kwargs: Any, made: Any) -> Callable[[], None]:
    """Return what runs an operation again and writes its results where they were."""
    given = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    outs = [
        leaf if isinstance(leaf, torch.Tensor) and id(leaf) not in given else None
        for leaf in tree_leaves(made)
    ]
    flat, spec = tree_flatten((args, kwargs))
    kept = [same_memory(leaf) for leaf in flat]

    def step() -> None:
        arguments, named = tree_unflatten(kept, spec)
        for out, new in zip(outs, tree_leaves(func(*arguments, **named)), strict=True):
            if out is not None:
                out.copy_(new)

    return step


def same_memory(value: Any) -> Any:
    """Return a tensor of the same memory, which keeps its shape whatever becomes of the first.

    Other values are returned as they are.
    """
    return value.detach() if isinstance(value, torch.Tensor) else value


def keep_launch(launch: Callable[..., None], args: Any, kwargs: Any) -> None:
    """Add a kernel's launch to the capture that is under way, if any."""
    if under_way := recording():
        with _disable_current_modes():
            kept = [same_memory(one) for one in args]
            named = {key: same_memory(one) for key, one in kwargs.items()}
        under_way.graph.steps.append(lambda: launch(*kept, **named))


def install() -> None:
    """Let `torch.cuda` have these."""
    names = {
        "CUDAGraph": Graph,
        "graph": Capture,
        "graph_pool_handle": lambda: 0,
        "is_current_stream_capturing": lambda: recording() is not None,
    }
    for name, value in names.items():
        setattr(torch.cuda, name, value)
