"""What the guard model's logits are held against can fail."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.guard.checks.guard_model import LARGEST, logit_difference


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_no_number_is_the_largest_difference(value: float) -> None:
    logits = torch.zeros(3, 4, dtype=torch.float64)
    logits[1, 2] = value
    assert logit_difference(logits, torch.zeros(3, 4, dtype=torch.float64)).tolist() == [0, LARGEST, 0]
