"""Cases as files: reduced, written, played again. One is a scenario of the exact model, or a cell of logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hybrid_kv.files import read_text
from hybrid_kv.guard import logits
from hybrid_kv.guard import replay as scenarios
from hybrid_kv.guard.play import Failure
from hybrid_kv.guard.scenario import Scenario
from hybrid_kv.guard.shrink import filed, shrink
from hybrid_kv.guard.workers import processes
from hybrid_kv.kernels.common.interpreter import is_interpreter, start_interpreter

T = TypeVar("T")
SECONDS = 60.0  # of one core, for reducing one case


@dataclass(frozen=True)
class Reproducer:
    """A reduced case.

    Attributes:
        file: to be played by `hybrid-kv guard --replay`.
        rule: the first that it breaks.
        tokens: of all prompts.
        seconds: of one core, of reducing it.
        story: what became of it, and what it does; may be empty.
    """

    file: str
    rule: str
    requests: int
    tokens: int
    seconds: float
    story: str = ""


def reproduce(text: str, folder: Path) -> Reproducer:
    """Reduce the case of a file's text and write its file; see `replay.write_case`.

    Raises:
        ConfigError: it is no case.
        HybridKVError: the file cannot be written.
    """
    case, rule = _read(text, "case"), json.loads(text)["rule"]
    if _needs_interpreter(case):
        return _interpreted(reproduce, text, folder)
    if isinstance(case, Scenario):
        shrunk = shrink(Failure(case, rule, ""), SECONDS)
        file, story = filed(shrunk, folder)
        prompts = shrunk.failure.scenario.prompts
        sizes = len(prompts), sum(map(len, prompts))
        return Reproducer(str(file), shrunk.failure.rule, *sizes, shrunk.seconds, story)
    small = logits.LogitShrinker(case, rule, SECONDS)
    small.run()
    case = small.case
    file = scenarios.write_case(logits.to_json(case, rule), rule, folder)
    sizes = case.num_requests, case.num_tokens
    story = logits.tell(case, *logits.play_logits(case))
    summary = scenarios.announce(*sizes, small.num_plays, small.seconds, small.is_minimal, file)
    return Reproducer(str(file), rule, *sizes, small.seconds, f"{summary}\n{story}")


def broken_rule(file: Path) -> str:
    """The rule that a case breaks first; empty: none.

    Raises:
        ConfigError: the file is no case.
        OSError: it cannot be read.
    """
    case = _read(read_text(file), str(file))
    if _needs_interpreter(case):
        return _interpreted(broken_rule, file)
    if isinstance(case, logits.LogitCase):
        return logits.play_logits(case)[0]
    failure, _ = scenarios.tell(case)
    return "" if failure is None else failure.rule


def replay(file: Path) -> int:
    """Play a case and print its story; the exit code is 1 while it breaks a rule, else 0.

    Raises:
        ConfigError: the file is no case.
        OSError: it cannot be read.
    """
    case = _read(read_text(file), str(file))
    if _needs_interpreter(case):
        return _interpreted(replay, file)
    return logits.replay(case) if isinstance(case, logits.LogitCase) else scenarios.replay(case)


def _needs_interpreter(case: Scenario | logits.LogitCase) -> bool:
    """Whether it is of Triton's kernels, and neither a GPU nor this process runs them."""
    options = case.options if isinstance(case, Scenario) else case.cell
    return options.get("kernels") == "triton" and not is_interpreter() and not torch.cuda.is_available()


def _interpreted(function: Callable[..., T], *arguments: Any) -> T:
    with processes(1, start_interpreter) as pool:
        return pool.submit(function, *arguments).result()


def _read(text: str, name: str) -> Scenario | logits.LogitCase:
    def read(document: Any) -> Scenario | logits.LogitCase:
        of_logits = isinstance(document, dict) and document.get("format") == logits.FORMAT
        return logits.from_document(document) if of_logits else scenarios.from_document(document)

    return scenarios.from_text(text, name, read)
