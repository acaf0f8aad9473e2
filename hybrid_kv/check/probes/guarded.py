"""An engine that is guarded from outside: its sessions, and all probes in one setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hybrid_kv.check.probes.judge import ExactJudge, Judge, WeightsJudge
from hybrid_kv.check.probes.oracle import Oracle
from hybrid_kv.check.probes.registry import Probe, Verdict, load_probes
from hybrid_kv.check.probes.session import Outcome, References, Session, SessionLoad, calibrate
from hybrid_kv.check.targets.exact import is_exact
from hybrid_kv.check.targets.kinds import for_model
from hybrid_kv.check.targets.target import Kind, TargetError, is_plain
from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.exact_weights.checkpoint import has_exact_weights

Settings = dict[str, str]
UNHEARD = "?"  # the version of an engine that did not start yet
# Of one kind in one setting; vLLM takes 20 s to start again, and there are 26 probes.
MOST_DEATHS = 3


class Guarded:
    """An engine and a model, and what their sessions share.

    Args:
        kind: the engine.
        folder: the checkpoint.
        against: an engine to take answers from, instead of the oracle.
        amount: how much each probe requests; 1 is a quick look.
        thorough: also probes that a run of both models has with the other, see `registry.Probe`.

    Attributes:
        version: of the engine, once one was heard.
        judges: by dtype, those that were needed so far.
        shortest: tokens that a prompt has at least: one more than one that killed the engine alone.

    Raises:
        ConfigError: the oracle does not read the model, or the engine cannot run an exact one.
    """

    def __init__(
        self,
        kind: Kind,
        folder: str,
        against: Kind | None = None,
        seed: int = 0,
        amount: int = 1,
        thorough: bool = True,
    ) -> None:
        self.kind = for_model(kind, folder)
        self.folder = folder
        self.against = against
        self.seed = seed
        self.amount = amount
        self.thorough = thorough
        self.version = UNHEARD
        self.judges: dict[str, Judge] = {}
        self.shortest = 1
        self._references: dict[str, References] = {}
        self.vocab_size = ConfigFile.read(folder).size("vocab_size")

    def judge_of(self, settings: Mapping[str, str]) -> Judge:
        """Return the judge of the setting's dtype."""
        dtype = settings.get("dtype", self.kind.factors.get("dtype", ("float32",))[0])
        if dtype not in self.judges and is_exact(self.folder):
            self.judges[dtype] = ExactJudge(self.folder)
        elif dtype not in self.judges and has_exact_weights(self.folder):
            self.judges[dtype] = next(iter(self.judges.values()), None) or WeightsJudge(self.folder)
        elif dtype not in self.judges:
            self.judges[dtype] = Judge(Oracle(self.folder, dtype) if self.against is None else None)
        return self.judges[dtype]

    def references_of(self, settings: Mapping[str, str]) -> References:
        """Return the references of the setting's dtype, if the engine that gives them has it."""
        kind = self.against or self.kind
        dtype = settings.get("dtype", "")
        if dtype not in self._references:
            has_it = dtype in kind.factors.get("dtype", ())
            plain = {"dtype": dtype} if has_it else {}
            self._references[dtype] = References(kind, self.folder, plain)
        return self._references[dtype]

    def is_plain(self, settings: Mapping[str, str]) -> bool:
        """Return whether all factors but the dtype are at their plainest level."""
        return is_plain(self.kind, settings, {*settings} - {"dtype"})

    def hear(self, outcome: Outcome) -> None:
        """Stop trusting the oracle where the plain engine, alone and cold, disagrees with it.

        An engine that dies says nothing of the oracle.
        """
        disagrees = any(not failure.died for failure in outcome.failures)
        judge = self.judge_of(outcome.settings)
        is_plain_alone = outcome.probe == "alone" and self.is_plain(outcome.settings)
        if disagrees and is_plain_alone and not judge.is_exact:
            judge.trusted = False

    def close(self) -> None:
        """End the engines that gave references."""
        for references in self._references.values():
            references.close()

    def session(self, settings: Mapping[str, str]) -> Session:
        """Start a session.

        Raises:
            ConfigError: the engine does not know the setting or the model.
            TargetError: it does not start.
        """
        judge = self.judge_of(settings)
        references = self.references_of(settings)
        load = SessionLoad(self.seed, self.amount, self.shortest, self.thorough)
        try:
            session = Session(self.kind, self.folder, settings, judge, references, load)
        except TargetError as error:
            self.version = error.version or self.version
            raise
        self.version = session.target.version
        if not judge.is_calibrated:
            calibrate(session, self.vocab_size)
        return session


def runs_in(
    probe: Probe, kind: Kind, settings: Mapping[str, str], weights: str, thorough: bool
) -> bool:
    """Return whether a probe runs in a setting of an engine.

    Args:
        weights: of the model, `exact` or `random`.
    """
    if (probe.exact and weights != "exact") or (weights in probe.not_in and not thorough):
        return False
    is_sparing = weights == "exact" and not thorough and kind.is_slow(settings)
    if is_sparing and not probe.exact and probe.name != "alone":
        return False
    if probe.elsewhere or not is_plain(kind, settings, probe.when.split()):
        return True
    # Where steps are fast, the plainest setting runs every probe.
    return not is_sparing and is_plain(kind, settings, {*settings} - {"dtype"})


def ask(
    guarded: Guarded, settings: Settings, select: Sequence[str], report: Callable[[Outcome], None]
) -> None:
    """Run all selected probes in one setting.

    An engine that dies of the same thing again and again gets no more.
    """
    try:
        session = guarded.session(settings)
    except (ConfigError, TargetError) as error:
        verdict: Verdict = "not supported" if isinstance(error, ConfigError) else "wrong"
        report(Outcome("start", settings, verdict, str(error)))
        return
    weights = "exact" if session.judge.is_exact else "random"
    deaths = Counter[str]()
    try:
        for probe in load_probes():
            is_selected = not select or any(word in probe.name for word in select)
            if probe.name != "alone" and not is_selected:
                continue
            if not runs_in(probe, guarded.kind, settings, weights, guarded.thorough):
                continue
            if max(deaths.values(), default=0) >= MOST_DEATHS:
                detail = f"not sent: it died {MOST_DEATHS} times of one thing"
                report(Outcome(probe.name, settings, "inconclusive", detail))
                continue
            outcome = session.run(probe, guarded.vocab_size)
            deaths.update(failure.last_words for failure in outcome.failures if failure.died)
            guarded.hear(outcome)
            guarded.shortest = max(guarded.shortest, session.shortest)
            report(outcome)
            if outcome.is_last:
                break
    finally:
        session.target.close()
