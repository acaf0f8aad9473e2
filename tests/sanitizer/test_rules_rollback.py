"""One class has the rules that a scheme adds; a scheme without one keeps its states in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from hybrid_kv.attention import rollback
from hybrid_kv.attention.rollback import Rollback
from hybrid_kv.cache.spec import RollbackSpec
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel
from hybrid_kv.sampling import SamplingParams
from hybrid_kv.sanitizer import Sanitizer
from hybrid_kv.sanitizer.rules_rollback import RecomputeRules, RollbackRules


def sanitizer(scheme: str) -> tuple[LLM, Sanitizer]:
    llm = LLM(
        ExactModel(ExactConfig(pattern="M*")), attention_backend="TORCH", block_size=8, num_blocks=60, max_num_seqs=2,
        max_model_len=64, device="cpu", mamba_cache_mode="all", state_scheme=scheme, sanitize=True,
    )  # fmt: skip
    (observer,) = llm.observers
    assert isinstance(observer, Sanitizer)
    return llm, observer


@pytest.mark.parametrize(("scheme", "rules"), [("slots", RollbackRules), ("recompute", RecomputeRules)])
def test_only_groups_with_states_have_rules_of_a_scheme(scheme: str, rules: type[RollbackRules]) -> None:
    _, observer = sanitizer(scheme)
    groups = list(zip(observer.rollback, observer.shadows, strict=True))
    assert {type(own) for own, shadow in groups if shadow.is_mamba} == {rules}
    assert {type(own) for own, shadow in groups if not shadow.is_mamba} == {RollbackRules}


@dataclass(frozen=True)
class ThirdSpec(RollbackSpec):
    """As `slots`, under a name of its own."""

    scheme: ClassVar[str] = "third"


class Third(Rollback):
    """As `slots`, under a name of its own."""

    @staticmethod
    def memory(*arguments: object) -> RollbackSpec:
        return ThirdSpec()


def test_a_third_scheme_runs_under_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rollback.SCHEMES, "third", Third)
    llm, observer = sanitizer("third")
    outputs = llm.generate([list(range(20))] * 2, SamplingParams(max_tokens=10), progress=False)
    plain, _ = sanitizer("slots")
    expected = plain.generate([list(range(20))] * 2, SamplingParams(max_tokens=10), progress=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert observer.ledger.step > 8
