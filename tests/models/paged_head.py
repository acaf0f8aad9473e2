"""A draft head on a paged cache of its own, without an engine."""

import torch

from hybrid_kv.attention.paged import AttentionPart, PagedAttentionMetadata, SlotMapping
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.models.mtp import NAME

CPU = torch.device("cpu")


class Paged:
    """A head's cache: poisoned pages in shuffled order, and what an engine does for each step."""

    def __init__(self, head, num_rows, block_size=4, width=32, dtype=torch.float64):
        g = torch.Generator().manual_seed(num_rows)
        spec = head.layer_specs[NAME]
        blocks = 1 + torch.randperm(num_rows * width, generator=g)
        self.head, self.block_size = head, block_size
        self.table = blocks.view(num_rows, width).int()
        shape = (len(blocks) + 1, block_size, spec.num_kv_heads, spec.head_size)
        self.views = {NAME: (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))}

    def step(self, chunks):
        """chunks: (row, position of the first pair, hidden [n, d], ids [n]) each; returns the outputs in that order."""
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i][3]) > 1)
        ordered = [chunks[i] for i in order]
        positions = [torch.arange(start, start + len(ids)) for _, start, _, ids in ordered]
        slots = [
            self.table[row, p // self.block_size] * self.block_size + p % self.block_size
            for (row, *_), p in zip(ordered, positions, strict=True)
        ]
        num_decodes = sum(len(p) == 1 for p in positions)
        parts, token = [], 0
        for part in (slice(num_decodes), slice(num_decodes, None)):
            if not positions[part]:
                continue
            rows = Ragged(torch.tensor([len(p) for p in positions[part]]), CPU)
            flat = torch.cat(positions[part])
            used = -(-(int(flat.max()) + 1) // self.block_size)
            table = self.table[[row for row, *_ in ordered[part]], :used]
            parts.append(AttentionPart(token, len(flat), rows, rows.padded(flat), table, int(flat.max()) + 1))
            token += len(flat)
        metadata = PagedAttentionMetadata(SlotMapping(torch.cat(slots).long()), tuple(parts), torch.cat(positions))
        hidden, ids = torch.cat([c[2] for c in ordered]), torch.cat([c[3] for c in ordered])
        with torch.no_grad():
            out = self.head(hidden, ids, ForwardContext({NAME: metadata}, self.views))
        outputs = dict(zip(order, out.split([len(p) for p in positions]), strict=True))
        return [outputs[i] for i in range(len(chunks))]


def pairs(request, start, stop):
    """Hidden states and ids of the pairs at positions start … stop-1; that of token -1 is NaN."""
    ids, hidden = request
    before = torch.cat([torch.full_like(hidden[:1], torch.nan), hidden])
    return before[start:stop], ids[start:stop]
