"""Exact kernels of a Mamba-2 layer, with the contracts of SGLang's own in Triton.

Tensors are [tokens, heads, head_dim] of which the first head is used; a state is [heads, head_dim,
size]. Layers have one state, and one group of B and C that are as wide as the head.
"""

from __future__ import annotations

from typing import Any

import torch

from . import kernels


class LayerWeights:
    """The weights of a layer, where SGLang has a vector D that it hands on to the kernels.

    Attributes:
        to_map: [states, 4, size, width].
        out: [states, size, width].
    """

    def __init__(self, to_map: torch.Tensor, out: torch.Tensor) -> None:
        self.to_map = to_map
        self.out = out

    def __getitem__(self, _: Any) -> LayerWeights:
        return self

    def expand(self, *_: int) -> LayerWeights:
        """Return the same weights: they are of all elements of a head."""
        return self


def chunk_scan(
    x: torch.Tensor,
    dt: Any,
    a: Any,
    b: torch.Tensor,
    c: torch.Tensor,
    chunk_size: int,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states [1, …] before chunks, after rows, and at tracked tokens; outputs go to `out`.

    Chunks of tokens lie over the whole batch: the state before one is that after the token
    before it, whichever row that is of.

    Args:
        x, b, c: [1, tokens, heads or groups, width], after the convolution.
        given: what else SGLang's kernel takes; `D` is a `LayerWeights`.
    """
    weights = given["D"]
    mixed = kernels.mix(x, b, c)
    scale, offset = kernels.maps_of(mixed, weights.to_map)
    starts = given["cu_seqlens"].tolist()
    num_rows = len(starts) - 1
    initial = given["initial_states"]
    if initial is None:
        initial = torch.zeros(num_rows, *scale.shape[1:], dtype=torch.int64)
    # The state before each row and after each of its tokens.
    rows = [
        torch.cat([start[None], kernels.scan(scale[first:last], offset[first:last], start)])
        if last > first
        else start[None]
        for first, last, start in zip(starts, starts[1:], initial.long(), strict=False)
    ]
    after = torch.cat([row[1:] for row in rows])
    given["out"].zero_()[0, :, 0] = kernels.read(mixed, after, weights.out)
    before_chunks = torch.cat([rows[0][:1], after[:-1]])[::chunk_size]
    tracked = [
        rows[row][end - starts[row]]
        for row, end in zip(
            _listed(given["track_seq_idx"]), _listed(given["track_end_locs"]), strict=True
        )
    ]
    dtype = given["state_dtype"]
    at_tokens = torch.stack(tracked) if tracked else after[:0]
    last = torch.stack([row[-1] for row in rows])
    return before_chunks[None].to(dtype), last.to(dtype), at_tokens[None].to(dtype)


def _listed(indices: torch.Tensor | None) -> list[int]:
    return [] if indices is None else indices.tolist()


def state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: Any,
    a: Any,
    b: torch.Tensor,
    c: torch.Tensor,
    d: LayerWeights,
    **given: Any,
) -> None:
    """Write outputs of rows of tokens to `out`, and states to their slots or to scratch memory.

    Args:
        state: [slots, heads, head_dim, size].
        x, b, c: [rows, heads or groups, width], or [rows, drafts, heads or groups, width].
    """
    rows = len(x)
    drafts = x.shape[1] if x.dim() == 4 else 1
    heads = [part.reshape(1, rows * drafts, -1, part.shape[-1]) for part in (x, b, c)]
    y = kernels.advance(
        kernels.mix(*heads).view(rows, drafts, -1),
        (d.to_map, d.out),
        state,
        given["state_batch_indices"].long(),
        parents=given.get("retrieve_parent_token"),
        scratch=kernels.scratch_of(given),
        keeps_slots=bool(given.get("disable_state_update")),
    )
    given["out"].zero_().view(rows, drafts, -1, x.shape[-1])[:, :, 0] = y
