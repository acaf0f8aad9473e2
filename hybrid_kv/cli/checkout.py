"""Commands that need a checkout of hybrid-kv.

Their code is not in the wheel: it is found in the checkout by name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from hybrid_kv.cli import help
from hybrid_kv.errors import HybridKVError

# By command: the module of the checkout with a function of the command's name, written as any other
# command, and its group in the help.
COMMANDS = {
    "mutants": ("mutants.runner.command", help.CHECK),
    "compare": ("bench.commands.compare", help.MEASURE),
    "bisect": ("bench.commands.bisect", help.MEASURE),
    "kernels": ("bench.commands.kernels", help.MEASURE),
}


_PANELS = [help.CHECK, help.MEASURE, help.PLAN, help.RUN]


class Commands(help.CommandGroup):
    """The commands of the package and, inside a checkout, those in `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands by group of the help."""
        every = [*super().list_commands(ctx), *(COMMANDS if checkout_root() else ())]
        return sorted(every, key=self._place)

    def _place(self, name: str) -> int:
        if name in COMMANDS:
            return _PANELS.index(COMMANDS[name][1])
        command: Any = self.commands[name]
        return _PANELS.index(command.rich_help_panel)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command.

        Raises:
            HybridKVError: the command needs a checkout, and there is none.
        """
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, panel = COMMANDS[cmd_name]
        program = typer.Typer(add_completion=False)
        function = getattr(checkout_module(cmd_name, module), cmd_name)
        program.command(cmd_name, cls=help.Command, rich_help_panel=panel)(function)
        return typer.main.get_command(program)


def checkout_root() -> Path | None:
    """Return the checkout that this package is part of, or that the current folder is in."""
    folders = (Path(__file__).resolve().parents[2], Path.cwd(), *Path.cwd().parents)
    return next((folder for folder in folders if _is_checkout(folder)), None)


def _is_checkout(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    if not (folder / "bench").is_dir() or not project.is_file():
        return False
    return 'name = "hybrid_kv"' in project.read_text("utf-8")


def checkout_module(command: str, module: str) -> ModuleType:
    """Import a module of the checkout, such as `bench.commands.compare`.

    Raises:
        HybridKVError: there is no checkout.
    """
    root = checkout_root()
    if root is None:
        raise HybridKVError(
            f"`hybrid-kv {command}` needs a checkout of hybrid-kv: run it inside one"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return import_module(module)
