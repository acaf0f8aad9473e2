"""The runner's persistent buffers, padded rows, and memory that earlier owners left dirty."""

import numpy as np
import pytest

from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.sampling import SamplingParams
from hybrid_kv.guard.traffic import SmallBlocksFirst, SmallKVFirst
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, 97, length).tolist() for length in (13, 1, 24, 8, 5)]
PARAMS = SamplingParams(max_tokens=9)


def engine(**options):
    defaults = {
        "attention_backend": SmallBlocksFirst.name,
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 48,
        "captured_batch_sizes": (8,),
    }
    return LLM(ExactModel(ExactConfig(pattern="M*MM*")), device="cpu", **(defaults | options))


def expected(llm):
    oracle = ExactOracle(llm.model)
    return [oracle.generate(prompt, PARAMS.max_tokens) for prompt in PROMPTS]


def run(llm, on_step=None):
    return [o.token_ids for o in llm.generate(PROMPTS, PARAMS, progress=False, on_step=on_step)]


def test_buffers_keep_their_address():
    llm = engine()
    runner, seen = llm.runner, set()

    def note(llm):
        tables = runner.block_tables
        buffers = [
            runner.input_ids,
            runner.positions,
            tables.slot_mappings,
            runner._state_indices,
            *tables.input_tables,
            *tables.tables,
        ]
        seen.add(tuple(buffer.data_ptr() for buffer in buffers))

    assert run(llm, note) == expected(llm)
    note(llm)
    assert len(seen) == 1


def test_decode_steps_are_padded_with_neutral_rows():
    llm = engine()
    model, runner = llm.runner.model, llm.runner
    padded_steps = 0

    class Spy:
        def __getattr__(self, name):
            return getattr(model, name)

        def __call__(self, input_ids, positions, context):
            nonlocal padded_steps
            decodes = len(runner.batch)
            if all(item.is_decode for item in runner.batch):
                assert len(input_ids) == len(positions) == 8
                padded_steps += decodes < 8
                assert (positions[decodes:] == 0).all()
                for group in runner.groups:
                    metadata = context.metadata[group.layer_names[0]]
                    if group.backend.is_ssm():
                        assert (metadata.state_indices[decodes:] == NULL_BLOCK).all()
                        assert (metadata.state_indices[:decodes] != NULL_BLOCK).all()
                    else:
                        assert (metadata.slots[decodes:] == PAD_SLOT).all()
                        assert (metadata.parts[0].block_table[decodes:] == NULL_BLOCK).all()
            return model(input_ids, positions, context)

    runner.model = Spy()
    assert run(llm) == expected(llm)
    assert padded_steps > 3


@pytest.mark.parametrize("captured", [(), (3,), (1, 2, 4, 8)])
def test_stale_garbage_in_padded_rows_changes_nothing(captured):
    llm = engine(captured_batch_sizes=captured)

    def litter(llm):
        runner, tables = llm.runner, llm.runner.block_tables
        runner.input_ids.fill_(96)
        runner.positions.fill_(47)
        tables.slot_mappings.fill_(9)
        for table in tables.input_tables:
            table.fill_(1)

    assert run(llm, litter) == expected(llm)


def test_a_manager_block_is_several_kernel_blocks():
    llm = engine(attention_backend=SmallKVFirst.name)
    attention = [group for group in llm.runner.groups if not group.backend.is_ssm()]
    assert all(group.kernel_block_size < group.spec.block_size for group in attention)
    assert run(llm) == expected(llm)


def poison(llm):
    """Every page that no request holds, the null block included, becomes bytes of -1."""
    held = [ids for request in llm.scheduler.running for ids in llm.manager.block_ids(request.request_id)]
    free = np.setdiff1d(np.arange(llm.plan.config.num_blocks), np.concatenate([np.array([], np.int32), *held]))
    for raw in llm.runner.raw_buffers:
        raw.view(llm.plan.config.num_blocks, -1)[free] = -1


@pytest.mark.parametrize("options", [{}, {"num_blocks": 22, "max_num_seqs": 3}], ids=["roomy", "small"])
def test_a_new_owner_sees_nothing_of_the_previous_one(options):
    llm = engine(**options)
    assert run(llm, poison) == expected(llm)
    assert run(llm, poison) == expected(llm), "rows and blocks of the first run, used again"
