"""The sections of the page.

A section is a file of this folder with one public function, `section`: it takes the report, finds its finding, says
what is missing, and is None without rows. `PLACE` is where it stands on the page.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from hybrid_kv.dashboard.report import Report, Section


def sections() -> list[Callable[[Report], Section | None]]:
    """The function of every file in this folder, in the order of the page."""
    modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
    return [module.section for module in sorted(modules, key=lambda module: module.PLACE)]
