"""A reader of stale memory that finds the right value by chance is seen all the same, whichever tables gather it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_kv.cache.block_table import BlockTables, LaunchedBlockTables
from hybrid_kv.engine.llm import LLM
from hybrid_kv.guard.play import run_scenario
from hybrid_kv.guard.poison import StaleColumns, poison
from hybrid_kv.guard.scenario import Scenario, SmallKVFirst, answer_book, cache_options
from hybrid_kv.sampling import SamplingParams
from hybrid_kv.watch import Watcher
from tests.kernels.interpreter import interpreted

TABLES = {"torch": BlockTables, "triton": LaunchedBlockTables}


def one_after_the_other(kernels: str) -> Scenario:
    """The same prompt three times, each time in the same row: what is cached has the same blocks each time."""
    options = {
        "attention_backend": SmallKVFirst.name,
        "block_size": 8,
        "num_blocks": 60,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "device": "cpu",
        "kernels": kernels,
        **cache_options("attention", 0, "none"),
    }
    prompts, params = [list(range(20))] * 3, [SamplingParams(max_tokens=6)] * 3
    return Scenario(0, "**", options, prompts, params, (1, 1, 1))


def first_column_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Tables whose first column is gathered for the first request in a place, and never again."""

    def update(self: BlockTables, *arguments: Any) -> Any:
        kept, is_first = [table[:, 0].clone() for table in self.input_tables], not self.num_gathers
        found = plain(self, *arguments)
        for table, column in zip(self.input_tables, kept, strict=True):
            table[:, 0] = table[:, 0] if is_first else column
        return found

    return update


def check_stale_read(kernels: str) -> tuple[int, int]:
    """How much is wrong under a planted stale read: with live columns left as they are, and with poisoned ones."""
    assert run_scenario(one_after_the_other(kernels)).wrong == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TABLES[kernels], "update", first_column_once(TABLES[kernels].update))
        poisoned = len(run_scenario(one_after_the_other(kernels)).wrong)
        patch.setattr(StaleColumns, "poison", lambda *_: None)
        return len(run_scenario(one_after_the_other(kernels)).wrong), poisoned


@pytest.mark.parametrize("kernels", TABLES)
def test_a_stale_column_that_holds_the_right_block_by_chance(kernels: str) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
        unseen, seen = interpreted(check_stale_read, kernels)
    else:
        unseen, seen = check_stale_read(kernels)
    assert unseen == 0 and seen > 0


def test_a_step_reads_no_column_that_it_has_not_written() -> None:
    """Everything that was gathered may go once the request has left its place, and nothing before."""

    class Spoiler(Watcher):
        def __init__(self, llm: LLM) -> None:
            self.stale, self.tables = StaleColumns(llm.runner.block_tables), llm.runner.block_tables
            self.kept: list[int] = []

        def on_prepare(self, batch: Any) -> None:
            self.stale.poison(batch)
            self.kept.append(int((self.tables.input_tables[0][0] > 0).sum()))

    scenario = one_after_the_other("torch")
    llm = LLM(answer_book("**").model, **scenario.options)
    spoiler = Spoiler(llm)
    llm.watchers.append(spoiler)
    llm.generate(scenario.prompts[:2], SamplingParams(max_tokens=6), progress=False)
    split = spoiler.tables.blocks_per_kv_block[0]
    # A prompt of 20 tokens has three blocks, and only the last step of its answer needs a fourth.
    assert spoiler.kept == [split * count for count in (0, 3, 3, 3, 3, 3, 0, 3, 3, 3, 3, 3)]


def test_what_rows_keep_beside_the_cache_is_poisoned_too() -> None:
    options = {**one_after_the_other("torch").options, **cache_options("align", 2, "none"), "state_scheme": "replay"}
    llm = LLM(answer_book("M*").model, **options)
    poison(llm)
    parts = [part for memory in llm.runner.row_memory.values() for part in vars(memory).values()]
    tensors = [part for part in parts if torch.is_tensor(part)]
    assert tensors and all((part.isnan() if part.is_floating_point() else part == -1).all() for part in tensors)
    assert all((buffer.view(torch.uint8) == 255).all() for buffer in llm.runner.raw_buffers)
