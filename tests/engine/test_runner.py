"""The runner's persistent buffers: padded rows, dirty memory, and the previous step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hybrid_kv.cache.backend import AttentionGroup
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.check.guard.scenario import SmallBlocksFirst
from hybrid_kv.engine.llm import LLM
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams

Right = Callable[[int, Request], int]

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, 97, length).tolist() for length in (13, 1, 24, 8, 5)]
PARAMS = SamplingParams(max_tokens=9)
MODES = ("none", "align", "all")
ORACLE = ExactOracle(ExactModel(ExactConfig(pattern="M*MM*")))


class Script:
    """Drafts of the oracle for `right(position, request)` tokens, and wrong from there on."""

    def __init__(self, prompts: list[list[int]], k: int, right: Right, length: int = 48) -> None:
        self.k, self.right = k, right
        self.texts = {
            tuple(prompt): [*prompt, *ORACLE.generate(prompt, length)] for prompt in prompts
        }

    def propose(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[npt.NDArray[np.int64]],
        num_tokens: npt.NDArray[np.int64],
    ) -> list[list[int]]:
        drafts = []
        for request, n in zip(requests, num_tokens.tolist(), strict=True):
            text = self.texts[tuple(request.prompt_token_ids)]
            good = self.right(n, request)
            drafts.append(
                [t if j < good else (t + 1) % 97 for j, t in enumerate(text[n : n + self.k])]
            )
        return drafts


def engine(proposer: Script | None = None, **options: Any) -> LLM:
    defaults = {
        "attention_backend": SmallBlocksFirst.name,
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 48,
        "captured_batch_sizes": (8,),
    }
    return LLM(
        ExactModel(ExactConfig(pattern="M*MM*")),
        device="cpu",
        proposer=proposer,
        **(defaults | options),
    )


def drafting(
    k: int = 3,
    right: Right = lambda n, request: n % 4,
    prompts: list[list[int]] = PROMPTS,
    **options: Any,
) -> LLM:
    """An engine with a scripted proposer; by default every number of accepted drafts occurs."""
    return engine(Script(prompts, k, right), num_speculative_tokens=k, **options)


def expected(
    prompts: list[list[int]] = PROMPTS, params: SamplingParams = PARAMS
) -> list[list[int]]:
    return [ORACLE.generate(prompt, params.max_tokens) for prompt in prompts]


def run(
    llm: LLM,
    on_step: Callable[[LLM], None] | None = None,
    prompts: list[list[int]] = PROMPTS,
    params: SamplingParams = PARAMS,
) -> list[list[int]]:
    return [o.token_ids for o in llm.generate(prompts, params, progress=False, on_step=on_step)]


def spy(llm: LLM, look: Callable[[torch.Tensor, torch.Tensor, ForwardContext], None]) -> None:
    """Call `look(input_ids, positions, context)` before each forward pass."""
    model = llm.runner.model

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(
            self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
        ) -> torch.Tensor:
            look(input_ids, positions, context)
            return model(input_ids, positions, context)

    llm.runner.model = Spy()


def builders(llm: LLM) -> Iterable[Any]:
    return llm.runner.builders.values()


def mamba_groups(llm: LLM) -> list[AttentionGroup]:
    return [group for group in llm.runner.groups if isinstance(group.spec, MambaSpec)]


@pytest.mark.parametrize("mode", MODES)
def test_buffers_keep_their_address(mode: str) -> None:
    llm = drafting(mamba_cache_mode=mode)
    runner, seen = llm.runner, set()

    def note(llm: LLM) -> None:
        tables = runner.block_tables
        buffers = [
            runner.input_ids,
            runner.positions,
            tables.slot_mappings,
            *tables.input_tables,
            *tables.tables,
            torch.from_numpy(runner.cursors.state_block_idx),
            torch.from_numpy(runner.cursors.window_row),
        ]
        for builder in builders(llm):
            buffers += [
                value for value in vars(builder).values() if isinstance(value, torch.Tensor)
            ]
            assert builder.offsets.tolist() == [0, 1, 2, 3]
        seen.add(tuple(buffer.data_ptr() for buffer in buffers))

    assert run(llm, note) == expected()
    note(llm)
    assert len(seen) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [0, 3])
def test_decode_steps_are_padded_with_neutral_rows(mode: str, k: int) -> None:
    """A step of n requests has n + padding rows, whatever their drafts (vllm!41233)."""
    llm = drafting(k, mamba_cache_mode=mode) if k else engine(mamba_cache_mode=mode)
    runner = llm.runner
    seen = Counter()

    def look(input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> None:
        batch = runner.batch
        n, tokens = len(batch), sum(item.num_tokens for item in batch)
        if not all(item.is_decode for item in batch):
            return
        assert len(input_ids) == len(positions) == tokens + 8 - n
        assert (positions[tokens:] == 0).all()
        seen["padded"] += n < 8
        seen["drafts and padding"] += n < 8 and tokens > n
        for group in runner.groups:
            metadata = context.metadata[group.layer_names[0]]
            if group.backend.is_ssm():
                assert metadata.num_decodes == 8
                assert metadata.num_decode_tokens == len(positions)
                assert metadata.state_indices.shape == (8, 1 + k)
                assert (metadata.state_indices[n:] == NULL_BLOCK).all()
                assert (metadata.state_indices[:n, 0] != NULL_BLOCK).all()
                assert metadata.window_rows[n:].tolist() == [0] * (8 - n)
                for indices in (metadata.window_indices, metadata.source_indices):
                    assert indices.shape == (8,)
                    assert (indices[:n] != NULL_BLOCK).all()
                    assert (indices[n:] == NULL_BLOCK).all()
                for item, row in zip(batch, metadata.state_indices, strict=False):
                    assert (row[item.num_tokens :] == NULL_BLOCK).all()
            else:
                assert (metadata.slot_mapping.slots[tokens:] == PAD_SLOT).all()
                assert (metadata.slot_mapping.slots[:tokens] != PAD_SLOT).all()
                assert (metadata.parts[0].block_table[n:] == NULL_BLOCK).all()

    spy(llm, look)
    assert run(llm) == expected()
    assert seen["padded"] >= 3
    assert not k or seen["drafts and padding"] >= 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("captured", [(), (3,), (1, 2, 4, 8)])
def test_stale_garbage_in_padded_rows_changes_nothing(captured: tuple[int, ...], mode: str) -> None:
    llm = drafting(captured_batch_sizes=captured, mamba_cache_mode=mode)

    def litter(llm: LLM) -> None:
        runner, tables = llm.runner, llm.runner.block_tables
        runner.input_ids.fill_(96)
        runner.positions.fill_(47)
        tables.slot_mappings.fill_(9)
        for table in tables.input_tables:
            table.fill_(1)
        tables.forget()  # what a step may reuse is no garbage; this one writes all of it anew
        for builder in builders(llm):
            builder.window_rows.fill_(3)
            builder.blocks.fill_(1)
        idle = np.setdiff1d(np.arange(8), [request.row for request in llm.scheduler.running])
        runner.cursors.state_block_idx[idle] = 5
        runner.cursors.window_row[idle] = 3

    assert run(llm, litter) == expected()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("right", [0, 7])
def test_a_request_of_the_greatest_length_stays_inside_its_row(
    mode: str, k: int, right: int
) -> None:
    """vllm!41233: a row has K logical blocks after `cdiv(max_model_len, block_size)` for drafts."""
    prompt = PROMPTS[0]
    limit = 42  # its last cached token begins a block
    llm = drafting(
        k, lambda n, request: right, [prompt], mamba_cache_mode=mode, max_model_len=limit
    )
    size = llm.plan.sizes.mamba_block_size
    width = k + (1 if mode == "none" else cdiv(limit, size))
    beyond = Counter()

    def look(input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> None:
        (item,) = llm.runner.batch
        for group in mamba_groups(llm):
            metadata = context.metadata[group.layer_names[0]]
            table = llm.runner.block_tables.tables[group.group_id]
            assert table.shape[1] == width
            if item.drafts:
                row = table[item.request.row].tolist()
                state_block_idx = (
                    0 if mode == "none" else (item.num_computed_tokens + len(item.drafts)) // size
                )
                written = metadata.state_indices[0, : item.num_tokens].tolist()
                assert written == row[state_block_idx : state_block_idx + item.num_tokens]
                assert len(set(written)) == item.num_tokens
                beyond["logical_blocks"] += state_block_idx + item.num_tokens > width - k

    spy(llm, look)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=99), progress=False)
    assert output.token_ids == ORACLE.generate(prompt, limit - len(prompt))
    assert output.finish_reason == "length"
    assert beyond["logical_blocks"] > 0
