"""Engine and transformers must give the same tokens before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.harness.cells import Case, Cell

pytest.importorskip("transformers")

from bench import generate
from bench.harness import command
from bench.harness.cells import WrongResultError
from bench.harness.measurement import Measurement
from hybrid_kv.measure.results import Receipt, read_rows
from hybrid_kv.measure.timing.case import ENGINE, checked
from hybrid_kv.measure.timing.clock import Interval

Questions = Callable[[str, str], Case]

CELLS = generate.contests()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Cell]]:
    monkeypatch.setattr(generate, "NUM_TOKENS", 3)
    generate.prompts_and_answers.cache_clear()
    yield [cell for cell in CELLS if cell.quick and cell.benchmark == "greedy"]
    generate.prompts_and_answers.cache_clear()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Questions]:
    """Three questions, two at a time, with every variant."""
    monkeypatch.setattr(generate, "LONGEST_ANSWER", 16)  # so that answers end for either reason
    generate.questions_and_answers.cache_clear()
    yield partial(generate.questions, 0, 3, 2)
    generate.questions_and_answers.cache_clear()


def test_every_cell_has_its_rival() -> None:
    assert len(CELLS) == 16 + 18
    rivals = [cell for cell in CELLS if cell.params["subject"] == "transformers"]
    engines = [cell for cell in CELLS if cell.params["subject"] == ENGINE]
    assert {cell.promise for cell in engines} == {None}
    assert [{**cell.params, "subject": ENGINE} for cell in rivals] == [
        cell.params for cell in engines
    ]
    high = [cell.params for cell in rivals if cell.promise != 1.0]
    assert [cell.promise for cell in rivals if cell.params in high] == [3.0, 3.0]
    found = [(params["count"], params["batch"], params["variant"]) for params in high]
    assert found == [(24, 8, "drafts"), (64, 8, "drafts")]


@pytest.mark.parametrize(
    ("variant", "subject"), [*((v, ENGINE) for v in generate.VARIANTS), ("plain", "transformers")]
)
def test_questions_get_the_answers_that_each_gets_alone(
    two: Questions, variant: str, subject: str
) -> None:
    case = two(variant, subject)
    texts, stop, wanted = generate.questions_and_answers(3)
    assert case.check() == 0
    case.reset()
    assert case.run() == wanted
    assert [len(answer) for answer in wanted] == [16, 13, 16] and [
        answer[-1] == stop for answer in wanted
    ] == [0, 1, 0]
    assert len({len(text) for text in texts}) > 1, "nothing is padded"


def test_a_cached_run_starts_with_an_empty_cache(two: Questions) -> None:
    case, llm = two("cached", ENGINE), generate.build_engine("guard", 2, "cached")
    case.run()
    case.reset()
    texts, params = generate.questions_and_answers(3)[0], generate.SamplingParams(max_tokens=1)
    outputs = llm.generate(texts, params, progress=False)
    # the others wait for the first
    assert [output.cached_tokens for output in outputs] == [0, 256, 256]


@pytest.mark.parametrize("wrong", [[[1, 2]], [[1]], [[1, 2, 3], [4]]])
def test_another_answer_is_no_result(wrong: list[list[int]]) -> None:
    with pytest.raises(WrongResultError):
        generate.require_same(wrong, [[1, 3]] if len(wrong) == 1 else [[1, 2], [3, 4]])


def test_both_give_the_tokens_of_each_prompt_alone(short: list[Cell]) -> None:
    assert [cell.params["subject"] for cell in short] == [ENGINE, "transformers"]
    for cell in short:
        case = cell.make()
        assert checked(cell.key, case) == 0
        assert [len(tokens) for tokens in case.run()] == [3] * 8


@pytest.mark.parametrize("subject", [ENGINE, "transformers"])
def test_another_token_is_no_result(
    short: list[Cell], subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = [cell for cell in short if cell.params["subject"] == subject]
    case = cell.make()
    wrong = [[1, 2, 3]] * 8
    engine = SimpleNamespace(
        generate=lambda *_, **__: [SimpleNamespace(token_ids=tokens) for tokens in wrong]
    )
    monkeypatch.setattr(generate, "build_engine", lambda model: engine)
    monkeypatch.setattr(generate, "_generate", lambda model, ids: wrong)
    with pytest.raises(WrongResultError, match="generate/greedy"):
        checked(cell.key, case)


def results(high: float, benchmark: str = "greedy") -> list[Measurement]:
    cells = [cell for cell in CELLS if cell.benchmark == benchmark]
    engine, rival = next(
        pair for pair in zip(cells[::2], cells[1::2], strict=True) if pair[1].promise == 1
    )
    time, receipt = (
        Interval(2.0, 1.9, 2.1),
        Receipt(checked_before=True, checked_after=True, max_error=0.0),
    )
    return [
        Measurement(rival, time, Interval(high - 0.1, high - 0.2, high), 9, receipt),
        Measurement(engine, time, None, 9, receipt),
    ]


@pytest.mark.parametrize(("high", "code"), [(1.5, 0), (0.9, 1)])
def test_the_table_and_the_exit_code(
    high: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "rows.csv"
    made = {"greedy": results(high), "questions": results(1.7, "questions")}
    monkeypatch.setattr(
        generate, "contests", lambda: [one.cell for each in made.values() for one in each]
    )
    monkeypatch.setattr(command, "measure_together", lambda group, _: made[group[0].benchmark])
    assert generate.main(["--out", str(out)]) == code
    printed = capsys.readouterr().out
    assert (
        f"({high - 0.1:.2f}; {high - 0.2:.2f} to {high:.2f})" in printed
        and "(1.60; 1.50 to 1.70)" in printed
    )
    assert "generate/greedy, cpu time" in printed and "generate/questions, cpu time" in printed
    assert ("fail: generate/greedy" in printed) == bool(
        code
    ) and "fail: generate/questions" not in printed
    assert len(read_rows(out)) == 6
