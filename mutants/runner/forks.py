"""Processes that begin with everything imported but the engine.

It is run as a script, which imports nothing of the project.

A line of standard input names the folder of a copy, a module of `mutants.runner` and one of its
functions; what the function makes of the task in that folder is written next to it. The line of
output that answers is the exit code of the process, or minus the signal that ended it.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import traceback
import warnings
from math import ceil
from pathlib import Path

# What the quick guard imports, 7 CPU seconds. One that is not installed is not needed, or what
# needs it reports that.
PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "pandas",
    "tqdm.auto",
    "scipy.stats",
    "yaml",
    "safetensors.torch",
    "tokenizers",
    "transformers",
    "lm_eval",
    "lm_eval.evaluator",
    "datasets",
)
TASK, ANSWER, CASE, OUTPUT = "task.json", "answer.json", "case.json", "output"  # files of a folder


def serve() -> None:
    """Answer tasks until standard input ends."""
    sys.path[0] = str(
        Path(__file__).parents[2]
    )  # the checkout, in place of the folder of this script
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a package prints is not an answer.
    warnings.simplefilter("ignore")
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _run(*line.rstrip("\n").split("\t"))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(folder: str, module: str, function: str) -> None:
    """Import the copy and carry out its task; this process ends here."""
    root = Path(folder)
    code = 1
    try:
        with open(root / OUTPUT, "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        task = json.loads((root / TASK).read_text())
        # A busy machine must not end what is only slow there. Ten times as long is for what waits
        # and never runs.
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(task["limit"]), resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, 10 * task["limit"])
        if not task["compiled"]:
            os.environ["NUMBA_DISABLE_JIT"] = "1"
            importlib.import_module("numba").core.config.reload_config()
        os.chdir(root)
        sys.path.insert(0, folder)
        found = getattr(importlib.import_module(f"mutants.runner.{module}"), function)(
            task, root / CASE
        )
        (root / ANSWER).write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # without what the parent has registered to be run at its end


if __name__ == "__main__":
    serve()
