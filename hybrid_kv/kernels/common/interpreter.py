"""Triton's interpreter, which runs kernels on a CPU: in a process of its own, for Triton decides once, when it is
imported, whether it interprets or compiles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from hybrid_kv import environment


def is_interpreter() -> bool:
    """Whether this process interprets kernels."""
    return environment.interprets_triton()


def start_interpreter() -> None:
    """The first thing that such a process does."""
    environment.interpret_triton()
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # Both branches of `tl.where` are computed, whatever the unused one holds.
    _skip_what_changes_no_result()


def _skip_what_changes_no_result() -> None:
    """Two thirds of the time of Triton 3.7's interpreter: each call of a function patches the language again, each sum
    of integers computes an overflow that nothing asserts, each look at a type makes a dict of all, each tensor and each
    type of one makes a tuple of its shape.
    """
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    builder, function = interpreter.interpreter_builder, interpreter.InterpretedFunction
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang(language.max.fn)  # what Triton's own functions see; a launch patches what ours see
    function.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    numpy_dtype = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: numpy_dtype(language.uint64 if dtype.scalar.is_ptr() else dtype.scalar)

    @lru_cache(None, typed=True)  # or 4.0, which no shape may have, would pass as 4
    def shape_of(*sizes: int) -> tuple[Any, Any, int]:
        return core.tuple(sizes), core.tuple(map(language.constexpr, sizes)), core.validate_block_shape(sizes)

    def set_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty, self.sizes = element_ty, core._unwrap_shape(shape)
        self.shape, _, self.numel = shape_of(*self.sizes)
        self.name = f"<{self.sizes}, {element_ty}>"

    def set_tensor(self: Any, handle: Any, ty: Any) -> None:
        _, self.shape, numel = shape_of(*(ty.sizes if ty.is_block() else ()))
        self.handle, self.type, self.dtype, self.numel = handle, ty, ty.scalar, language.constexpr(numel)

    core.block_type.__init__, core.tensor.__init__ = set_type, set_tensor
