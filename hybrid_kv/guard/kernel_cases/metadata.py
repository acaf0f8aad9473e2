"""What layers are told of a step: rows, lengths and blocks, of attention for each way to compute it, and of states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.attention.mamba import MambaMetadata, MambaMetadataBuilder
from hybrid_kv.attention.paged import AttentionPart, build_paged_attention_metadata
from hybrid_kv.attention.undo import NO_DECODES, ReplayDecodes, ReplaySpec
from hybrid_kv.cache.modes import MODES
from hybrid_kv.cache.spec import MambaSpec, UndoSpec, window_and_states
from hybrid_kv.guard import definitions
from hybrid_kv.guard.kernel_cases.attention import SCALE, Stored
from hybrid_kv.guard.kernel_cases.backends import new_compute
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw, longs, own_tokens, starts, wide
from hybrid_kv.guard.kernel_cases.packages import PrefillWrapper, installed
from hybrid_kv.kernels.paged_attention import write_kv
from hybrid_kv.kernels.replay import default_ring_len

WORKSPACE_BYTES = 134_217_728  # 128 MB, as FlashInfer's documentation has it
CHUNKS = {torch.bfloat16: 128, torch.float32: 64}  # tokens, by the dtype of the window
LONGEST = 24  # tokens of a request


class Step:
    """A batch: decodes, prefills, and padding where there are no prefills.

    Attributes:
        lengths, computed: of each row, its tokens and those before them; padding has one token at position 0.
        totals: both together, without padding.
        split: rows before the prefills.
    """

    def __init__(self, draw: Draw, num_drafts: int) -> None:
        decodes = [(draw.number(1, 1 + num_drafts), draw.number(1, 7)) for _ in range(draw.number(0, 3))]
        prefills = [(draw.number(1, 6), draw.one_of(0, draw.number(1, 5))) for _ in range(draw.one_of(0, 0, 1, 2))]
        rows = [*decodes, *prefills] or [(1, draw.number(1, 7))]
        self.totals = [new + before for new, before in rows]
        rows += [(1, 0)] * (0 if prefills else draw.number(0, 2))
        self.lengths, self.computed = [new for new, _ in rows], [before for _, before in rows]
        self.split = len(rows) - len(prefills)
        positions = [before + t for new, before in rows for t in range(new)]
        self.common = CommonAttentionMetadata(
            num_reqs=len(self.totals),
            num_reqs_padded=len(rows),
            num_tokens=sum(self.lengths[: len(self.totals)]),
            num_tokens_padded=len(positions),
            num_decodes=self.split,
            num_decode_tokens=sum(self.lengths[: self.split]),
            query_lens=np.array(self.lengths, dtype=np.int64),
            num_computed_tokens=np.array(self.computed, dtype=np.int64),
            positions=longs(positions),
        )


class Geometry(NamedTuple):
    """Of an attention layer; `per_kv` heads share K and V."""

    kv_heads: int
    per_kv: int
    size: int
    dtype: torch.dtype
    scale: float


class Layer:
    """Queries of a step, and caches that hold the tokens of its rows."""

    def __init__(self, draw: Draw, step: Step, stored: Stored, geometry: Geometry) -> None:
        kv_heads, per_kv, size, dtype, self.scale = geometry
        tokens = [draw.floats(sum(step.totals), kv_heads, size, dtype=dtype) for _ in "kv"]
        pool = draw.pool(stored.num_blocks, 2, stored.block_size, kv_heads, size, dtype=dtype)
        self.caches = pool[:, 0], pool[:, 1]
        write_kv(tokens[0], tokens[1], *self.caches, stored.cells)
        self.keys, self.values = map(wide, tokens)
        self.query = draw.floats(sum(step.lengths), kv_heads * per_kv, size, dtype=dtype)

    def compare(self, name: str, step: Step, parts: tuple[AttentionPart, ...], grid: int = 0) -> Iterator[Compared]:
        """Of padding rows nothing. Torch alone leaves out the keys on a grid."""
        outputs = []
        more: dict[str, Any] = {"grid": grid} if grid else {}
        for part in parts:
            query = part.rows.padded(self.query[part.start : part.start + part.num_tokens])
            outputs.append(part.rows.flat(part.compute.attend(query, *self.caches, part, self.scale, **more)))
        out = torch.cat(outputs)
        for row, (own, seen) in enumerate(zip(own_tokens(step.lengths), own_tokens(step.totals), strict=False)):
            ends = range(step.totals[row] - step.lengths[row], step.totals[row])
            operands = wide(self.query[own]), self.keys[seen], self.values[seen]
            yield f"{name}, attend, grid {grid}", out[own], definitions.attention(*operands, ends, self.scale, grid)


def attended(draw: Draw) -> Iterator[Compared]:
    """Each way to compute attention, through a step's metadata: two layers alike, and one that differs in one thing.

    Tables are wider than what a step reads, by ids that do not exist.
    """
    step = Step(draw, num_drafts=2)
    stored, unused = Stored(draw, step.totals, 0), draw.number(0, 2)
    padding = len(step.lengths) - len(step.totals)
    table = [row + [2**30] * unused for row in stored.table] + [[0] * (len(stored.table[0]) + unused)] * padding
    ids, slots = torch.tensor(table, dtype=torch.int32), torch.full_like(step.common.positions, -1)
    alike = Geometry(draw.number(1, 2), draw.number(2, 3), draw.number(1, 3), torch.float64, SCALE)
    other = draw.one_of(
        alike._replace(per_kv=alike.per_kv + 1),
        alike._replace(kv_heads=alike.kv_heads * alike.per_kv, per_kv=1),
        alike._replace(size=alike.size + 1),
        alike._replace(dtype=torch.float32),
        alike._replace(scale=2 * SCALE),
    )
    layers = [Layer(draw, step, stored, geometry) for geometry in (alike, alike, other)]
    for name in ("torch", "flash_attn", "flashinfer"):
        with installed(True):
            compute = new_compute(name)
        PrefillWrapper.made.clear()
        metadata = build_paged_attention_metadata(step.common, ids, slots, stored.block_size, compute)
        for layer, grid in product(layers, (0, draw.number(1, 4)) if name == "torch" else (0,)):
            yield from layer.compare(name, step, metadata.parts, grid)
        for part in metadata.parts:
            lone = torch.tensor(part.mask(1, torch.float64) is None)
            yield "a lone query has no mask", lone, np.array(part.positions.numel() == 1)
        made, planned = PrefillWrapper.made, 2 * len(metadata.parts) * (name == "flashinfer")
        yield f"{name}, plans", longs([len(made)]), np.array([planned])
        if made:
            workspaces = {one.workspace.data_ptr(): one.workspace.nbytes for one in made}
            yield f"{name}, workspaces", longs([*workspaces.values()]), np.array([WORKSPACE_BYTES])


class States:
    """What a group's builder is given for a step, and what it should make of that, row by row.

    Attributes:
        windows, sources: the block of each row.
        states: of each row the blocks for its states.
        kept: row, offset and block of the states that a prefill leaves on its way.
    """

    def __init__(self, draw: Draw, spec: MambaSpec, step: Step) -> None:
        self.spec, self.step = spec, step
        self.is_replay = isinstance(spec.undo, ReplaySpec)
        rows, padding = len(step.totals), len(step.lengths) - len(step.totals)
        width, columns = spec.block_table_width(LONGEST), spec.mode.num_columns(LONGEST, spec.block_size)
        blocks = draw.blocks(rows * width)
        self.table = [[blocks.pop() for _ in range(width)] for _ in range(rows)] + [[0] * width] * padding
        self.prev = draw.numbers(0, columns - 1, rows) + [0] * padding
        self.skipped = draw.numbers(0, spec.num_speculative_tokens, rows) + [0] * padding

    def expect(self) -> None:
        bs, mode, step = self.spec.block_size, self.spec.mamba_cache_mode, self.step
        self.windows, self.sources = list[int](), list[int]()
        self.states, self.kept = list[list[int]](), list[tuple[int, int, int]]()
        self.anchors = list[int]()
        for row, (before, new) in enumerate(zip(step.computed, step.lengths, strict=True)):
            blocks, prev = self.table[row], self.prev[row]
            anchor = {"none": 0}.get(mode, (before + new - 1) // bs)
            count = new if row < step.split else 1
            ids = [blocks[anchor + j] if j < count else 0 for j in range(1 + self.spec.num_speculative_blocks)]
            self.anchors.append(anchor)
            self.states.append(ids)
            self.windows.append(blocks[prev])
            self.sources.append(blocks[prev if self.is_replay else prev + self.skipped[row]])
            if row >= step.split:
                inside = [end for end in range(before + 1, before + new) if end % bs == 0]
                ends = {"all": inside}.get(mode, [])
                self.kept += [(row - step.split, end - before, blocks[end // bs - 1]) for end in ends]

    def compare(self, built: MambaMetadata) -> Iterator[Compared]:
        step, split = self.step, self.step.split
        yield "window_indices", built.window_indices, np.array(self.windows)
        yield "window_rows", built.window_rows, np.array(self.skipped)
        yield "source_indices", built.source_indices, np.array(self.sources)
        yield "state_indices", built.state_indices, np.array(self.states)
        K = self.spec.num_speculative_tokens
        sizes = [built.num_decodes, built.num_decode_tokens, built.max_query_len]
        yield "sizes", longs(sizes), np.array([split, sum(step.lengths[:split]), 1 + K])
        if split:
            assert built.decode_rows is not None
            yield "decode_rows", built.decode_rows.lengths, np.array(step.lengths[:split])
            yield "cu_seqlens", built.cu_seqlens, np.array(starts(step.lengths[:split]))
            # Kernels read the first column alone, and take the number of columns for that of tokens.
            yield "window_targets", built.window_targets[:, 0], np.array(self.states)[:split, 0]
            yield "window_targets, shape", longs(built.window_targets.shape), np.array([split, 1 + K])
        if split < len(step.lengths):
            yield from self._prefills(built)

    def _prefills(self, built: MambaMetadata) -> Iterator[Compared]:
        lengths, split = self.step.lengths[self.step.split :], self.step.split
        assert built.prefill_rows is not None and built.has_initial_state is not None
        yield "prefill_rows", built.prefill_rows.lengths, np.array(lengths)
        yield "has_initial_state", built.has_initial_state, np.array(self.step.computed[split:]) > 0
        ends = [(row, new, self.states[split + row][0]) for row, new in enumerate(lengths)]
        rows, offsets, blocks = (part.tolist() for part in built.prefill_states)
        left = sorted(zip(rows, offsets, blocks, strict=True))
        yield "prefill_states", longs(left), np.array(sorted([*ends, *self.kept]))
        if (spans := built.spans) is not None:
            begin, order = starts(lengths), sorted([*ends, *self.kept])
            counts = [sum(own == row for own, _, _ in order) for row in range(len(lengths))]
            yield "spans, tokens", spans.cu_spans, np.array([0, *(begin[row] + n for row, n, _ in order)])
            yield "spans, blocks", spans.span_blocks, np.array([block for _, _, block in order])
            yield "spans, rows", spans.row_spans, np.array(starts(counts))
            yield "spans, chunk", longs([spans.chunk_size]), np.array([CHUNKS[self.spec.parts[0].dtype]])


def states(draw: Draw) -> Iterator[Compared]:
    """Steps of one builder: each another one, or the same but for its blocks, for where its states are, or nothing."""
    K, is_replay, dtype = draw.number(0, 3), draw.number(0, 2) == 0, draw.one_of(*CHUNKS)
    undo = ReplaySpec(K, default_ring_len(1 + K)) if is_replay else UndoSpec(K)
    parts = window_and_states(((3 + K, 2), dtype), ((1, 2), torch.float32))
    # Most often what there is most to say of.
    mode, launches = draw.one_of(*MODES, "all"), draw.number(0, 2) > 0
    spec = MambaSpec(draw.number(1 + K, 6), parts, mamba_cache_mode=mode, undo=undo)
    builder = MambaMetadataBuilder(spec, 8, torch.device("cpu"), launches)
    number, before, last = 0, "", None
    given = States(draw, spec, Step(draw, K))
    for _ in range(12):
        step, other = given.step, States(draw, spec, given.step)
        given.expect()
        cu_seqlens = longs(starts(step.lengths[: step.split]))
        decodes = ReplayDecodes(cast(Any, None), cu_seqlens) if is_replay and step.split else NO_DECODES
        table, prev, skipped = (
            torch.tensor(given.table, dtype=torch.int32),
            np.array(given.prev),
            np.array(given.skipped),
        )
        gathers = draw.one_of(None, *[number] * 7)
        built = builder.build(step.common, table, prev, skipped, decodes, gathers)
        yield from given.compare(built)
        yield "spans", torch.tensor(built.spans is not None), np.array(launches and step.split < len(step.lengths))
        read = repr((number, step.lengths, given.anchors, given.prev, given.skipped))
        lasts = decodes is NO_DECODES and step.split == len(step.lengths) and gathers is not None
        yield "the step before", torch.tensor(built is last), np.array(lasts and read == before)
        before, last = read if lasts else "", built
        change = draw.one_of(0, 1, 2, 2, 3, 3, 4, 4)
        if change == 0:
            given, number = States(draw, spec, Step(draw, K)), number + 1
        elif change == 1:
            given.table, number = other.table, number + 1
        elif change == 2:
            given.prev = other.prev
        elif change == 3:
            given.skipped = other.skipped


def windows(draw: Draw) -> Iterator[Compared]:
    """Of each row its last inputs, where accepted drafts have left them; in pools of a few blocks, too."""
    size, more, num_rows = draw.number(1, 4), draw.number(0, 3), draw.number(1, 4)
    num_blocks = draw.one_of(size, size + more, draw.number(1, 8))
    conv_state = draw.floats(num_blocks, size + more, 2)
    blocks, begins = draw.numbers(0, num_blocks - 1, num_rows), draw.numbers(0, more, num_rows)
    held = SimpleNamespace(window_indices=longs(blocks), window_rows=longs(begins), plans={})
    places = zip(blocks, begins, strict=True)
    expected = np.stack([wide(conv_state[block, begin : begin + size]) for block, begin in places])
    for _ in range(2):  # the second time from what the first one has noted
        yield "windows", MambaMetadata.windows(cast(MambaMetadata, held), conv_state, size), expected


CASES = (attended, states, windows)
