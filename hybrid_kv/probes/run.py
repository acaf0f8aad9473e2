"""All probes in every setting of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from hybrid_kv.config import ConfigError
from hybrid_kv.probes.judge import Judge
from hybrid_kv.probes.oracle import Oracle
from hybrid_kv.probes.registry import load_probes
from hybrid_kv.probes.session import Outcome, References, Session, calibrate
from hybrid_kv.targets.target import Kind, TargetError

Settings = dict[str, str]


def default_matrix(kind: Kind) -> list[Settings]:
    """The plainest engine, each level of the prefix cache, and with the last of these each other level by itself."""
    prefixes = kind.factors.get("prefix", ())
    cells: list[Settings] = [{}, *({"prefix": level} for level in prefixes[1:])]
    cached: Settings = {"prefix": prefixes[-1]} if len(prefixes) > 1 else {}
    for factor, levels in kind.factors.items():
        if factor != "prefix":
            cells += [{**cached, factor: level} for level in levels[1:]]
    return cells


def matrix_of(kind: Kind, text: Sequence[str]) -> list[Settings]:
    """All combinations of `factor=level,level` texts; the plainest engine is always the first.

    Raises:
        ConfigError: no such factor or level.
    """
    wanted: dict[str, list[str]] = {}
    for part in " ".join(text).split():
        factor, separator, levels = part.partition("=")
        if not separator or factor not in kind.factors:
            raise ConfigError(f"--matrix {part}: write FACTOR=LEVEL,…; {kind.name} has {', '.join(kind.factors)}")
        wanted[factor] = levels.split(",")
        if unknown := [level for level in wanted[factor] if level not in kind.factors[factor]]:
            raise ConfigError(f"--matrix {factor}={unknown[0]}: use one of {', '.join(kind.factors[factor])}")
    cells = [dict(zip(wanted, levels, strict=True)) for levels in product(*wanted.values())]
    plain = [cell for cell in cells if all(level == kind.factors[factor][0] for factor, level in cell.items())]
    return [{}, *(cell for cell in cells if cell not in plain)]


def run_probes(
    kind: Kind,
    folder: str,
    matrix: Sequence[Settings],
    against: Kind | None = None,
    select: Sequence[str] = (),
    seed: int = 0,
    amount: int = 1,
    told: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Every probe in every setting; a setting that cannot be started is an outcome, too.

    Args:
        against: an engine to take answers from, instead of the oracle.
        select: only probes that have one of these in their name; `alone` is always run.
        told: called with each outcome.

    Raises:
        ConfigError: the model is not read by the oracle nor by the engine, or no probe is selected.
    """
    probes = [one for one in load_probes() if not select or any(part in one.name for part in select)]
    if not probes:
        raise ConfigError(f"-k {', '.join(select)}: no probe has this in its name")
    if probes[0].name != "alone":
        probes = [one for one in load_probes() if one.name == "alone"] + probes
    references = References(against or kind, folder, matrix[0] if against is None else {})
    judges: dict[str, Judge] = {}
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        told(outcome)

    vocab_size = Oracle(folder).vocab_size if against is None else _vocab_size(folder)
    try:
        for settings in matrix:
            dtype = settings.get("dtype", kind.factors.get("dtype", ("float32",))[0])
            if new := dtype not in judges:
                judges[dtype] = Judge(Oracle(folder, dtype) if against is None else None)
            judge = judges[dtype]
            try:
                session = Session(kind, folder, settings, judge, references, seed, amount)
            except (ConfigError, TargetError) as error:
                verdict = "cannot be asked here" if isinstance(error, ConfigError) else "wrong"
                tell(Outcome("start", settings, verdict, str(error)))  # type: ignore[arg-type]
                continue
            try:
                if new:
                    calibrate(session, vocab_size)
                for probe in probes:
                    outcome = session.run(probe, vocab_size)
                    if new and probe.name == "alone" and outcome.verdict == "wrong":
                        judge.trusted = False
                    tell(outcome)
            finally:
                session.target.close()
    finally:
        references.close()
    return outcomes


def _vocab_size(folder: str) -> int:
    from hybrid_kv.models.config_file import ConfigFile

    return ConfigFile.read(folder).size("vocab_size")
