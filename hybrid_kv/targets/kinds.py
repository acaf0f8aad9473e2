"""Every engine that can be started, by name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from hybrid_kv.config import ConfigError
from hybrid_kv.targets.target import Kind

KINDS = ("ours",)  # a file of `targets` each


def kind_of(name: str) -> Kind:
    """
    Raises:
        ConfigError: there is no such engine.
    """
    if name not in KINDS:
        raise ConfigError(f"--target {name}: there is no such engine; use one of {', '.join(KINDS)}")
    return cast(Kind, import_module(f"hybrid_kv.targets.{name}"))
