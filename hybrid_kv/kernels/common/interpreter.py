"""Triton's interpreter, which runs kernels on a CPU.

It runs in a process of its own, since Triton decides once, when it is imported, whether it
interprets or compiles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from hybrid_kv import environment


def is_interpreter() -> bool:
    """Return whether this process interprets kernels."""
    return environment.interprets_triton()


def start_interpreter() -> None:
    """Prepare this process to interpret kernels; call it before Triton is imported."""
    environment.interpret_triton()
    torch.set_num_threads(1)
    # Both branches of `tl.where` are computed, whatever the unused one holds.
    np.seterr(all="ignore")
    _skip_what_changes_no_result()


def _skip_what_changes_no_result() -> None:
    """Patch out two thirds of the time of Triton 3.7's interpreter.

    Each call of a function patches the language again, each sum of integers computes an overflow
    that nothing asserts, each look at a type makes a dict of all, each tensor and each type of one
    makes a tuple of its shape.
    """
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    function = interpreter.InterpretedFunction
    builder.options = replace(builder.options, sanitize_overflow=False)
    # What Triton's own functions see; a launch patches what ours see.
    interpreter._patch_lang(language.max.fn)
    numpy_dtype_of_scalar = cache(interpreter._get_np_dtype)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    def numpy_dtype(dtype: Any) -> Any:
        return numpy_dtype_of_scalar(language.uint64 if dtype.scalar.is_ptr() else dtype.scalar)

    @lru_cache(None, typed=True)  # or 4.0, which no shape may have, would pass as 4
    def shape_of(*sizes: int) -> tuple[Any, Any, int]:
        return (
            core.tuple(sizes),
            core.tuple(map(language.constexpr, sizes)),
            core.validate_block_shape(sizes),
        )

    def set_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.sizes = core._unwrap_shape(shape)
        self.shape, _, self.numel = shape_of(*self.sizes)
        self.name = f"<{self.sizes}, {element_ty}>"

    def set_tensor(self: Any, handle: Any, ty: Any) -> None:
        _, self.shape, numel = shape_of(*(ty.sizes if ty.is_block() else ()))
        self.handle = handle
        self.type = ty
        self.dtype = ty.scalar
        self.numel = language.constexpr(numel)

    function.__call__ = call
    interpreter._get_np_dtype = numpy_dtype
    core.block_type.__init__ = set_type
    core.tensor.__init__ = set_tensor
