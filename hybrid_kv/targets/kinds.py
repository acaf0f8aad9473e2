"""Every engine that can be started, by name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from hybrid_kv.config import ConfigError
from hybrid_kv.errors import require
from hybrid_kv.targets.target import Kind

KINDS = ("ours", "serve", "mlx", "vllm", "transformers")  # a file of `targets` each


def kind_of(name: str) -> Kind:
    """The engine of that name, or the server at that address.

    Raises:
        ConfigError: there is no such engine.
    """
    if name == "serve" or name.startswith(("http://", "https://")):
        require("aiohttp", "pydantic")
    if name.startswith(("http://", "https://")):
        from hybrid_kv.targets.server import Address

        return Address(name)
    if name not in KINDS:
        raise ConfigError(f"--target {name}: there is no such engine; use one of {', '.join(KINDS)}, or a server's URL")
    return cast(Kind, import_module(f"hybrid_kv.targets.{name}"))
