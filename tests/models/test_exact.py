"""The integer model: engine equals oracle, and every cache mistake shows in the tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache.backend import AttentionGroup
from hybrid_kv.check.guard.scenario import SmallKVFirst
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.runner import ModelRunner
from hybrid_kv.models.exact import PRIME, ExactConfig, ExactModel, ExactOracle, affine_scan
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams

Change = Callable[[ModelRunner, Request], None]

PROMPT = np.random.default_rng(3).integers(0, 97, 21).tolist()


@given(st.integers(1, 20), st.integers(0, 2**31))
def test_scan_equals_loop(length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, PRIME, (2, length, 3)) for _ in "ab")
    got_a, got_b = a.copy(), b.copy()
    affine_scan(got_a, got_b)
    total_a, total_b = np.ones((2, 3), np.int64), np.zeros((2, 3), np.int64)
    for t in range(length):
        total_a, total_b = total_a * a[:, t] % PRIME, (a[:, t] * total_b % PRIME + b[:, t]) % PRIME
        assert (got_a[:, t] == total_a).all()
        assert (got_b[:, t] == total_b).all()


@pytest.mark.parametrize("pattern", ["M", "*", "M*", "M*MM*"])
@pytest.mark.parametrize("at", [0, 10, 19])
def test_the_oracle_feels_each_prompt_token(pattern: str, at: int) -> None:
    oracle = ExactOracle(ExactModel(ExactConfig(pattern=pattern)))
    right = oracle.generate(PROMPT, 6)
    swapped = PROMPT.copy()
    swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
    assert swapped != PROMPT
    for wrong in (swapped, PROMPT[: at + 1] + PROMPT[at:], PROMPT[:at] + PROMPT[at + 1 :]):
        assert oracle.generate(wrong, 6) != right


def test_tokens_are_diverse() -> None:
    output = ExactOracle(ExactModel()).generate(PROMPT, 150)
    assert len(set(output)) > 60  # 97 tokens, 150 draws: 76 are expected of a uniform source


def damaged(change: Change) -> list[int]:
    """Return the tokens when `change(runner, request)` runs after the prompt and two tokens."""
    options = {
        "attention_backend": SmallKVFirst.name,
        "block_size": 8,
        "max_num_seqs": 4,
        "max_model_len": 64,
    }
    llm, done = LLM(ExactModel(), device="cpu", **options), []

    def disturb(llm: LLM) -> None:
        if (
            not done
            and llm.scheduler.running
            and len(llm.scheduler.running[0].output_token_ids) == 3
        ):
            done.append(change(llm.runner, llm.scheduler.running[0]))

    (output,) = llm.generate(
        [PROMPT], SamplingParams(max_tokens=8), progress=False, on_step=disturb
    )
    assert done
    return output.token_ids


def test_the_engine_feels_damage_to_state_window_and_table() -> None:
    right = ExactOracle(ExactModel()).generate(PROMPT, 8)
    assert damaged(lambda *_: None) == right

    def mamba(runner: ModelRunner) -> list[AttentionGroup]:
        return [g for g in runner.groups if g.backend.is_ssm()]

    def other_state(runner: ModelRunner, request: Request) -> None:
        for group in mamba(runner):
            block = int(runner.block_tables.tables[group.group_id][request.row, 0])
            runner.views[group.layer_names[0]][1][block] = runner.views[group.layer_names[0]][1][0]

    def old_window(runner: ModelRunner, request: Request) -> None:
        group = mamba(runner)[0]
        window = runner.views[group.layer_names[0]][0]
        block = int(runner.block_tables.tables[group.group_id][request.row, 0])
        window[block] = window[block].roll(1, 0)

    def swapped_blocks(runner: ModelRunner, request: Request) -> None:
        group = next(g for g in runner.groups if not g.backend.is_ssm())
        # what the steps read; a step rewrites what changed
        row = runner.block_tables.input_tables[group.group_id][0]
        row[:2] = row[:2].flip(0).clone()

    for change in (other_state, old_window, swapped_blocks):
        got = damaged(change)
        assert got[:3] == right[:3], change.__name__
        assert got[3:] != right[3:], change.__name__
