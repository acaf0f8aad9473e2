"""What a scheme adds is asked of one class; a scheme that nobody knows keeps its states in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from hybrid_kv.attention import undo
from hybrid_kv.attention.undo import Slots
from hybrid_kv.cache.spec import UndoSpec
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel
from hybrid_kv.sampling import SamplingParams
from hybrid_kv.sanitizer import Sanitizer
from hybrid_kv.sanitizer.rules_undo import ReplayRules, UndoRules


def sanitizer(scheme: str) -> tuple[LLM, Sanitizer]:
    llm = LLM(
        ExactModel(ExactConfig(pattern="M*")), attention_backend="TORCH", block_size=8, num_blocks=60, max_num_seqs=2,
        max_model_len=64, device="cpu", mamba_cache_mode="all", state_scheme=scheme, sanitize=True,
    )  # fmt: skip
    (watcher,) = llm.watchers
    assert isinstance(watcher, Sanitizer)
    return llm, watcher


@pytest.mark.parametrize(("scheme", "rules"), [("slots", UndoRules), ("replay", ReplayRules)])
def test_only_groups_with_states_have_rules_of_a_scheme(scheme: str, rules: type[UndoRules]) -> None:
    _, watcher = sanitizer(scheme)
    assert {type(own) for own, shadow in zip(watcher.undo, watcher.shadows, strict=True) if shadow.is_mamba} == {rules}
    attention = {type(own) for own, shadow in zip(watcher.undo, watcher.shadows, strict=True) if not shadow.is_mamba}
    assert attention == {UndoRules}


@dataclass(frozen=True)
class ThirdSpec(UndoSpec):
    """As `slots`, under a name of its own."""

    scheme: ClassVar[str] = "third"


class Third(Slots):
    """As `slots`, under a name of its own."""

    @staticmethod
    def memory(*arguments: object) -> UndoSpec:
        return ThirdSpec()


def test_a_third_scheme_runs_under_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(undo.SCHEMES, "third", Third)
    llm, watcher = sanitizer("third")
    outputs = llm.generate([list(range(20))] * 2, SamplingParams(max_tokens=10), progress=False)
    plain, _ = sanitizer("slots")
    expected = plain.generate([list(range(20))] * 2, SamplingParams(max_tokens=10), progress=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert watcher.ledger.step > 8
