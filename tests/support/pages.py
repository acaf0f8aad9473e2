"""The blocks of code in README and docs, by the standard library: `.ci/smoke` has no more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# tests/measure/dashboard holds these
GENERATED = re.compile(r"<!-- figures:[\w-]+ -->.*?<!-- /figures -->", re.DOTALL)


class Block(NamedTuple):
    page: str
    language: str
    text: str


BLOCKS = [
    Block(str(page.relative_to(ROOT)), language, text)
    for page in PAGES
    for language, text in FENCE.findall(GENERATED.sub("", page.read_text(encoding="utf-8")))
]


def commands(text: str) -> list[str]:
    """The command lines of a block, comments and continuations taken out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines if line.strip()]
