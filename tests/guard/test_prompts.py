"""Prompts that share their worked examples."""

from hybrid_kv.guard.prompts import five_shot


def test_all_prompts_share_their_examples():
    first, second = five_shot(3, 2)
    assert first != second
    assert first[: first.rindex("Question:")] == second[: second.rindex("Question:")]
