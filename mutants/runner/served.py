"""Probes that find an injected bug through a server: a changed copy behind `hybrid-kv serve`.

They know nothing of the bug: every one is probed in the same settings. Most are of the embedded
trained models, whose drafts are accepted now and then. Their states forget within a hundred tokens;
random ones do not.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from hybrid_kv.check.guard_model import FOLDERS
from hybrid_kv.check.probes.judge import Judge
from hybrid_kv.check.probes.oracle import Oracle
from hybrid_kv.check.probes.registry import load_probes
from hybrid_kv.check.probes.session import References, Session, calibrate
from hybrid_kv.check.targets import serve
from hybrid_kv.check.targets.target import Kind, TargetError
from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.threads import one_thread
from mutants.runner.guard import Catch

# A model and a setting each, those first in which most bugs act: drafts, a history of inputs
# instead of states, states at boundaries inside a chunk, chunks of more than a block in a pool that
# evicts and loads, random weights, blocks of unequal size (without a prefix cache that of a state
# is as long as a request may be), several boundaries in a chunk.
CELLS: tuple[tuple[str, dict[str, str]], ...] = (
    ("qwen3_5_moe_text", {"prefix": "align", "spec": "mtp3"}),
    ("nemotron_h", {"prefix": "align", "spec": "mtp3", "scheme": "recompute"}),
    ("qwen3_5_moe_text", {"prefix": "all", "spec": "ngram3", "chunk": "17"}),
    ("qwen3_5_moe_text", {"prefix": "align", "chunk": "100", "blocks": "tight", "offload": "host"}),
    ("bamba", {"prefix": "align", "spec": "ngram3", "scheme": "recompute"}),
    ("qwen3_5_moe_text", {"spec": "mtp3", "async": "on"}),
    ("bamba", {"prefix": "all"}),
)


def _copy(root: Path) -> Kind:
    """Return `hybrid-kv serve` of a copy of this package."""
    return replace(serve.KIND, start=partial(serve.Served, root=root))


@cache
def _made(model: str) -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory()
    write_checkpoint(model, made.name, "tiny")
    return made


def _folder(model: str) -> str:
    """Return the folder of an embedded model, or of a family with random weights.

    The latter lives as long as this process.
    """
    return str(FOLDERS[model]) if model in FOLDERS else _made(model).name


_oracle = cache(Oracle)  # No mutant changes what it says: one for all of them.


@cache
def _sound(model: str, levels: tuple[tuple[str, str], ...]) -> tuple[Judge, int]:
    """Return the judge and the block size of the server without a bug, in this setting.

    The judge knows its rounding.
    """
    folder, settings = _folder(model), dict(levels)
    judge = Judge(_oracle(folder, settings.get("dtype", "float32")))
    session = Session(serve, folder, settings, judge, References(serve, folder))
    try:
        calibrate(session, ConfigFile.read(folder).size("vocab_size"))
    finally:
        session.target.close()
    return judge, session.unit


def probe(root: Path) -> tuple[Catch, float]:
    """Run the probes in each setting, in their order, to the first wrong answer.

    Return it, and the seconds until then.

    Args:
        root: the folder of a copy with a bug.
    """
    begin, kind, requests = time.perf_counter(), _copy(root), 0
    with one_thread(), ExitStack() as stack:
        references = {model: References(kind, _folder(model)) for model, _ in CELLS}
        for one in references.values():
            stack.callback(one.close)
        for model, settings in CELLS:
            found = _probe(kind, model, settings, references[model])
            requests += found.requests
            if found.section:
                name = FOLDERS[model].name if model in FOLDERS else model
                found.cell = " ".join(
                    [name, *(f"{name}={level}" for name, level in settings.items())]
                )
                break
    return replace(found, requests=requests), time.perf_counter() - begin


def _probe(kind: Kind, model: str, settings: Mapping[str, str], references: References) -> Catch:
    folder, requests = _folder(model), 0
    judge, unit = _sound(model, tuple(settings.items()))
    try:
        session = Session(kind, folder, settings, judge, references)
    except (ConfigError, TargetError) as error:
        return Catch("probes", "start", str(error))
    try:
        session.unit = unit
        for one in load_probes():
            outcome = session.run(one, ConfigFile.read(folder).size("vocab_size"))
            requests += outcome.num_answers
            if outcome.verdict == "wrong":
                return Catch("probes", one.name, outcome.detail, requests)
    except (ConfigError, TargetError) as error:
        return Catch("probes", "death", str(error), requests)
    finally:
        session.target.close()
    return Catch(requests=requests)
