"""lm-eval's `local-completions` gets the same scores and texts as the engine in its process."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_kv import LLM
from hybrid_kv.check.guard_model import FOLDER
from tests.check.serve.conftest import QUESTION, Served
from tests.measure.accuracy.lm import engine_model, instance

CONTEXTS = [QUESTION, QUESTION.replace("3", "5"), QUESTION.replace("buys", "gives Tom")]
CHOICES = [" 7", " 3+4=7", " 12", "\n#### 7"]


@pytest.fixture
def remote(server: Served) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        model="guard_model",
        base_url=f"{server.url}/v1/completions",
        tokenizer=str(FOLDER),
        max_length=512,
        tokenizer_backend="huggingface",
        batch_size=3,
        max_retries=1,
    )


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [instance(kind, own, i) for i, own in enumerate(arguments)]


def test_answers_to_choose_from_get_the_same_scores(remote: Any, alone: LLM) -> None:
    sent = instances(
        "loglikelihood", [(context, choice) for context in CONTEXTS for choice in CHOICES]
    )
    expected = engine_model(llm=alone, progress=False).loglikelihood(sent)
    found = remote.loglikelihood(sent)
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], abs=1e-3
    )
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert any(is_greedy for _, is_greedy in found) and not all(is_greedy for _, is_greedy in found)


def test_questions_get_the_same_answers(remote: Any, alone: LLM) -> None:
    until = {"until": ["Question:"], "max_gen_toks": 60}
    sent = instances("generate_until", [(context, dict(until)) for context in CONTEXTS])
    expected = engine_model(llm=alone, progress=False).generate_until(sent)
    assert remote.generate_until(sent) == expected
    assert "#### 7" in expected[0]
