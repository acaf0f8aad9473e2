"""Known failures: reported of a release, so that a run names them and does not count them.

It goes on after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hybrid_kv.check.probes.registry import Verdict
from hybrid_kv.check.targets.target import Kind, Known, is_plain


class NamedOutcome(Protocol):
    """The attributes of `session.Outcome` that are read and changed here."""

    probe: str
    settings: Mapping[str, str]
    verdict: Verdict
    detail: str
    failures: list[Any]


COUNTED = ("wrong", "void")


def known_of(kind: Kind, version: str, outcome: NamedOutcome) -> Known | None:
    """Return the known failure of this release, probe and setting with the same words."""
    return next((known for known in kind.known if _says(known, kind, version, outcome)), None)


def name_known(kind: Kind, version: str, outcome: NamedOutcome) -> Known | None:
    """Give an outcome that is known the verdict "known", and return the known failure."""
    known = known_of(kind, version, outcome) if outcome.verdict in COUNTED else None
    if known is not None:
        outcome.verdict = "known"
        outcome.detail = f"{known.name}: {outcome.detail}"
        outcome.failures = []
    return known


def _says(known: Known, kind: Kind, version: str, outcome: NamedOutcome) -> bool:
    if (
        known.release != version
        or known.probe not in outcome.probe
        or known.words not in outcome.detail
    ):
        return False
    if known.setting:
        return _levels_of(known.setting) == {**outcome.settings}
    return all(_is_met(kind, outcome.settings, factor) for factor in known.factors)


def _is_met(kind: Kind, settings: Mapping[str, str], text: str) -> bool:
    """Return whether a factor is at its `factor=level`; without one, not at its plainest."""
    factor, _, level = text.partition("=")
    if level:
        return settings.get(factor, kind.factors[factor][0]) == level
    return not is_plain(kind, settings, [factor])


def _levels_of(setting: str) -> Mapping[str, str]:
    return dict(level.split("=") for level in setting.split() if level != "plain")
