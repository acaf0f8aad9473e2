"""What finds a planted bug by asking a server: probes, and a changed copy of the engine behind `hybrid-kv serve`.

Nothing is told to them of the bug: every one is asked about in the same settings. Most are of the embedded trained
models, whose drafts are accepted now and then. Their states forget within a hundred tokens; random ones do not.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hybrid_kv.accuracy.guard_model import FOLDERS
from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.mutation.catch import Catch
from hybrid_kv.probes.judge import Judge, first_difference
from hybrid_kv.probes.oracle import Oracle
from hybrid_kv.probes.registry import load_probes
from hybrid_kv.probes.session import Failure, References, Session, calibrate
from hybrid_kv.targets import ours, serve
from hybrid_kv.targets.target import Ask, Target, TargetError
from hybrid_kv.threads import one_thread

# A model and a setting each, those first in which most bugs act: drafts, a history of inputs instead of states, states
# at boundaries inside a chunk, chunks of more than a block in a pool that evicts and loads, random weights, blocks of
# unequal size (without a prefix cache that of a state is as long as a request may be), several boundaries in a chunk.
CELLS: tuple[tuple[str, dict[str, str]], ...] = (
    ("qwen3_5_moe_text", {"prefix": "align", "spec": "mtp3"}),
    ("nemotron_h", {"prefix": "align", "spec": "mtp3", "scheme": "replay"}),
    ("qwen3_5_moe_text", {"prefix": "all", "spec": "ngram3", "chunk": "17"}),
    ("qwen3_5_moe_text", {"prefix": "align", "chunk": "100", "blocks": "tight", "offload": "host"}),
    ("bamba", {"prefix": "align", "spec": "ngram3", "scheme": "replay"}),
    ("qwen3_5_moe_text", {"spec": "mtp3", "async": "on"}),
    ("bamba", {"prefix": "all"}),
)


@dataclass
class Found(Catch):
    """
    Attributes:
        cell: the model and the setting.
        is_first: whether the token that is named is the one at which the answer leaves that of the unchanged engine;
            None: none is named.
    """

    cell: str = ""
    is_first: bool | None = None


class Planted:
    """`hybrid-kv serve` of a copy of this package. See `targets.target.Kind`."""

    name: str = serve.name
    factors: Mapping[str, Sequence[str]] = serve.factors
    size: str = serve.size

    def __init__(self, root: Path) -> None:
        self.root = root

    def start(self, folder: str, settings: Mapping[str, str]) -> Target:
        """See `targets.target.Kind`."""
        return serve.start(folder, settings, self.root)


@cache
def _made(model: str) -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory()
    write_checkpoint(model, made.name, "tiny")
    return made


def _folder(model: str) -> str:
    """Of an embedded model, or of a family with random weights, which lives as long as this process."""
    return str(FOLDERS[model]) if model in FOLDERS else _made(model).name


# No mutant changes what these say: one of each for all of them.
_oracle, _unchanged = cache(Oracle), cache(lambda folder, dtype: ours.start(folder, {"dtype": dtype}))


@cache
def _sound(model: str, levels: tuple[tuple[str, str], ...]) -> tuple[Judge, int]:
    """What the server without a bug says of rounding and of the size of a block, in this setting."""
    folder, settings = _folder(model), dict(levels)
    judge = Judge(_oracle(folder, settings.get("dtype", "float32")))
    session = Session(serve, folder, settings, judge, References(serve, folder))
    try:
        calibrate(session, ConfigFile.read(folder).size("vocab_size"))
    finally:
        session.target.close()
    return judge, session.unit


def ask(root: Path) -> tuple[Found, float]:
    """The probes in each setting, in their order, to the first wrong answer; and the seconds until then.

    Args:
        root: where a bug was planted.
    """
    found, begin, kind = Found(), time.perf_counter(), Planted(root)
    with one_thread(), ExitStack() as stack:
        references = {model: References(kind, _folder(model)) for model, _ in CELLS}
        for one in references.values():
            stack.callback(one.close)
        for model, settings in CELLS:
            _ask(kind, model, settings, references[model], found)
            if found.section:
                name = FOLDERS[model].name if model in FOLDERS else model
                found.cell = " ".join([name, *(f"{name}={level}" for name, level in settings.items())])
                break
    return found, time.perf_counter() - begin


def _ask(kind: Planted, model: str, settings: Mapping[str, str], references: References, found: Found) -> None:
    folder, dtype = _folder(model), settings.get("dtype", "float32")
    judge, unit = _sound(model, tuple(settings.items()))
    vocab_size = ConfigFile.read(folder).size("vocab_size")
    found.section, found.rule = "probes", "start"
    try:
        session = Session(kind, folder, settings, judge, references)
    except (ConfigError, TargetError) as error:
        found.detail = str(error)
        return
    found.rule = "death"
    try:
        session.unit = unit
        for probe in load_probes():
            outcome = session.run(probe, vocab_size)
            found.requests += outcome.num_answers
            if outcome.verdict == "wrong":
                found.rule, found.detail = probe.name, outcome.detail
                for failure in outcome.failures:
                    found.is_first = is_first(failure, judge.limit, _unchanged(folder, dtype))
                return
        found.section = found.rule = ""
    except (ConfigError, TargetError) as error:
        found.detail = str(error)
    finally:
        session.target.close()


def is_first(failure: Failure, limit: float, unchanged: Target) -> bool | None:
    """Whether the token that a failure names is the first that differs from an unchanged engine's answer.

    Args:
        limit: what a log-probability may differ by.

    Returns:
        None if no token is named, or it is not known in which of several answers.
    """
    asked, told, position = failure.rounds[-1].asks[failure.index], failure.answer, failure.judgement.position
    if told.error or told.others or not failure.judgement.expected:
        return None
    plain = Ask(asked.prompt, asked.max_tokens, asked.temperature, asked.seed, logprobs=True)
    (right,) = unchanged.ask([plain])
    i = first_difference(told.token_ids, right.token_ids)
    if failure.judgement.expected[position : position + 1] != told.token_ids[position : position + 1]:
        return i == position
    values = zip(told.logprobs, right.logprobs, told.token_ids, strict=False)
    off = (j for j, (one, other, token) in enumerate(values) if not abs(one[token] - other[token]) <= limit)
    return next(off, None) == position
