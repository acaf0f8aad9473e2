"""A folder with a test of vLLM's hybrid caches: one test file, its traffic, and what plays it.

It needs vLLM, pytest, and the Triton that a build for GPUs brings; nothing of this package. Both
model runners of GPUs run, on a GPU that is not there. Answers are those of the exact model,
computed when the folder is written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hybrid_kv.check.exports.traffic import PACKAGE, TEST, probes_of, recorded
from hybrid_kv.check.probes.guarded import Settings
from hybrid_kv.check.probes.run import matrix_of, text_of
from hybrid_kv.check.probes.session import SLOW_BATCH
from hybrid_kv.check.targets import vllm
from hybrid_kv.check.targets.kinds import for_model, model_folder
from hybrid_kv.check.targets.target import Kind
from hybrid_kv.check.targets.workers import vllm as worker
from hybrid_kv.environment import WORKER_DEFAULTS

WRITTEN, WORKERS = Path(__file__).with_name("written"), Path(worker.__file__).parent
MODULES = ("vllm_case.py", "vllm_exact.py", "vllm_releases.py", "vllm_gpu")
# What vLLM 0.32 and 0.33 get right, by exact model; on a GPU each is served.
CELLS = {
    "mixed": (
        "runner=v2 async=on",
        "runner=v2 chunk=24",
        "runner=v2 prefix=align",
        "runner=v2 prefix=on blocks=tight",
        "runner=v2 graph=full async=on",
        "runner=v2 spec=ngram3",
        "runner=v2 graph=decode spec=mtp3 prefix=align",
        "runner=v1 chunk=24 async=on",
        "runner=v1 prefix=on",
        "runner=v1 blocks=tight",
        "runner=v1 prefix=on chunk=40 blocks=tight",
        "runner=v1 spec=ngram3",
    ),
    "window": ("runner=v2 prefix=on", "runner=v1 prefix=on blocks=tight"),
}
# With drafts, these releases get prompts of one token wrong; see `vllm_one_token_beside_drafts`.
SHORTEST_WITH_DRAFTS = 2


def write_test(folder: Path, seed: int = 0) -> None:
    """Write the test into an empty folder."""
    cases: dict[str, Any] = {"configs": {}, "traffic": {}, "settings": {}}
    for model, cells in CELLS.items():
        with model_folder(f"exact:{model}") as checkpoint:
            kind = for_model(vllm.KIND, checkpoint)
            config = json.loads((Path(checkpoint) / "config.json").read_text())
            cases["configs"][model] = config
            # Without the plainest setting: what it shows the others show, too.
            for cell in matrix_of(kind, cells)[1:]:
                _add_setting(cases, model, kind, checkpoint, cell, seed)
    cases["environment"] = WORKER_DEFAULTS
    _copy_modules(folder / PACKAGE)
    (folder / PACKAGE / "cases.json").write_text(json.dumps(cases) + "\n")
    shutil.copy(WRITTEN / "vllm_test.py", folder / TEST)
    shutil.copy(WRITTEN / "vllm_step.yaml", folder / PACKAGE / "step.yaml")


def _add_setting(
    cases: dict[str, Any], model: str, kind: Kind, checkpoint: str, cell: Settings, seed: int
) -> None:
    """Add a setting of a model to the cases, with the traffic of its probes."""
    shortest = SHORTEST_WITH_DRAFTS if "spec" in cell else 1
    about = {"shortest": shortest, "batch": SLOW_BATCH}
    titles = {}
    for probe in probes_of(kind, cell, worker.CAN):
        title = f"{probe.name}, from {shortest} tokens"
        titles[title] = f"{model}: {title}"
        if titles[title] not in cases["traffic"]:
            rounds = recorded(probe, checkpoint, seed, worker.ROOM, **about)
            cases["traffic"][titles[title]] = rounds
    cases["settings"][named(model, cell)] = {
        "model": model,
        "options": worker.arguments(cell) | worker.exact_arguments(cell),
        "kernel_block_size": int(cell.get("kernel", "0")),
        "changes": ["make_tight"] if cell.get("blocks") == "tight" else [],
        "gpu": cell,
        "probes": titles,
    }


def named(model: str, cell: Settings) -> str:
    """Return a setting's name in the test; that of the first model's is its levels alone."""
    return text_of(cell) if model == next(iter(CELLS)) else f"model={model} {text_of(cell)}"


def _copy_modules(package: Path) -> None:
    package.mkdir()
    for name in MODULES:
        if (source := WORKERS / name).is_dir():
            shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, package)
    shutil.copy(WRITTEN / "vllm_run.py", package / "run.py")
