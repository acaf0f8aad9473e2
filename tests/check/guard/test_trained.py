"""The trained models of the guard: the first keeps its rows, the others get a share."""

from __future__ import annotations

from hybrid_kv.check.guard.trained import ACCEPTANCE, TRAINED, five_shot
from hybrid_kv.check.guard_model import FOLDERS


def test_every_embedded_model_is_guarded_and_has_its_recorded_metrics() -> None:
    assert TRAINED.keys() == FOLDERS.keys()
    assert ACCEPTANCE.keys() == {model.folder.name for model in TRAINED.values()}
    assert len({tuple(sorted(floors)) for floors in ACCEPTANCE.values()}) == 1
    assert all(
        (model.folder / name).exists()
        for model in TRAINED.values()
        for name in ("README.md", "recorded.json")
    )


def test_the_first_model_has_all_of_a_check_and_the_others_a_share() -> None:
    first, *others = TRAINED.values()
    assert (first.suffix, first.params, first.amount(200, 12)) == ("", {}, 200)
    for model in others:
        assert model.suffix and model.params == {"model": model.folder.name}
        assert model.amount(200, 12) == 20 and model.amount(4, 3) == 3


def test_all_prompts_share_their_examples() -> None:
    first, second = five_shot(3, 2)
    assert first != second
    assert first[: first.rindex("Question:")] == second[: second.rindex("Question:")]
