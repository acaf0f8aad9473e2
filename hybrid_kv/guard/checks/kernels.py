"""What a CPU runs and what kernels are held against is held against formulas: `guard.definitions`.

A kernel is right if it equals its reference in plain torch. Were that wrong, it would make wrong kernels look right. So
would wrong tables and metadata: what kernels are handed on a GPU is made here on a CPU, and held against each row.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.guard.kernel_cases import CASES
from hybrid_kv.guard.kernel_cases.draw import Draw
from hybrid_kv.guard.registry import CheckResult, Run, check

# Of the largest value, and at least of 1, as operands are: what a sum cancels is not lost by the operation. What has
# fewer bits was computed in float32, and rounded once.
SHARE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-5}


@check(
    "kernels", quick=25, full=250, seconds=0.055, place=13,
    factors=lambda: {"case": [case.__name__ for case in CASES]},
)  # fmt: skip
def check_kernels(run: Run) -> list[CheckResult]:
    """`run.amount` rounds of all cases or one, on small operands that the seed draws."""
    begin = time.perf_counter()
    wrong, count = list[str](), 0
    cases = [(number, case) for number, case in enumerate(CASES) if run.only.get("case") in (None, case.__name__)]
    for trial in range(run.amount):
        for number, case in cases:
            try:
                for name, got, expected in case(Draw(run.seed, trial, number)):
                    count += 1
                    if error := _error(got, expected):
                        wrong.append(f"round {trial}: {name} {list(got.shape)}: {error}")
            except Exception as error:  # what broke may be any of them, and the others are still asked
                wrong.append(f"round {trial}: {case.__name__}: {type(error).__name__}: {error}")
        run.progress(1)
        if wrong and run.fail_fast:
            break
    return [
        CheckResult(
            "kernels", "references and loops unlike their definitions", not wrong, len(wrong), "operations", "0", count,
            time.perf_counter() - begin, wrong[0] if wrong else "", {"seed": run.seed},
        )
    ]  # fmt: skip


def _error(got: torch.Tensor, expected: npt.NDArray[Any]) -> str:
    """How much too far they are apart; nothing if they are not. Integers are equal, and NaN is where NaN should be."""
    if got.shape != expected.shape:
        return f"the definition has {list(expected.shape)}"
    if not got.is_floating_point():
        values = got.numpy()
        return "" if (values == expected).all() else f"{values.tolist()}, not {expected.tolist()}"[:300]
    values = got.double().numpy()
    difference = np.where(np.isnan(values) & np.isnan(expected), 0, np.abs(values - expected))
    difference = np.nan_to_num(difference, nan=np.inf)  # a number from NaN
    size = np.nan_to_num(np.abs(expected))
    limit = SHARE[got.dtype] * size.max(initial=1) + torch.finfo(got.dtype).eps / 2 * size
    return "" if (difference <= limit).all() else f"it is off by {difference.max():.3g} of {size.max():.3g}"
