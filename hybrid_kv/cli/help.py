"""The look of help: groups of commands by purpose, and types of options as click names them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from typer.core import TyperCommand, TyperGroup

# The groups of commands in `hybrid-kv --help`, in their order.
CHECK = "Check: is an engine right?"
MEASURE = "Measure: how right, how fast, since when?"
PLAN = "Plan: what fits, what will it cost?"
RUN = "Run a model"

_TYPES = {"bool": "", "str": "TEXT", "int": "INTEGER", "float": "FLOAT", "path": "PATH"}


class Command(TyperCommand):
    """A command whose help names types as click does."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments, each with its type as help shows it."""
        return _with_types(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """A group of commands whose help names types as click does."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the group, each with its type as help shows it."""
        return _with_types(super().get_params(ctx))


def _with_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if hasattr(parameter, "display_type"):  # older versions of typer leave it to click
            parameter.display_type = partial(_display_type, parameter)
    return parameters


def _display_type(parameter: Any, ctx: Any) -> str:
    """Return INTEGER for typer's `<int>`, `<int range>` or `<list[int]>`; nothing for a flag."""
    shown = type(parameter).display_type(parameter, ctx).strip("<>")
    name = re.sub(r"^list\[(.*)\]$", r"\1", shown).removesuffix(" range")
    if name in _TYPES:
        return _TYPES[name]
    return f"[{name}]" if "|" in name else name.upper()
