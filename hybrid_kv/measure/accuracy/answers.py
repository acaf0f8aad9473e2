"""Runs as files hold them: an answer to each question, or the score alone.

`read.read_run` reads them from files of several programs.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_kv import files
from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy.acceptance import NO_DRAFTS, DraftCounts

HASHES = {
    "doc_hash": ("documents", "another data set or seed"),
    "prompt_hash": ("prompts", "other shots, another template or seed"),
    "target_hash": ("targets", "other reference answers"),
}


@dataclass(frozen=True)
class QuestionAnswer:
    """An answer to a question in a run.

    `invalid`: no answer was found in the text; then it is not correct either.

    Attributes:
        hashes: lm-eval's of document, prompt and target; empty ones are not known.
        output_sha: of the answer's tokens; None where they are not known.
        drafts: none where the file does not tell them by question.
        question: digest of the question's own text, without shots; empty where that is not known.
    """

    hashes: tuple[str, ...]
    correct: bool
    invalid: bool
    output_sha: str | None
    drafts: DraftCounts = NO_DRAFTS
    question: str = ""


@dataclass(frozen=True)
class Protocol:
    """The form in which questions were put; None where a file does not say.

    `endpoint` is completions or chat.
    """

    endpoint: str | None = None
    num_shots: int | None = None
    max_tokens: int | None = None
    thinking: bool | None = None

    def __str__(self) -> str:
        shots = "" if self.num_shots is None else f"{self.num_shots} shots"
        tokens = "" if self.max_tokens is None else f"at most {self.max_tokens:,} tokens"
        thinking = {None: "", True: "thinking", False: "not thinking"}[self.thinking]
        return (
            ", ".join(known for known in (self.endpoint, shots, tokens, thinking) if known)
            or "nothing is known"
        )

    def differs_from(self, other: Protocol) -> bool:
        """Return whether a field is known of both, and not the same."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


UNKNOWN = Protocol()


def thinks(settings: Mapping[str, Any]) -> bool | None:
    """Return whether a request wants reasoning; None if it does not say.

    `reasoning_effort` and `chat_template_kwargs` say so.
    """
    effort = settings.get("reasoning_effort")
    variables = settings.get("chat_template_kwargs")
    if effort is not None:
        return bool(effort != "none")
    named = (
        [value for name, value in variables.items() if "thinking" in name]
        if isinstance(variables, dict)
        else []
    )
    return bool(named[0]) if named else None


@dataclass(frozen=True)
class Totals:
    """A run of which the score alone is known, of the first `num_questions` of its task."""

    name: str
    digest: str
    task: str
    protocol: Protocol
    num_questions: int
    num_right: int
    num_invalid: int
    params: Mapping[str, Any]
    commit: str = ""


@dataclass(frozen=True)
class Answers:
    """A run: its answers by doc_id.

    `digest` distinguishes files of the same name; `commit` is empty where unknown.

    Attributes:
        chosen: its questions are those that another run lost, see `judge.write_lost`.
        repeats: how often each question was asked; the majority of its answers is one.
    """

    name: str
    digest: str
    task: str
    params: dict[str, Any]
    commit: str
    by_doc: dict[int, QuestionAnswer]
    chosen: bool = False
    protocol: Protocol = UNKNOWN
    repeats: int = 1

    def only(self, questions: Sequence[int]) -> Answers:
        """Return this run, cut to these questions."""
        return replace(
            self, by_doc={doc_id: self.by_doc[doc_id] for doc_id in questions}, chosen=True
        )

    def first(self, questions: int) -> Answers:
        """Return this run, cut to its first questions."""
        kept = {doc_id: self.by_doc[doc_id] for doc_id in sorted(self.by_doc)[:questions]}
        return replace(self, by_doc=kept)

    @property
    def totals(self) -> Totals:
        """The score alone."""
        values = self.by_doc.values()
        return Totals(
            name=self.name,
            digest=self.digest,
            task=self.task,
            protocol=self.protocol,
            num_questions=len(self.by_doc),
            num_right=sum(answer.correct for answer in values),
            num_invalid=sum(answer.invalid for answer in values),
            params=self.params,
            commit=self.commit,
        )


def read_text(file: str | Path) -> str:
    """Return the text of a file of answers.

    Raises:
        HybridKVError: it cannot be read.
    """
    file = Path(file)
    try:
        return files.read_text(file, unpack=file.suffix == ".gz")
    except (OSError, EOFError, zlib.error) as error:
        raise HybridKVError(
            f"{file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def json_document(text: str, place: str) -> dict[str, Any]:
    """Return the JSON object of a whole file.

    Raises:
        HybridKVError: it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise HybridKVError(f"{place} is not a JSON object; was the file cut off?")
    return value


def json_lines(text: str, place: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the JSON object of each line.

    Raises:
        HybridKVError: a line is not an object.
    """
    # Not splitlines: lm-eval writes other separators, such as U+2028, into its strings as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # the latter of 100,000 nested brackets
            value = None
        if not isinstance(value, dict):
            raise HybridKVError(
                f"{place} line {number} is not a JSON object; was the file cut off?"
            )
        yield number, value


def digest_of(text: str) -> str:
    """Return a digest that tells two files of one name apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
