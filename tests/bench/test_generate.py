"""The engine and transformers give the same tokens before they are timed, and who gives others is found out."""

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from bench import generate
from bench._timing import Interval
from bench.cases import WrongResultError
from bench.measurement import ENGINE, Measurement, checked
from hybrid_kv.results import Receipt

CELLS = generate.cells()


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(generate, "NUM_TOKENS", 3)
    generate._prompts.cache_clear()
    yield [cell for cell in CELLS if cell.quick]
    generate._prompts.cache_clear()


def test_every_cell_has_its_rival():
    assert len(CELLS) == 16
    for subject, promise in ((ENGINE, None), ("transformers", 1.0)):
        same = [cell for cell in CELLS if cell.params["subject"] == subject]
        assert len(same) == 8 and {cell.promise for cell in same} == {promise}


def test_both_give_the_tokens_of_each_prompt_alone(short):
    assert [cell.params["subject"] for cell in short] == [ENGINE, "transformers"]
    for cell in short:
        case = cell.make()
        assert checked(cell, case) == 0
        assert [len(tokens) for tokens in case.run()] == [3] * 8


@pytest.mark.parametrize("subject", [ENGINE, "transformers"])
def test_another_token_is_no_result(short, subject, monkeypatch):
    (cell,) = [cell for cell in short if cell.params["subject"] == subject]
    case = cell.make()
    wrong = [[1, 2, 3]] * 8
    engine = SimpleNamespace(generate=lambda *_, **__: [SimpleNamespace(token_ids=tokens) for tokens in wrong])
    monkeypatch.setattr(generate, "_engine", lambda model: engine)
    monkeypatch.setattr(generate, "_generate", lambda model, ids: wrong)
    with pytest.raises(WrongResultError, match="generate/greedy"):
        checked(cell, case)


def results(high):
    engine, rival = CELLS[:2]
    time, receipt = Interval(2.0, 1.9, 2.1), Receipt(True, True, 0.0)
    return [
        Measurement(rival, time, Interval(high - 0.1, high - 0.2, high), 9, receipt),
        Measurement(engine, time, None, 9, receipt),
    ]


@pytest.mark.parametrize(("high", "code"), [(1.5, 0), (0.9, 1)])
def test_the_table_and_the_exit_code(high, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate", "--quick"])
    monkeypatch.setattr(generate, "run", lambda quick: iter([results(high)] if quick else []))
    assert generate.main() == code
    assert f"{high - 0.1:.2f} [{high - 0.2:.2f}, {high:.2f}]" in capsys.readouterr().out
