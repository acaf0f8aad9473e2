# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Play settings of `cases.json` in vLLM, each in a fork of this process.

A line of JSON comes for each setting that ends: its name, and what is wrong. vLLM is
imported once, as on a GPU; see `vllm_gpu`.
"""

import gc
import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PROCESSES = min(4, os.cpu_count() or 1)


def load(environment: dict[str, str]) -> tuple[Any, Any]:
    """Import vLLM.

    Args:
        environment: Variables of this process.

    Returns:
        The modules of the exact model, and of what plays requests.
    """
    os.environ.update(environment)
    import_module("vllm_gpu").prepare()
    case: Any = import_module("vllm_case")
    case.declare_vision()
    exact: Any = import_module("vllm_exact")
    exact.adapt = import_module("vllm_releases").adapt
    exact.make_tight = case.make_tight
    for name in (
        "engine.llm_engine",
        "worker.gpu_model_runner",
        "worker.gpu.model_runner",
    ):
        import_module(f"vllm.v1.{name}")
    registry: Any = import_module("vllm.model_executor.models.registry")
    # Another process lacks what was replaced here.
    registry._run_in_subprocess = lambda function: function()
    return exact, case


def wrong_answer(requests: Any, answers: Any, expected: Any) -> str:
    """Return a line about the first answer that is wrong; empty if all are right."""
    for number, (request, answer, tokens) in enumerate(
        zip(requests, answers, expected, strict=True)
    ):
        got = answer["token_ids"]
        wanted = tokens[: len(got)] if "abort_after" in request else tokens
        if got != wanted:
            return f"request {number} got {got}, not {wanted}"
    return ""


def play(exact: Any, case: Any, setting: dict[str, Any], cases: dict[str, Any]) -> str:
    """Play the probes of a setting.

    Returns:
        What is wrong first; empty if all is right.
    """
    config = cases["configs"][setting["model"]]
    llm, sent = case.engine({**setting, "config": config}, exact), 0
    for title, traffic in setting["probes"].items():
        if not llm.reset_prefix_cache():
            return f"{title}: reset_prefix_cache says that it did not"
        exact.renew(llm)
        for one in cases["traffic"][traffic]:
            requests = one["requests"]
            answers = case.play(llm, requests, one["preempt_every"], sent)
            sent += len(requests)
            if problem := wrong_answer(requests, answers, one["expected"]):
                return f"{title}: {problem}"
    return ""


def play_in_fork(name: str, exact: Any, case: Any, cases: dict[str, Any]) -> int:
    """Start a fork that plays a setting and prints its line.

    Returns:
        The fork's process id.
    """
    if child := os.fork():
        return child
    try:
        problem = play(exact, case, cases["settings"][name], cases)
    except BaseException:
        problem = traceback.format_exc()
    line = json.dumps({"setting": name, "problem": problem}) + "\n"
    os.write(3, line.encode())
    os._exit(0)


def main() -> None:
    """Play the settings that the arguments name; without any, all."""
    os.dup2(1, 3)  # vLLM prints, too
    os.dup2(2, 1)
    cases = json.loads((FOLDER / "cases.json").read_text())
    exact, case = load(cases["environment"])
    gc.freeze()
    running = 0
    for name in sys.argv[1:] or cases["settings"]:
        if running == PROCESSES:
            os.wait()
            running -= 1
        play_in_fork(name, exact, case, cases)
        running += 1
    while running:
        os.wait()
        running -= 1
    os._exit(0)  # freeing what vLLM has imported takes seconds


if __name__ == "__main__":
    main()
