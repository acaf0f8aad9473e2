"""All probes in every setting of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from hybrid_kv.config import ConfigError
from hybrid_kv.guard.registry import Size
from hybrid_kv.probes.at_once import ask_at_once
from hybrid_kv.probes.guarded import Guarded, Settings, ask
from hybrid_kv.probes.registry import load_probes
from hybrid_kv.probes.session import Outcome
from hybrid_kv.targets.target import Kind

FINE = ("right", "not supported", "as before", "known")


def compare_with(old: Guarded, seen: Sequence[Outcome], jobs: int = 1, size: Size = "full") -> None:
    """Make each verdict that an old build of the engine shares "as before": it is no news of the new one."""
    doubtful = [one for one in seen if one.verdict not in FINE]
    if not doubtful:
        return
    cells = [dict(one.settings) for one in seen if one in doubtful or old.is_plain(one.settings)]
    select = ["alone", *(one.probe for one in doubtful)]  # a start is no probe
    distinct = [cell for i, cell in enumerate(cells) if cell not in cells[:i]]
    run = Run(old, distinct, select, size=size)
    guard([run], jobs)
    known = [(one.probe, one.settings, _signs(one)) for one in run.found()]
    for one in doubtful:
        if (one.probe, one.settings, _signs(one)) in known:
            one.verdict, one.failures = "as before", []


def subtract_known(guarded: Guarded, outcome: Outcome) -> None:
    """Name a failure that was reported of this release, and do not count it."""
    for one in getattr(guarded.kind, "known", ()):
        levels = guarded.kind.factors
        met = all(outcome.settings.get(factor, levels[factor][0]) != levels[factor][0] for factor in one.factors)
        here = met and one.release == guarded.version and one.probe in outcome.probe and one.words in outcome.detail
        if outcome.verdict in ("wrong", "void") and here:
            outcome.verdict, outcome.detail, outcome.failures = "known", f"{one.name}: {outcome.detail}", []


def _signs(outcome: Outcome) -> tuple[str, ...]:
    """Of equal outcomes: the verdict, and of what is wrong the words without their numbers."""
    return outcome.verdict, *(failure.last_words for failure in outcome.failures)


def default_matrix(kind: Kind, size: Size = "full") -> list[Settings]:
    """The plainest engine, each level of the prefix cache, and with the last of these each other level by itself.

    Of levels that differ in a number alone, such as `mtp3` and `mtp1`, the first one; all of them if the size is long,
    and if it is quick the levels of the prefix cache alone. Factors in the kind's `apart`, if it has that, exclude the
    prefix cache: their levels are met without it. With an exact model it is the kind's `matrix`.
    """
    if matrix := getattr(kind, "matrix", ()):
        return matrix_of(kind, matrix)
    prefixes = kind.factors.get("prefix", ())
    cells: list[Settings] = [{}, *({"prefix": level} for level in prefixes[1:])]
    for factor, levels in kind.factors.items():
        if factor != "prefix" and size != "quick":
            is_cached = len(prefixes) > 1 and factor not in getattr(kind, "apart", ())
            cached = {"prefix": prefixes[-1]} if is_cached else {}
            kinds = {level if size == "long" else level.rstrip("0123456789"): level for level in reversed(levels[1:])}
            cells += [{**cached, factor: level} for level in levels[1:] if level in kinds.values()]
    return cells


def matrix_of(kind: Kind, texts: Sequence[str]) -> list[Settings]:
    """All combinations of the `factor=level,level` of each text; the plainest engine is always the first.

    Raises:
        ConfigError: no such factor or level.
    """
    cells: list[Settings] = [{}]
    for text in texts:
        wanted = dict(_levels(kind, part) for part in text.split())
        for levels in product(*wanted.values()):
            cell = dict(zip(wanted, levels, strict=True))
            is_plain = all(level == kind.factors[f][0] for f, level in cell.items())
            cells += [cell] if not is_plain and cell not in cells else []
    return cells


def text_of(settings: Mapping[str, str]) -> str:
    """What `matrix_of` reads; `plain` of no settings."""
    return " ".join(f"{factor}={level}" for factor, level in settings.items()) or "plain"


def _levels(kind: Kind, part: str) -> tuple[str, list[str]]:
    factor, _, levels = part.partition("=")
    wanted = levels.split(",")
    for level in wanted:
        check_level(kind, factor, level)
    return factor, wanted


def check_level(kind: Kind, factor: str, level: str) -> None:
    """
    Raises:
        ConfigError: the engine has no such factor, or the factor no such level.
    """
    if factor not in kind.factors:
        raise ConfigError(f"{factor}={level}: write FACTOR=LEVEL,…; {kind.name} has {', '.join(kind.factors)}")
    if level not in kind.factors[factor]:
        raise ConfigError(f"{factor}={level}: use one of {', '.join(kind.factors[factor])}")


class Run:
    """All probes of an engine with one model, a wave of settings after another; what cannot start is an outcome, too.

    Args:
        matrix: None: the default one, in the first dtype that the engine takes this model in.
        select: only probes that have one of these in their name; `alone` is always run.
        report: called with each outcome.
        size: of the default matrix.

    Attributes:
        outcomes: so far.

    Raises:
        ConfigError: no probe is selected.
    """

    def __init__(
        self,
        guarded: Guarded,
        matrix: Sequence[Settings] | None = None,
        select: Sequence[str] = (),
        report: Callable[[Outcome], None] = lambda outcome: None,
        size: Size = "full",
    ) -> None:
        if not any(part in one.name for part in select or [""] for one in load_probes()):
            raise ConfigError(f"-k {', '.join(select)}: no probe has this in its name")
        self.guarded, self.select, self.outcomes = guarded, select, list[Outcome]()
        self.cells = default_matrix(guarded.kind, size) if matrix is None else [*matrix]
        self._order: list[Settings] = []
        self._is_default, self._report = matrix is None, report

    def waves(self) -> Iterator[list[Settings]]:
        """Settings that may run at a time, behind those before them.

        The plain ones come first: where their answers are not the oracle's, all others are held against theirs. With
        an exact model the oracle is always right.
        """
        guarded, order = self.guarded, self._order
        order += [settings for settings in self.cells if guarded.is_plain(settings)]
        rest = [settings for settings in self.cells if settings not in order]
        if guarded.judge_of({}).is_exact:
            order += rest
            yield [*order]
            return
        yield [*order]
        # vLLM runs a Qwen3.5 on a CPU in bfloat16 alone.
        for dtype in guarded.kind.factors.get("dtype", ())[1:] if self._is_default else ():
            if (self.outcomes[-1].probe, self.outcomes[-1].verdict) != ("start", "not supported"):
                break
            order.append({"dtype": dtype})
            yield order[-1:]
        if len(order) > 1 and self._is_default:
            rest = [{**order[-1], **settings} for settings in rest if "dtype" not in settings]
        order += rest
        yield rest

    def hear(self, outcome: Outcome) -> None:
        """Keep and report an outcome."""
        subtract_known(self.guarded, outcome)
        self.outcomes.append(outcome)
        if (outcome.probe, len(self.cells)) != ("start", 1):  # the error of `found`, or the only row, says it
            self._report(outcome)

    def found(self) -> list[Outcome]:
        """Outcomes by setting, the plain ones first.

        Raises:
            ConfigError: none is supported, in any setting.
        """
        if self.outcomes and all(one.verdict == "not supported" for one in self.outcomes):
            raise ConfigError(f"no setting is supported: {self.outcomes[0].detail}")
        return sorted(self.outcomes, key=lambda one: self._order.index(dict(one.settings)))


def guard(runs: Sequence[Run], jobs: int = 1) -> None:
    """Every probe in every setting of some runs.

    Args:
        jobs: settings at a time, an engine and a process each; those of the first run that has any left come first.
    """
    try:
        if jobs > 1 and sum(len(run.cells) for run in runs) > 1:
            ask_at_once(runs, jobs)
            return
        for run in runs:
            for wave in run.waves():
                for settings in wave:
                    ask(run.guarded, settings, run.select, run.hear)
    finally:
        for run in runs:
            run.guarded.close()
