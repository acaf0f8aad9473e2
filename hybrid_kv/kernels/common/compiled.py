"""Loops over numpy arrays as machine code, by numba.

A loop is a plain function until its first use: commands without an engine do not load numba. It
trails new versions of numpy and Python by some weeks; where it cannot be imported Python runs the
loop, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

Loop = TypeVar("Loop", bound=Callable[..., Any])


@cache
def compiled(loop: Loop, signature: str, reorder: bool = False) -> Loop:
    """Return a loop as machine code for arguments of exactly these types.

    The loop may call no other function of the project. With a signature all of it is compiled here:
    without, in the middle of a step, and again for each new layout of an argument. It takes
    seconds, once: numba keeps the code next to the source, or else in the user's cache.

    Args:
        signature: types of the result and the arguments, as numba writes them.
        reorder: sums may be taken in another order, and a product and a sum rounded once; NaN and
            infinities stay.

    Returns:
        The compiled loop; `loop` itself where numba cannot be imported.
    """
    try:
        import numba
    except ImportError:  # a numpy or a Python that is newer than it
        return loop
    njit: Any = partial(numba.njit, fastmath={"reassoc", "contract"} if reorder else False)
    try:
        return njit(signature, cache=True)(loop)
    except (RuntimeError, OSError):  # it cannot keep it: no folder, or a full one
        return njit(signature)(loop)
