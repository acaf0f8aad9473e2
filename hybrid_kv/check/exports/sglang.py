"""A folder with a test of SGLang's hybrid caches: one test file, its traffic, and what plays it.

It needs SGLang and what SGLang needs, nothing of this package. Answers are those of the exact
model, computed when the folder is written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hybrid_kv.check.exports.traffic import PACKAGE, TEST, probes_of, recorded
from hybrid_kv.check.probes.run import matrix_of, text_of
from hybrid_kv.check.probes.session import BATCH
from hybrid_kv.check.targets import sglang
from hybrid_kv.check.targets.kinds import for_model, model_folder
from hybrid_kv.check.targets.workers import sglang as worker

WRITTEN = Path(__file__).with_name("written")
MODULES = Path(worker.__file__).with_name("sglang_cpu")
# Without them a launch in Triton's interpreter takes three times as long.
INTERPRETER = ("interpreter", "shortcuts")
# By model; nine minutes of CPU. Each setting is one that SGLang serves, on a GPU.
CELLS = {
    "gdn": (
        *sglang.MATRIX[:2],
        sglang.MATRIX[3],
        "prefix=on buffer=extra overlap=on graph=on",
    ),
    "mamba2": sglang.FURTHER["mamba2"],
    "short_conv": sglang.FURTHER["short_conv"][:1],
}
# Of the probes that a default check of one model leaves to others, those that found patches alone.
MORE = (
    "together across a boundary",
    "answers across a boundary",
    "ends at a cached entry",
)


def write_test(folder: Path, seed: int = 0) -> None:
    """Write the test into an empty folder."""
    cases: dict[str, Any] = {"models": {}, "settings": {}}
    for name, texts in CELLS.items():
        with model_folder(f"exact:{name}") as checkpoint:
            kind = for_model(sglang.KIND, checkpoint)
            # Without the plainest setting: what it shows the others show, too.
            cells = {text_of(cell): cell for cell in matrix_of(kind, texts)[1:]}
            probes = {
                text: [*probes_of(kind, cell, worker.CAN, MORE)] for text, cell in cells.items()
            }
            every = {probe.name: probe for of in probes.values() for probe in of}
            config = json.loads((Path(checkpoint) / "config.json").read_text())
            cases["models"][name] = {
                "config": config,
                "traffic": {
                    title: recorded(probe, checkpoint, seed, worker.LONGEST, batch=BATCH)
                    for title, probe in every.items()
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
    shutil.copy(WRITTEN / "sglang_test.py", folder / TEST)


def _copy_modules(package: Path) -> None:
    interpreter = (MODULES.with_name("vllm_gpu") / f"{name}.py" for name in INTERPRETER)
    package.mkdir()
    for module in (*sorted(MODULES.glob("*.py")), *interpreter):
        shutil.copy(module, package)
    shutil.copy(WRITTEN / "sglang_run.py", package / "run.py")
