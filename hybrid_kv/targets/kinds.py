"""Every engine that can be started, by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from hybrid_kv.config import ConfigError
from hybrid_kv.errors import require
from hybrid_kv.targets.exact import is_exact, name_of
from hybrid_kv.targets.target import Inside, Kind

KINDS = ("ours", "serve", "mlx", "vllm", "transformers")  # a file of `targets` each


def kind_of(name: str, python: str | Path | None = None) -> Kind:
    """The engine of that name, or the server at that address.

    Args:
        python: of the environment that has the engine, instead of the one that `remote.python_of` finds.

    Raises:
        ConfigError: there is no such engine, or it runs in this Python.
    """
    if name == "serve" or name.startswith(("http://", "https://")):
        require("aiohttp", "pydantic")
    if name.startswith(("http://", "https://")):
        from hybrid_kv.targets.server import Address

        return Address(name)
    if name not in KINDS:
        raise ConfigError(f"--target {name}: there is no such engine; use one of {', '.join(KINDS)}, or a server's URL")
    kind = cast(Kind, import_module(f"hybrid_kv.targets.{name}"))
    if python is None:
        return kind
    if not hasattr(kind, "package"):
        raise ConfigError(f"--python {python}: {name} runs in this Python; leave it out")
    from hybrid_kv.targets.remote import build_of

    return build_of(kind, kind.package, str(python))


def for_model(kind: Kind, folder: str) -> Kind:
    """The engine with the factors that it has for this checkpoint.

    Raises:
        ConfigError: the checkpoint is an exact model, which the engine cannot run.
    """
    if not is_exact(folder):
        return kind
    inside: Inside | None = getattr(kind, "inside", None)
    if inside is None:
        raise ConfigError(f"--exact: {kind.name} cannot run an exact model; leave it out")
    python = getattr(kind, "python", None)
    return SimpleNamespace(
        name=kind.name, size=kind.size, factors=inside.factors, known=getattr(kind, "known", ()), python=python,
        matrix=inside.further.get(name_of(folder), inside.matrix), start=kind.start,
    )  # fmt: skip
