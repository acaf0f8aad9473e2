"""Cases as files: reduced, written, played again.

A case is a scenario of the exact model, or a cell of logits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hybrid_kv.check.guard import logits
from hybrid_kv.check.guard import replay as scenarios
from hybrid_kv.check.guard.play import ScenarioFailure
from hybrid_kv.check.guard.scenario import Scenario
from hybrid_kv.check.guard.shrink import Shrunk, shrink
from hybrid_kv.check.guard.workers import processes
from hybrid_kv.files import read_text, write_whole
from hybrid_kv.kernels.common.interpreter import is_interpreter, start_interpreter

T = TypeVar("T")
Case = Scenario | logits.LogitCase
SECONDS = 60.0  # of one core, for reducing one case


@dataclass(frozen=True)
class Reproducer:
    """A reduced case.

    Attributes:
        file: to be played by `hybrid-kv replay`.
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
    """Reduce the case of a file's text and write its file.

    Raises:
        ConfigError: it is no case.
        HybridKVError: the file cannot be written.
    """
    case = _read(text, "case")
    rule = json.loads(text)["rule"]
    if _needs_interpreter(case):
        return _interpreted(reproduce, text, folder)
    if isinstance(case, Scenario):
        shrunk = shrink(ScenarioFailure(case, rule, ""), SECONDS)
        return filed(shrunk.failure.scenario, shrunk.failure.rule, shrunk, folder)
    small = logits.LogitShrinker(case, rule, SECONDS)
    small.run()
    return filed(small.case, rule, small, folder)


def filed(case: Case, rule: str, how: Shrunk | logits.LogitShrinker, folder: Path) -> Reproducer:
    """Write a reduced case as `<rule>-<hash>.json`, and tell its story.

    Raises:
        HybridKVError: it cannot be written.
    """
    text = (
        scenarios.to_json(case, rule) if isinstance(case, Scenario) else logits.to_json(case, rule)
    )
    name = re.sub(r"[^a-z0-9]+", "-", rule.lower()).strip("-")
    file = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    write_whole(file, text)
    time_was_up = "" if how.is_minimal else ", the time was up"
    effort = f"{how.num_plays} plays in {how.seconds:.1f} s{time_was_up}"
    small = f"{case.num_requests} requests with {case.num_tokens} prompt tokens"
    story = f"shrunk to {small} ({effort}): hybrid-kv replay {file}\n{tell(case)[1]}"
    return Reproducer(str(file), rule, case.num_requests, case.num_tokens, how.seconds, story)


def tell(case: Case) -> tuple[str, str]:
    """Play a case; return the first rule that it breaks, empty if none, and its story."""
    rule, lines = scenarios.tell(case) if isinstance(case, Scenario) else logits.tell(case)
    return rule, "\n".join([*lines, f"broken rule: {rule}" if rule else "no rule is broken"])


def broken_rule(file: Path) -> str:
    """Return the rule that a case breaks first; empty: none. Raises as `replay`."""
    return _told(file)[0]


def replay(file: Path) -> int:
    """Play a case and print its story; the exit code is 1 while it breaks a rule, else 0.

    Raises:
        ConfigError: the file is no case.
        OSError: it cannot be read.
    """
    rule, story = _told(file)
    print(story)
    return int(bool(rule))


def _told(file: Path) -> tuple[str, str]:
    case = _read(read_text(file), str(file))
    return _interpreted(tell, case) if _needs_interpreter(case) else tell(case)


def _needs_interpreter(case: Case) -> bool:
    """Return whether a case needs Triton's interpreter in another process."""
    options = case.options if isinstance(case, Scenario) else case.cell
    return (
        options.get("kernels") == "triton"
        and not is_interpreter()
        and not torch.cuda.is_available()
    )


def _interpreted(function: Callable[..., T], *arguments: Any) -> T:
    with processes(1, start_interpreter) as pool:
        return pool.submit(function, *arguments).result()


def _read(text: str, name: str) -> Case:
    def read(document: Any) -> Case:
        of_logits = isinstance(document, dict) and document.get("format") == logits.FORMAT
        return logits.from_document(document) if of_logits else scenarios.from_document(document)

    return scenarios.from_text(text, name, read)
