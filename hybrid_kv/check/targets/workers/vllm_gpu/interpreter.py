"""Triton's interpreter, in which kernels run on this memory.

Launches are counted, captured and made cheap. It patches the language for each launch and copies
all memory that a launch can reach, there and back. Where no compiler runs, once is enough; on a
CPU, never. It also looks for overflow at each addition, as a compiler does for debugging.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

from . import shortcuts

launches = 0  # so far


@dataclass
class Watchers:
    """The listeners to each launch.

    Attributes:
        before: gets the arguments.
        after: gets what launches again, and the arguments.
    """

    before: Callable[[tuple[Any, ...]], object] = lambda given: None
    after: Callable[..., object] = lambda launch, args, kwargs: None


_watchers = Watchers()
_patch_language = interpreter._patch_lang
_patched: set[frozenset[int]] = set()  # the languages that modules see


class _Never:
    """A scope of patches that stay."""

    def restore(self) -> None:
        """Do nothing."""


@cache
def _patch_once(function: Any) -> _Never:
    known = (interpreter.tl, interpreter.tl.core)
    seen = [each for each in known if any(one is each for one in function.__globals__.values())]
    if (languages := frozenset(map(id, seen))) not in _patched:
        _patch_language(function)
        _patched.add(languages)
        shortcuts.install_operators()
        for language in seen:
            shortcuts.install_memory(language)
    return _Never()


@cache
def _signature_of(function: Any) -> tuple[inspect.Signature, frozenset[str]]:
    signature = inspect.signature(function)
    return signature, frozenset(signature.parameters)


_type_of = interpreter._get_np_dtype
# Types of numpy, by the kind and name of a type or of a block's elements.
_types: dict[tuple[type, str], np.dtype[Any]] = {}


def _type_once(of: Any) -> np.dtype[Any]:
    """Stand in for `_get_np_dtype`, which makes a table of all types for each look into it."""
    scalar = of.element_ty if isinstance(of, interpreter.tl.block_type) else of
    if (key := (type(scalar), scalar.name)) not in _types:
        _types[key] = _type_of(scalar)
    return _types[key]


def _run(executor: Any, args: Any, kwargs: Any) -> None:
    """Run a kernel's programs one after another."""
    signature, names = _signature_of(executor.fn)
    for hook in executor.pre_run_hooks:
        hook(*args, **kwargs)
    _patch_once(executor.fn)
    bound = signature.bind(
        *args, **{name: value for name, value in kwargs.items() if name in names}
    )
    bound.apply_defaults()
    given = {
        name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
        for name, value in bound.arguments.items()
    }
    grid = executor.grid(given) if callable(executor.grid) else executor.grid
    grid = (*grid, 1, 1, 1)[:3]
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*grid)
    for place in np.ndindex(*grid):
        builder.set_grid_idx(*place)
        executor.fn(**given)


def _launch(executor: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for `GridExecutor.__call__`.

    A launch is one step of a graph, its own operations are none.
    """
    global launches
    launches += 1
    _watchers.before((*args, *kwargs.values()))
    with _disable_current_modes():
        _run(executor, args, kwargs)
    _watchers.after(lambda *kept, **named: _launch(executor, *kept, **named), args, kwargs)


def _with_bool_masks(name: str, place: int) -> None:
    """Let a method of the interpreter take integers as a mask, which a compiler takes."""
    method = getattr(interpreter.InterpreterBuilder, name)

    def with_bools(builder: Any, *args: Any) -> Any:
        if args[place].data.dtype != np.bool_:
            args[place].data = args[place].data.astype(np.bool_)
        return method(builder, *args)

    setattr(interpreter.InterpreterBuilder, name, with_bools)


def install(watchers: Watchers = _watchers) -> None:
    """Let Triton's interpreter launch so."""
    global _watchers
    _watchers = watchers
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _type_once
    shortcuts.install_types()
    interpreter._patch_lang = _patch_once
    interpreter.GridExecutor.__call__ = _launch
    _with_bool_masks("create_masked_load", 1)
    _with_bool_masks("create_masked_store", 2)
