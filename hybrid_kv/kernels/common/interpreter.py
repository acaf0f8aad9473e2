"""Triton's interpreter, which runs kernels on a CPU: in a process of its own, for Triton decides once, when it is
imported, whether it interprets or compiles.
"""

from __future__ import annotations

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
