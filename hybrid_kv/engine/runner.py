"""One step on the device: stage block ids, build metadata, run the model, sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.attention.mamba import (
    BoundaryCopies,
    MambaMetadataBuilder,
    boundary_copies,
    due_copies,
    last_scheduled_block_idx,
    postprocess_mamba,
)
from hybrid_kv.attention.paged import Compute, build_paged_attention_metadata, compute_of
from hybrid_kv.attention.rollback import Rollback, RollbackStep
from hybrid_kv.cache.backend import (
    AttentionBackend,
    AttentionGroup,
    BackendContext,
    CUDAGraphSupport,
    get_attention_cg_support_info,
    init_attn_backend,
)
from hybrid_kv.cache.block_table import BlockTables, LaunchedBlockTables
from hybrid_kv.cache.layout import allocate_raw_buffers, allocate_row_memory, bind_views
from hybrid_kv.cache.plan import CachePlan
from hybrid_kv.cache.spec import MambaSpec, layer_specs
from hybrid_kv.config import EngineConfig
from hybrid_kv.engine.drafter import MTPDrafter
from hybrid_kv.engine.state_cursor import StateCursor
from hybrid_kv.kernels.common.launch import choose
from hybrid_kv.kernels.common.upload import Staged, download, fill, move, now, together
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.models.interface import DraftHead, Model
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import Request, ScheduledRequest
from hybrid_kv.sampling import TokenLogprobs, token_logprobs
from hybrid_kv.spec_decode.verify import Sampling, gained, stage_sampling, verify

Ints = npt.NDArray[np.int64]

LOGITS_ROWS = 64  # prompt tokens whose logits are made at once: 64 of 131,072 words are 32 MiB in float32


class Proposer(Protocol):
    """Guesses the tokens that follow, for the next step to verify."""

    def propose(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[npt.NDArray[np.int64]],
        num_tokens: npt.NDArray[np.int64],
    ) -> list[list[int]]:
        """At most K tokens for each request; from the first one outside the vocabulary on they are ignored.

        Args:
            requests: as they were before the step.
            token_ids: of each request [max_model_len + 1]; beyond its `num_tokens` lie rejected drafts.
            num_tokens: [num_requests], known tokens, those of this step included.
        """


@dataclass(frozen=True)
class StepOutput:
    """The batch of a step, and by request id its tokens, and the drafts that follow them.

    For requests that want it also how likely the tokens are, and those of the prompt that follow the step's.
    """

    batch: list[ScheduledRequest]
    tokens: dict[str, list[int]]
    drafts: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs]]


class Step(NamedTuple):
    """A prepared step, before the model runs.

    Attributes:
        rows: [num_reqs], of the engine.
        current_blocks: [num_reqs_padded], the current state blocks of the Mamba layers; zeros without any.
        copies: of boundary states, due if all drafts are accepted; `moved_copies`, if there are any: on the device.
        drafting: what the drafter staged, if there is one.
    """

    context: ForwardContext
    num_tokens_padded: int
    sampling: Sampling
    rows: Ints
    common: CommonAttentionMetadata
    current_blocks: Ints
    copies: BoundaryCopies
    moved_copies: Sequence[torch.Tensor]
    drafting: Any


class ModelRunner:
    """Owns the cache memory, the block tables and every buffer that a captured graph would read.

    A request's tokens live in row `request.row` of `token_ids` while it runs, and so does what the next step must know
    of the last one, in `cursors`, and what the rollback scheme keeps of it, in `row_memory`. The batch is ordered
    decodes first; a pure decode step is padded to a captured size with rows on the null block.
    """

    def __init__(
        self,
        model: Model,
        plan: CachePlan,
        backend: type[AttentionBackend],
        context: BackendContext,
        config: EngineConfig,
        device: torch.device,
        observers: list[EngineObserver],
        proposer: Proposer | None = None,
        head: DraftHead | None = None,
    ) -> None:
        self.model = model
        self.proposer = proposer
        self.device = device
        self.kernels = choose(config.kernels, device)
        self.groups = init_attn_backend(plan.config, backend, context)
        max_num_seqs = config.scheduler.max_num_seqs
        # What tokens leave behind for later steps. These three stay, and are empty while there is no memory.
        self.raw_buffers: list[torch.Tensor] = []
        self.views: dict[str, tuple[torch.Tensor, ...]] = {}
        self.row_memory: dict[str, Any] = {}
        self._memory = plan.config, max_num_seqs
        self.allocate_memory()
        max_model_len = config.scheduler.max_model_len
        self._captured = [size for size in config.captured_batch_sizes if size <= max_num_seqs]
        if get_attention_cg_support_info(self.groups) == CUDAGraphSupport.NEVER:
            self._captured = []
        # Padding rows come on top of a full budget of drafts.
        max_tokens = config.scheduler.max_num_batched_tokens + max_num_seqs
        self._slot_groups = [group.group_id for group in self.groups if not group.backend.is_ssm()]
        sizes = (
            [group.spec.block_size for group in self.groups],
            [group.kernel_block_size for group in self.groups],
            max_num_seqs,
            max_tokens,
            [group.spec.block_table_width(max_model_len) for group in self.groups],
            device,
            self._slot_groups,
        )
        launches = self.kernels == "triton"
        self.block_tables = LaunchedBlockTables(*sizes) if launches else BlockTables(*sizes)
        self._computes = {group_id: self._compute(self.groups[group_id]) for group_id in self._slot_groups}
        self.builders = {
            group.group_id: MambaMetadataBuilder(group.spec, max_num_seqs, device, launches)
            for group in self.groups
            if isinstance(group.spec, MambaSpec)
        }
        # Mamba layers have one block size, so one current state block serves all of their groups.
        self._mamba_spec = next((builder.spec for builder in self.builders.values()), None)
        self.cursors = StateCursor(max_num_seqs)
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # known ones, in `token_ids`
        self._drafts: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._num_speculative_tokens = config.speculative.num_speculative_tokens
        self._max_model_len = max_model_len
        self._drafter: MTPDrafter | None = None
        if head is not None:
            (name,) = head.layer_specs
            group = next(group for group in self.groups if name in group.layer_names)
            self._drafter = MTPDrafter(
                head,
                self._num_speculative_tokens,
                group,
                self.views,
                self.block_tables,
                self.token_ids,
                max_model_len,
                self._computes[group.group_id],
            )
        self.batch: list[ScheduledRequest] = []  # of the last step, in batch order
        self.observers = observers

    def _compute(self, group: AttentionGroup) -> Compute:
        dtypes = {dtype for spec in layer_specs(group.layer_names, group.spec) for dtype in spec.cache_dtypes}
        return compute_of(group.backend.get_compute(self.device.type, self.kernels, dtypes))

    def allocate_memory(self) -> None:
        """Allocate the blocks, and the rollback scheme's memory of each row; all zeros."""
        config, num_rows = self._memory
        self.raw_buffers += allocate_raw_buffers(config, self.device)
        self.views |= bind_views(config, self.groups, self.raw_buffers)
        self.row_memory |= allocate_row_memory(config, num_rows, self.device)

    def free_memory(self) -> None:
        """Release the cache memory."""
        for held in (self.raw_buffers, self.views, self.row_memory):
            held.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def padded_size(self, num_reqs: int) -> int:
        """Rows of a pure decode step of `num_reqs` requests: the next captured size, or as many as there are."""
        return next((size for size in self._captured if size >= num_reqs), num_reqs)

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepOutput:
        """Run one step: sample where the last known token was computed, verify drafts, propose new ones."""
        for observer in self.observers:
            observer.on_schedule(scheduled)
        resolved = [item if item.drafts is not None else self._resolve(item) for item in scheduled]
        self.batch = batch = sorted(resolved, key=lambda item: not item.is_decode)
        for observer in self.observers:
            observer.on_prepare(batch)
        step = self._prepare(batch)
        for observer in self.observers:
            observer.on_step(batch, self.input_ids, self.positions, step.context.metadata)
        inputs = self.input_ids[: step.num_tokens_padded], self.positions[: step.num_tokens_padded]
        hidden = self.model(*inputs, step.context)
        for observer in self.observers:
            observer.on_hidden(batch, hidden)
        logits, drawn, accepted, proposed = self._sample(step, hidden)
        *read, proposals = download(drawn, accepted, proposed)  # the step's one wait
        tokens, logprobs = self._commit(batch, step.sampling, logits, *read)
        prompt_logprobs = self._prompt_logprobs(batch, hidden)
        self._postprocess(step, [max(1, len(new)) for new in tokens])
        for observer in self.observers:
            observer.on_commit(tokens)
        drafts = self._propose(batch, tokens, proposals)
        sampled = {item.request.request_id: new for item, new in zip(batch, tokens, strict=True) if new}
        for item in batch:
            self._drafts[item.request.row] = drafts.get(item.request.request_id, [])
        return StepOutput(batch, sampled, drafts, logprobs, prompt_logprobs)

    @torch.inference_mode()
    def flush(self, request: Request) -> None:
        """Write the state at the last block boundary among a request's tokens, before it gives up its row and blocks.

        A later step, whose tokens are not known yet, has written it already if it began behind that boundary.
        """
        spec = self._mamba_spec
        assert spec is not None
        if self.cursors.begin[request.row] >= request.num_computed_tokens // spec.block_size * spec.block_size:
            return
        self._write_states(request, lambda rollback, *where: rollback.flush(*where))

    @torch.inference_mode()
    def flush_all(self, request: Request) -> None:
        """Write the states after the last token of a request, before another engine goes on with it."""
        current_blocks = self.cursors.current_block[request.row : request.row + 1]
        self._write_states(
            request, lambda rollback, rows, gained, table: rollback.flush_all(rows, gained, current_blocks, table)
        )

    def _write_states(
        self, request: Request, due: Callable[[Rollback, Ints, Ints, torch.Tensor], RollbackStep]
    ) -> None:
        """Write the states that are `due` of a request that runs no tokens, in all layers."""
        rows = np.array([request.row], dtype=np.int64)
        gained = self.cursors.num_gained(rows, np.array([request.num_computed_tokens]))
        steps: dict[str, RecomputeStep] = {}
        for group_id, builder in self.builders.items():
            step = due(
                builder.rollback, rows, gained, self.block_tables.tables[group_id][request.row : request.row + 1]
            )
            for observer in self.observers:
                observer.on_flush(request, group_id, step)
            if step.history is not None:
                steps |= dict.fromkeys(self.groups[group_id].layer_names, step.history)
        if steps:
            self.model.flush(steps, ForwardContext({}, self.views, self.row_memory, self.kernels))

    def _resolve(self, item: ScheduledRequest) -> ScheduledRequest:
        """Fill in what the step before has left: how many tokens there are, and which drafts follow them.

        A request that this step finds complete runs its last token once more; the result is dropped.
        """
        request, row = item.request, item.request.row
        known = int(self.num_tokens[row])
        room = min(request.params.max_tokens - (known - len(request.prompt_token_ids)), self._max_model_len - known)
        drafts = tuple(self._drafts[row][: max(0, min(item.num_drafts, room - 1))])
        return replace(item, num_computed_tokens=known - 1, num_tokens=1 + len(drafts), drafts=drafts)

    def _sample(self, step: Step, hidden: torch.Tensor) -> tuple[Any, ...]:
        """Launch logits, tokens and accepted drafts (see `verify`), and the drafts of a head.

        The host does not wait for them. Boundary states are copied to their blocks.
        """
        sampling = step.sampling
        logits = drawn = accepted = proposed = None
        if sampling.places:
            last = hidden[: sampling.num_rows] if sampling.rows is None else hidden[sampling.rows]
            logits = self.model.compute_logits(last)
            drawn, accepted = verify(logits, *sampling.verification)
        if step.moved_copies and accepted is not None:
            copies = due_copies(BoundaryCopies(*step.moved_copies), accepted)
            for group_id, builder in self.builders.items():
                layers = [self.views[name] for name in self.groups[group_id].layer_names]
                table = self.block_tables.input_tables[group_id]
                copies_states = builder.rollback.copies_states
                for observer in self.observers:
                    observer.on_copy(group_id, copies, table, layers, copies_states)
                postprocess_mamba(copies, table, layers, builder.spec, copies_states)
        if self._drafter is not None:
            proposed = self._drafter.propose(step.drafting, hidden, drawn, sampling.rows, accepted, self.observers)
        return logits, drawn, accepted, proposed

    def _commit(
        self, batch: Sequence[ScheduledRequest], sampling: Sampling, logits: Any, *read: Any
    ) -> tuple[list[list[int]], dict[str, list[TokenLogprobs]]]:
        """Return the tokens of each request: none, one, or its accepted drafts and one more."""
        tokens: list[list[int]] = [[] for _ in batch]
        logprobs: dict[str, list[TokenLogprobs]] = {}
        verified = gained(read[0], read[1], [batch[i].num_drafts for i in sampling.places])
        row = 0
        for i, first, new in zip(sampling.places, sampling.first_positions, verified, strict=True):
            request = batch[i].request
            tokens[i] = new
            self.token_ids[request.row, first : first + len(new)] = new
            self.num_tokens[request.row] = first + len(new)
            if (num_top := request.params.logprobs) is not None:
                logprobs[request.request_id] = token_logprobs(logits[row : row + len(new)], new, num_top)
            row += 1 + batch[i].num_drafts
        return tokens, logprobs

    def _prompt_logprobs(
        self, batch: Sequence[ScheduledRequest], hidden: torch.Tensor
    ) -> dict[str, list[TokenLogprobs]]:
        """Return log-probabilities of the prompt tokens whose logits this step produced."""
        found: dict[str, list[TokenLogprobs]] = {}
        start = 0
        for item in batch:
            if (num_top := item.request.params.prompt_logprobs) is not None:
                first = item.num_computed_tokens + 1
                wanted = item.request.prompt_token_ids[first : first + item.num_tokens]
                own = found[item.request.request_id] = []
                for begin in range(0, len(wanted), LOGITS_ROWS):
                    part = wanted[begin : begin + LOGITS_ROWS]
                    logits = self.model.compute_logits(hidden[start + begin : start + begin + len(part)])
                    own += token_logprobs(logits, part, num_top)
            start += item.num_tokens
        return found

    def _postprocess(self, step: Step, num_accepted: Sequence[int]) -> None:
        """Remember where each request's state is."""
        if (spec := self._mamba_spec) is None:
            return
        num_reqs, copies = len(step.rows), step.copies
        computed = step.common.num_computed_tokens[:num_reqs]
        accepted = np.array(num_accepted, dtype=np.int64)
        window_rows = accepted - 1
        current_blocks = step.current_blocks[:num_reqs].copy()
        if len(copies.rows):
            # If the accepted tokens end exactly on a block boundary, resume from the copied state; copying overwrote
            # the first window rows of that block.
            ended = copies.rows[copies.drafts + 1 == accepted[copies.rows]]
            current_blocks[ended] = computed[ended] // spec.block_size
            window_rows[ended] = 0
        self.cursors.advance(step.rows, computed, current_blocks, window_rows)

    def _propose(
        self, batch: Sequence[ScheduledRequest], tokens: Sequence[list[int]], proposed: list[list[int]] | None
    ) -> dict[str, list[int]]:
        """Drafts by request id; `proposed`: what a head has found."""
        requests = [item.request for item, new in zip(batch, tokens, strict=True) if new]
        if proposed is not None:
            return {request.request_id: drafts for request, drafts in zip(requests, proposed, strict=True)}
        if self.proposer is None or not requests:
            return {}
        rows = [request.row for request in requests]
        known, num_known = [self.token_ids[row] for row in rows], self.num_tokens[rows]
        drafts = self.proposer.propose(requests, known, num_known)
        for observer in self.observers:
            observer.on_propose(requests, known, num_known, drafts)
        most, size = self._num_speculative_tokens, self.model.vocab_size
        return {
            request.request_id: list(takewhile(lambda token: 0 <= token < size, draft[:most]))
            for request, draft in zip(requests, drafts, strict=True)
        }

    def _prepare(self, batch: Sequence[ScheduledRequest]) -> Step:
        """Fill the persistent buffers, by one upload."""
        for item in batch:
            request = item.request
            if item.overwrite:
                self.token_ids[request.row, : request.num_tokens] = request.token_ids
                self.num_tokens[request.row] = request.num_tokens
                self.cursors.restart(request.row, item.num_computed_tokens, self._mamba_spec)
            if item.drafts:
                first = item.num_computed_tokens + 1
                self.token_ids[request.row, first : first + len(item.drafts)] = item.drafts
        for item in batch:
            new = item.new_blocks
            if len(new.ids):
                self.block_tables.append_block_ids(item.request.row, new.ids, new.counts, item.overwrite)

        num_reqs = len(batch)
        num_decodes = sum(item.is_decode for item in batch)
        num_reqs_padded = self.padded_size(num_reqs) if num_decodes == num_reqs else num_reqs
        padding = num_reqs_padded - num_reqs
        rows = np.array([item.request.row for item in batch], dtype=np.int64)
        query_lens = np.array([item.num_tokens for item in batch] + [1] * padding, dtype=np.int64)
        computed = np.array([item.num_computed_tokens for item in batch] + [0] * padding, dtype=np.int64)
        num_tokens = int(query_lens[:num_reqs].sum())
        num_tokens_padded = num_tokens + padding
        num_decode_tokens = int(query_lens[:num_decodes].sum()) + padding

        token_rows = np.repeat(rows, query_lens[:num_reqs])
        starts = np.cumsum(query_lens) - query_lens
        positions = np.arange(num_tokens) - np.repeat((starts - computed)[:num_reqs], query_lens[:num_reqs])
        if padding:
            self.positions[num_tokens:num_tokens_padded] = 0

        common = CommonAttentionMetadata(
            num_reqs=num_reqs,
            num_reqs_padded=num_reqs_padded,
            num_decodes=num_decodes + padding,
            num_decode_tokens=num_decode_tokens,
            query_lens=query_lens,
            num_computed_tokens=computed,
            positions=self.positions[:num_tokens_padded],
        )
        current_blocks, prev_step, window_rows, gained = np.zeros((4, num_reqs_padded), dtype=np.int64)
        if self._mamba_spec is not None:
            current_blocks = last_scheduled_block_idx(self._mamba_spec, computed, query_lens)
        prev_step[:num_reqs], window_rows[:num_reqs] = self.cursors.current_block[rows], self.cursors.window_row[rows]
        gained[:num_reqs] = self.cursors.num_gained(rows, computed[:num_reqs])
        padded_rows = np.full(num_reqs_padded, -1)
        padded_rows[:num_reqs] = rows
        owned_anew = [i for i, item in enumerate(batch) if item.overwrite]
        padded = num_reqs_padded, num_tokens_padded
        tables, slots = self.block_tables.views(*padded)
        inputs = fill(
            (self.input_ids[:num_tokens], self.token_ids[token_rows, positions]),
            (self.positions[:num_tokens], positions),
        )
        update = self.block_tables.stage(rows, query_lens[:num_reqs], torch.from_numpy(positions), *padded)
        decodes = computed[:num_decodes], query_lens[:num_decodes], current_blocks[:num_decodes]
        copies = boundary_copies(self._mamba_spec, *decodes)
        moved = move(*copies) if len(copies.rows) else move()
        drafting = move() if self._drafter is None else self._drafter.stage(batch, token_rows, positions)
        staged: list[Staged[Any]] = [stage_sampling(batch), moved, drafting, inputs, update, common.stage_rows()]
        for group_id, builder in self.builders.items():
            table = tables[group_id]
            rollback = builder.rollback.prepare(padded_rows, owned_anew, gained, common, table)
            where = current_blocks, prev_step, window_rows
            staged.append(builder.build(common, table, *where, rollback, self.block_tables.num_gathers))
        sampling, moved_copies, drafts, _, _, _, *built = now(self.device, together(*staged))
        states = dict(zip(self.builders, built, strict=True))
        metadata: dict[str, Any] = {}
        for group, table in zip(self.groups, tables, strict=True):
            own = states.get(group.group_id) or build_paged_attention_metadata(
                common, table, slots[group.group_id], group.kernel_block_size, self._computes[group.group_id]
            )
            metadata.update(dict.fromkeys(group.layer_names, own))
        context = ForwardContext(metadata, self.views, self.row_memory, self.kernels)
        return Step(context, num_tokens_padded, sampling, rows, common, current_blocks, copies, moved_copies, drafts)
