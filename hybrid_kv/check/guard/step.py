"""Requests and steps of the engine as the guard's rules see them: from tokens and answers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybrid_kv.request import ScheduledRequest

Prefix = tuple[str, bytes]  # the salt and the tokens: the name of what the cache holds after them


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with in common."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


class RuleError(AssertionError):
    """The first broken `rule`, and what the engine did."""

    def __init__(self, rule: str, report: str) -> None:
        super().__init__(f"{rule}: {report}")
        self.rule = rule


@dataclass
class Track:
    """A running request as the rules see it.

    `most` and `logical_blocks` start anew with each admission.
    """

    sequence: list[int]  # prompt and answer, stop tokens ignored
    prompt: int
    end: int  # tokens of prompt and answer, as far as it goes
    salt: str
    known: int = 0
    admissions: int = 0
    cached: int = 0  # tokens, when it was admitted first
    drafts: int = 0  # that were verified, and of them accepted; nothing behind its end counts
    num_accepted: int = 0
    ended_before: int = 0  # requests, when this one started
    known_before: int = 0  # generated tokens, when it was admitted last
    hit: int = 0
    # Tokens that attention had when it was admitted last, if more than the hit; else 0.
    junction: int = 0
    most: list[int] = field(default_factory=list)  # per group, upper bound of the logical blocks
    logical_blocks: list[set[int]] = field(default_factory=list)  # mode align: those held
    previous_drafts: int = -1  # scheduled in the step before; -1 before the first decode
    accepted: int = 0  # in the step before
    reach: int = 0  # tokens up to the last draft of the step before
    base: int = 0  # scheme `recompute`: tokens that the last written state has seen
    computed: int = 0  # and those in the cache

    def prefix(self, num_tokens: int) -> Prefix:
        """Return the name of what the cache holds after so many tokens."""
        return self.salt, bytes(self.sequence[:num_tokens])


@dataclass(frozen=True)
class Ran:
    """One row of a step that has run."""

    item: ScheduledRequest  # with its drafts filled in
    track: Track
    tokens: list[int]  # what it gave

    @property
    def end(self) -> int:
        """Return the number of accepted tokens in the cache after the step."""
        item = self.item
        kept = min(
            len(self.tokens),
            self.track.end - item.num_computed_tokens - item.num_tokens + item.num_drafts,
        )
        return item.num_computed_tokens + item.num_tokens - item.num_drafts + max(0, kept - 1)

    @property
    def is_prefill(self) -> bool:
        """Return whether the row runs more than the last known token and the drafts after it."""
        return is_prefill(self.item)


def is_prefill(item: ScheduledRequest) -> bool:
    """Return whether a row runs more than the last known token and the drafts after it."""
    return (
        item.num_computed_tokens == 0 or not item.samples or item.num_tokens > 1 + item.num_drafts
    )
