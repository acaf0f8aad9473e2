"""The mistakes that a split of prefill and decode invites are seen."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from hybrid_kv.engine import handover, llm
from hybrid_kv.guard.checks import split
from hybrid_kv.guard.checks.split import check_split
from hybrid_kv.guard.registry import CHECKS, Run

# What becomes of which text of `engine/handover.py`.
BREAKS = {
    "the state is sent from the request's last block": (
        "int(columns[anchor]), int(columns[source])",
        "int(columns[anchor]), int(columns[runner.block_tables.num_blocks[row, group.group_id] - 1])",
    ),
    "the state is written to the request's last block": (
        "int(columns[spec.mode.anchor(num_tokens - 1, spec.block_size)])",
        "int(columns[-1])",
    ),
    "a request has one block of states": (
        "block = int(columns[spec.mode.anchor(num_tokens - 1, spec.block_size)])",
        "(block,) = columns[columns != 0].tolist()",
    ),
    "the window stays behind": (
        "view[block, slice(rows)] = part.to(view.device)",
        "view[block, slice(rows)] = part.to(view.device) if rows is None else 0",
    ),
    "the window is read from its first row": ("view[window, first : first + rows]", "view[window, :rows]"),
    "one token too few is computed": (
        "len(self.output_token_ids) - 1",
        "len(self.output_token_ids) - 2",
    ),
    "slots are counted in kernel blocks": (
        "positions, spec.block_size)",
        "positions, view.shape[1])",
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    text = Path(handover.__file__).read_text()
    assert text.count(old) == 1
    changed = ModuleType("changed_handover")
    monkeypatch.setitem(sys.modules, changed.__name__, changed)
    exec(compile(text.replace(old, new), handover.__file__, "exec"), changed.__dict__)
    for name in ("pack", "check_fits", "Arrival"):
        monkeypatch.setattr(llm, name, vars(changed)[name])


def test_every_pair_of_engines_gives_the_right_tokens() -> None:
    amount = CHECKS["split"].amounts["quick"]
    continued, refused = check_split(Run(amount))
    assert continued.passed, continued.detail
    assert refused.passed, refused.detail
    assert min(continued.figures[what.replace(" ", "_")] for what in split.SEEN) > 0


@pytest.mark.parametrize("what", BREAKS)
def test_a_break_is_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    plant(monkeypatch, *BREAKS[what])
    continued, _ = check_split(Run(CHECKS["split"].amounts["quick"], fail_fast=True))
    assert not continued.passed and not continued.detail.startswith("void")
    assert continued.failed_after is not None


def test_a_state_whose_history_is_left_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_kv.engine.runner import ModelRunner

    monkeypatch.setattr(ModelRunner, "settle", lambda self, request: None)
    continued, _ = check_split(Run(CHECKS["split"].amounts["quick"], fail_fast=True))
    assert not continued.passed


def test_an_engine_that_checks_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "check_fits", lambda *_: None)
    _, refused = check_split(Run(1))
    assert not refused.passed and refused.detail == "a request with other weights is taken over"


def test_traffic_in_which_nothing_happened_is_void() -> None:
    continued, _ = check_split(Run(0))
    assert not continued.passed and continued.detail.startswith("void: never handed over")
