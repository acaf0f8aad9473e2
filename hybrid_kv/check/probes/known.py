"""Failures of a release that were reported: a run names them and does not count them, and goes on after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hybrid_kv.check.probes.registry import Verdict
from hybrid_kv.check.targets.target import Kind, Known, is_plain


class Outcome(Protocol):
    """What of `session.Outcome` is read and changed here."""

    probe: str
    settings: Mapping[str, str]
    verdict: Verdict
    detail: str
    failures: list[Any]


COUNTED = ("wrong", "void")


def known_of(kind: Kind, version: str, outcome: Outcome) -> Known | None:
    """Return what is known of this release, probe and setting and says the same, words and tokens."""
    return next((one for one in kind.known if _says(one, kind, version, outcome)), None)


def name_known(kind: Kind, version: str, outcome: Outcome) -> Known | None:
    """Make an outcome that is known "known", and return what it is."""
    if outcome.verdict not in COUNTED or (known := known_of(kind, version, outcome)) is None:
        return None
    outcome.verdict, outcome.detail, outcome.failures = (
        "known",
        f"{known.name}: {outcome.detail}",
        [],
    )
    return known


def _says(known: Known, kind: Kind, version: str, outcome: Outcome) -> bool:
    if (
        known.release != version
        or known.probe not in outcome.probe
        or known.words not in outcome.detail
    ):
        return False
    if known.setting:
        return _levels_of(known.setting) == {**outcome.settings}
    return not any(is_plain(kind, outcome.settings, [factor]) for factor in known.factors)


def _levels_of(setting: str) -> Mapping[str, str]:
    return dict(level.split("=") for level in setting.split() if level != "plain")
