"""A stale read that finds the right value by chance is seen, whichever tables gather it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_kv.cache.block_table import BlockTables, LaunchedBlockTables
from hybrid_kv.check.guard.play import run_scenario
from hybrid_kv.check.guard.poison import StaleBlocks, poison
from hybrid_kv.check.guard.scenario import Scenario, answer_book, cache_options
from hybrid_kv.engine.llm import LLM
from hybrid_kv.sampling import SamplingParams
from tests.kernels.interpreter import interpreted
from tests.support.scenarios import scenario

TABLES = {"torch": BlockTables, "triton": LaunchedBlockTables}


def one_after_the_other(kernels: str) -> Scenario:
    """Return the same prompt three times in the same row: cached contents have the same blocks."""
    base = scenario(
        "attention", num_blocks=60, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64
    )
    prompts, params = [list(range(20))] * 3, [SamplingParams(max_tokens=6)] * 3
    return replace(
        base,
        options={**base.options, "kernels": kernels},
        prompts=prompts,
        params=params,
        waves=(1, 1, 1),
    )


def first_block_idx_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return tables whose first logical block is gathered once in each place, and never again."""

    def stage(self: BlockTables, *arguments: Any) -> Any:
        kept, is_first = [table[:, 0].clone() for table in self.input_tables], not self.num_gathers
        arrays, make = plain(self, *arguments)

        def update(*moved: torch.Tensor) -> None:
            make(*moved)
            for table, block_idx in zip(self.input_tables, kept, strict=True):
                table[:, 0] = table[:, 0] if is_first else block_idx

        return arrays, update

    return stage


def check_stale_read(kernels: str) -> tuple[int, int]:
    """Inject a stale read; count wrong answers with live logical blocks, and with poisoned ones."""
    assert run_scenario(one_after_the_other(kernels)).wrong == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TABLES[kernels], "stage", first_block_idx_once(TABLES[kernels].stage))
        poisoned = len(run_scenario(one_after_the_other(kernels)).wrong)
        patch.setattr(StaleBlocks, "poison", lambda *_: None)
        return len(run_scenario(one_after_the_other(kernels)).wrong), poisoned


@pytest.mark.parametrize("kernels", TABLES)
def test_a_stale_block_idx_that_holds_the_right_block_by_chance(kernels: str) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
        unseen, seen = interpreted(check_stale_read, kernels)
    else:
        unseen, seen = check_stale_read(kernels)
    assert unseen == 0 and seen > 0


def test_what_rows_keep_beside_the_cache_is_poisoned_too() -> None:
    options = {
        **one_after_the_other("torch").options,
        **cache_options("align", 2, "none"),
        "state_scheme": "recompute",
    }
    llm = LLM(answer_book("M*").model, **options)
    poison(llm)
    parts = [part for memory in llm.runner.row_memory.values() for part in vars(memory).values()]
    tensors = [part for part in parts if torch.is_tensor(part)]
    assert tensors and all(
        (part.isnan() if part.is_floating_point() else part == -1).all() for part in tensors
    )
    assert all((buffer.view(torch.uint8) == 255).all() for buffer in llm.runner.raw_buffers)
