"""All probes in every setting of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.probes.judge import Judge
from hybrid_kv.probes.oracle import Oracle
from hybrid_kv.probes.registry import Verdict, load_probes
from hybrid_kv.probes.session import Outcome, References, Session, calibrate
from hybrid_kv.targets.target import Kind, TargetError

Settings = dict[str, str]


def default_matrix(kind: Kind) -> list[Settings]:
    """The plainest engine, each level of the prefix cache, and with the last of these each other level by itself.

    Factors in the kind's `apart`, if it has that, exclude the prefix cache: their levels are met without it.
    """
    prefixes = kind.factors.get("prefix", ())
    cells: list[Settings] = [{}, *({"prefix": level} for level in prefixes[1:])]
    for factor, levels in kind.factors.items():
        if factor != "prefix":
            is_cached = len(prefixes) > 1 and factor not in getattr(kind, "apart", ())
            cached = {"prefix": prefixes[-1]} if is_cached else {}
            cells += [{**cached, factor: level} for level in levels[1:]]
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


class Guarded:
    """An engine and a model, and what their sessions share.

    Args:
        kind: the engine.
        folder: the checkpoint.
        against: an engine to take answers from, instead of the oracle.
        amount: how much each probe asks; 1 is a quick look.

    Attributes:
        version: of the engine, once one was started.
        judges: by dtype, those that were needed so far.

    Raises:
        ConfigError: the oracle does not read the model.
    """

    def __init__(self, kind: Kind, folder: str, against: Kind | None = None, seed: int = 0, amount: int = 1) -> None:
        self.kind, self.folder, self.against, self.seed, self.amount = kind, folder, against, seed, amount
        self.version = "?"
        self.judges: dict[str, Judge] = {}
        self._references: dict[str, References] = {}
        self.vocab_size = ConfigFile.read(folder).size("vocab_size")

    def judge_of(self, settings: Mapping[str, str]) -> Judge:
        """That of the setting's dtype."""
        dtype = settings.get("dtype", self.kind.factors.get("dtype", ("float32",))[0])
        if dtype not in self.judges:
            self.judges[dtype] = Judge(Oracle(self.folder, dtype) if self.against is None else None)
        return self.judges[dtype]

    def references_of(self, settings: Mapping[str, str]) -> References:
        """Those of the setting's dtype, if the engine that gives them has it."""
        kind, dtype = self.against or self.kind, settings.get("dtype", "")
        if dtype not in self._references:
            has_it = dtype in kind.factors.get("dtype", ())
            self._references[dtype] = References(kind, self.folder, {"dtype": dtype} if has_it else {})
        return self._references[dtype]

    def is_plain(self, settings: Mapping[str, str]) -> bool:
        """Whether all factors but the dtype are at their plainest level."""
        levels = self.kind.factors
        return all(level == levels[factor][0] for factor, level in settings.items() if factor != "dtype")

    def hear(self, outcome: Outcome) -> None:
        """The oracle is not asked any more where the plain engine, alone and cold, disagrees with it."""
        if outcome.probe == "alone" and outcome.failures and self.is_plain(outcome.settings):
            self.judge_of(outcome.settings).trusted = False

    def close(self) -> None:
        """End the engines that gave references."""
        for references in self._references.values():
            references.close()

    def session(self, settings: Mapping[str, str]) -> Session:
        """A new one.

        Raises:
            ConfigError: the engine does not know the setting or the model.
            TargetError: it does not start.
        """
        judge = self.judge_of(settings)
        references = self.references_of(settings)
        session = Session(self.kind, self.folder, settings, judge, references, self.seed, self.amount)
        self.version = session.target.version
        if not judge.is_calibrated:
            calibrate(session, self.vocab_size)
        return session


def guard(
    guarded: Guarded,
    matrix: Sequence[Settings],
    select: Sequence[str] = (),
    told: Callable[[Outcome], None] = lambda outcome: None,
    jobs: int = 1,
) -> list[Outcome]:
    """Every probe in every setting; a setting that cannot be started is an outcome, too.

    The plain settings come first: where their answers are not the oracle's, all others are held against theirs.

    Args:
        select: only probes that have one of these in their name; `alone` is always run.
        told: called with each outcome.
        jobs: settings at a time, an engine and a process each.

    Returns:
        Outcomes in the order of the matrix.

    Raises:
        ConfigError: no probe is selected; or none could be asked, in any setting.
    """
    from hybrid_kv.probes.at_once import ask_at_once

    if not any(part in one.name for part in select or [""] for one in load_probes()):
        raise ConfigError(f"-k {', '.join(select)}: no probe has this in its name")
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        told(outcome)

    first = [settings for settings in matrix if guarded.is_plain(settings)]
    try:
        for some in (first, [settings for settings in matrix if settings not in first]):
            if min(jobs, len(some)) > 1:
                ask_at_once(guarded, some, select, tell, jobs)
            else:
                for settings in some:
                    ask(guarded, settings, select, tell)
    finally:
        guarded.close()
    if all(one.verdict == "cannot be asked here" for one in outcomes):
        raise ConfigError(f"nothing could be asked: {outcomes[0].detail}")
    return sorted(outcomes, key=lambda one: matrix.index(dict(one.settings)))


def ask(guarded: Guarded, settings: Settings, select: Sequence[str], told: Callable[[Outcome], None]) -> None:
    """All probes that are selected, in one setting."""
    try:
        session = guarded.session(settings)
    except (ConfigError, TargetError) as error:
        verdict: Verdict = "cannot be asked here" if isinstance(error, ConfigError) else "wrong"
        told(Outcome("start", settings, verdict, str(error)))
        return
    try:
        for probe in load_probes():
            if probe.name == "alone" or not select or any(part in probe.name for part in select):
                outcome = session.run(probe, guarded.vocab_size)
                guarded.hear(outcome)
                told(outcome)
    finally:
        session.target.close()
