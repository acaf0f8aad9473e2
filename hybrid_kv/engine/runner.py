"""One step on the device: stage block ids, build metadata, run the model, sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.common import CommonAttentionMetadata, PartialStates
from hybrid_kv.attention.mamba import (
    BoundaryCopies,
    MambaMetadata,
    MambaMetadataBuilder,
    boundary_copies,
    due_copies,
    postprocess_mamba,
    stage_copies,
)
from hybrid_kv.attention.paged import Compute, build_paged_attention_metadata, compute_of
from hybrid_kv.attention.rollback import RollbackStep
from hybrid_kv.cache.backend import (
    AttentionGroup,
    CUDAGraphSupport,
    get_attention_cg_support_info,
)
from hybrid_kv.cache.block_pool import BlockIds
from hybrid_kv.cache.block_table import BlockTables, LaunchedBlockTables
from hybrid_kv.cache.layout import allocate_raw_buffers, allocate_row_memory, bind_views
from hybrid_kv.cache.plan import CachePlan
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, layer_specs, window_of
from hybrid_kv.config import ConfigError, EngineConfig, SchedulerConfig
from hybrid_kv.engine.block_drafter import BlockDrafter
from hybrid_kv.engine.drafter import Drafter, MTPDrafter
from hybrid_kv.engine.state_cursor import StateCursor
from hybrid_kv.engine.step_inputs import StepInputs, padded_size
from hybrid_kv.kernels.common.launch import choose
from hybrid_kv.kernels.common.upload import Pending, StepUpload, download, fill, upload
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.models.attention import attention_layers
from hybrid_kv.models.interface import BlockDraftHead, DraftHead, Model
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import Request, ScheduledRequest
from hybrid_kv.sampling import TokenLogprobs, token_logprobs
from hybrid_kv.spec_decode.verify import Sampling, gained, stage_sampling, verify

Ints = npt.NDArray[np.int64]

# Prompt tokens whose logits are made at once: 64 of 131,072 words are 32 MiB in float32
LOGITS_ROWS = 64


class Proposer(Protocol):
    """Guesses the tokens that follow, for the next step to verify."""

    def propose(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[npt.NDArray[np.int64]],
        num_tokens: npt.NDArray[np.int64],
    ) -> list[list[int]]:
        """Return at most K tokens for each request.

        From the first one outside the vocabulary on they are ignored.

        Args:
            requests: as they were before the step.
            token_ids: of each request [max_model_len + 1]; beyond its `num_tokens` lie rejected
                drafts.
            num_tokens: [num_requests], known tokens, those of this step included.
        """


@dataclass(frozen=True)
class StepOutput:
    """The batch of a step, and by request id its tokens and the drafts that follow them.

    For requests that want it also how likely the tokens are, and those of the prompt that follow
    the step's.
    """

    batch: list[ScheduledRequest]
    tokens: dict[str, list[int]]
    drafts: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs]]


@dataclass(frozen=True)
class DraftSource:
    """The source of drafts: a proposer on the host, a head of the checkpoint, or neither.

    A head drafts one token after another, or a block at once.
    """

    proposer: Proposer | None = None
    head: DraftHead | None = None
    block_head: BlockDraftHead | None = None

    @property
    def layer_specs(self) -> dict[str, KVCacheSpec]:
        """The cache of each layer of a head."""
        head = self.head or self.block_head
        return {} if head is None else head.layer_specs

    def num_ahead(self, num_drafts: int) -> int:
        """Return how many positions after a step's tokens a head writes, for so many drafts."""
        if self.block_head is not None:
            return 1 + num_drafts
        return num_drafts if self.head is not None else 0


@dataclass(frozen=True)
class PreparedStep:
    """A step before the model runs.

    Attributes:
        copies: of boundary states, due if all drafts are accepted; `moved_copies`, if there are
            any: on the device.
        drafting: what the drafter staged, if there is one.
    """

    inputs: StepInputs
    context: ForwardContext
    sampling: Sampling
    copies: BoundaryCopies
    moved_copies: BoundaryCopies | None
    drafting: Any


class Sampled(NamedTuple):
    """The results of sampling, on the device; None where nothing was there to compute."""

    logits: torch.Tensor | None
    drawn: torch.Tensor | None
    accepted: torch.Tensor | None
    proposed: torch.Tensor | None


class ModelRunner:
    """Owns the cache memory, the block tables and every buffer that a captured graph would read.

    A request's tokens live in row `request.row` of `token_ids` while it runs, and so does what the
    next step must know of the last one, in `cursors`, and what the rollback scheme keeps of it, in
    `row_memory`. The batch is ordered decodes first; a pure decode step is padded to a captured
    size with rows on the null block.
    """

    def __init__(
        self,
        model: Model,
        plan: CachePlan,
        groups: Sequence[AttentionGroup],
        config: EngineConfig,
        device: torch.device,
        observers: list[EngineObserver],
        drafts: DraftSource,
    ) -> None:
        self.model = model
        self.proposer = drafts.proposer
        self.device = device
        self.kernels = choose(config.kernels, device)
        self.groups = groups
        self.observers = observers
        self.batch: list[ScheduledRequest] = []  # of the last step, in batch order
        limits = config.scheduler
        self._max_model_len = limits.max_model_len
        self._speculative = config.speculative
        # What tokens leave behind for later steps. These three stay, and are empty while there is
        # no memory.
        self.raw_buffers: list[torch.Tensor] = []
        self.views: dict[str, tuple[torch.Tensor, ...]] = {}
        self.row_memory: dict[str, Any] = {}
        self._memory = plan.config, limits.max_num_seqs
        # Before any memory: a compute may be missing, or miss what a layer needs.
        self._computes = {
            group.group_id: self._compute(group) for group in groups if not group.backend.is_ssm()
        }
        self.allocate_memory()
        self.captured_sizes = [
            size for size in config.captured_batch_sizes if size <= limits.max_num_seqs
        ]
        if get_attention_cg_support_info(groups) == CUDAGraphSupport.NEVER:
            self.captured_sizes = []
        # Padding rows come on top of a full budget of drafts.
        max_tokens = limits.max_num_batched_tokens + limits.max_num_seqs
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.token_ids = np.zeros((limits.max_num_seqs, limits.max_model_len + 1), dtype=np.int64)
        # Known ones, in `token_ids`
        self.num_tokens = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self._drafts: list[list[int]] = [[] for _ in range(limits.max_num_seqs)]
        self.block_tables = self._make_block_tables(limits, max_tokens)
        launches = self.kernels == "triton"
        self.builders = {
            group.group_id: MambaMetadataBuilder(
                group.spec, limits.max_num_seqs, device, launches, group.group_id
            )
            for group in groups
            if isinstance(group.spec, MambaSpec)
        }
        self._mamba_spec = next((builder.spec for builder in self.builders.values()), None)
        self.cursors = StateCursor(limits.max_num_seqs, self._mamba_spec)
        self._drafter = self._make_drafter(drafts)

    def _make_block_tables(self, limits: SchedulerConfig, max_tokens: int) -> BlockTables:
        tables = LaunchedBlockTables if self.kernels == "triton" else BlockTables
        return tables(
            block_sizes=[group.spec.block_size for group in self.groups],
            kernel_block_sizes=[group.kernel_block_size for group in self.groups],
            max_num_reqs=limits.max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_num_blocks_per_group=[
                group.spec.block_table_width(limits.max_model_len) for group in self.groups
            ],
            device=self.device,
            slot_groups=[group.group_id for group in self.groups if not group.backend.is_ssm()],
        )

    def _make_drafter(self, drafts: DraftSource) -> Drafter | None:
        joined = [
            (group, self._computes[group.group_id])
            for group in self.groups
            if not drafts.layer_specs.keys().isdisjoint(group.layer_names)
        ]
        if drafts.block_head is not None:
            return BlockDrafter(
                drafts.block_head,
                joined,
                self.views,
                self.block_tables,
                self._max_model_len,
                self.observers,
            )
        if drafts.head is None:
            return None
        ((group, compute),) = joined
        return MTPDrafter(
            drafts.head,
            group,
            self.views,
            self.block_tables,
            self.token_ids,
            self._max_model_len,
            compute,
            self.observers,
        )

    def _compute(self, group: AttentionGroup) -> Compute:
        dtypes = {
            dtype
            for spec in layer_specs(group.layer_names, group.spec)
            for dtype in spec.cache_dtypes
        }
        name = group.backend.get_compute(self.device.type, self.kernels, dtypes)
        compute = compute_of(name)
        for layer in attention_layers(self.model):
            lacking = layer.lacking(compute) if layer.name in group.layer_names else None
            if lacking is not None:
                what, instead = lacking
                raise ConfigError(
                    f"layer {layer.name} has {what}, which {name} does not compute here; use "
                    f"{instead}"
                )
        return compute

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

    def copy_blocks(self, sources: BlockIds, targets: BlockIds) -> None:
        """Copy pages from blocks to others, in every layer, after all steps that have begun.

        Args:
            sources, targets: [n], no target twice or among the sources.
        """
        source, target = upload(self.device, sources.astype(np.int64), targets.astype(np.int64))
        for buffer in self.raw_buffers:
            pages = buffer.view(self._memory[0].num_blocks, -1)
            pages[target] = pages[source]

    def padded_size(self, num_reqs: int) -> int:
        """Return the rows of a pure decode step of `num_reqs` requests."""
        return padded_size(num_reqs, self.captured_sizes)

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepOutput:
        """Run one step.

        Sample where the last known token was computed, verify drafts, propose new ones.
        """
        for observer in self.observers:
            observer.on_schedule(scheduled)
        resolved = [self._resolve(item) if item.awaits_drafts else item for item in scheduled]
        self.batch = batch = sorted(resolved, key=_is_prefill)
        for observer in self.observers:
            observer.on_prepare(batch)
        step = self._prepare(batch)
        for observer in self.observers:
            observer.on_step(batch, self.input_ids, self.positions, step.context.metadata)
        num_tokens = step.inputs.num_tokens_padded
        hidden = self.model(self.input_ids[:num_tokens], self.positions[:num_tokens], step.context)
        for observer in self.observers:
            observer.on_hidden(batch, hidden)
        sampled = self._sample(step, hidden)
        # The step's one wait
        drawn, accepted, proposals = download(sampled.drawn, sampled.accepted, sampled.proposed)
        verified = gained(drawn, accepted, [batch[i].num_drafts for i in step.sampling.places])
        tokens, logprobs = self._commit(batch, step.sampling, sampled.logits, verified)
        prompt_logprobs = self._prompt_logprobs(batch, hidden)
        self._postprocess(step, [max(1, len(new)) for new in tokens])
        for observer in self.observers:
            observer.on_commit(tokens)
        drafts = self._propose(batch, tokens, proposals)
        tokens_by_id = {
            item.request.request_id: new for item, new in zip(batch, tokens, strict=True) if new
        }
        for item in batch:
            self._drafts[item.request.row] = drafts.get(item.request.request_id, [])
        return StepOutput(batch, tokens_by_id, drafts, logprobs, prompt_logprobs)

    @torch.inference_mode()
    def flush(self, request: Request) -> None:
        """Write a request's state at its last block boundary, before it gives up row and blocks.

        A later step, whose tokens are not known yet, has written it already if it began after that
        boundary.
        """
        spec = self._mamba_spec
        assert spec is not None
        boundary = request.num_computed_tokens // spec.block_size * spec.block_size
        if self.cursors.begin[request.row] >= boundary:
            return
        rows, num_gained = self._gained(request)
        self._write_states(
            request,
            (
                (group_id, builder.rollback.flush(rows, num_gained, self._row(group_id, request)))
                for group_id, builder in self.builders.items()
            ),
        )

    @torch.inference_mode()
    def flush_all(self, request: Request) -> None:
        """Write a request's states after its last token, before another engine goes on with it."""
        rows, num_gained = self._gained(request)
        state_block_idx = self.cursors.state_block_idx[rows]
        self._write_states(
            request,
            (
                (
                    group_id,
                    builder.rollback.flush_all(
                        rows, num_gained, state_block_idx, self._row(group_id, request)
                    ),
                )
                for group_id, builder in self.builders.items()
            ),
        )

    def _gained(self, request: Request) -> tuple[Ints, Ints]:
        """Return the row of a request, and the tokens that it has gained since its last step."""
        rows = np.array([request.row], dtype=np.int64)
        return rows, self.cursors.num_gained(rows, np.array([request.num_computed_tokens]))

    def _row(self, group_id: int, request: Request) -> torch.Tensor:
        """Return a request's row of a group's block table."""
        return self.block_tables.tables[group_id][request.row : request.row + 1]

    def _write_states(self, request: Request, due: Iterable[tuple[int, RollbackStep]]) -> None:
        """Write the states that are due in each group, of a request that runs no tokens."""
        steps: dict[str, RecomputeStep] = {}
        for group_id, step in due:
            for observer in self.observers:
                observer.on_flush(request, group_id, step)
            if step.history is not None:
                steps |= dict.fromkeys(self.groups[group_id].layer_names, step.history)
        if steps:
            self.model.flush(steps, ForwardContext({}, self.views, self.row_memory, self.kernels))

    def _resolve(self, item: ScheduledRequest) -> ScheduledRequest:
        """Fill in the tokens and drafts that a request awaited from the step before.

        A request that this step finds complete runs its last token once more; the result is
        dropped.
        """
        request = item.request
        known = int(self.num_tokens[request.row])
        num_output = known - len(request.prompt_token_ids)
        room = min(request.params.max_tokens - num_output, self._max_model_len - known)
        num_drafts = max(0, min(item.num_drafts, room - 1))
        drafts = tuple(self._drafts[request.row][:num_drafts])
        return replace(
            item,
            num_computed_tokens=known - 1,
            num_tokens=1 + len(drafts),
            drafts=drafts,
            awaits_drafts=False,
        )

    def _sample(self, step: PreparedStep, hidden: torch.Tensor) -> Sampled:
        """Launch logits, tokens and accepted drafts (see `verify`), and the drafts of a head.

        The host does not wait for them. Boundary states are copied to their blocks.
        """
        sampling = step.sampling
        logits = drawn = accepted = proposed = None
        if sampling.places:
            last = hidden[: sampling.num_rows] if sampling.rows is None else hidden[sampling.rows]
            logits = self.model.compute_logits(last)
            drawn, accepted = verify(logits, *sampling.verification)
        if step.moved_copies is not None and accepted is not None:
            self._copy_boundary_states(due_copies(step.moved_copies, accepted))
        if self._drafter is not None and step.drafting is not None:
            proposed = self._drafter.propose(
                step.drafting, hidden, step.context, drawn, sampling.rows, accepted
            )
        return Sampled(logits, drawn, accepted, proposed)

    def _copy_boundary_states(self, copies: BoundaryCopies) -> None:
        for group_id, builder in self.builders.items():
            layers = [self.views[name] for name in self.groups[group_id].layer_names]
            table = self.block_tables.input_tables[group_id]
            copies_states = builder.rollback.copies_states
            for observer in self.observers:
                observer.on_copy(group_id, copies, table, layers, copies_states)
            postprocess_mamba(copies, table, layers, builder.spec, copies_states)

    def _commit(
        self,
        batch: Sequence[ScheduledRequest],
        sampling: Sampling,
        logits: Any,
        verified: Sequence[list[int]],
    ) -> tuple[list[list[int]], dict[str, list[TokenLogprobs]]]:
        """Keep the tokens that the step gave.

        Returns:
            The tokens of each request: none, one, or its accepted drafts and one more; and by
            request id how likely they are, for requests that want it.
        """
        tokens: list[list[int]] = [[] for _ in batch]
        logprobs: dict[str, list[TokenLogprobs]] = {}
        row = 0
        for i, first, new in zip(sampling.places, sampling.first_positions, verified, strict=True):
            request = batch[i].request
            tokens[i] = new
            self.token_ids[request.row, first : first + len(new)] = new
            self.num_tokens[request.row] = first + len(new)
            num_top = request.params.logprobs
            if num_top is not None:
                logprobs[request.request_id] = token_logprobs(
                    logits[row : row + len(new)], new, num_top
                )
            row += 1 + batch[i].num_drafts
        return tokens, logprobs

    def _prompt_logprobs(
        self, batch: Sequence[ScheduledRequest], hidden: torch.Tensor
    ) -> dict[str, list[TokenLogprobs]]:
        """Return log-probabilities of the prompt tokens whose logits this step produced."""
        by_request: dict[str, list[TokenLogprobs]] = {}
        start = 0
        for item in batch:
            num_top = item.request.params.prompt_logprobs
            if num_top is not None:
                by_request[item.request.request_id] = self._item_prompt_logprobs(
                    item, hidden[start : start + item.num_tokens], num_top
                )
            start += item.num_tokens
        return by_request

    def _item_prompt_logprobs(
        self, item: ScheduledRequest, hidden: torch.Tensor, num_top: int
    ) -> list[TokenLogprobs]:
        first = item.num_computed_tokens + 1
        next_tokens = item.request.prompt_token_ids[first : first + item.num_tokens]
        logprobs: list[TokenLogprobs] = []
        for begin in range(0, len(next_tokens), LOGITS_ROWS):
            chunk = next_tokens[begin : begin + LOGITS_ROWS]
            logits = self.model.compute_logits(hidden[begin : begin + len(chunk)])
            logprobs += token_logprobs(logits, chunk, num_top)
        return logprobs

    def _postprocess(self, step: PreparedStep, num_accepted: Sequence[int]) -> None:
        """Remember where the next step of each row finds its state.

        Args:
            num_accepted: [num_reqs], tokens that each gained, the bonus token included: one more
                than the accepted drafts that `due_copies` counts.
        """
        spec = self._mamba_spec
        if spec is None:
            return
        inputs = step.inputs
        copies = step.copies
        num_reqs = inputs.num_reqs
        computed = inputs.num_computed_tokens[:num_reqs]
        accepted = np.array(num_accepted, dtype=np.int64)
        window_rows = accepted - 1
        state_block_idx = inputs.state_block_idx[:num_reqs].copy()
        if len(copies.rows):
            # If the accepted tokens end exactly on a block boundary, resume from the copied state;
            # copying overwrote the first window rows of that block.
            ended = copies.rows[copies.token_idx + 1 == accepted[copies.rows]]
            state_block_idx[ended] = computed[ended] // spec.block_size
            window_rows[ended] = 0
        self.cursors.advance(inputs.rows, computed, state_block_idx, window_rows)

    def _propose(
        self,
        batch: Sequence[ScheduledRequest],
        tokens: Sequence[list[int]],
        proposed: list[list[int]] | None,
    ) -> dict[str, list[int]]:
        """Return drafts by request id.

        Args:
            proposed: by a head.
        """
        requests = [item.request for item, new in zip(batch, tokens, strict=True) if new]
        num_drafts = self._speculative.drafts_after(len(batch))
        if not requests or not num_drafts or (self.proposer is None and proposed is None):
            return {}
        rows = [request.row for request in requests]
        known = [self.token_ids[row] for row in rows]
        num_known = self.num_tokens[rows]
        proposals: Sequence[Sequence[int]] = proposed or []
        if self.proposer is not None:
            proposals = self.proposer.propose(requests, known, num_known)
        for observer in self.observers:
            observer.on_propose(requests, known, num_known, proposals)
        return {
            request.request_id: self._usable(drafts[:num_drafts])
            for request, drafts in zip(requests, proposals, strict=True)
        }

    def _usable(self, drafts: Sequence[int]) -> list[int]:
        """Return drafts as far as they are tokens of the vocabulary."""
        usable: list[int] = []
        for token in drafts:
            if not 0 <= token < self.model.vocab_size:
                break
            usable.append(token)
        return usable

    def _prepare(self, batch: Sequence[ScheduledRequest]) -> PreparedStep:
        """Fill the persistent buffers, by one upload."""
        self._stage_requests(batch)
        inputs = StepInputs.from_batch(batch, self.cursors, self.captured_sizes)
        num_tokens = inputs.num_tokens
        if inputs.num_tokens_padded > num_tokens:
            self.positions[num_tokens : inputs.num_tokens_padded] = 0
        common = CommonAttentionMetadata(
            num_reqs=inputs.num_reqs,
            num_reqs_padded=inputs.num_reqs_padded,
            num_decodes=inputs.num_decodes,
            num_decode_tokens=inputs.num_decode_tokens,
            query_lens=inputs.query_lens,
            num_computed_tokens=inputs.num_computed_tokens,
            positions=self.positions[: inputs.num_tokens_padded],
            partial=_partial_states(batch, inputs.num_decodes, len(self.groups)),
        )
        split = min(inputs.num_decodes, inputs.num_reqs)
        copies = boundary_copies(
            self._mamba_spec,
            inputs.num_computed_tokens[:split],
            inputs.query_lens[:split],
            inputs.state_block_idx[:split],
        )
        upload = StepUpload()
        sampling = upload.add(stage_sampling(batch))
        moved_copies = upload.add(stage_copies(copies)) if len(copies.rows) else None
        drafting = None
        if self._drafter is not None:
            num_drafts = self._speculative.drafts_after(len(batch))
            drafting = upload.add(
                self._drafter.stage(batch, inputs.token_rows, inputs.positions, num_drafts)
            )
        token_ids = self.token_ids[inputs.token_rows, inputs.positions]
        upload.add(
            fill(
                (self.input_ids[:num_tokens], token_ids),
                (self.positions[:num_tokens], inputs.positions),
            )
        )
        upload.add(
            self.block_tables.stage(
                inputs.rows,
                inputs.query_lens[: inputs.num_reqs],
                torch.from_numpy(inputs.positions),
                inputs.num_reqs_padded,
                inputs.num_tokens_padded,
            )
        )
        upload.add(common.stage_rows())
        states = self._stage_states(upload, inputs, common)
        upload.send(self.device)
        return PreparedStep(
            inputs=inputs,
            context=self._context(common, states),
            sampling=sampling.result,
            copies=copies,
            moved_copies=moved_copies.result if moved_copies is not None else None,
            drafting=drafting.result if drafting is not None else None,
        )

    def _stage_requests(self, batch: Sequence[ScheduledRequest]) -> None:
        """Write the tokens of new owners and the drafts to their rows, and stage new block ids."""
        for item in batch:
            request = item.request
            if item.overwrite:
                self.token_ids[request.row, : request.num_tokens] = request.token_ids
                self.num_tokens[request.row] = request.num_tokens
                self.cursors.restart(request.row, item.num_computed_tokens)
            if item.drafts:
                first = item.num_computed_tokens + 1
                self.token_ids[request.row, first : first + len(item.drafts)] = item.drafts
            new = item.new_blocks
            if len(new.ids):
                self.block_tables.append_block_ids(request.row, new.ids, new.counts, item.overwrite)

    def _stage_states(
        self, upload: StepUpload, inputs: StepInputs, common: CommonAttentionMetadata
    ) -> dict[int, Pending[MambaMetadata]]:
        """Stage the metadata of each Mamba group, and what its rollback scheme is due."""
        tables, _ = self.block_tables.views(inputs.num_reqs_padded, inputs.num_tokens_padded)
        states: dict[int, Pending[MambaMetadata]] = {}
        for group_id, builder in self.builders.items():
            table = tables[group_id]
            rollback = builder.rollback.prepare(
                inputs.padded_rows, inputs.new_owners, inputs.num_gained, common, table
            )
            metadata = builder.build(
                common,
                table,
                inputs.state_block_idx,
                inputs.prev_state_block_idx,
                inputs.window_rows,
                rollback,
                self.block_tables.num_gathers,
            )
            states[group_id] = upload.add(metadata)
        return states

    def _context(
        self, common: CommonAttentionMetadata, states: Mapping[int, Pending[MambaMetadata]]
    ) -> ForwardContext:
        """Return the metadata of every layer, with the memory that it reads and writes."""
        tables, slots = self.block_tables.views(common.num_reqs_padded, len(common.positions))
        metadata: dict[str, Any] = {}
        for group, table in zip(self.groups, tables, strict=True):
            group_id = group.group_id
            group_metadata = (
                states[group_id].result
                if group_id in states
                else build_paged_attention_metadata(
                    common,
                    table,
                    slots[group_id],
                    group.kernel_block_size,
                    self._computes[group_id],
                    window_of(layer_specs(group.layer_names, group.spec)[0]),
                )
            )
            metadata.update(dict.fromkeys(group.layer_names, group_metadata))
        return ForwardContext(metadata, self.views, self.row_memory, self.kernels)


def _partial_states(
    batch: Sequence[ScheduledRequest], num_decodes: int, num_groups: int
) -> PartialStates | None:
    """Return where the prefills of a batch leave states in partial blocks; None: nowhere."""
    places = [place for place, item in enumerate(batch) if item.partial is not None]
    if not places:
        return None
    blocks = np.zeros((num_groups, len(places)), dtype=np.int64)
    offsets = np.zeros(len(places), dtype=np.int64)
    for column, place in enumerate(places):
        item = batch[place]
        assert item.partial is not None
        offsets[column] = item.partial.num_tokens - item.num_computed_tokens
        for group_id, block in item.partial.blocks.items():
            blocks[group_id, column] = block
    return PartialStates(np.array(places, dtype=np.int64) - num_decodes, offsets, blocks)


def _is_prefill(item: ScheduledRequest) -> bool:
    return not item.is_decode
