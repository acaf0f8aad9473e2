"""The synthetic task is lm-eval's gsm8k with other documents; the real one loads offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.config import ConfigError
from hybrid_kv.measure.accuracy import tasks
from tests.support.gsm8k import write_gsm8k

OURS = {"task", "custom_dataset", "fewshot_config", "metadata"}
THEIRS = {"task", "tag", "dataset_path", "dataset_name", "metadata"}


@pytest.fixture(scope="module")
def synth() -> Any:
    return tasks.load_task("gsm8k_synth", limit=12)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's own gsm8k on our documents."""
    return tasks.load_task("gsm8k", gsm8k_dir=write_gsm8k(tmp_path_factory.mktemp("gsm8k")))


def test_only_the_documents_differ_from_lm_evals_gsm8k() -> None:
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    ours = load_yaml(Path(tasks.__file__).parent / "gsm8k_synth.yaml", resolve_func=False)
    theirs = load_yaml(Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml")
    assert {k: v for k, v in ours.items() if k not in OURS} == {
        k: v for k, v in theirs.items() if k not in THEIRS
    }


def test_prompt_is_lm_evals_for_the_same_document(synth: Any, real: Any) -> None:
    doc = synth.test_docs()[0]
    assert (
        synth.doc_to_text(doc) == real.doc_to_text(doc) == f"Question: {doc['question']}\nAnswer:"
    )
    assert synth.doc_to_target(doc) == real.doc_to_target(doc)
    shots = list(synth.fewshot_docs())
    real.sampler.replace_df(shots)
    zero = synth.fewshot_context(doc, 0)
    assert zero == real.fewshot_context(doc, 0)
    # The five shots stand in their order, whatever the document: the first one tells the box size.
    expected = "\n\n".join(f"Question: {s['question']}\nAnswer: {s['answer']}" for s in shots)
    assert synth.fewshot_context(doc, 5) == f"{expected}\n\n{zero}"
    assert "Each box now holds" in shots[0]["question"]


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        (" 2*8=16\n#### 16\n\n", "16", "16"),
        (" so it is $1,024.", "[invalid]", "$1,024."),
        (" #### 5 no, #### 7", "5", "7"),
        (" none", "[invalid]", "[invalid]"),
        ("[invalid]", "[invalid]", "[invalid]"),
    ],
)
def test_filters_agree(synth: Any, real: Any, answer: str, strict: str, flexible: str) -> None:
    for task in (synth, real):
        found = {f.name: next(iter(_apply(f, answer))) for f in task._filters}
        assert found == {"strict-match": strict, "flexible-extract": flexible}


def _apply(ensemble: Any, answer: str) -> list[Any]:
    responses: Any = [[answer]]
    for make in ensemble.filters:
        responses = list(make().apply(responses, [{}]))
    return responses


def test_documents_depend_on_the_seed_only() -> None:
    def questions(seed: int, limit: int) -> list[str]:
        return list(tasks.load_task("gsm8k_synth", seed=seed, limit=limit).test_docs()["question"])

    assert questions(0, 4) == questions(0, 12)[:4]
    assert questions(0, 4) != questions(1, 4)


def test_every_document_is_answered_by_its_target(synth: Any) -> None:
    for doc in synth.test_docs():
        number = doc["answer"].rsplit("#### ", 1)[1]
        assert synth.process_results(doc, [number])["exact_match"] == 1
        assert synth.process_results(doc, [number + "1"])["exact_match"] == 0
    assert {doc["needs_latch"] for doc in synth.test_docs()} == {True, False}


GOOD = '{"question": "a", "answer": "b"}\n'
SURROGATE = GOOD.replace('"a"', r'"\ud800"')


def test_a_line_is_not_cut_at_a_separator_in_its_text(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(GOOD * 5)
    (tmp_path / "test.jsonl").write_text(GOOD.replace('"a"', '"a\u2028b"'), encoding="utf-8")
    assert list(tasks.load_task("gsm8k", gsm8k_dir=tmp_path).test_docs()["question"]) == [
        "a\u2028b"
    ]


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("gsm9k", None, "gsm9k.*unknown.*gsm8k_synth"),
        ("gsm8k_synth", {}, "makes its own documents"),
        ("gsm8k", {}, "train.jsonl: No such file"),
        ("gsm8k", {"train.jsonl": ""}, "train.jsonl is empty"),
        ("gsm8k", {"train.jsonl": GOOD + '{"question": 1}\n'}, "train.jsonl line 2"),
        ("gsm8k", {"train.jsonl": GOOD + "\n" + GOOD}, "train.jsonl line 2"),
        ("gsm8k", {"train.jsonl": "[" * 100_000}, "train.jsonl line 1"),
        ("gsm8k", {"train.jsonl": GOOD * 5, "test.jsonl": "\udcff"}, "test.jsonl is not text"),
        (
            "gsm8k",
            {"train.jsonl": GOOD * 5, "test.jsonl": GOOD + SURROGATE},
            "cannot be loaded from",
        ),
        (
            "gsm8k",
            {"train.jsonl": GOOD * 4, "test.jsonl": GOOD},
            "train.jsonl has 4 questions, a prompt shows 5",
        ),
    ],
)
def test_bad_tasks_are_refused(
    tmp_path: Path, task: str, content: dict[str, str] | None, message: str
) -> None:
    for name, text in (content or {}).items():
        (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=message):
        tasks.load_task(task, gsm8k_dir=None if content is None else tmp_path)
