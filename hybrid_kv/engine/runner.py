"""One step on the device: stage block ids, build metadata, run the model, sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.attention.mamba import build_mamba_metadata
from hybrid_kv.attention.paged import build_paged_attention_metadata
from hybrid_kv.cache.backend import (
    AttentionBackend,
    BackendContext,
    CUDAGraphSupport,
    get_attention_cg_support_info,
    init_attn_backend,
)
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.cache.layout import allocate_raw_buffers, bind_views
from hybrid_kv.cache.plan import CachePlan
from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.config import EngineConfig
from hybrid_kv.engine.sampling import sample
from hybrid_kv.engine.scheduler import ScheduledRequest
from hybrid_kv.models.layers import ForwardContext


class Model(Protocol):
    """What the engine asks of a model. Layer names are the keys of `layer_specs`; their block sizes are ignored."""

    vocab_size: int
    mamba_chunk_size: int | None
    layer_specs: dict[str, KVCacheSpec]

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] int64 each; hidden states [num_tokens, …]."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, …] to [num_tokens, vocab_size]."""


class ModelRunner:
    """Owns the cache memory, the block tables and every buffer that a captured graph would read.

    A request's tokens live in row `request.row` of `token_ids` while it runs. The batch is ordered decodes first; a
    pure decode step is padded to a captured size with rows on the null block.
    """

    def __init__(
        self,
        model: Model,
        plan: CachePlan,
        backend: type[AttentionBackend],
        context: BackendContext,
        config: EngineConfig,
        device: torch.device,
    ) -> None:
        self.model = model
        self.device = device
        self.groups = init_attn_backend(plan.config, backend, context)
        self.raw_buffers = allocate_raw_buffers(plan.config, device)
        self.views = bind_views(plan.config, self.groups, self.raw_buffers)
        max_num_seqs = config.scheduler.max_num_seqs
        max_model_len = config.scheduler.max_model_len
        self._captured = [size for size in config.captured_batch_sizes if size <= max_num_seqs]
        if get_attention_cg_support_info(self.groups) == CUDAGraphSupport.NEVER:
            self._captured = []
        max_tokens = max(config.scheduler.max_num_batched_tokens, max_num_seqs)
        self.block_tables = BlockTables(
            block_sizes=[group.spec.block_size for group in self.groups],
            kernel_block_sizes=[group.kernel_block_size for group in self.groups],
            max_num_reqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_num_blocks_per_group=[group.spec.block_table_width(max_model_len) for group in self.groups],
            device=device,
        )
        self._state_indices = torch.zeros(len(self.groups), max_num_seqs, dtype=torch.int64, device=device)
        self._slot_groups = [group.group_id for group in self.groups if not group.backend.is_ssm()]
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.batch: list[ScheduledRequest] = []  # of the last step, in batch order

    def padded_size(self, num_reqs: int) -> int:
        """Rows of a pure decode step of `num_reqs` requests: the next captured size, or as many as there are."""
        return next((size for size in self._captured if size >= num_reqs), num_reqs)

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledRequest]) -> dict[str, int]:
        """Run one step. Returns the sampled token of every request whose last known token it computed."""
        self.batch = batch = sorted(scheduled, key=lambda item: not item.is_decode)
        context, num_tokens_padded = self._prepare(batch)
        hidden = self.model(self.input_ids[:num_tokens_padded], self.positions[:num_tokens_padded], context)
        last = np.cumsum([item.num_tokens for item in batch]) - 1
        samples = [i for i, item in enumerate(batch) if item.samples]
        if not samples:
            return {}
        requests = [batch[i].request for i in samples]
        logits = self.model.compute_logits(hidden[torch.from_numpy(last[samples]).to(self.device)])
        tokens = sample(
            logits, [r.params for r in requests], [r.seed for r in requests], [r.num_tokens for r in requests]
        )
        for request, token in zip(requests, tokens, strict=True):
            self.token_ids[request.row, request.num_tokens] = token
        return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}

    def _prepare(self, batch: Sequence[ScheduledRequest]) -> tuple[ForwardContext, int]:
        """Fill the persistent buffers; returns the layers' context and the padded number of tokens."""
        for item in batch:
            if item.overwrite:
                self.token_ids[item.request.row, : item.request.num_tokens] = item.request.token_ids
        for item in batch:
            new = item.new_blocks
            if len(new.ids):
                self.block_tables.append_block_ids(item.request.row, new.ids, new.counts, item.overwrite)
        self.block_tables.apply_staged_writes()

        num_reqs = len(batch)
        num_decodes = sum(item.is_decode for item in batch)
        num_reqs_padded = self.padded_size(num_reqs) if num_decodes == num_reqs else num_reqs
        padding = num_reqs_padded - num_reqs
        rows = np.array([item.request.row for item in batch], dtype=np.int64)
        query_lens = np.array([item.num_tokens for item in batch] + [1] * padding, dtype=np.int64)
        computed = np.array([item.num_computed_tokens for item in batch] + [0] * padding, dtype=np.int64)
        num_tokens = int(query_lens[:num_reqs].sum())
        num_tokens_padded = num_tokens + padding

        token_rows = np.repeat(rows, query_lens[:num_reqs])
        starts = np.cumsum(query_lens) - query_lens
        positions = np.arange(num_tokens) - np.repeat((starts - computed)[:num_reqs], query_lens[:num_reqs])
        self.input_ids[:num_tokens] = torch.from_numpy(self.token_ids[token_rows, positions])
        self.positions[:num_tokens] = torch.from_numpy(positions)
        self.positions[num_tokens:num_tokens_padded] = 0

        max_seq_len = int((query_lens + computed).max())
        columns = [group.spec.block_table_width(max_seq_len) for group in self.groups]
        tables = self.block_tables.gather_block_tables(rows, num_reqs_padded, columns)
        slots = self.block_tables.compute_slot_mappings(
            torch.from_numpy(token_rows).to(self.device),
            self.positions[:num_tokens],
            num_tokens_padded,
            self._slot_groups,
        )
        common = CommonAttentionMetadata(
            num_reqs=num_reqs,
            num_reqs_padded=num_reqs_padded,
            num_tokens=num_tokens,
            num_tokens_padded=num_tokens_padded,
            num_decodes=num_decodes + padding,
            query_lens=query_lens,
            num_computed_tokens=computed,
            positions=self.positions[:num_tokens_padded],
            max_seq_len=max_seq_len,
        )
        metadata: dict[str, Any] = {}
        for group, table in zip(self.groups, tables, strict=True):
            built: Any
            if group.backend.is_ssm():
                built = build_mamba_metadata(common, table, self._state_indices[group.group_id])
            else:
                built = build_paged_attention_metadata(common, table, slots[group.group_id], group.kernel_block_size)
            metadata.update(dict.fromkeys(group.layer_names, built))
        return ForwardContext(metadata, self.views), num_tokens_padded
