"""What finds a planted bug by asking a server: probes, and a changed copy of the engine behind `hybrid-kv serve`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.mutation.catch import Catch
from hybrid_kv.mutation.mutant import Mutant
from hybrid_kv.probes.judge import Judge
from hybrid_kv.probes.oracle import Oracle
from hybrid_kv.probes.registry import load_probes
from hybrid_kv.probes.session import References, Session, calibrate
from hybrid_kv.targets import serve
from hybrid_kv.targets.models import model_folder
from hybrid_kv.targets.target import Target, TargetError

MODEL = "qwen3_5_text"
_FOLDERS = ExitStack()  # until the process ends


class Planted:
    """`hybrid-kv serve` of a copy of this package. See `targets.target.Kind`."""

    name: str = serve.name
    factors: Mapping[str, Sequence[str]] = serve.factors

    def __init__(self, root: Path) -> None:
        self.root = root

    def start(self, folder: str, settings: Mapping[str, str]) -> Target:
        """See `targets.target.Kind`."""
        return serve.start(folder, settings, self.root)


@cache
def _oracle(model: str) -> tuple[str, Oracle]:
    """A checkpoint and what transformers says of it, which no mutant changes: one for all of them."""
    folder = _FOLDERS.enter_context(model_folder(model))
    return folder, Oracle(folder)


def ask(mutant: Mutant, root: Path) -> tuple[Catch, float]:
    """The probes of one setting, in their order, to the first wrong answer; and the seconds until then.

    Args:
        root: where the mutant was planted.
    """
    settings = dict(mutant.settings)
    folder, oracle = _oracle(settings.pop("model", MODEL))
    kind, vocab_size = Planted(root), ConfigFile.read(folder).size("vocab_size")
    catch, begin = Catch(), time.perf_counter()
    references = References(kind, folder)
    session: Session | None = None
    try:
        known = {factor: level for factor, level in settings.items() if factor in kind.factors}
        session = Session(kind, folder, known, Judge(oracle), references)
        calibrate(session, vocab_size)
        for probe in load_probes():
            outcome = session.run(probe, vocab_size)
            catch.requests += outcome.num_answers
            if outcome.verdict == "wrong":
                catch.section, catch.rule, catch.detail = "probes", probe.name, outcome.detail
                break
    except (ConfigError, TargetError) as error:
        catch.section, catch.rule, catch.detail = "probes", "start", str(error)
    finally:
        references.close()
        if session is not None:
            session.target.close()
    return catch, time.perf_counter() - begin
