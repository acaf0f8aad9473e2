"""A failure as files: JSON that is played again, and a text for an issue tracker."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hybrid_kv.check.guard.replay import check_size
from hybrid_kv.check.probes.guarded import Guarded
from hybrid_kv.check.probes.registry import Round, send
from hybrid_kv.check.probes.session import Failure
from hybrid_kv.check.probes.shrink import as_json
from hybrid_kv.check.targets.remote import Remote
from hybrid_kv.check.targets.target import Answer, Target, TargetError
from hybrid_kv.config import ConfigError
from hybrid_kv.files import write_whole

FORMAT = "hybrid-kv target failure"
VERSION = 1


@dataclass(frozen=True)
class ProbeCase:
    """A failure as its file has it.

    Attributes:
        model: how the checkpoint is made or where it is: a family's name, a folder or a hub's id.
        expected: the answer's tokens up to the first that was wrong, with what was right there.
        margin: how much likelier that was, as a difference of log-probabilities.
        logprob: the right log-probability of the last of them, if it is not the tokens that were
            wrong.
        most_cached: tokens of the prompt that may come from the cache, if it is that.
        least_cached: tokens of the prompt that must come from it.
        limit: the most that a log-probability may differ by.
    """

    target: str
    version: str
    model: str
    settings: Mapping[str, str]
    probe: str
    problem: str
    rounds: tuple[Round, ...]
    index: int
    expected: tuple[int, ...]
    got: tuple[int, ...]
    margin: float
    logprob: float | None
    most_cached: int | None
    limit: float
    least_cached: int = 0

    def is_wrong(self, answer: Answer) -> bool:
        """Return whether an answer to the last round's ask is as wrong as this one was."""
        tokens = answer.token_ids[: len(self.expected)]
        if answer.error or tokens != self.expected:
            return True
        last = len(self.expected) - 1
        if self.logprob is not None:
            given = answer.logprobs[last:]
            return not given or not abs(given[0][tokens[last]] - self.logprob) <= self.limit
        cached = answer.cached_tokens or 0
        is_too_long = self.most_cached is not None and cached > self.most_cached
        return is_too_long or cached < self.least_cached


def case_of(failure: Failure, target: str, version: str, model: str, limit: float) -> ProbeCase:
    """Return the failure of an engine on a model as a case."""
    judgement = failure.judgement
    return ProbeCase(
        target,
        version,
        model,
        dict(failure.settings),
        failure.probe,
        judgement.problem,
        failure.rounds,
        failure.index,
        judgement.expected,
        failure.answer.token_ids[: judgement.position + 1],
        judgement.margin,
        judgement.logprob,
        judgement.most_cached,
        limit,
        judgement.least_cached,
    )


def replay(case: ProbeCase, target: Target) -> Answer:
    """Request the wrong answer again in the same way.

    A server may have answered since it started, to find out what it can: it is reset, as it was
    when the case was reduced.

    Raises:
        TargetError: the engine died.
    """
    if "reset" in target.can:
        target.reset()
    answers: list[Answer] = []
    for sent in case.rounds:
        answers = send(target, sent)
    return answers[case.index]


def wrong_read(guarded: Guarded, case: ProbeCase) -> str:
    """Return what the sanitizer sees first when a case is played again.

    Empty where the engine has no sanitizer or it does not follow the setting.
    """
    if "sanitize" not in guarded.kind.factors or case.settings.get("async") == "on":
        return ""
    try:
        target = guarded.kind.start(guarded.folder, {**case.settings, "sanitize": "on"})
    except (ConfigError, TargetError):
        return ""
    try:
        with suppress(TargetError):  # an engine that failed may have read something wrong before
            replay(case, target)
        return cast(Remote, target).wrong_read()
    except TargetError:
        return ""
    finally:
        target.close()


def to_json(case: ProbeCase) -> str:
    """Return the text of a case's file."""
    parts = {"format": FORMAT} | vars(case) | {"version": VERSION, "engine": case.version}
    lines = [f' "{key}": {json.dumps(value)},' for key, value in parts.items() if key != "rounds"]
    rounds = ",\n  ".join(map(json.dumps, as_json(case.rounds)))
    return "\n".join(["{", *lines, f' "rounds": [\n  {rounds}\n ]', "}", ""])


def from_json(text: str, name: str) -> ProbeCase:
    """Return the case of a file's text; `name` is the file's, for the error.

    Raises:
        ConfigError: it is no failure of this version, or has a value that no failure has.
    """
    from pydantic import TypeAdapter, ValidationError

    from hybrid_kv.check.targets.dialects import problem_of

    try:
        document = json.loads(text)
        if document.pop("format") != FORMAT or document.pop("version") != VERSION:
            raise ValueError(f"it is not of the format {FORMAT!r}, version {VERSION}")
        document["version"] = document.pop("engine")
        case = TypeAdapter(ProbeCase).validate_json(json.dumps(document), strict=True)
        _check(case)
        return case
    except ValidationError as error:
        problem = problem_of(error)
    except KeyError as error:
        problem = f"{error} is missing"
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        problem = str(error)
    raise ConfigError(
        f"{name} can't be played: {problem}; write it anew with hybrid-kv check"
    ) from None


def _check(case: ProbeCase) -> None:
    if not case.rounds or not all(
        sent.requests and sent.preempt_every >= 0 for sent in case.rounds
    ):
        raise ValueError("a round has no requests")
    for sent in case.rounds:
        for ask in sent.requests:
            if not ask.prompt or min(ask.prompt) < 0:
                raise ValueError(f"prompt {list(ask.prompt)[:8]} has no token ids")
            if min(ask.max_tokens, ask.n) < 1 or not 0 <= ask.after < len(sent.requests):
                raise ValueError(f"of {len(sent.requests)} requests one cannot have {ask.extras()}")
        # One by one: each waits only for answers that come without it.
        awaited = enumerate(sorted(ask.after for ask in sent.requests))
        if any(after > place for place, after in awaited):
            raise ValueError(f"{len(sent.requests)} requests wait for each other's answers")
        check_size(sum(ask.n * ask.max_tokens for ask in sent.requests), {})
    last = case.rounds[-1].requests
    if not 0 <= case.index < len(last):
        raise ValueError(
            f"index {case.index} is none of the {len(last)} requests of the last round"
        )
    if case.logprob is not None and not (case.expected and last[case.index].logprobs):
        raise ValueError("logprob is of no token, or was not requested")


def write_files(case: ProbeCase, folder: Path, script: str = "") -> list[Path]:
    """Write the JSON and the text, and a script if there is one."""
    text = to_json(case)
    slug = re.sub(r"\W+", "-", f"{case.target} {case.probe}").strip("-")  # a target may be a URL
    stem = folder / f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    contents = {".json": text, ".md": _markdown(case, stem)} | ({".py": script} if script else {})
    written = {stem.with_name(stem.name + suffix): content for suffix, content in contents.items()}
    for path, content in written.items():
        write_whole(path, content)
    return [*written]


def _markdown(case: ProbeCase, stem: Path) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in case.settings.items()) or "defaults"
    likelier = f"likelier by {case.margin:.3g} (rounding goes to {case.limit:.2g})"
    expected = f"- Expected {list(case.expected)}, {likelier}"
    lines = [
        f"# {case.target} {case.version}: a wrong answer ({case.probe})",
        "",
        f"Model: `{case.model}`. Settings: {settings}.",
        "",
        f"- What is wrong: {case.problem.rstrip('.')}.",
        *([expected, f"- Got {list(case.got)}"] if case.expected else []),
        "",
        f"`{sum(len(sent.requests) for sent in case.rounds)}` requests lead to it:",
        "",
    ]
    for number, sent in enumerate(case.rounds, 1):
        for ask in sent.requests:
            extras = ", ".join(f"{key} {value}" for key, value in ask.extras().items())
            lines.append(f"{number}. `{list(ask.prompt)}` {extras}".rstrip())
    return "\n".join([*lines, "", f"Again: `hybrid-kv replay {stem.name}.json`", ""])
