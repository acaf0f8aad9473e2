"""One class has the rules that a scheme adds; groups without states have none of them."""

from __future__ import annotations

import pytest

from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel
from hybrid_kv.sanitizer import Sanitizer
from hybrid_kv.sanitizer.rules_rollback import RecomputeRules, RollbackRules


@pytest.mark.parametrize(("scheme", "rules"), [("slots", RollbackRules), ("recompute", RecomputeRules)])
def test_only_groups_with_states_have_rules_of_a_scheme(scheme: str, rules: type[RollbackRules]) -> None:
    (observer,) = LLM(
        ExactModel(ExactConfig(pattern="M*")), attention_backend="TORCH", block_size=8, num_blocks=60, max_num_seqs=2,
        max_model_len=64, device="cpu", mamba_cache_mode="all", state_scheme=scheme, sanitize=True,
    ).observers  # fmt: skip
    assert isinstance(observer, Sanitizer)
    groups = list(zip(observer.rollback, observer.shadows, strict=True))
    assert {type(own) for own, shadow in groups if shadow.is_mamba} == {rules}
    assert {type(own) for own, shadow in groups if not shadow.is_mamba} == {RollbackRules}
