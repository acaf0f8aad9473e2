"""Options of a command line, against those that the command has."""

from __future__ import annotations

import re
from types import SimpleNamespace

from tests.cli import run as cli


def check_options(words: list[str], line: str) -> None:
    """The command is there, and so is every option that the line gives it."""
    command = SimpleNamespace(commands=cli.commands())
    if "--" in words:  # what follows is another command's
        words = words[: words.index("--")]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    command = getattr(command, "default", command)  # `hybrid-kv results` lists
    assert not hasattr(command, "commands") or not words or words[0].startswith("-"), line
    known = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    given = {word.split("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)}
    assert given <= known | {"--help"}, f"{line}: no {sorted(given - known)}"
