"""Bounds of what counters say: hits from above and from below, accepted drafts from below."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hybrid_kv.check.guard.step import common_prefix
from hybrid_kv.check.probes.registry import Round
from hybrid_kv.check.targets.target import Answer, Ask

MOST_KNOWN = 1024  # tokens: a pool may have to evict what comes after them


class Kept:
    """The boundaries at which a hybrid's prefix cache keeps a state, however sparse it is.

    They are the last boundary of each prompt, which may be found once more, and the last one that a
    prompt shares with an earlier text (Marconi, arXiv:2411.19379; vLLM's replay boundaries and
    junctions). It knows them as long as requests come one at a time, end by themselves, and are too
    few to be evicted.
    """

    def __init__(self) -> None:
        self._texts = list[tuple[int, ...]]()
        self._ends = list[tuple[int, ...]]()
        self._is_sure = True

    def least(self, sent: Round, unit: int) -> int:
        """Return how many tokens of a single request's prompt the cache has at least.

        Every hit is a multiple of `unit` tokens, and leaves a token to be computed.
        """
        if not self._is_sure or len(sent.requests) > 1:
            return 0
        prompt = sent.requests[0].prompt[:-1]
        kept = (end[: len(end) // unit * unit] for end in self._ends)
        return max((len(text) for text in kept if text == prompt[: len(text)]), default=0)

    def add(self, sent: Round, answers: Sequence[Answer]) -> None:
        """Note what a round leaves in the cache."""
        (first, *others), (answer, *_) = sent.requests, answers
        is_plain = not (others or sent.preempt_every or sent.after_sleep or first.salt)
        self._is_sure &= is_plain and first.n == 1 and first.abort_after is None
        prompt = first.prompt[:-1]
        shared = max((common_prefix(known, prompt) for known in self._texts), default=0)
        self._ends += [prompt, prompt[:shared]]
        # The answer's last token was never computed.
        self._texts.append((*first.prompt, *answer.token_ids[:-1]))
        self._is_sure &= sum(map(len, self._texts)) <= MOST_KNOWN


class Seen:
    """The texts that a cache may know, by salt: nothing else may be found in it.

    Of those that it must have kept, see `Kept`.
    """

    def __init__(self) -> None:
        self._texts: dict[str, list[tuple[int, ...]]] = {}
        self._kept = Kept()

    def add(self, sent: Round, answers: Sequence[Answer]) -> None:
        for ask, answer in zip(sent.requests, answers, strict=True):
            for tokens in (answer.token_ids, *answer.others):
                self._texts.setdefault(ask.salt, []).append((*ask.prompt, *tokens))
        self._kept.add(sent, answers)

    def forget_kept(self) -> None:
        """Note that the cache is empty; a further tier may still have what it knew."""
        self._kept = Kept()

    def least(self, sent: Round, unit: int) -> int:
        """Return how many tokens of a round's prompt the cache has at least; see `Kept`."""
        return self._kept.least(sent, unit)

    def shared(self, sent: Round, index: int, finds_itself: bool = False) -> int:
        """Return how many tokens of an ask's prompt another text of its salt begins with.

        The texts are the known ones, and those of the ask's round.
        """
        ask = sent.requests[index]
        # One that is preempted, or has several answers, finds itself.
        finds_itself = finds_itself or sent.preempt_every > 0 or ask.n > 1
        beside = [other for i, other in enumerate(sent.requests) if i != index or finds_itself]
        texts = [other.prompt for other in beside if other.salt == ask.salt]
        return max(
            (common_prefix(text, ask.prompt) for text in (*texts, *self._texts.get(ask.salt, ()))),
            default=0,
        )


def num_sure_drafts(ask: Ask, answer: Answer) -> int:
    """Count the tokens of an answer that have always followed the token before them.

    Whatever n-gram a lookup finds, it proposes them. Each is then an accepted draft, or what a step
    draws after one: no fewer than half are accepted drafts, where nothing cuts drafts short.
    """
    text = (*ask.prompt, *answer.token_ids)
    followers: dict[int, set[int]] = {}
    num_sure = 0
    for place, (token, follower) in enumerate(pairwise(text)):
        known = followers.setdefault(token, set())
        num_sure += place >= len(ask.prompt) and known == {follower}
        known.add(follower)
    return num_sure
