"""Traffic of probes with the tokens that the exact model answers, as an exported test keeps it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybrid_kv.check.probes.guarded import runs_in
from hybrid_kv.check.probes.registry import Probe, Round, Rounds, Traffic, load_probes
from hybrid_kv.check.probes.session import DEFAULT_UNIT
from hybrid_kv.check.probes.shrink import as_json
from hybrid_kv.check.targets.exact import ExactAnswers
from hybrid_kv.check.targets.target import Answer, Kind
from hybrid_kv.models.config_file import ConfigFile

PACKAGE = "exact_hybrid"  # the folder of what plays it
TEST = "test_exact_hybrid_cache.py"


def probes_of(
    kind: Kind, cell: Mapping[str, str], can: Sequence[str], more: Sequence[str] = ()
) -> Iterator[Probe]:
    """Yield the probes of a setting, in their order.

    Args:
        can: what the engine's worker can.
        more: names of probes that a run of several models leaves to another one.
    """
    for probe in load_probes():
        thorough = probe.name in more
        if {*can}.issuperset(probe.needs.split()) and runs_in(probe, kind, cell, "exact", thorough):
            yield probe


def recorded(
    probe: Probe, checkpoint: str, seed: int, limit: int, **about: Any
) -> list[dict[str, Any]]:
    """Return the rounds of a probe as JSON, each with the tokens of the exact model.

    Args:
        limit: tokens that a request of the engine may have.
        about: further attributes of `Traffic`.
    """
    answers = ExactAnswers(checkpoint)
    size = ConfigFile.read(checkpoint).size("vocab_size")
    longest = min(limit, max(256, 5 * DEFAULT_UNIT))
    drawn = random.Random(f"{seed}/{probe.name}")
    rounds = probe.rounds(Traffic(drawn, size, DEFAULT_UNIT, longest, limit, **about))
    kept = []
    sent: Round | None = next(rounds)
    while sent is not None:
        expected = [answers.tokens(ask.prompt, ask.max_tokens) for ask in sent.requests]
        kept.append({"preempt_every": 0, **as_json([sent], whole=True)[0], "expected": expected})
        sent = _next(rounds, expected)
    return kept


def _next(rounds: Rounds, expected: Sequence[Sequence[int]]) -> Round | None:
    """Return the round after these answers; None at the end."""
    try:
        return rounds.send([Answer(tuple(tokens)) for tokens in expected])
    except StopIteration:
        return None
