"""A folder with a test of SGLang's hybrid caches: one test file, its traffic, and what plays it.

It needs SGLang and what SGLang needs, nothing of this package. Answers are those of the exact
model, computed when the folder is written.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_kv.check.probes.guarded import runs_in
from hybrid_kv.check.probes.registry import Probe, Round, Rounds, Traffic, load_probes
from hybrid_kv.check.probes.run import matrix_of, text_of
from hybrid_kv.check.probes.session import BATCH, DEFAULT_UNIT
from hybrid_kv.check.probes.shrink import as_json
from hybrid_kv.check.targets import sglang
from hybrid_kv.check.targets.exact import ExactAnswers
from hybrid_kv.check.targets.kinds import for_model, model_folder
from hybrid_kv.check.targets.target import Answer, Kind
from hybrid_kv.check.targets.workers import sglang as worker
from hybrid_kv.models.config_file import ConfigFile

TEST, RUN = (Path(__file__).with_name(f"sglang_{name}.py") for name in ("test", "run"))
MODULES = Path(worker.__file__).with_name("sglang_cpu")
# Without them a launch in Triton's interpreter takes three times as long.
INTERPRETER = ("interpreter", "shortcuts")
PACKAGE = "exact_hybrid"
# By model; nine minutes of CPU. Each setting is one that SGLang serves, on a GPU.
CELLS = {
    "gdn": (*sglang.MATRIX[:2], sglang.MATRIX[3], "prefix=on buffer=extra overlap=on graph=on"),
    "mamba2": sglang.FURTHER["mamba2"],
    "short_conv": sglang.FURTHER["short_conv"][:1],
}
# Of the probes that a default check of one model leaves to others, those that found patches alone.
MORE = ("together across a boundary", "answers across a boundary", "ends at a cached entry")


def write_test(folder: Path, seed: int = 0) -> None:
    """Write the test into an empty folder."""
    cases: dict[str, Any] = {"models": {}, "settings": {}}
    for name, texts in CELLS.items():
        with model_folder(f"exact:{name}") as checkpoint:
            kind = for_model(sglang.KIND, checkpoint)
            # Without the plainest setting: what it shows the others show, too.
            cells = {text_of(cell): cell for cell in matrix_of(kind, texts)[1:]}
            probes = {text: _probes_of(kind, cell) for text, cell in cells.items()}
            every = {probe.name: probe for of in probes.values() for probe in of}
            config = json.loads((Path(checkpoint) / "config.json").read_text())
            cases["models"][name] = {
                "config": config,
                "traffic": {
                    title: recorded(probe, checkpoint, seed) for title, probe in every.items()
                },
            }
        for text, cell in cells.items():
            cases["settings"][f"{name}: {text}"] = {
                "model": name,
                "options": worker.arguments(cell),
                "environment": worker.environment(cell),
                "changes": worker.changes(cell),
                "probes": [probe.name for probe in probes[text]],
            }
    _copy_modules(folder / PACKAGE)
    (folder / PACKAGE / "cases.json").write_text(json.dumps(cases) + "\n")
    shutil.copy(TEST, folder / "test_exact_hybrid_cache.py")


def _copy_modules(package: Path) -> None:
    interpreter = (MODULES.with_name("vllm_gpu") / f"{name}.py" for name in INTERPRETER)
    package.mkdir()
    for module in (*sorted(MODULES.glob("*.py")), *interpreter):
        shutil.copy(module, package)
    shutil.copy(RUN, package / "run.py")


def _probes_of(kind: Kind, cell: Mapping[str, str]) -> list[Probe]:
    """Return the probes of a setting, in their order."""
    can = {*worker.CAN}
    return [
        probe
        for probe in load_probes()
        if can.issuperset(probe.needs.split())
        and runs_in(probe, kind, cell, "exact", thorough=probe.name in MORE)
    ]


def recorded(probe: Probe, checkpoint: str, seed: int) -> list[dict[str, Any]]:
    """Return the rounds of a probe as JSON, each with the tokens of the exact model."""
    answers = ExactAnswers(checkpoint)
    size = ConfigFile.read(checkpoint).size("vocab_size")
    longest = min(worker.LONGEST, max(256, 5 * DEFAULT_UNIT))
    drawn = random.Random(f"{seed}/{probe.name}")
    traffic = Traffic(drawn, size, DEFAULT_UNIT, longest, worker.LONGEST, batch=BATCH)
    rounds = probe.rounds(traffic)
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
