"""The runner's persistent buffers, padded rows, memory that earlier owners left dirty, and what it remembers of the
last step."""

from collections import Counter

import numpy as np
import pytest
import torch

from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.engine import runner as runner_module
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.state_cursor import StateCursor
from hybrid_kv.guard.scenario import SmallBlocksFirst, SmallKVFirst
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.sampling import SamplingParams

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, 97, length).tolist() for length in (13, 1, 24, 8, 5)]
PARAMS = SamplingParams(max_tokens=9)
MODES = ("none", "align", "all")
ORACLE = ExactOracle(ExactModel(ExactConfig(pattern="M*MM*")))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small are slower on several, by far where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Script:
    """Drafts that follow the oracle for `right(position, request)` tokens and are wrong from there on."""

    def __init__(self, prompts, k, right, length=48):
        self.k, self.right = k, right
        self.texts = {tuple(prompt): [*prompt, *ORACLE.generate(prompt, length)] for prompt in prompts}

    def propose(self, requests, token_ids, num_tokens):
        drafts = []
        for request, n in zip(requests, num_tokens.tolist(), strict=True):
            text = self.texts[tuple(request.prompt_token_ids)]
            good = self.right(n, request)
            drafts.append([t if j < good else (t + 1) % 97 for j, t in enumerate(text[n : n + self.k])])
        return drafts


def engine(proposer=None, **options):
    defaults = {
        "attention_backend": SmallBlocksFirst.name,
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 48,
        "captured_batch_sizes": (8,),
    }
    return LLM(ExactModel(ExactConfig(pattern="M*MM*")), device="cpu", proposer=proposer, **(defaults | options))


def drafting(k=3, right=lambda n, request: n % 4, prompts=PROMPTS, **options):
    """An engine with a scripted proposer; by default every number of accepted drafts occurs."""
    return engine(Script(prompts, k, right), num_speculative_tokens=k, **options)


def expected(prompts=PROMPTS, params=PARAMS):
    return [ORACLE.generate(prompt, params.max_tokens) for prompt in prompts]


def run(llm, on_step=None, prompts=PROMPTS, params=PARAMS):
    return [o.token_ids for o in llm.generate(prompts, params, progress=False, on_step=on_step)]


def spy(llm, look):
    """Call `look(input_ids, positions, context)` before each forward pass."""
    model = llm.runner.model

    class Spy:
        def __getattr__(self, name):
            return getattr(model, name)

        def __call__(self, input_ids, positions, context):
            look(input_ids, positions, context)
            return model(input_ids, positions, context)

    llm.runner.model = Spy()


def builders(llm):
    return llm.runner.builders.values()


def mamba_groups(llm):
    return [group for group in llm.runner.groups if isinstance(group.spec, MambaSpec)]


@pytest.mark.parametrize("mode", MODES)
def test_buffers_keep_their_address(mode):
    llm = drafting(mamba_cache_mode=mode)
    runner, seen = llm.runner, set()

    def note(llm):
        tables = runner.block_tables
        buffers = [
            runner.input_ids,
            runner.positions,
            tables.slot_mappings,
            *tables.input_tables,
            *tables.tables,
            torch.from_numpy(runner.cursors.anchor),
            torch.from_numpy(runner.cursors.window_row),
        ]
        for builder in builders(llm):
            buffers += [value for value in vars(builder).values() if isinstance(value, torch.Tensor)]
            assert builder._offsets.tolist() == [0, 1, 2, 3]
        seen.add(tuple(buffer.data_ptr() for buffer in buffers))

    assert run(llm, note) == expected()
    note(llm)
    assert len(seen) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [0, 3])
def test_decode_steps_are_padded_with_neutral_rows(mode, k):
    """Per request, not per token: a step of n requests has n + padding rows whatever their drafts (vllm!41233)."""
    llm = drafting(k, mamba_cache_mode=mode) if k else engine(mamba_cache_mode=mode)
    runner = llm.runner
    seen = Counter()

    def look(input_ids, positions, context):
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
def test_stale_garbage_in_padded_rows_changes_nothing(captured, mode):
    llm = drafting(captured_batch_sizes=captured, mamba_cache_mode=mode)

    def litter(llm):
        runner, tables = llm.runner, llm.runner.block_tables
        runner.input_ids.fill_(96)
        runner.positions.fill_(47)
        tables.slot_mappings.fill_(9)
        for table in tables.input_tables:
            table.fill_(1)
        tables.forget()  # what a step may reuse is no garbage; this one writes all of it anew
        for builder in builders(llm):
            builder.block_idx_last_scheduled_token.fill_(3)
            builder.block_idx_last_scheduled_token_prev_step.fill_(3)
            builder.window_rows.fill_(3)
            for part in (builder.window_indices, builder.source_indices, builder.state_indices):
                part.fill_(1)
        idle = np.setdiff1d(np.arange(8), [request.row for request in llm.scheduler.running])
        runner.cursors.anchor[idle] = 5
        runner.cursors.window_row[idle] = 3

    assert run(llm, litter) == expected()


def test_a_manager_block_is_several_kernel_blocks():
    llm = engine(attention_backend=SmallKVFirst.name)
    attention = [group for group in llm.runner.groups if not group.backend.is_ssm()]
    assert all(group.kernel_block_size < group.spec.block_size for group in attention)
    assert run(llm) == expected()


def poison(llm):
    """Every page that no request holds and no prefix needs, the null block included, becomes bytes of -1."""
    held = [ids for request in llm.scheduler.running for ids in llm.manager.block_ids(request.request_id)]
    kept = np.flatnonzero(llm.manager.pool._published)
    free = np.setdiff1d(np.arange(llm.plan.config.num_blocks), np.concatenate([kept, *held]))
    for raw in llm.runner.raw_buffers:
        raw.view(llm.plan.config.num_blocks, -1)[free] = -1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"num_blocks": 28, "max_num_seqs": 3}], ids=["roomy", "small"])
def test_a_new_owner_sees_nothing_of_the_previous_one(options, mode):
    llm = drafting(mamba_cache_mode=mode, **options)
    assert run(llm, poison) == expected()
    assert run(llm, poison) == expected(), "rows and blocks of the first run, used again"
    llm.reset_prefix_cache()
    assert run(llm, poison) == expected(), "and once more without hits"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("right", [0, 7])
def test_a_request_of_the_greatest_length_stays_inside_its_row(mode, k, right):
    """vllm!41233: a row has K columns beyond `cdiv(max_model_len, block_size)`, and the last verify step needs them."""
    prompt = PROMPTS[0]
    limit = 42  # its last cached token begins a block
    llm = drafting(k, lambda n, request: right, [prompt], mamba_cache_mode=mode, max_model_len=limit)
    size = llm.plan.sizes.mamba_block_size
    width = k + (1 if mode == "none" else cdiv(limit, size))
    beyond = Counter()

    def look(input_ids, positions, context):
        (item,) = llm.runner.batch
        for group in mamba_groups(llm):
            metadata = context.metadata[group.layer_names[0]]
            table = llm.runner.block_tables.tables[group.group_id]
            assert table.shape[1] == width
            if item.drafts:
                row = table[item.request.row].tolist()
                anchor = 0 if mode == "none" else (item.num_computed_tokens + len(item.drafts)) // size
                written = metadata.state_indices[0, : item.num_tokens].tolist()
                assert written == row[anchor : anchor + item.num_tokens]
                assert len(set(written)) == item.num_tokens
                beyond["columns"] += anchor + item.num_tokens > width - k

    spy(llm, look)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=99), progress=False)
    assert output.token_ids == ORACLE.generate(prompt, limit - len(prompt))
    assert output.finish_reason == "length"
    assert beyond["columns"] > 0


@pytest.mark.parametrize("mode", ["align", "all"])
def test_the_metadata_reads_the_remembered_anchor(mode):
    """vllm!41233: a persistent buffer, kept per request between steps; padding rows read column 0."""
    llm = drafting(right=lambda n, request: n % 2, mamba_cache_mode=mode)
    remembered = {}
    seen = Counter()

    def look(input_ids, positions, context):
        runner = llm.runner
        for i, item in enumerate(runner.batch):
            name, row = item.request.request_id, item.request.row
            for group in mamba_groups(llm):
                builder = runner.builders[group.group_id]
                metadata = context.metadata[group.layer_names[0]]
                table = runner.block_tables.tables[group.group_id][row]
                prev = int(builder.block_idx_last_scheduled_token_prev_step[i])
                assert prev == runner.cursors.anchor[row]
                assert metadata.window_indices[i] == table[prev]
                assert metadata.source_indices[i] == table[prev + int(metadata.window_rows[i])]
            # The anchor of the step before, unless the state was brought home to the boundary where it ended.
            if (last := remembered.get(name)) is not None and item.num_computed_tokens % 8:
                assert prev == last
                seen["not what the tokens say"] += prev != (item.num_computed_tokens - 1) // 8
            remembered[name] = (item.num_computed_tokens + item.num_tokens - 1) // 8

    spy(llm, look)
    assert run(llm) == expected()
    assert seen["not what the tokens say"] > 0


def recomputed(llm):
    """The mistake of vllm!41233: the previous anchor had from the number of computed tokens."""
    for request in llm.scheduler.running:
        column = max(0, request.num_computed_tokens - 1) // llm.plan.sizes.mamba_block_size
        llm.runner.cursors.anchor[request.row] = column


@pytest.mark.parametrize("mode", ["align", "all"])
def test_drafts_across_a_boundary_that_are_rejected_leave_the_state_behind_their_anchor(mode):
    llm = drafting(k=2, right=lambda n, request: 0, mamba_cache_mode=mode)
    assert run(llm) == expected()
    llm = drafting(k=2, right=lambda n, request: 0, mamba_cache_mode=mode)
    assert run(llm, recomputed) != expected(), "an anchor that is recomputed must show"


def nothing(*args):
    pass


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("cleaned", [True, False])
def test_a_new_owner_of_a_row_starts_from_its_own_hit(mode, cleaned, monkeypatch):
    """`cleanup_mamba_state_idx`: the anchor and the accepted tokens of a row die with its owner."""
    if not cleaned:
        monkeypatch.setattr(StateCursor, "restart", nothing)
    long = PROMPTS[2]
    prompts = [long, long[:10]]
    options = {"mamba_cache_mode": mode, "max_num_seqs": 1, "max_num_batched_tokens": 9, "num_blocks": 100}
    llm = drafting(3, lambda n, request: 2, prompts, **options)
    outputs = llm.generate([long, long[:10], long], PARAMS, progress=False)
    assert [output.cached_tokens for output in outputs] == [0, 8, 16]
    right = [output.token_ids for output in outputs] == expected([long, long[:10], long])
    assert right == cleaned


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("cleaned", [True, False])
def test_a_resumed_request_starts_from_its_hit(mode, cleaned, monkeypatch):
    if not cleaned:
        monkeypatch.setattr(StateCursor, "restart", nothing)
    llm = drafting(3, lambda n, request: 2, mamba_cache_mode=mode)

    def preempt(llm):
        if llm.num_steps in (4, 7):
            for request in reversed(list(llm.scheduler.running)):
                llm.scheduler.preempt(request)

    outputs = llm.generate(PROMPTS, PARAMS, progress=False, on_step=preempt)
    assert max(output.num_preemptions for output in outputs) == 2
    assert ([output.token_ids for output in outputs] == expected()) == cleaned


def test_what_a_row_remembers_after_a_step():
    llm = drafting(3, lambda n, request: 3 if n < 24 else 0, [PROMPTS[2][:5]], mamba_cache_mode="all")
    runner, seen = llm.runner, []

    def note(llm):
        for request in llm.scheduler.running:
            n = request.num_computed_tokens
            prev = int(runner.cursors.anchor[request.row])
            seen.append((n, prev, int(runner.cursors.window_row[request.row])))

    run(llm, note, [PROMPTS[2][:5]], SamplingParams(max_tokens=25))
    # Steps of 4 tokens that are all accepted: 5 … 9 crosses a boundary after its third token, so the anchor is 1; from
    # 23 on nothing is accepted, so that the anchor of token 24 + 3 … stays where the drafts were.
    assert seen[:5] == [(5, 0, 0), (9, 1, 3), (13, 1, 3), (17, 2, 3), (21, 2, 3)]
    assert all(prev == (n - 1 + 3) // 8 for n, prev, accepted in seen if n > 25 and accepted == 1 and n % 8 and n < 28)


@pytest.mark.parametrize("mode", MODES)
def test_postprocessing_is_dispatched_by_mode(mode, monkeypatch):
    """Mode none keeps no boundary; in align and all the accepted boundary states go home, never a rejected one."""
    copied = []
    original = runner_module.postprocess_mamba

    def record(copies, block_table, layers, spec, copies_states):
        copied.extend(zip(copies.drafts.tolist(), copies.columns.tolist(), strict=True))
        assert copies_states
        original(copies, block_table, layers, spec, copies_states)

    monkeypatch.setattr(runner_module, "postprocess_mamba", record)
    for right, some in ((0, 0), (3, 1)):
        copied.clear()
        llm = drafting(3, lambda n, request, right=right: right, mamba_cache_mode=mode)
        assert run(llm) == expected()
        groups = len(mamba_groups(llm))
        # A first token may end a block: then it goes home from the anchor that its drafts have moved.
        assert {draft for draft, _ in copied if draft > right} == set()
        assert bool([draft for draft, _ in copied if draft]) == bool(some and mode != "none")
        assert not copied or len(copied) % groups == 0
        assert copied or mode == "none" or not some


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("home", [True, False])
def test_a_hit_restores_the_accepted_boundary_states(mode, home, monkeypatch):
    """Both the window and the state of a boundary that a verify step passed; without the copies the hit is wrong."""
    if not home:
        monkeypatch.setattr(runner_module, "postprocess_mamba", nothing)
    prompt = PROMPTS[0]
    first = ORACLE.generate(prompt, 24)
    again = [*prompt, *first]  # 37 tokens, of which 32 are in the cache
    llm = drafting(3, lambda n, request: n % 4, [prompt, again], mamba_cache_mode=mode)
    got = run(llm, None, [prompt], SamplingParams(max_tokens=24))[0]
    if home:
        assert got == first
    (output,) = llm.generate([again], PARAMS, progress=False) if home else (None,)
    if output is not None:
        assert output.cached_tokens == 32
        assert output.token_ids == ORACLE.generate(again, 9)
    else:
        assert got != first


def test_a_first_chunk_does_not_read_its_blocks():
    llm = engine(mamba_cache_mode="all")
    fresh = []

    def look(input_ids, positions, context):
        split = sum(item.is_decode for item in llm.runner.batch)
        for group in mamba_groups(llm):
            metadata = context.metadata[group.layer_names[0]]
            if metadata.has_initial_state is not None:
                starts = [item.num_computed_tokens > 0 for item in llm.runner.batch[split:]]
                assert metadata.has_initial_state.tolist() == starts
                fresh.append(not all(starts))

    spy(llm, look)
    assert run(llm) == expected()
    assert any(fresh)


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("seed", range(12))
def test_random_prefixes_drafts_and_small_pools_equal_the_oracle(mode, seed):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(0, 4))
    root = rng.integers(0, 97, 40).tolist()
    prompts = [
        root[: int(rng.integers(1, 36))] + rng.integers(0, 97, int(rng.integers(0, 4))).tolist() for _ in range(10)
    ]
    guesses = np.random.default_rng(seed).integers(0, 5, 1000).tolist()
    right = lambda n, request: guesses[(7 * n + int(request.request_id)) % 1000]  # noqa: E731
    options = {
        "mamba_cache_mode": mode,
        "max_num_seqs": int(rng.integers(2, 6)),
        "max_num_batched_tokens": int(rng.integers(6, 30)),
        "block_size": int(rng.choice([4, 8])),
        "num_blocks": int(rng.integers(58, 100)),
    }
    llm = drafting(k, right, prompts, **options) if k else engine(**options)
    outputs = llm.generate(prompts, PARAMS, progress=False, on_step=poison)
    assert [output.token_ids for output in outputs] == expected(prompts)
    assert any(output.cached_tokens for output in outputs)
    llm.scheduler.check_integrity()
    assert llm.manager.pool.num_free_blocks == llm.plan.usable_blocks


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("outside", [97, -1, 10**9])
def test_drafts_outside_the_vocabulary_are_cut(outside, asynchronous):
    """From the first such id on; what stands before it is verified as ever."""

    class Outside(Script):
        def propose(self, *args):
            return [[*draft[:2], outside, *draft[2:]] for draft in super().propose(*args)]

    proposer = Outside(PROMPTS, 4, lambda n, request: 4)
    llm = engine(proposer, num_speculative_tokens=4, async_scheduling=asynchronous)
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [output.token_ids for output in outputs] == expected()
    assert all(output.num_accepted_draft_tokens > 0 for output in outputs)
