"""A failure of the exact model inside vLLM as a script that needs vLLM alone.

`python -m hybrid_kv.check.probes.script FILE` prints that of a case.
"""

from __future__ import annotations

import json
import pprint
import sys
import tempfile
from pathlib import Path

from hybrid_kv.check.probes.reproducer import ProbeCase, from_json
from hybrid_kv.check.probes.shrink import as_json
from hybrid_kv.check.targets.exact import write_exact_checkpoint
from hybrid_kv.check.targets.workers import vllm as worker
from hybrid_kv.environment import WORKER_DEFAULTS
from hybrid_kv.files import read_text

WORKERS = Path(worker.__file__).parent
GPU = "vllm_gpu"  # a folder of workers


def script_of(case: ProbeCase) -> str:
    """Return a script of a case: the plugin's source, the case, and what plays it.

    Its exit code is 1 while the answer is wrong. Empty for other engines and models.
    """
    if case.target != "vllm" or not case.model.startswith("exact"):
        return ""
    _, _, name = case.model.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        write_exact_checkpoint(name or "mixed", folder)
        config = json.loads((Path(folder) / "config.json").read_text())
    settings = dict(case.settings)
    changes = {"make_tight": ("blocks", "tight"), "allow_async": ("async", "on")}
    on_gpu = settings.get("runner", "v2") != "cpu"
    if on_gpu:
        changes.pop("allow_async")  # on a GPU it is allowed
    data = {
        "options": worker.arguments(settings) | worker.exact_arguments(settings),
        "kernel_block_size": int(settings.get("kernel", "0").replace("own", "0")),
        "changes": [
            name for name, (factor, level) in changes.items() if settings.get(factor) == level
        ],
        "gpu": settings if on_gpu else None,
        "rounds": as_json(case.rounds, whole=True),
        "index": case.index,
        "expected": list(case.expected),
    }
    words = " ".join(f"{factor}={level}" for factor, level in settings.items())
    described = words or "default settings"
    lines = [
        f'"""{case.target} {case.version}, {described}: a wrong answer. '
        "Found by `hybrid-kv check vllm`.",
        "",
        f"{case.problem.rstrip('.')}.",
        "",
        "The model's arithmetic is exact: integers modulo a "
        "prime. It runs over vLLM's own cache, block tables and",
        "metadata, so a wrong token is a wrong block, slot, "
        "state or column. Run it with vLLM's Python; the exit code",
        "is 1 while the answer is wrong. The requests are in CASE, below the model.",
        '"""',
        "",
        (WORKERS / "vllm_case.py").read_text(),
        f"for name, value in {WORKER_DEFAULTS}.items():",
        "    os.environ.setdefault(name, value)",
        *(_gpu() if on_gpu else ()),
        "declare_vision()",
        *((WORKERS / f"{name}.py").read_text() for name in ("vllm_exact", "vllm_releases")),
        "",
        "CONFIG = " + json.dumps(config).replace("true", "True").replace("false", "False"),
        "CASE = " + pprint.pformat(data, width=118, compact=True, sort_dicts=False),
        'CASE["config"] = CONFIG',
        "",
        'if __name__ == "__main__":',
        "    main(CASE, sys.modules[__name__])",
        "",
    ]
    return "\n".join(lines)


def _gpu() -> list[str]:
    """Return lines that make the folder of the GPU that is not there, and begin to pretend."""
    files = sorted((WORKERS / GPU).glob("*.py"))
    return [
        "# A GPU that is not there, on which vLLM's GPU worker runs as it is.",
        "GPU = {}",
        *(f"GPU[{file.stem!r}] = r'''{file.read_text()}'''" for file in files),
        "os.mkdir(gpu_folder := os.path.join(tempfile.mkdtemp(), " + repr(GPU) + "))",
        "for name, source in GPU.items():",
        '    with open(f"{gpu_folder}/{name}.py", "w") as file:',
        "        file.write(source)",
        "sys.path.insert(0, os.path.dirname(gpu_folder))",
        f"import {GPU}",
        "",
        f"{GPU}.prepare()",
    ]


if __name__ == "__main__":
    print(script_of(from_json(read_text(Path(sys.argv[1])), sys.argv[1])))
