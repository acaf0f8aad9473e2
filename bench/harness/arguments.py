"""Command lines of `python -m …` modules."""

from __future__ import annotations

import argparse
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line, and whose options cannot be abbreviated."""

    def __init__(self, prog: str, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise SystemExit(
            f"{message}; see {self.prog} --help"
        )  # `errors.run_command` prints it, and exits with 2
