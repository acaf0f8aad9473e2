"""What a user chooses by name. Nothing is imported here, so that the command line knows it before torch is loaded.

Cache modes are the keys of `hybrid_kv.cache.modes.MODES`; `StateScheme` repeats those of `hybrid_kv.attention.undo`,
which needs torch, for the command line's help; a test compares them.
"""

from __future__ import annotations

from typing import Literal

StateScheme = Literal["slots", "replay"]
DraftMethod = Literal["ngram", "mtp"]
Kernels = Literal["auto", "torch", "triton"]
