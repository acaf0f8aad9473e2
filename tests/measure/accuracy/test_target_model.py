"""Questions to a target get the answers, scores and file of our own engine's process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv import LLM
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.check.targets.target import Answer, Ask, TargetError
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.measure.accuracy.run import evaluate, write_samples
from hybrid_kv.models.loader import load_tokenizer
from tests.check.serve.conftest import OPTIONS, QUESTION, Served, served
from tests.cli.run import raising, refused
from tests.measure.accuracy.lm import instance
from tests.support.answers import call

UNTIL = {"until": ["Question:"], "max_gen_toks": 40, "do_sample": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(LLM(str(FOLDER), **OPTIONS)) as one:
        yield one


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("answers") / "base.jsonl.gz"
    write_samples(evaluate(limit=4, progress=False, device="cpu"), file)
    return file


class Fake:
    """A target that answers as configured."""

    name, version, model, longest = "fake", "1", FOLDER.name, 100
    factors: dict[str, tuple[str, ...]] = {}  # noqa: RUF012  (of a kind; this is both)

    def __init__(self, answer: Answer) -> None:
        self.answer, self.sent, self.is_closed = answer, list[Ask](), False

    def start(self, folder: str, settings: object) -> Fake:
        return self

    def ask(self, requests: Sequence[Ask]) -> list[Answer]:
        self.sent += requests
        return [self.answer for _ in requests]

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.is_closed = True


def asked_of(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, count: int = 1, **more: Any
) -> tuple[Any, list[str]]:
    from hybrid_kv.measure.accuracy import target_model

    monkeypatch.setattr(target_model, "kind_of", lambda name: fake)
    lm = target_model.TargetLM("fake", FOLDER)
    arguments = (QUESTION, {**UNTIL, **more})
    return lm, lm.generate_until([instance("generate_until", arguments, i) for i in range(count)])


def test_a_server_gets_the_questions_the_scores_and_the_tokens_of_a_run_in_this_process(
    server: Served, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = tmp_path / "b.jsonl.gz"
    given = [
        "--target",
        server.url,
        "--against",
        baseline,
        "--samples",
        samples,
        "--results",
        tmp_path,
    ]
    code, printed, error = call(capsys, *given)
    assert code == 0 and "4 of 4" in printed, error
    through = evaluate(target=f"{server.url}/v1", limit=4, progress=False)
    here = evaluate(limit=4, progress=False, device="cpu")
    assert through.records == here.records
    assert through.num_prompt_tokens == here.num_prompt_tokens and through.hit_rate
    assert server.url not in str(through.params) and "target" in through.params


def test_what_goes_on_behind_its_end_is_cut_where_the_engine_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = load_tokenizer(FOLDER)
    tokens = tokenizer.encode(" 3+4=7\n#### 7\n\nQuestion: Ann has 3 pens.")
    end = len(tokenizer.encode(" 3+4=7\n#### 7\n\nQuestion:"))
    fake = Fake(Answer(tuple(tokens), cached_tokens=5))
    lm, (text,) = asked_of(fake, monkeypatch)
    (output,) = lm.outputs["toy", 0]
    assert text == " 3+4=7\n#### 7\n\n" and output.token_ids == tokens[:end] and lm.caches_prefixes
    assert fake.sent[0].stop == ("Question:",) and fake.sent[0].max_tokens == 40
    fake.answer = Answer((*tokens[:4], 0, 9, 9))
    lm, (text,) = asked_of(fake, monkeypatch)
    assert text == tokenizer.decode(tokens[:4]) and lm.outputs["toy", 0][0].token_ids == [
        *tokens[:4],
        0,
    ]


def test_no_more_requests_are_open_than_a_server_lets_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(Answer((1,)))
    asked_of(fake, monkeypatch, count=40)
    assert [ask.after for ask in fake.sent] == [0] * 32 + list(range(1, 9))


def test_an_answer_is_no_longer_than_the_target_lets_it_be(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(Answer((1,)))
    asked_of(fake, monkeypatch, max_gen_toks=90)
    assert fake.sent[0].max_tokens == 100 - len(fake.sent[0].prompt) < 90


def test_a_request_that_fails_is_a_question_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm, (text,) = asked_of(Fake(Answer((), error="HTTP 500: 7")), monkeypatch)
    assert text == "[invalid]" and lm.outputs["toy", 0][0].error == "HTTP 500: 7"


def test_a_task_that_samples_or_scores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot run a task that samples"):
        asked_of(Fake(Answer((1,))), monkeypatch, do_sample=True)
    lm, _ = asked_of(Fake(Answer((1,))), monkeypatch)
    for score in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(ConfigError, match="cannot score, only generate"):
            score([])


def test_what_cannot_be_asked_is_said_in_one_line(
    server: Served,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given, said in (
        (
            ["--target", "http://127.0.0.1:9"],
            "http://127.0.0.1:9: no model is served there",
        ),
        (["--target", "tensorrt"], "tensorrt: there is no such engine"),
        (
            ["--target", server.url, "--model", "guard_model_qwen3_5"],
            "serves guard_model, not guard_model_qwen3_5",
        ),
        (
            ["--target", server.url, "--num-blocks", "9"],
            "num_blocks is for this engine alone; leave it out",
        ),
    ):
        assert said in refused(capsys, "accuracy", *given, "--limit", "2", "--results", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_target_is_closed_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(Answer((1,)))
    monkeypatch.setattr("hybrid_kv.measure.accuracy.target_model.kind_of", lambda name: fake)
    fake.model = "another"
    with pytest.raises(ConfigError, match="serves another"):
        evaluate(target="fake", limit=1, progress=False)
    assert fake.is_closed
    dying = Fake(Answer((1,)))
    monkeypatch.setattr("hybrid_kv.measure.accuracy.target_model.kind_of", lambda name: dying)
    dying.ask = raising(TargetError("it died"))  # type: ignore[method-assign]
    with pytest.raises(HybridKVError, match="it died"):
        evaluate(target="fake", limit=1, progress=False)
    assert dying.is_closed


@pytest.mark.parametrize(
    ("levels", "caches", "settings"),
    [
        (("off", "all", "on"), True, {"prefix": "on"}),  # what vLLM takes by itself
        (("off", "align", "all"), True, {"prefix": "align"}),
        (("off", "align"), False, {}),
        ((), True, {}),
    ],
)
def test_an_engine_is_started_with_its_own_prefix_cache(
    levels: tuple[str, ...], caches: bool, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_kv.measure.accuracy import target_model

    started: list[object] = []

    class Noted(Fake):
        factors = {"prefix": levels} if levels else {}

        def start(self, folder: str, settings: object) -> Fake:
            started.append(settings)
            return self

    monkeypatch.setattr(target_model, "kind_of", lambda _: Noted(Answer(())))
    target_model.start_target("noted", FOLDER, caches)
    assert started == [settings]
