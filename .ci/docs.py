"""Build docs/ as a site that opens offline, with a reference of the commands and of Python.

    python .ci/docs.py [FOLDER]

The default folder is site/docs. It is replaced as a whole, and only by a build without a warning.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer.main
from typer.cli import get_docs_for_click

import hybrid_kv
from hybrid_kv.cli import app
from hybrid_kv.config import PARTS, EngineConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "zensical.toml"


def main(folder: Path) -> int:
    """Build the site into a folder.

    Returns 1 for pages with warnings, 2 if it cannot be built here.
    """
    if find_spec("zensical") is None:
        print(
            "error: zensical is not installed; it needs Python 3.11: pip install -e '.[docs]'",
            file=sys.stderr,
        )
        return 2
    with TemporaryDirectory() as temporary:
        source = Path(temporary)
        shutil.copytree(ROOT / "docs", source / "docs")
        shutil.copy(ROOT / CONFIG, source)
        (source / "docs/reference-cli.md").write_text(_commands(), encoding="utf-8")
        (source / "docs/reference-python.md").write_text(_classes(), encoding="utf-8")
        if wrong := [*_not_in_navigation(source)]:
            print(*wrong, sep="\n", file=sys.stderr)
            return 1
        command = (sys.executable, "-m", "zensical", "build", "--strict")
        built = subprocess.run(
            command, cwd=source, capture_output=True, text=True, encoding="utf-8"
        )
        if built.returncode:
            print(built.stdout, built.stderr.partition("Traceback")[0], sep="", file=sys.stderr)
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source / "site", folder)
    return 0


def _not_in_navigation(source: Path) -> Iterator[str]:
    """Yield an error for each page that the navigation lacks, and for each that only it has.

    Zensical looks at links in pages alone.
    """
    import tomllib  # of Python 3.11, as Zensical

    listed = set(
        _targets(tomllib.loads((source / CONFIG).read_text(encoding="utf-8"))["project"]["nav"])
    )
    pages = {str(page.relative_to(source / "docs")) for page in (source / "docs").rglob("*.md")}
    yield from (
        f"error: the navigation in {CONFIG} lacks {page}; add it" for page in sorted(pages - listed)
    )
    yield from (
        f"error: the navigation in {CONFIG} has {page}; there is none"
        for page in sorted(listed - pages)
    )


def _targets(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from _targets(entry)


def _commands() -> str:
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="hybrid-kv")
    parts = [f"# Commands\n\n{group.help}\n"]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        parts.append(
            get_docs_for_click(
                obj=command, ctx=context, indent=1, call_prefix="hybrid-kv", name=name
            )
        )
    return "\n".join(parts)


def _classes() -> str:
    public = [getattr(hybrid_kv, name) for name in hybrid_kv.__all__ if name != "__version__"]
    parts = ["# Python\n\n`LLM` takes the fields of these configurations by name.\n"]
    for public_class in [*public, EngineConfig, *PARTS.values()]:
        parts.append(_entry(f"## {public_class.__name__}", public_class))
        methods = {} if is_dataclass(public_class) else vars(public_class)
        parts += [
            _entry(f"### {name}", method)
            for name, method in methods.items()
            if not name.startswith("_") and inspect.isfunction(method)
        ]
    return "\n".join(parts)


def _entry(heading: str, documented: Any) -> str:
    """Return the heading, the signature and the docstring of a class or function."""
    text = inspect.getdoc(documented) or ""
    return f"{heading}\n\n```python\n{_signature(documented)}\n```\n\n{text}\n"


def _signature(documented: Any) -> str:
    """Return the signature of a class or function, a parameter a line."""
    signature = inspect.signature(documented)
    # Annotations are texts, which are shown without their quotes.
    shown = {
        name: re.sub(r": '(.*?)'", r": \1", str(parameter))
        for name, parameter in signature.parameters.items()
    }
    lines = [f"    {text}," for name, text in shown.items() if name != "self"]
    returned = (
        ""
        if signature.return_annotation in (None, signature.empty)
        else f" -> {signature.return_annotation}"
    )
    return (
        "\n".join([f"{documented.__name__}(", *lines, f"){returned}"])
        if lines
        else f"{documented.__name__}(){returned}"
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site" / "docs"))
