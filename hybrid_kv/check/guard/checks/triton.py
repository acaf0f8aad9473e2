"""Engines with `kernels="triton"` in Triton's interpreter: arguments and results of launches.

Each kernel is held against its reference by the unit tests of its folder. Here whole engines run on
all of them.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

from hybrid_kv.check.guard.exactness import Alone, Cell, Compared, describe
from hybrid_kv.check.guard.forced import FORCED
from hybrid_kv.check.guard.logits import LogitCase
from hybrid_kv.check.guard.logits import to_json as logits_to_json
from hybrid_kv.check.guard.play import Differences, run_scenario, unwarned
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.replay import to_json as scenario_to_json
from hybrid_kv.check.guard.traffic import SCENARIOS_PER_RUN, design, draw_scenario
from hybrid_kv.check.guard.workers import processes
from hybrid_kv.kernels.common.interpreter import start_interpreter

MODEL = "nemotron_h"
COMMON = {"dtype": "float32", "attention_backend": "TORCH", "kernels": "triton"}
# Both rollback schemes, each with a cache that hits and drafts that are accepted. Together they
# launch every kernel.
CELLS: tuple[Cell, ...] = (
    {**COMMON, "mamba_cache_mode": "all", "script": "mixed"},
    {
        **COMMON,
        "mamba_cache_mode": "align",
        "script": "mixed",
        "state_scheme": "recompute",
        "recompute_ring_len": 11,
    },
)
# Of random weights, which are the same each time, as these are: in float32 another prompt might
# have two best tokens. One that is a block and a little longer, and is sent again; one beside it.
PROMPTS = [[(7 * i * i + 3 * i) % 89 + 1 for i in range(length)] for length in (17, 3)]
NUM_NEW = 4
# All that an engine of this family can launch.
KERNELS = (
    "_attention",
    "_block_tables",
    "_conv_prefill",
    "_conv_update",
    "_gated_norm",
    "_outputs",
    "_state_update",
    "_states",
    "_store_kv",
    "commit_kernel",
    "recompute_kernel",
)


@check(
    "triton",
    quick=0,
    full=2,
    long=16,
    seconds=16.0,
    place=65,
    needs="safetensors tokenizers transformers",
)
def check_triton(run: Run) -> Iterator[CheckResult]:
    """Run exact scenarios, and compare the logits of a random model in both rollback schemes."""
    if find_spec("triton") is None:
        yield CheckResult("not run: Triton is not installed", 0, "", "", 0)
        return
    total = Differences()
    launched = set[str]()
    numbers = random.Random(run.seed).sample(range(len(FORCED) + len(design())), run.amount)
    with processes(1, start_interpreter) as pool:
        for number in numbers:
            differences, kernels = pool.submit(
                _play, run.seed * SCENARIOS_PER_RUN + number
            ).result()
            total += differences
            launched |= kernels
            run.progress(1)
            if total.wrong and run.fail_fast:
                break
        yield _exact(total, run.seed)
        cells, kernels = pool.submit(_ask).result()
    yield from map(_logits, cells)
    yield launch_result(launched | kernels)


@contextmanager
def _launched() -> Iterator[set[str]]:
    """Collect the names of the kernels that are launched inside."""
    from triton.runtime.interpreter import GridExecutor

    names = set[str]()
    launch = GridExecutor.__call__

    def naming(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(self.fn.__name__)
        return launch(self, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", naming):
        yield names


def _play(number: int) -> tuple[Differences, set[str]]:
    scenario = draw_scenario(number)
    with _launched() as names:
        differences = run_scenario(
            replace(scenario, options={**scenario.options, "kernels": "triton"})
        )
    return differences, names


@unwarned()
def _ask() -> tuple[Sequence[Compared], set[str]]:
    from hybrid_kv.models.random_checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory() as folder, _launched() as names:
        write_checkpoint(MODEL, folder, "tiny")
        alone = Alone(folder, prompts=PROMPTS, again=(0,), max_tokens=NUM_NEW)
        return [alone.check(cell) for cell in CELLS], names


def _exact(total: Differences, seed: int) -> CheckResult:
    first = total.wrong[0] if total.wrong else None
    return CheckResult(
        "wrong tokens, exact model",
        len(total.wrong),
        "requests",
        "0",
        total.num_requests,
        str(first or ""),
        {"seed": seed},
        {"scenarios": total.num_scenarios},
        case=scenario_to_json(first.scenario, first.rule) if first else "",
    )


def _logits(compared: Compared) -> CheckResult:
    case = LogitCase("alone", MODEL, compared.cell, PROMPTS, (0,), NUM_NEW)
    return CheckResult(
        f"largest logit difference, {describe(compared.cell)}",
        compared.worst,
        "logit",
        f"{compared.limit:.1g}",
        compared.num_tokens,
        compared.problem,
        dict(compared.cell),
        {"cached_tokens": compared.cached_tokens, "accepted": compared.accepted},
        case=logits_to_json(case, compared.broken[0]) if compared.broken[0] else "",
    )


def launch_result(launched: set[str]) -> CheckResult:
    missing = sorted(set(KERNELS) - launched)
    most = len(KERNELS)
    void = f"void: never launched: {', '.join(missing)}" if missing else ""
    return CheckResult("kernels launched", most - len(missing), "", str(most), most, void)
