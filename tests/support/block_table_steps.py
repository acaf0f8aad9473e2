"""Steps of block tables, drawn, for the kernel and the host tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from hybrid_kv.kernels.block_tables import (
    StagedBlocks,
    StepBatch,
    TableLayout,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """`staged`: (row, overwrite, blocks per group); `batch`: (row, first position, tokens)."""

    staged: list[tuple[int, bool, list[int]]]
    batch: list[tuple[int, int, int]]
    padding_rows: int = 0
    padding_tokens: int = 0
    forgets: bool = False


@dataclass(frozen=True)
class Scenario:
    layouts: list[TableLayout]
    max_num_reqs: int
    steps: list[Step]
    cp: tuple[int, int, int] = (1, 0, 1)
    max_num_tokens: int = 2048


def tensors(
    step: Step, ids: list[np.ndarray[Any, Any]], num_groups: int, device: torch.device = CPU
) -> tuple[StagedBlocks, StepBatch]:
    flat = np.concatenate([*ids, np.empty(0, np.int32)])
    staged = StagedBlocks(
        ids=torch.from_numpy(flat).to(device),
        rows=torch.tensor([row for row, _, _ in step.staged], dtype=torch.int32, device=device),
        counts=torch.tensor([c for _, _, c in step.staged], dtype=torch.int32, device=device).view(
            -1, num_groups
        ),
        overwrite=torch.tensor([o for _, o, _ in step.staged], dtype=torch.bool, device=device),
    )
    starts = np.cumsum([0, *(length for _, _, length in step.batch)])
    positions = np.concatenate(
        [np.arange(p, p + n) for _, p, n in step.batch] + [np.empty(0, np.int64)]
    )
    return staged, StepBatch(
        rows=torch.tensor([row for row, _, _ in step.batch], dtype=torch.int64, device=device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        num_reqs_padded=len(step.batch) + step.padding_rows,
        num_tokens_padded=len(positions) + step.padding_tokens,
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    interleave = draw(st.sampled_from([1, 1, 2]))
    cp_size = draw(st.sampled_from([1, 1, 2, 3]))
    cp = (cp_size, draw(st.integers(0, cp_size - 1)), interleave)
    layouts = []
    for _ in range(draw(st.integers(1, 3))):
        bpk = draw(st.sampled_from([1, 2, 34]))
        layouts.append(
            TableLayout(
                width=draw(st.sampled_from([1, 3, 20])),
                block_size=bpk * interleave * draw(st.sampled_from([1, 4, 5])),
                blocks_per_kv_block=bpk,
                kernel_block_stride=bpk + draw(st.sampled_from([0, 0, 3])),
                has_slots=draw(st.integers(0, 3)) > 0,
            )
        )
    max_num_reqs = draw(st.integers(1, 5))
    held: dict[int, list[int]] = {}
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        staged = []
        for row in draw(st.permutations(range(max_num_reqs)))[: draw(st.integers(0, max_num_reqs))]:
            overwrite = row not in held or draw(st.integers(0, 3)) == 0
            before = [0] * len(layouts) if overwrite else held[row]
            counts = [
                draw(st.integers(0, layout.width - n))
                for layout, n in zip(layouts, before, strict=True)
            ]
            held[row] = [n + count for n, count in zip(before, counts, strict=True)]
            staged.append((row, overwrite, counts))
        # Any running rows in any order: they swap places, leave and come back, and need not be
        # among the staged.
        rows = (
            draw(st.permutations(sorted(held)))[: draw(st.integers(0, len(held)))] if held else []
        )
        limit = max(layout.width * layout.block_size * cp_size for layout in layouts)
        batch = [
            (row, draw(st.integers(0, limit + 3)), draw(st.sampled_from([1, 4, 33])))
            for row in rows
        ]
        padding = (
            draw(st.integers(0, max_num_reqs - len(rows))),
            draw(st.sampled_from([0, 1, 600])),
        )
        steps.append(Step(staged, batch, *padding, forgets=draw(st.integers(0, 5)) == 0))
    return Scenario(layouts, max_num_reqs, steps, cp)
