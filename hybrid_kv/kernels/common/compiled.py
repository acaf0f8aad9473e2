"""Loops over numpy arrays as machine code, by numba where it is installed.

A loop is a plain function until its first use, so that its module imports without numba. Elsewhere Python runs it: the
results are the same, an entry costs 100 ns in place of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

Loop = TypeVar("Loop", bound=Callable[..., Any])


@cache
def compiled(loop: Loop, signature: str) -> Loop:
    """A loop for arguments of exactly these types; it calls no other function of the project.

    With a signature all of it is compiled here: without, in the middle of a step, and again for each new layout of an
    argument. It takes seconds, once: numba keeps the code beside the source, or else in the user's cache.
    """
    try:
        import numba
    except ImportError:  # it is missing, or does not know a numpy that is newer
        return loop
    njit: Any = numba.njit
    try:
        return njit(signature, cache=True)(loop)
    except (RuntimeError, OSError):  # it cannot keep it: no folder, or a full one
        return njit(signature)(loop)
