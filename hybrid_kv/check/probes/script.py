"""A failure of the exact model inside vLLM or SGLang as a script that needs the engine alone.

`python -m hybrid_kv.check.probes.script FILE` prints that of a case.
"""

from __future__ import annotations

import json
import pprint
import sys
import tempfile
from pathlib import Path
from typing import Any

from hybrid_kv.check.probes.reproducer import ProbeCase, from_json
from hybrid_kv.check.probes.shrink import as_json
from hybrid_kv.check.targets.exact import write_exact_checkpoint
from hybrid_kv.check.targets.workers import sglang
from hybrid_kv.check.targets.workers import vllm as worker
from hybrid_kv.environment import WORKER_DEFAULTS
from hybrid_kv.files import read_text

WORKERS = Path(worker.__file__).parent
GPU, CPU = "vllm_gpu", "sglang_cpu"  # folders of workers


def script_of(case: ProbeCase) -> str:
    """Return a script of a case: the model's source, the case, and what plays it.

    Its exit code is 1 while the answer is wrong. Empty for other engines and models.
    """
    if case.target not in SCRIPTS or not case.model.startswith("exact"):
        return ""
    _, _, name = case.model.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        write_exact_checkpoint(name or "mixed", folder)
        config = json.loads((Path(folder) / "config.json").read_text())
    lines = [*_about(case), *SCRIPTS[case.target](case, config)]
    return "\n".join([*lines, ""])


def _about(case: ProbeCase) -> list[str]:
    """Return the lines of a script's docstring."""
    words = " ".join(f"{factor}={level}" for factor, level in case.settings.items())
    engine = {"vllm": "vLLM", "sglang": "SGLang"}[case.target]
    return [
        f'"""{case.target} {case.version}, {words or "default settings"}: a wrong answer. '
        f"Found by `hybrid-kv check {case.target}`.",
        "",
        f"{case.problem.rstrip('.')}.",
        "",
        "The model's arithmetic is exact: integers modulo a "
        f"prime. It runs over {engine}'s own cache, tables and",
        "metadata, so a wrong token is a wrong block, slot, "
        f"state or column. Run it with {engine}'s Python; the exit code",
        "is 1 while the answer is wrong. The requests are in CASE, below the model.",
        '"""',
        "",
    ]


def _data(case: ProbeCase, config: dict[str, Any], **more: Any) -> list[str]:
    """Return the lines of a case."""
    data = {
        **more,
        "rounds": as_json(case.rounds, whole=True),
        "index": case.index,
        "expected": list(case.expected),
    }
    return [
        "CONFIG = " + json.dumps(config).replace("true", "True").replace("false", "False"),
        "CASE = " + pprint.pformat(data, width=118, compact=True, sort_dicts=False),
        'CASE["config"] = CONFIG',
        "",
        'if __name__ == "__main__":',
    ]


def _of_vllm(case: ProbeCase, config: dict[str, Any]) -> list[str]:
    settings = dict(case.settings)
    changes = {"make_tight": ("blocks", "tight"), "allow_async": ("async", "on")}
    on_gpu = settings.get("runner", "v2") != "cpu"
    if on_gpu:
        changes.pop("allow_async")  # on a GPU it is allowed
    chosen = [name for name, (factor, level) in changes.items() if settings.get(factor) == level]
    begins = [
        "# A GPU that is not there, on which vLLM's GPU worker runs as it is.",
        *_folder(GPU),
        f"import {GPU}",
        "",
        f"{GPU}.prepare()",
    ]
    return [
        (WORKERS / "vllm_case.py").read_text(),
        f"for name, value in {WORKER_DEFAULTS}.items():",
        "    os.environ.setdefault(name, value)",
        *(begins if on_gpu else ()),
        "declare_vision()",
        *((WORKERS / f"{name}.py").read_text() for name in ("vllm_exact", "vllm_releases")),
        "",
        *_data(
            case,
            config,
            options=worker.arguments(settings) | worker.exact_arguments(settings),
            kernel_block_size=int(settings.get("kernel", "0").replace("own", "0")),
            changes=chosen,
            gpu=settings if on_gpu else None,
        ),
        "    main(CASE, sys.modules[__name__])",
    ]


def _of_sglang(case: ProbeCase, config: dict[str, Any]) -> list[str]:
    settings = dict(case.settings)
    return [
        "import os",
        "import sys",
        "import tempfile",
        "",
        f"for name, value in {WORKER_DEFAULTS}.items():",
        "    os.environ.setdefault(name, value)",
        "# SGLang's scheduler on a CPU, as it is.",
        *_folder(CPU),
        f"import {CPU}",
        "",
        *_data(
            case,
            config,
            options=sglang.arguments(settings),
            environment=sglang.environment(settings),
            changes=sglang.changes(settings),
        ),
        f"    {CPU}.replay(CASE)",
    ]


SCRIPTS = {"vllm": _of_vllm, "sglang": _of_sglang}


def _folder(name: str) -> list[str]:
    """Return lines that make a folder of workers, and make it one to import."""
    files = sorted((WORKERS / name).glob("*.py"))
    return [
        "FILES = {}",
        *(f"FILES[{file.stem!r}] = r'''{file.read_text()}'''" for file in files),
        f"os.mkdir(files_folder := os.path.join(tempfile.mkdtemp(), {name!r}))",
        "for name, source in FILES.items():",
        '    with open(f"{files_folder}/{name}.py", "w") as file:',
        "        file.write(source)",
        "sys.path.insert(0, os.path.dirname(files_folder))",
    ]


if __name__ == "__main__":
    print(script_of(from_json(read_text(Path(sys.argv[1])), sys.argv[1])))
