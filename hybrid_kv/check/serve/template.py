"""Prompts from messages by a chat template, in a process of its own.

A template is a program that came with a file.

The process has limits on CPU time and memory, and its text on characters. Whatever goes wrong in it
is one line. The environment is that of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hybrid_kv.errors import ConfigError

MAX_SECONDS = 2  # of CPU time
MAX_MEMORY = 2**29  # bytes


def render(template: str, variables: Mapping[str, Any], max_characters: int) -> str:
    """Return the text that a template makes of its variables.

    Args:
        variables: what JSON can carry.

    Raises:
        ConfigError: the template fails, or goes beyond a limit.
    """
    given = json.dumps(
        {"template": template, "variables": variables, "max_characters": max_characters}
    )
    child = subprocess.run(
        [sys.executable, "-m", __name__], input=given.encode(), capture_output=True, check=False
    )
    if child.returncode == 1:
        raise ConfigError(child.stderr.decode(errors="replace"))
    if child.returncode:
        raise ConfigError(f"it takes more than {MAX_SECONDS} s or {MAX_MEMORY >> 20} MiB of memory")
    return child.stdout.decode()


class _Generation(Extension):
    """`{% generation %}` marks answers to train on; the text is the same."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _text(template: str, variables: Mapping[str, Any], max_characters: int) -> str:
    spaces = {"trim_blocks": True, "lstrip_blocks": True}
    environment = ImmutableSandboxedEnvironment(**spaces, extensions=[_Generation, loopcontrols])
    # jinja2's own filter escapes HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _strftime_now,
    }
    rendered = ""
    for piece in environment.from_string(template).generate(variables):
        rendered += piece
        if len(rendered) > max_characters:
            raise TemplateError(f"it makes more than {max_characters} characters")
    return rendered


def _main() -> None:
    with suppress(OSError, ValueError):  # macOS has no limit of memory
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    try:
        sys.stdout.buffer.write(_text(**json.load(sys.stdin)).encode())
    except Exception as error:
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        sys.exit(f"{kind}{error}"[:200] if not isinstance(error, MemoryError) else 2)


if __name__ == "__main__":
    _main()
