"""Where a checkpoint comes from: made on the spot, a folder, or the hub."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from hybrid_kv.models.loader import resolve_folder
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.models.registry import sized
from hybrid_kv.targets.exact import write_exact_checkpoint


@contextmanager
def model_folder(model: str) -> Iterator[str]:
    """A folder with a checkpoint, as long as the context lasts.

    Args:
        model: a family's name, with `:small` behind it for that size: random weights are written; `exact:` and one of
            `exact.PATTERNS`; else a folder, or what the hub calls a model.

    Raises:
        ConfigError: it is none of these.
    """
    family, _, size = model.partition(":")
    if family == "exact":
        with tempfile.TemporaryDirectory() as folder:
            write_exact_checkpoint(size or "mixed", folder)
            yield folder
    elif family in sized():
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(family, folder, size or "tiny")
            yield folder
    else:
        yield str(resolve_folder(model))
