"""The commands of a night on this machine: on a pretend device or smaller, or else as they are."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from rehearsal.github import guard_rows

RUN_ID = "0123456789ab"  # of a stand-in's row
QUESTIONS = 10
NO_WARNING = "-W ignore::pytest.PytestAssertRewriteWarning"


@contextmanager
def pretend_device(kernels: str) -> Iterator[None]:
    """Compute on a pretend GPU with CUDA's events, by torch's kernels or Triton's interpreter."""
    import torch

    from hybrid_kv.kernels.common.interpreter import start_interpreter
    from hybrid_kv.measure.device import pretend_gpu

    if kernels == "torch":
        sys.modules["triton"] = None  # type: ignore[assignment]
    else:
        start_interpreter()
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 1.0
    )
    properties = SimpleNamespace(name="pretend GPU", L2_cache_size=4096)
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "Event", lambda **_: event))
        stack.enter_context(
            patch.object(torch.cuda, "get_device_properties", lambda *_: properties)
        )
        stack.enter_context(pretend_gpu())
        yield


def one_logit_cell() -> None:
    """Let the guard model play one engine and few tokens."""
    from hybrid_kv.check.guard.checks import guard_model

    guard_model.LOGIT_CELLS = guard_model.LOGIT_CELLS[:1]
    guard_model.LEAST = 2
    guard_model.NUM_NEW = 4
    guard_model.PREEMPTS = 2


def two_contests() -> None:
    """Let `bench.gpu` race two kernels on a tiny model, launched without a CUDA graph."""
    from bench import gated_norm, gpu, kernel_blocks
    from bench._shapes import SHAPES, LayerShape

    def contests(*_: object, **__: object) -> Iterator[gpu.Contest]:
        yield gated_norm.norms("cuda", "tiny", 5)
        yield kernel_blocks.contest("cuda", 16, 8)

    SHAPES["tiny"] = LayerShape(4, 16, 16, 2, 4, 2, 32)
    gpu.contests = contests
    gpu.Cuda.capture = lambda self, run: run


def write_questions() -> None:
    """Write ten questions and the shots before them as the files of GSM8K.

    They are for a machine that is offline.
    """
    from hybrid_kv.check.guard_model import problems

    made = problems.dataset(0, QUESTIONS, shots=5)
    folder = Path("gsm8k")
    folder.mkdir(exist_ok=True)
    for name, documents in (("train", made.shots), ("test", made.docs)):
        lines = (
            json.dumps({key: document[key] for key in ("question", "answer")})
            for document in documents
        )
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def nothing() -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Smaller:
    """A command that is cut.

    Attributes:
        command: a part of its line.
        unrehearsed: what of it is not run.
        kernels: of the pretend device; empty: it runs on the CPU.
        swap: arguments and what replaces them.
        add: arguments before all other options.
        prepare: what is done before it runs.
    """

    command: str
    unrehearsed: str
    kernels: str = ""
    swap: Mapping[str, str] = field(default_factory=dict)
    add: str = ""
    prepare: Callable[[], None] = nothing


SMALLER = (
    Smaller(
        "-m pytest -m gpu",
        "of the GPU tests all but tests/cache/test_offload.py and tests/kernels/gated_norm: "
        "kernels are interpreted",
        kernels="triton",
        add=f"{NO_WARNING} tests/cache/test_offload.py tests/kernels/gated_norm",
    ),
    Smaller(
        "guard --device cuda",
        "of the guard all but the guard model in one engine: the other sections need no device, "
        "and ran in ci.yml",
        kernels="torch",
        add="--quick --jobs 1 --only 'guard model'",
        prepare=one_logit_cell,
    ),
    Smaller(
        "-m bench.gpu",
        "of bench.gpu all but two contests on a tiny model",
        kernels="triton",
        add="--quick",
        prepare=two_contests,
    ),
    Smaller(
        "compare --tier gpu",
        "the GPU's cells of the comparison, which launch thousands of times: memory/plan is "
        "counted",
        swap={"gpu": "count"},
        add="-k memory/plan",
    ),
    Smaller(
        "--hypothesis-profile=nightly",
        "of the fuzz tests all but two examples each, and the hostile servers",
        swap={"--hypothesis-profile=nightly": "--hypothesis-profile=rehearsal"},
        add=f"{NO_WARNING} -k 'not hostile'",
    ),
    Smaller(
        "accuracy --model",
        f"GSM8K's own questions and the models of NIGHTLY_MODELS, from the hub: {QUESTIONS} made "
        "ones, the guard model",
        kernels="torch",
        swap={"--limit=1319": f"--limit={QUESTIONS}"},
        prepare=write_questions,
    ),
    Smaller(
        "accuracy divergence",
        "cached log-probabilities on a device: 8 tokens after each of 12 prompts are scored on the "
        "CPU",
        add="--limit 12 --max-tokens 8",
    ),
)
UNREHEARSED = (
    "times of a GPU: each launch takes 1 ms here",
    "CUDA graphs, and Triton's compiler: kernels are torch's or interpreted",
    *(smaller.unrehearsed for smaller in SMALLER),
    "commits before HEAD in asv: the night measures one",
    "GitHub itself: runners, rights, time limits, Pages, and the first night, which finds no "
    "branch `results`",
)


def run_tool(name: str, arguments: list[str]) -> None:
    """Run a tool of this environment with the workspace's code."""
    line = shlex.join([name, *arguments])
    sys.path[0] = os.environ["PYTHONPATH"] = os.getcwd()
    smaller = next((each for each in SMALLER if each.command in line), None)
    fault = os.environ.get("REHEARSED_FAULT")
    if fault:
        stand_in(fault, line)
        if fault == "no-gpu" and smaller:
            smaller = replace(smaller, kernels="", prepare=nothing)  # the command's own error
    if smaller is None:
        program = str(Path(sys.executable).parent / name)
        os.execv(program, [program, *arguments])
    run_smaller(smaller, name, arguments)


def run_smaller(smaller: Smaller, name: str, arguments: list[str]) -> None:
    """Run a command that is cut, in this process, which has the pretend device."""
    arguments = [smaller.swap.get(argument, argument) for argument in arguments]
    position = 2  # behind the module
    if name != "python":
        position = next(
            index for index, argument in enumerate(arguments) if argument.startswith("-")
        )
    arguments[position:position] = shlex.split(smaller.add)
    with ExitStack() as stack:
        if smaller.kernels:
            stack.enter_context(pretend_device(smaller.kernels))
        smaller.prepare()
        if "--task=gsm8k" in arguments:
            arguments.append("--gsm8k-dir=gsm8k")
        if name == "python":
            sys.exit(importlib.import_module(arguments[1]).main(arguments[2:]))
        from hybrid_kv.cli import main

        main(arguments)


def stand_in(fault: str, line: str) -> None:
    """Do what stands for a command in a night with a fault, and exit.

    Return if the real command is to run.
    """
    needs_gpu = re.search("-m gpu|device cuda|bench.gpu", line)
    is_full = fault == "disk" and "bench.gpu" in line
    if "results --check" in line or is_full or (fault == "no-gpu" and needs_gpu):
        return
    if "device cuda" in line:
        header, *_, row = guard_rows()
        folder = Path(os.environ["RESULTS"])
        folder.mkdir()
        (folder / "guard.csv").write_text(header + re.sub(",[^,]*", f",{RUN_ID}", row, count=1))
    for file in ("site/index.html", ".asv/results/machine.json"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    sys.exit(fault == "step" and "device cuda" in line)
