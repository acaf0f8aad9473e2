"""Every engine that can be started, by name, and the checkpoints that it runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import cast

from hybrid_kv.check.targets.exact import has_windows, is_exact, name_of, write_exact_checkpoint
from hybrid_kv.check.targets.target import Kind
from hybrid_kv.config import ConfigError
from hybrid_kv.errors import require
from hybrid_kv.models.exact_weights.checkpoint import write_exact_weights
from hybrid_kv.models.loader import resolve_folder
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.models.registry import sized

# A file of `targets` each.
KINDS = ("ours", "serve", "mlx", "vllm", "sglang", "llamacpp", "transformers")


def kind_of(name: str, python: str | Path | None = None) -> Kind:
    """Return the engine of that name, or the server at that address.

    Args:
        python: of the environment that has the engine, or the server of a build, instead of the one
            that is found.

    Raises:
        ConfigError: there is no such engine, or it runs in this Python.
    """
    is_address = name.startswith(("http://", "https://"))
    if name in ("serve", "llamacpp") or is_address:
        require("aiohttp", "pydantic")
    if is_address:
        from hybrid_kv.check.targets.server import kind_at

        return kind_at(name)
    if name not in KINDS:
        raise ConfigError(
            f"{name}: there is no such engine; use one of {', '.join(KINDS)}, or a server's URL"
        )
    kind = cast(Kind, import_module(f"hybrid_kv.check.targets.{name}").KIND)
    if python is None:
        return kind
    if kind.at is not None:
        return kind.at(str(python))
    if not kind.package:
        raise ConfigError(f"--python {python}: {name} runs in this Python; leave it out")
    from hybrid_kv.check.targets.remote import build_of

    return build_of(kind, str(python))


def for_model(kind: Kind, folder: str) -> Kind:
    """Return the engine with the factors that it has for this checkpoint.

    Raises:
        ConfigError: the checkpoint is an exact model, which the engine cannot run.
    """
    if not is_exact(folder):
        return kind
    if (inside := kind.inside) is None:
        raise ConfigError(f"--exact: {kind.name} cannot run an exact model; leave it out")
    name = name_of(folder)
    if has_windows(name) and not inside.has_windows:
        raise ConfigError(
            f"exact:{name}: {kind.name} runs no exact model with sliding windows; "
            f"use exact:{inside.model}"
        )
    return replace(
        kind,
        factors=inside.factors,
        matrix=inside.further.get(name, inside.matrix),
        known=[known for known in kind.known if known.model in ("", name)],
    )


@contextmanager
def model_folder(model: str) -> Iterator[str]:
    """Yield a folder with a checkpoint, as long as the context lasts.

    Args:
        model: a family's name, with `:small` after it for that size: random weights are written;
            with `:exact` after it: exact ones; `exact:` and one of `exact.PATTERNS`; else a folder,
            or what the hub calls a model.

    Raises:
        ConfigError: it is none of these.
    """
    family, _, size = model.partition(":")
    if family != "exact" and family not in sized():
        yield str(resolve_folder(model))
        return
    with tempfile.TemporaryDirectory() as folder:
        if family == "exact":
            write_exact_checkpoint(size or "mixed", folder)
        elif size == "exact":
            write_exact_weights(family, folder)
        else:
            write_checkpoint(family, folder, size or "tiny")
        yield folder
