"""The sanitizer is silent on a right engine, names each bug's rule in time, and is cheap.

In time: when it reports, no request has a wrong token yet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hybrid_kv.attention import mamba
from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.attention.mamba import BoundaryCopies, MambaMetadata, MambaMetadataBuilder
from hybrid_kv.attention.rollback import Recompute, RecomputeSpec, RollbackStep
from hybrid_kv.cache.block_pool import BlockIds, BlockKey, BlockPool
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.offload import KVOffload, Page
from hybrid_kv.cache.request_blocks import NewBlocks, RequestBlocks
from hybrid_kv.cache.spec import SlidingWindowSpec, SlotsSpec, StateProgress
from hybrid_kv.check.guard.scenario import ScriptedProposer, SmallBlocksFirst, SmallKVFirst
from hybrid_kv.engine import runner
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.runner import ModelRunner, PreparedStep
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.kernels.block_tables.host import HostTables
from hybrid_kv.kernels.common.spans import Boundaries
from hybrid_kv.kernels.common.upload import Staged
from hybrid_kv.kernels.recompute import RecomputeCursors, RecomputeStep
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.request import Request, ScheduledRequest
from hybrid_kv.sampling import SamplingParams
from hybrid_kv.sanitizer import Sanitizer, SanitizerError

Method = Callable[..., Any]
Fault = Callable[[Method], Method]
Ints = npt.NDArray[np.int64]

MAX_TOKENS = 12
PATTERNS = ("M*", "M*MM*", "*M", "MMM*M", "**", "MM")


def scripted(
    script: str, k: int, prompts: Sequence[Sequence[int]], sequences: Sequence[Sequence[int]]
) -> ScriptedProposer:
    return ScriptedProposer(
        script, k, sequences, [len(prompt) for prompt in prompts], 8, ExactConfig.vocab_size
    )


class Traffic:
    """Nine requests with shared prefixes in a pool too small for them, all drawn from `seed`."""

    def __init__(self, seed: int, **options: Any) -> None:
        rng = np.random.default_rng(seed)
        self.k = options.setdefault("num_speculative_tokens", int(rng.integers(0, 6)))
        pattern = options.pop("pattern", PATTERNS[int(rng.integers(len(PATTERNS)))])
        base = rng.integers(0, 97, 30).tolist()
        self.prompts = [
            base[: int(rng.integers(0, 31))]
            + rng.integers(0, 97, int(rng.integers(1, 16))).tolist()
            for _ in range(8)
        ]
        self.prompts.append(self.prompts[0])
        self.model = ExactModel(ExactConfig(pattern=pattern))
        oracle = ExactOracle(self.model)
        self.sequences = [prompt + oracle.generate(prompt, MAX_TOKENS) for prompt in self.prompts]
        longest = pattern.count("M") * (8 + self.k) + pattern.count("*") * 8
        mode = ("none", "align", "all")[seed % 3]
        self.options = {
            "attention_backend": (SmallKVFirst, SmallBlocksFirst)[seed // 3 % 2].name,
            "mamba_cache_mode": mode,
            "num_blocks": 1 + int(longest * rng.uniform(1.0, 2.0)),
            "max_num_seqs": 4,
            "max_num_batched_tokens": int(rng.choice([5, 9, 16, 64])),
            "max_model_len": 64,
            "captured_batch_sizes": ((), (1, 2, 4), (3,))[int(rng.integers(3))],
            "async_scheduling": bool(rng.random() < 0.3),
            "sanitize": True,
            "device": "cpu",
        } | options
        if "*" in pattern or self.options["mamba_cache_mode"] != "none":
            self.options["block_size" if "*" in pattern else "mamba_block_size"] = 8
        if self.k > 3 and self.options["mamba_cache_mode"] == "align":
            self.options["async_scheduling"] = False  # it would need blocks of 1 + 2K tokens

    def llm(self) -> LLM:
        proposer = (
            scripted("mixed", self.k, self.prompts * 2, self.sequences * 2) if self.k else None
        )
        return LLM(self.model, proposer=proposer, **self.options)

    def run(
        self, llm: LLM, before_step: Callable[[LLM], object] = lambda llm: None
    ) -> tuple[list[Request], SanitizerError | None]:
        """Step by step; returns the requests, and what the sanitizer reported, if it did."""
        params = SamplingParams(max_tokens=MAX_TOKENS)
        requests = [llm.make_request(prompt, params) for prompt in self.prompts]
        for request in requests:
            llm.scheduler.add(request)
        try:
            while llm.scheduler.has_requests:
                before_step(llm)
                llm.step()
        except SanitizerError as error:
            return requests, error
        return requests, None

    def is_right(self, request: Request) -> bool:
        """As far as it got."""
        sequence = self.sequences[int(request.request_id) % len(self.sequences)]
        return sequence[: request.num_tokens] == request.token_ids


@pytest.mark.parametrize("scheme", ["slots", "recompute"])
def test_a_right_engine_is_silent(scheme: str) -> None:
    seen = Counter()
    for seed in range(6, 12):  # Six seeds are every mode with every backend.
        own = (
            {"pattern": PATTERNS[seed % 4], "state_scheme": scheme} if scheme == "recompute" else {}
        )
        traffic = Traffic(seed, **own)
        llm = traffic.llm()
        requests, report = traffic.run(llm)
        assert report is None, f"seed {seed}: {report}"
        assert all(traffic.is_right(request) and request.is_finished for request in requests)
        assert not llm.observers[0].ledger.references.any()
        seen["hit"] += sum(request.hit.num_tokens > 0 for request in requests)
        seen["preempted"] += sum(request.num_preemptions for request in requests)
        seen["accepted"] += sum(request.num_accepted_draft_tokens for request in requests)
        seen["rejected"] += sum(r.num_draft_tokens - r.num_accepted_draft_tokens for r in requests)
        seen["evicted"] += llm.manager.pool.num_evictions
    assert all(seen[name] for name in ("hit", "preempted", "accepted", "rejected", "evicted")), seen


@pytest.mark.parametrize("seed", [1, 2, 4, 5])  # mode none, which is 0 mod 3, keeps nothing
def test_blocks_from_the_offload_tier_are_followed(seed: int) -> None:
    traffic = Traffic(seed, kv_offload_bytes=2**20)
    llm = traffic.llm()
    for _ in range(2):
        requests, report = traffic.run(llm)
        assert report is None, str(report)
        assert all(map(traffic.is_right, requests))
        llm.reset_prefix_cache()
    assert llm.manager.offload.stats.loaded_blocks


def test_blocks_that_another_engine_filed_first_may_differ_in_bytes_that_are_never_read(
    tmp_path: Path,
) -> None:
    model, prompt = ExactModel(), list(range(33))
    answer = ExactOracle(model).generate(prompt, 8)

    def engine(script: str, sanitize: bool) -> LLM:
        proposer = scripted(script, 3, [prompt, prompt + answer], [prompt + answer + [0] * 9] * 2)
        return LLM(
            model,
            proposer=proposer,
            num_speculative_tokens=3,
            attention_backend=SmallKVFirst.name,
            block_size=8,
            max_num_seqs=2,
            max_model_len=200,
            device="cpu",
            max_num_batched_tokens=64,
            num_blocks=100,
            mamba_cache_mode="all",
            kv_offload_folder=tmp_path,
            sanitize=sanitize,
        )

    # One engine drafts right, the other wrong: rows of drafts that they leave behind a window
    # differ.
    other, own = engine("wrong", sanitize=False), engine("mixed", sanitize=True)
    params = SamplingParams(max_tokens=8)

    def file_first(llm: LLM) -> None:
        if llm.num_steps == 1:
            other.generate([prompt], params, progress=False)

    own.generate([prompt], params, progress=False, on_step=file_first)
    own.reset_prefix_cache()
    (output,) = own.generate([prompt + answer], params, progress=False)
    assert output.cached_tokens == 40


# Injected faults. Each takes the place of a function, given that function.


def around(change: Method) -> Fault:
    """Replace what a method returns: `change(result, *arguments)`."""
    return lambda plain: lambda *args, **kwargs: change(plain(*args, **kwargs), *args)


def before(change: Method) -> Fault:
    """Replace a method's positional arguments: `change(*arguments)`."""
    return lambda plain: lambda *args, **kwargs: plain(*change(*args), **kwargs)


def accept_one_less(
    _: object, self: ModelRunner, step: PreparedStep, num_accepted: Sequence[int]
) -> None:
    self.cursors.window_row[step.inputs.rows] = np.maximum(
        0, self.cursors.window_row[step.inputs.rows] - 1
    )


def with_metadata(**changes: Callable[[MambaMetadata], object]) -> Fault:
    return around(
        lambda built, *_: replace(
            built, **{name: change(built) for name, change in changes.items()}
        )
    )


def live_padding(
    built: MambaMetadata, builder: MambaMetadataBuilder, common: CommonAttentionMetadata, *_: object
) -> MambaMetadata:
    built.state_indices[common.num_reqs :] = built.state_indices[0]
    return built


def state_in_place(
    built: MambaMetadata, builder: MambaMetadataBuilder, common: CommonAttentionMetadata, *_: object
) -> MambaMetadata:
    rows = slice(built.num_decodes, common.num_reqs)
    started = torch.from_numpy(common.num_computed_tokens[rows] > 0)
    built.state_indices[rows, 0] = torch.where(
        started, built.source_indices[rows], built.state_indices[rows, 0]
    )
    return built


def no_copies(copies: BoundaryCopies, *_: object) -> BoundaryCopies:
    return type(copies)(*(values[:0] for values in copies))


def publish_when_scheduled(
    new: NewBlocks | None, scheduler: Scheduler, item: ScheduledRequest, *_: object
) -> NewBlocks | None:
    request, end = item.request, item.num_computed_tokens + item.num_tokens
    if new is not None and not item.num_drafts and not item.awaits_drafts:
        scheduler.manager.cache_blocks(
            request.request_id,
            request.block_hashes,
            request.token_ids,
            StateProgress(end, end),
            item.is_decode,
        )
    return new


def keep_last_padding(plain: Method) -> Method:
    def map_slots(
        self: HostTables, rows: Ints, query_lens: Ints, positions: Ints, num_tokens_padded: int
    ) -> None:
        plain(self, rows, query_lens, positions, num_tokens_padded)
        self.slot_mappings[:, len(positions) : num_tokens_padded] = self.slot_mappings[:, :1]

    return map_slots


def forget_to_unpublish(plain: Method) -> Method:
    def unpublish(self: BlockPool, blocks: Iterable[int]) -> None:
        kept = dict(self._blocks)
        plain(self, blocks)
        self._blocks = kept

    return unpublish


def one_token_back(plain: Method) -> Method:
    def chunk(
        self: Scheduler, request: Request, start: int, budget: int, overwrite: bool = False
    ) -> ScheduledRequest:
        return plain(self, request, start - (overwrite and start > 0), budget, overwrite)

    return chunk


def write_elsewhere(plain: Method) -> Method:
    def commit(
        self: ModelRunner, batch: Sequence[ScheduledRequest], *args: Any
    ) -> tuple[list[list[int]], object]:
        tokens, logprobs = plain(self, batch, *args)
        for item, new in zip(batch, tokens, strict=True):
            if new:
                self.token_ids[item.request.row, item.request.num_tokens] = 0
        return tokens, logprobs

    return commit


def give_back_more(
    self: KVCacheManager,
    request_id: str,
    rows: Sequence[RequestBlocks],
    num_computed: int,
    num_seen: int,
) -> tuple[object, ...]:
    return self, request_id, rows, num_computed, num_seen + 8


def publish_inside(plain: Method) -> Method:
    def cache_blocks(self: Scheduler, request: Request, is_decode: bool) -> None:
        end = min(-(-request.num_computed_tokens // 8) * 8, request.num_tokens)
        args = (
            request.request_id,
            request.block_hashes,
            request.token_ids,
            StateProgress(end, end),
            is_decode,
        )
        self.manager.cache_blocks(*args)

    return cache_blocks


def repeat_manager_blocks(_: object, self: HostTables, *arguments: object) -> None:
    self.geometry[:, 4] = 1


def shift_slots(by: int) -> Fault:
    def shift(
        _: object,
        self: HostTables,
        rows: Ints,
        query_lens: Ints,
        positions: Ints,
        num_tokens_padded: int,
    ) -> None:
        self.slot_mappings[:, : len(positions)] += by

    return around(shift)


def states_beyond_the_row(built: MambaMetadata, *_: object) -> MambaMetadata:
    built.state_indices[built.num_decodes :] = built.state_indices[built.num_decodes :, :1].clone()
    return built


def boundary_into_state_block(built: MambaMetadata) -> Boundaries | None:
    if built.boundaries is None:
        return None
    return built.boundaries._replace(
        blocks=built.state_indices[built.num_decodes + built.boundaries.rows, 0]
    )


def metadata_of_its_own(built: PreparedStep, *_: object) -> PreparedStep:
    context = built.context
    context.metadata["layers.4"] = replace(context.metadata["layers.4"])
    return built


def count_one_more(_: object, self: Scheduler, item: ScheduledRequest, *__: object) -> None:
    item.request.progress.computed += 1


def hand_out_a_held_block(ids: BlockIds | None, pool: BlockPool, *_: object) -> BlockIds | None:
    if ids is not None and len(held := np.flatnonzero(pool.ref_count[1:] > 0)) > len(ids):
        ids[0] = 1 + next(block for block in held.tolist() if 1 + block not in ids)
    return ids


def next_row(self: HostTables, rows: Ints, *rest: object) -> tuple[object, ...]:
    return self, (rows + 1) % self.max_num_reqs, *rest


def wrong_block(block: int | None, self: BlockPool, key: BlockKey) -> int | None:
    others = [
        other for (group, _), other in self._blocks.items() if group == key[0] and other != block
    ]
    return others[0] if block is not None and others else block


def free_a_running_block(llm: LLM) -> None:
    if llm.num_steps == 3:
        ids = llm.manager.block_ids(llm.scheduler.running[0].request_id)
        llm.manager.pool.free(np.concatenate(ids)[:1])


def damage_published_pages(llm: LLM) -> None:
    pool = llm.manager.pool
    pages = llm.runner.raw_buffers[0].view(pool.num_blocks, -1)
    pages[[pool.lookup(key) for key in pool.published_keys()], 0] ^= 1


ALL = {
    "mamba_cache_mode": "all",
    "pattern": "M*",
    "num_speculative_tokens": 3,
    "async_scheduling": False,
}
ALIGN = ALL | {"mamba_cache_mode": "align"}
ATTENTION = ALL | {"pattern": "**"}
OFFLOAD = ATTENTION | {"kv_offload_bytes": 2**20}
WINDOWS = ALIGN | {"pattern": "M~*"}
ROOMY = {"num_blocks": 80, "max_num_batched_tokens": 16}

BUGS = {
    "accepted off by one": (
        ModelRunner,
        "_postprocess",
        around(accept_one_less),
        ALL,
        "read-window",
    ),
    "stale window row": (
        MambaMetadataBuilder,
        "_make",
        with_metadata(window_rows=lambda m: torch.zeros_like(m.window_rows)),
        ALL,
        "read-window",
    ),
    "stale source indices (C01)": (
        MambaMetadataBuilder,
        "_make",
        with_metadata(source_indices=lambda m: m.window_indices),
        ALL,
        "read-state",
    ),
    "window row beyond the window": (
        MambaMetadataBuilder,
        "_make",
        with_metadata(window_rows=lambda m: m.window_rows + 4),
        ALL,
        "index-range",
    ),
    "initial states flipped": (
        MambaMetadataBuilder,
        "_make",
        with_metadata(
            has_initial_state=lambda m: (
                None if m.has_initial_state is None else ~m.has_initial_state
            )
        ),
        ALL,
        "initial-state",
    ),
    "padding writes a live block (C06)": (
        MambaMetadataBuilder,
        "_make",
        around(live_padding),
        ALL,
        "pad-row",
    ),
    "shared state written in place (F34)": (
        MambaMetadataBuilder,
        "_make",
        around(state_in_place),
        ALL,
        "write-shared",
    ),
    "boundary copy forgotten": (runner, "boundary_copies", around(no_copies), ALL, "publish-state"),
    "boundary copy has no effect": (
        runner,
        "postprocess_mamba",
        lambda plain: lambda *_: None,
        ALIGN,
        "copy-bytes",
    ),
    "boundary copy of a rejected draft": (
        runner,
        "due_copies",
        before(lambda copies, accepted: (copies, copies.token_idx.max() + 0 * accepted)),
        ALL,
        "copy-rejected",
    ),
    "boundary offset off by one": (
        mamba,
        "boundaries_inside",
        around(lambda found, *_: (found[0], found[1], np.maximum(found[2] - 1, 1))),
        ALL,
        "publish-state",
    ),
    "align publishes jumped logical blocks": (
        KVCacheManager,
        "cache_blocks",
        before(lambda *args: (*args[:5], True, *args[6:])),
        ALIGN,
        "publish-unheld publish-state",
    ),
    "align publishes inside a block (F32)": (
        Scheduler,
        "_cache_blocks",
        publish_inside,
        ALIGN,
        "publish-unaccepted",
    ),
    "published when scheduled (vllm!56525)": (
        Scheduler,
        "_allocate",
        around(publish_when_scheduled),
        ALL,
        "publish-unaccepted",
    ),
    "slot off by one": (HostTables, "map_slots", shift_slots(1), ATTENTION, "read-slot"),
    "negative slot": (HostTables, "map_slots", shift_slots(-(2**20)), ATTENTION, "index-range"),
    "slots of another row (C22)": (
        HostTables,
        "map_slots",
        before(next_row),
        ATTENTION,
        "write-unheld",
    ),
    "padding keeps slots (B06)": (
        HostTables,
        "map_slots",
        keep_last_padding,
        ATTENTION,
        "pad-slot",
    ),
    "kernel blocks not expanded (B01)": (
        HostTables,
        "__init__",
        around(repeat_manager_blocks),
        ATTENTION,
        "read-slot",
    ),
    "a hit takes another block": (
        BlockPool,
        "lookup",
        around(wrong_block),
        ATTENTION | ROOMY,
        "hit-prefix",
    ),
    "a hit is computed again in place": (
        Scheduler,
        "_chunk",
        one_token_back,
        ATTENTION | ROOMY,
        "write-shared",
    ),
    "freed too early (F16)": (
        KVCacheManager,
        "_give_back",
        before(give_back_more),
        ALIGN,
        "read-unheld",
    ),
    "a window's block freed too early (sgl#8649)": (
        SlidingWindowSpec,
        "first_needed",
        around(lambda first, *_: first + 1),
        WINDOWS | ROOMY,
        "read-unheld",
    ),
    "a window one token too long (mlx!390)": (
        runner,
        "window_of",
        around(lambda window, *_: window and window + 1),
        WINDOWS | ROOMY,
        "window-start",
    ),
    "a window that begins late": (
        runner,
        "window_of",
        around(lambda window, *_: window and window - 1),
        WINDOWS | ROOMY,
        "window-start",
    ),
    "evicted and still found": (
        BlockPool,
        "_unpublish",
        forget_to_unpublish,
        ATTENTION,
        "evict-findable",
    ),
    "new token in the wrong place": (ModelRunner, "_commit", write_elsewhere, ALL, "input-token"),
    "pages loaded into each other's blocks": (
        KVOffload,
        "load",
        before(lambda self, pages, ids: (self, pages, ids[::-1])),
        OFFLOAD,
        "load-bytes",
    ),
    "states beyond a row's tokens": (
        MambaMetadataBuilder,
        "_make",
        around(states_beyond_the_row),
        ALL,
        "write-padding",
    ),
    "boundary state and last state in one block": (
        MambaMetadataBuilder,
        "_make",
        with_metadata(boundaries=boundary_into_state_block),
        ALL,
        "write-twice",
    ),
    "boundary copy one draft early": (
        runner,
        "due_copies",
        around(lambda c, *_: c._replace(token_idx=(c.token_idx - 1).clamp(min=0))),
        ALL,
        "copy-state",
    ),
    "one layer with metadata of its own": (
        ModelRunner,
        "_prepare",
        around(metadata_of_its_own),
        ALL | {"pattern": "M*MM*"},
        "layer-metadata",
    ),
    "a token too many is counted": (Scheduler, "update", around(count_one_more), ALL, "position"),
    "next logical block published": (
        RequestBlocks,
        "__getitem__",
        before(lambda self, block_idx: (self, min(block_idx + 1, self.length - 1))),
        ATTENTION,
        "publish-slots",
    ),
    "a held block is handed out": (
        BlockPool,
        "allocate",
        around(hand_out_a_held_block),
        ATTENTION,
        "allocate-held",
    ),
    "freed again and again": (
        RequestBlocks,
        "give_back",
        lambda plain: lambda self, end: dict.fromkeys(self._ids[:end].tolist(), 0),
        ALIGN,
        "free-unheld",
    ),
    "one block is never freed": (
        RequestBlocks,
        "held",
        around(lambda ids, *_: ids[:-1]),
        ATTENTION,
        "free-leak",
    ),
    "a token behind a rejected draft": (
        runner,
        "gained",
        around(lambda gained, *_: [[*new, 0] for new in gained]),
        ALL,
        "accept",
    ),
}


def with_recompute(**changes: Callable[[RecomputeStep], torch.Tensor]) -> Fault:
    """Replace parts of the `RecomputeStep` of every commit."""

    def change(found: RollbackStep, *_: object) -> RollbackStep:
        step = found.history
        return replace(
            found, history=step._replace(**{name: part(step) for name, part in changes.items()})
        )

    def staged(found: Staged[RollbackStep], *_: object) -> Staged[RollbackStep]:
        arrays, make = found
        return arrays, around(change)(make)

    return around(staged)


RECOMPUTE = ALL | {"state_scheme": "recompute", "recompute_ring_len": 11}
BUGS |= {
    "drafts count as accepted": (
        Recompute,
        "_step",
        before(
            lambda self, rows, _, common, table: (
                self,
                rows,
                common.query_lens[: len(rows)],
                common,
                table,
            )
        ),
        RECOMPUTE,
        "flush-unaccepted history-length read-state",
    ),
    "a token more is flushed": (
        Recompute,
        "_step",
        with_recompute(n_flush=lambda s: s.n_flush + (s.n_flush > 0)),
        RECOMPUTE,
        "flush-unaccepted flush-boundary",
    ),
    "all is flushed past a boundary": (
        Recompute,
        "_step",
        with_recompute(n_flush=lambda s: torch.where(s.n_flush > 0, s.n_hist, 0)),
        RECOMPUTE,
        "flush-boundary",
    ),
    "a token of history is lost": (
        Recompute,
        "_step",
        with_recompute(
            n_hist=lambda s: (s.n_hist - 1).clamp(min=0),
            n_flush=lambda s: 0 * s.n_flush,
            dst=lambda s: s.src,
        ),
        RECOMPUTE,
        "history-length",
    ),
    "the ring begins elsewhere": (
        Recompute,
        "_step",
        with_recompute(ring_start=lambda s: s.ring_start * 0),
        RECOMPUTE,
        "read-history",
    ),
    "the ring of another row": (
        Recompute,
        "_step",
        with_recompute(rows=lambda s: (s.rows + 1) % 4),
        RECOMPUTE,
        "ring-row",
    ),
    "flushed into the block that it starts from": (
        Recompute,
        "_step",
        with_recompute(dst=lambda s: s.src),
        RECOMPUTE,
        "flush-shared",
    ),
    "flushed into a free block": (
        Recompute,
        "_step",
        with_recompute(dst=lambda s: torch.where(s.n_flush > 0, 199, s.dst)),
        RECOMPUTE | {"num_blocks": 200},
        "flush-unheld",
    ),
    "a new owner keeps the cursors": (
        RecomputeCursors,
        "restart",
        before(lambda self, rows, ends: (self, rows[:0], ends[:0])),
        RECOMPUTE,
        "read-state read-unheld index-range history-length",
    ),
    "freed before the state has left it": (
        Scheduler,
        "_allocate",
        lambda plain: (
            lambda self, item, *hit: (
                setattr(item.request, "progress", StateProgress(*[item.num_computed_tokens] * 2)),
                plain(self, item, *hit),
            )[1]
        ),
        RECOMPUTE | {"mamba_cache_mode": "align"},
        "read-unheld finalize-lost",
    ),
    "published before it is flushed": (
        RecomputeSpec,
        "advance",
        lambda plain: SlotsSpec.advance,
        RECOMPUTE,
        "publish-unflushed",
    ),
    "given up without a last write": (
        Scheduler,
        "_release",
        before(lambda self, request, *_: (self, request, False)),
        RECOMPUTE,
        "finalize-lost",
    ),
    "lost at the end": (
        ModelRunner,
        "flush",
        lambda plain: lambda *_: None,
        RECOMPUTE,
        "finalize-lost publish-unflushed",
    ),
}


@pytest.mark.parametrize("folder", [False, True])
def test_loaded_bytes_that_were_never_published_are_named_where_no_other_engine_can_have_filed_them(
    folder: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def damaged(
        store: KVOffload, pages: list[Page], ids: Sequence[int]
    ) -> tuple[KVOffload, list[Page], Sequence[int]]:
        return store, [replace(page, data=page.data ^ (page.key[0] == 0)) for page in pages], ids

    monkeypatch.setattr(KVOffload, "load", before(damaged)(KVOffload.load))
    options = ALL | {"kv_offload_folder": tmp_path} if folder else OFFLOAD
    rules = set()
    for seed in range(6):
        traffic = Traffic(seed, **options)
        llm = traffic.llm()
        llm.observers[0].private_tier = not folder
        _, report = traffic.run(llm)
        rules.add(report and report.rule)
    assert rules <= {None, "load-bytes"}
    assert ("load-bytes" in rules) == (not folder)


def test_pages_of_a_shared_folder_loaded_into_each_others_blocks_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        KVOffload, "load", before(lambda self, pages, ids: (self, pages, ids[::-1]))(KVOffload.load)
    )
    reports = (
        traffic.run(traffic.llm())[1]
        for traffic in (
            Traffic(seed, **ATTENTION, kv_offload_folder=tmp_path / str(seed)) for seed in range(12)
        )
    )
    assert next(report.rule for report in reports if report is not None) == "load-bytes"


@pytest.mark.parametrize("name", BUGS)
def test_an_injected_fault_is_named_before_a_wrong_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, bug, options, rule = BUGS[name]
    monkeypatch.setattr(owner, attribute, bug(getattr(owner, attribute)))
    for seed in range(12):
        traffic = Traffic(seed, **options)
        requests, report = traffic.run(traffic.llm())
        assert all(map(traffic.is_right, requests)), f"seed {seed}: a wrong token came first"
        if report is not None:
            assert report.rule in rule.split(), str(report)
            return
    pytest.fail("the bug was not noticed")


@pytest.mark.parametrize(
    "disturb, options, rule",
    [
        (free_a_running_block, ALL, "free-held"),
        (damage_published_pages, ATTENTION | ROOMY, "hit-overwritten"),
    ],
)
def test_damage_from_outside_is_named(
    disturb: Callable[[LLM], None], options: dict[str, Any], rule: str
) -> None:
    traffic = Traffic(2, **options)
    _, report = traffic.run(traffic.llm(), disturb)
    assert report is not None and report.rule == rule, str(report)


def test_a_report_has_rule_request_group_block_step_and_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, attribute, bug, *_ = BUGS["accepted off by one"]
    monkeypatch.setattr(owner, attribute, bug(getattr(owner, attribute)))
    traffic = Traffic(2, **ALL)
    _, report = traffic.run(traffic.llm())
    first, request, group, block, *history = str(report).splitlines()
    assert re.fullmatch(
        r"read-window in step \d+: block \d+: row \d of a window is read after \d+ tokens; .*",
        first,
    )
    assert "the first" in first and "(step" in first
    assert re.fullmatch(r"request \d in row \d: \d+ tokens, \d+ of them in the cache", request)
    assert re.fullmatch(r"group 0: MambaSpec, blocks of 8 tokens: layers\.0", group)
    assert re.fullmatch(r"block \d+: not published, held by \d; history:", block)
    assert 2 <= len(history) <= 6
    assert re.fullmatch(r"  step \d+: write by request \d, group 0", history[-1])


@pytest.mark.parametrize(
    "variable, option, on", [("1", None, True), ("0", None, False), ("1", False, False)]
)
def test_the_environment_is_the_default(
    variable: str, option: bool | None, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KV_SANITIZE", variable)
    llm = Traffic(1, sanitize=option).llm()
    assert llm.runner.observers is llm.manager.observers is llm.observers
    assert [type(observer) for observer in llm.observers] == [Sanitizer] * on


def test_fresh_blocks_are_poisoned() -> None:
    traffic = Traffic(2, **ALL)
    llm = traffic.llm()
    new = llm.manager.allocate_slots("0", 0, 20, is_decode=False)
    for buffer in llm.runner.raw_buffers:
        pages = buffer.view(llm.manager.pool.num_blocks, -1)
        assert (pages[new.ids] == -1).all() and not pages[0].any()
