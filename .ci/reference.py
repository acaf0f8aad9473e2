"""A hook of mkdocs: reference pages of the commands and of the Python API, written from the code at each build."""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

import hybrid_kv
from hybrid_kv.cli import app
from hybrid_kv.config import PARTS, EngineConfig


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add both pages; nothing is written into the checkout."""
    for name, text in (("cli", _commands()), ("python", _classes())):
        files.append(File.generated(config, f"reference-{name}.md", content=text))
    return files


def _commands() -> str:
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="hybrid-kv")
    parts = [f"# Commands\n\n{group.help}\n"]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        parts.append(get_docs_for_click(obj=command, ctx=context, indent=1, call_prefix="hybrid-kv", name=name))
    return "\n".join(parts)


def _classes() -> str:
    public = [getattr(hybrid_kv, name) for name in hybrid_kv.__all__ if name != "__version__"]
    parts = ["# Python\n\n`LLM` takes the fields of these configurations by name.\n"]
    for one in [*public, EngineConfig, *PARTS.values()]:
        parts.append(f"## {one.__name__}\n\n```python\n{_signature(one)}\n```\n\n{inspect.getdoc(one) or ''}\n")
        methods = {} if is_dataclass(one) else vars(one)
        for name, method in methods.items():
            if not name.startswith("_") and inspect.isfunction(method):
                parts.append(f"### {name}\n\n```python\n{_signature(method)}\n```\n\n{inspect.getdoc(method) or ''}\n")
    return "\n".join(parts)


def _signature(one: Any) -> str:
    """A parameter a line."""
    signature = inspect.signature(one)
    # Annotations are texts, which are shown without their quotes.
    shown = {name: re.sub(r": '(.*?)'", r": \1", str(parameter)) for name, parameter in signature.parameters.items()}
    lines = [f"    {text}," for name, text in shown.items() if name != "self"]
    returned = "" if signature.return_annotation in (None, signature.empty) else f" -> {signature.return_annotation}"
    return "\n".join([f"{one.__name__}(", *lines, f"){returned}"]) if lines else f"{one.__name__}(){returned}"
