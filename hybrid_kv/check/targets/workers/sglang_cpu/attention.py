"""Attention over SGLang's own pools, tables and locations; no kernel.

`o_i = sum_{j <= i} (q_i + k_j)^2 v_j`; k_j has the position of its token, v_j the place at which it
is read.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from . import kernels

Span = tuple[int, int, int]  # row of the table, tokens with those of this step, tokens of this step


class SglangAttentionBackend(AttentionBackend):
    """A backend whose metadata is what the batch says."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.page_size = runner.page_size
        self.kv_index_translator = runner.kv_index_translator
        self._mask: torch.Tensor | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Keep which keys drafts see: all else the batch says."""
        self._mask = getattr(forward_batch.spec_info, "custom_mask", None)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: there is no memory of its own."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Do the same before a replay, whose batch is that of the capture."""
        self.init_forward_metadata(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of rows that are padding."""
        return 1

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Write one token of each row, and return outputs [rows, width]."""
        self._write(k, v, layer, forward_batch)
        rows = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        spans = [(row, length, 1) for row, length in zip(rows, lengths, strict=True)]
        return self._attend(q, layer, forward_batch, spans, None)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Write the tokens of each row, some of them drafts, and return outputs [tokens, width]."""
        self._write(k, v, layer, forward_batch)
        rows = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        if not forward_batch.forward_mode.is_target_verify():
            counts = forward_batch.extend_seq_lens.tolist()
            spans = list(zip(rows, lengths, counts, strict=True))
            return self._attend(q, layer, forward_batch, spans, None)
        drafts = forward_batch.spec_info.draft_token_num
        spans = [(row, length + drafts, drafts) for row, length in zip(rows, lengths, strict=True)]
        return self._attend(q, layer, forward_batch, spans, self._mask)

    def _write(self, k: Any, v: Any, layer: Any, batch: Any) -> None:
        """Write keys and values [tokens, width] where the batch says, as bits of float32."""
        bits = [part.to(torch.int32).view(torch.float32) for part in (k, v)]
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch), *bits)

    def _slots_of(self, batch: Any, lane: int, row: int, length: int) -> torch.Tensor:
        """Return the slots of a row's first tokens [length], as SGLang's kernels look them up.

        Args:
            lane: number of the row in the batch.
        """
        translator = self.kv_index_translator
        place = torch.arange(length)
        if translator is not None and translator.reads_are_translated:
            indices = batch.req_pool_indices
            source = translator.read_source(
                batch.kv_loc_plan, req_pool_indices=indices, bs=len(indices)
            )
            entry = source.entry_page_size
            ids = source.ids.reshape(-1)
            first = source.row_ids[lane].long() * source.row_stride
            slots = ids[first + place // entry].long() * entry + place % entry
            if source.v2p is None:
                return slots
            pages = source.v2p[slots // self.page_size].long()
            return pages * self.page_size + slots % self.page_size
        table = self.req_to_token_pool.req_to_token[row, :length].long()
        if self.page_size == 1:
            return table
        # A kernel of pages reads the first slot of each.
        pages = table[:: self.page_size] // self.page_size
        return pages[place // self.page_size] * self.page_size + place % self.page_size

    def _attend(
        self, q: torch.Tensor, layer: Any, batch: Any, spans: list[Span], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return outputs [tokens, width] of queries q.

        Args:
            mask: which keys each draft sees, row after row; None, and in rows that are padding: all
                before it and itself.
        """
        pool = self.token_to_kv_pool
        layer_id = layer.layer_id
        keys = pool.get_key_buffer(layer_id).view(torch.int32)[:, 0]
        values = pool.get_value_buffer(layer_id).view(torch.int32)[:, 0]
        outputs = [q[:0]]
        first = 0
        seen = 0
        for lane, (row, length, count) in enumerate(spans):
            slots = self._slots_of(batch, lane, row, length)
            k = keys[slots].long()
            v = values[slots].long()
            queries = q[first : first + count]
            first = first + count
            if mask is None or seen >= len(mask):
                outputs.append(kernels.causal(queries, k, v, layer.read_mark))
                continue
            visible = mask[seen : seen + length * count].view(count, length).bool()
            seen += length * count
            outputs.append(kernels.masked(queries, k, v, layer.read_mark, visible))
        return torch.cat(outputs)
