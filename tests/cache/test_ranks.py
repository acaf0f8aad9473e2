"""What one GPU of many keeps, against numbers worked out by hand from vLLM's rules."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_kv.attention.rollback import rollback_spec
from hybrid_kv.cache.backend import BackendContext, get_backend
from hybrid_kv.cache.plan import CachePlan, plan_cache
from hybrid_kv.cache.ranks import Ranks
from hybrid_kv.cache.spec import with_rollback
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.models.shapes import model_shape
from tests.model_configs import CONFIGS, NEMOTRON_3_NANO


def plan_of(
    ranks: Ranks, name: str = NEMOTRON_3_NANO, k: int = 0, rows: int = 0, **wishes: Any
) -> CachePlan:
    cache = CacheConfig(**({"num_blocks": 4096, "mamba_cache_mode": "align"} | wishes))
    shape = model_shape(CONFIGS[name], cache=cache, num_speculative_tokens=k, ranks=ranks)
    rollback = rollback_spec(cache, k, is_async=False, specs=list(shape.layers.values()))
    layers = {layer: with_rollback(spec, rollback) for layer, spec in shape.layers.items()}
    context = BackendContext.for_layers("cuda", layers)
    attention, stages = get_backend("auto", "cuda"), shape.stages(ranks)
    return plan_cache(
        layers,
        cache,
        attention,
        context,
        131072,
        shape.mamba_chunk_size,
        rows,
        stages,
        ranks.decode_context_parallel_size,
    )


@pytest.mark.parametrize(
    ("layers", "count", "sizes"),
    [
        (52, 1, [52]),
        (52, 4, [13, 13, 13, 13]),
        (52, 3, [17, 18, 17]),  # one is left: the stage before the last
        (42, 4, [10, 11, 11, 10]),  # two: the middle ones
        (7, 4, [2, 2, 2, 1]),  # three: all but the last
        (5, 5, [1, 1, 1, 1, 1]),
    ],
)
def test_stages_divide_the_layers_as_vllm_does(layers: int, count: int, sizes: list[int]) -> None:
    ranks = Ranks(2, count, 2)
    assert ranks.num_gpus == 2 * count
    stages = ranks.stages(layers)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_one_of_eight_ranks_of_nemotron_3_nano() -> None:
    """2 KV heads: one on each rank, 2 * 128 * 2 B = 512 B a token.

    8 of 64 Mamba heads, one of 8 groups: the window has 3 * (8 * 64 + 2 * 128) * 2 B = 4,608 B, the
    float32 state 8 * 64 * 128 * 4 B = 262,144 B: 266,752 B, 521 tokens of attention, so blocks of
    528 and pages of 270,336 B. Six layers in a group: 1,622,016 B a block.
    """
    plan = plan_of(Ranks(tensor_parallel_size=8), num_blocks=None, memory_bytes=10**9)
    assert (plan.sizes.block_size, plan.sizes.mamba_state_bytes) == (528, 266_752)
    assert plan.config.page_size_bytes == 270_336
    assert plan.config.block_bytes == 1_622_016
    assert plan.config.num_blocks == 616
    # ceil(131072 / 528) = 249 of attention, 2 in each of four groups of states.
    assert plan.blocks_per_request == 249 + 8


def test_stages_share_the_groups_of_the_whole_model_and_the_blocks_of_the_poorest() -> None:
    """Stages share the model's groups, and the stage with the fewest blocks decides.

    Attention at layers 5, 12, 19, 26, 33 and 42 of 52: stages of 17, 18 and 17 layers have 2, 3
    and 1.

    Their Mamba layers are 8, 7 and 8, dealt in turn to four groups: 2 at most in a group of a
    stage. A block has as many pages as the longest group of a stage has layers: 2, 3 and 2 of
    2,146,304 B, as on one GPU.
    """
    whole, plan = (
        plan_of(Ranks()),
        plan_of(Ranks(pipeline_parallel_size=3), num_blocks=None, memory_bytes=10**9),
    )
    assert [group.layer_names for group in plan.config.groups] == [
        group.layer_names for group in whole.config.groups
    ]
    assert [stage.block_bytes for stage in plan.stages] == [
        pages * 2_146_304 for pages in (2, 3, 2)
    ]
    assert [sum(len(group.layer_names) for group in stage.groups) for stage in plan.stages] == [
        10,
        10,
        9,
    ]
    assert plan.config.num_blocks == 10**9 // (3 * 2_146_304) == 155
    assert plan.blocks_per_request == whole.blocks_per_request


def test_the_stage_with_most_layers_decides_and_pays_for_its_own_rings() -> None:
    """The stage with most layers decides, and pays for its own rings.

    Two stages of 26 layers have 3 attention layers each, 12 and 11 Mamba layers; of four groups
    one lacks a layer in stage 1.

    A ring of 11 tokens takes for each of 10 rows and layer 11 * ((64 * 64 + 8 * 128) * 2 B + 64 * 4
    B) = 115,456 B.
    """
    # K = 3: windows of 6 * 6144 * 2 B and 2 MiB of state are 2,120 tokens of attention, so blocks
    # of 2,128.
    rings, page = 10 * 12 * 115_456, 2128 * 1024
    memory = rings + 100 * 3 * page
    plan = plan_of(
        Ranks(pipeline_parallel_size=2),
        k=3,
        rows=10,
        state_scheme="recompute",
        recompute_ring_len=11,
        num_blocks=None,
        memory_bytes=memory,
    )
    assert [stage.bytes_per_row for stage in plan.stages] == [12 * 115_456, 11 * 115_456]
    assert plan.config.page_size_bytes == page
    assert plan.config.num_blocks == 100
    assert plan.row_bytes == rings
    assert plan.fullest is plan.stages[0]


def test_a_stage_without_a_cache_is_no_limit() -> None:
    """The last of 52 stages has layer 51, experts alone."""
    plan = plan_of(Ranks(pipeline_parallel_size=52), num_blocks=None, memory_bytes=2_146_304 * 50)
    assert plan.stages[-1].block_bytes == 0
    assert plan.config.num_blocks == 50


def test_context_parallel_ranks_multiply_the_tokens_of_attention_blocks_alone() -> None:
    """4 ranks keep each of 2 KV heads: 528 tokens on each are 2,112, and 131,072 tokens 63 blocks.

    States are as before.
    """
    alone, shared = plan_of(Ranks(8)), plan_of(Ranks(8, 1, 4))
    assert shared.config == alone.config
    assert (alone.blocks_per_request, shared.blocks_per_request) == (249 + 8, 63 + 8)
    assert shared.token_capacity > 3 * alone.token_capacity


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 1, 1), "tensor_parallel_size=0 must be an integer >= 1"),
        ((1, -1, 1), "pipeline_parallel_size=-1 must be an integer >= 1"),
        ((1, 1, 0), "decode_context_parallel_size=0 must be an integer >= 1"),
        ((8, 1, 3), "--decode-context-parallel-size 3 must divide --tensor-parallel-size 8"),
    ],
)
def test_ranks_that_cannot_be(ranks: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ranks(*ranks)


def test_more_stages_than_layers_are_rejected() -> None:
    with pytest.raises(
        ConfigError,
        match="--pipeline-parallel-size 53: the model has 52 layers; use at most as many",
    ):
        plan_of(Ranks(pipeline_parallel_size=53))
