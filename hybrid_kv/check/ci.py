"""Verdicts as machines read them: JUnit XML, GitHub's annotations and the summary of a step."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from hybrid_kv import environment
from hybrid_kv.errors import VOID, printable
from hybrid_kv.files import write_whole

Word = Literal["ok", "failed", "void", "skipped"]
# Void is an error of the run, as JUnit has it: nothing was shown to be wrong, or to be right.
FAILING = ("failed", "void")
MAX_LETTERS = 120  # of a text in Markdown
ELEMENTS = {"failed": "failure", "void": "error", "skipped": "skipped"}
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Verdict:
    """The verdict of a check; `message` is what is wrong, its first line in short."""

    name: str
    word: Word
    message: str = ""
    seconds: float = 0.0


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """Return 1 if a verdict failed, else `VOID` if one was void, else 0."""
    words = {verdict.word for verdict in verdicts}
    return 1 if "failed" in words else VOID if "void" in words else 0


@contextmanager
def published(command: str, junit: Path | None) -> Iterator[Callable[[Sequence[Verdict]], None]]:
    """Provide a function that keeps all verdicts so far in `junit`, whenever there is another.

    At the end GitHub gets its annotations and summary. A run that an error ends is a failure of its
    own.
    """
    known: list[Verdict] = []

    def keep(verdicts: Sequence[Verdict]) -> None:
        known[:] = verdicts
        if junit is not None:
            write_whole(junit, junit_xml(command, known))

    try:
        yield keep
    except BaseException as error:
        message = f"ended early: {str(error) or type(error).__name__}"
        keep([*known, Verdict("the run itself", "failed", message)])
        raise
    finally:
        if environment.runs_on_github():
            for line in workflow_commands(command, known):
                print(line, file=sys.stderr)  # GitHub reads both, and stdout may have to be JSON
        file = environment.step_summary()
        if file is not None:
            with open(file, "a", encoding="utf-8") as summary:
                summary.write(markdown(command, known))


def junit_xml(command: str, verdicts: Sequence[Verdict]) -> str:
    """Return a suite with a case for each verdict; what XML has no letter for is replaced."""
    words = [str(verdict.word) for verdict in verdicts]
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name=command, tests=str(len(words)))
    for attribute, word in (("failures", "failed"), ("errors", "void"), ("skipped", "skipped")):
        suite.set(attribute, str(words.count(word)))
    suite.set("time", f"{sum(verdict.seconds for verdict in verdicts):.3f}")
    for verdict in verdicts:
        name = NO_XML.sub("\ufffd", verdict.name)
        seconds = f"{verdict.seconds:.3f}"
        case = ElementTree.SubElement(suite, "testcase", classname=command, name=name, time=seconds)
        if verdict.word != "ok":
            message = NO_XML.sub("\ufffd", verdict.message)
            first_line = message.partition("\n")[0]
            problem = ElementTree.SubElement(
                case, ELEMENTS[verdict.word], message=first_line, type=verdict.word
            )
            problem.text = message
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def workflow_commands(command: str, verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each verdict that fails the run.

    In a value `%`, line ends and separators are escaped.
    """
    lines = []
    for verdict in verdicts:
        if verdict.word in FAILING:
            title = _escaped(f"{command}: {verdict.name} {verdict.word}", ":,")
            lines.append(f"::error title={title}::{_escaped(verdict.message)}")
    return lines


def _escaped(text: str, separators: str = "") -> str:
    reserved = f"%\r\n{separators}"
    return "".join(
        f"%{ord(letter):02X}" if letter in reserved else letter
        for letter in NO_XML.sub("\ufffd", text)
    )


def markdown(command: str, verdicts: Sequence[Verdict]) -> str:
    """Return how many passed, and a table of those that did not."""
    failing = [verdict for verdict in verdicts if verdict.word in FAILING]
    passed = sum(verdict.word == "ok" for verdict in verdicts)
    lines = [f"### {command}: {passed} of {passed + len(failing)} passed", ""]
    if failing:
        lines += ["| check | verdict | reason |", "|---|---|---|"]
        lines += [
            f"| {plain(verdict.name)} | {verdict.word} | {plain(verdict.message)} |"
            for verdict in failing
        ]
    return "\n".join([*lines, ""])


def plain(words: str) -> str:
    """Return text as a code span that fits a cell.

    Nothing in it is a link, a mention, HTML, or the end of the cell.
    """
    words = " ".join(words.split())
    if len(words) > MAX_LETTERS:
        words = words[: MAX_LETTERS - 1] + "…"
    # A bar ends a cell, also in a code span; a backslash before it is read in two ways. Neither has
    # an escape.
    words = words.replace("`", "ˋ").replace("|", "¦")
    return f"`{printable(words)}`" if words else "–"
