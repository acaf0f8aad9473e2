"""Commands that need a checkout of hybrid-kv. Their code is not in the wheel: it is found in the checkout by name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup

from hybrid_kv.errors import HybridKVError

# By command: the module of the checkout with a function of the command's name, written as any other command.
COMMANDS = {
    "bisect": "bench.commands.bisect",
    "compare": "bench.commands.compare",
    "kernels": "bench.commands.kernels",
    "mutants": "mutants.runner.command",
}


class Commands(TyperGroup):
    """The commands of the package and, inside a checkout, those in `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(COMMANDS if checkout_root() else ())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """
        Raises:
            HybridKVError: the command needs a checkout, and there is none.
        """
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        one = typer.Typer(add_completion=False)
        one.command(cmd_name)(getattr(checkout_module(cmd_name, COMMANDS[cmd_name]), cmd_name))
        return typer.main.get_command(one)


def checkout_root() -> Path | None:
    """The checkout that this package is part of, or else the one that the current folder is in."""
    folders = (Path(__file__).resolve().parents[2], Path.cwd(), *Path.cwd().parents)
    return next((folder for folder in folders if _is_checkout(folder)), None)


def _is_checkout(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    return (folder / "bench").is_dir() and project.is_file() and 'name = "hybrid_kv"' in project.read_text("utf-8")


def checkout_module(command: str, module: str) -> ModuleType:
    """`module` of the checkout, such as `bench.commands.compare`.

    Raises:
        HybridKVError: there is no checkout.
    """
    if (root := checkout_root()) is None:
        raise HybridKVError(f"`hybrid-kv {command}` needs a checkout of hybrid-kv: run it inside one")
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return import_module(module)
