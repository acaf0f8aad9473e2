"""Names that transformers gives the cache of a model: one since 5.24, two before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

NAMES = ("cache", "cache_params", "past_key_values")  # of 5.24; of Mamba's models; of all others


def cache_argument(function: Callable[..., Any]) -> str:
    """Return the name of the argument by which a function takes a cache, or an output gives it."""
    parameters = inspect.signature(function).parameters
    return next(name for name in NAMES if name in parameters)


def cache_of(output: Any) -> Any:
    """Return the cache in an output of a model or of `generate`."""
    return next(output[name] for name in NAMES if name in output)
