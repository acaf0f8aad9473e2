"""The arrays of a step on the host, against what each row and each token of it is by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hybrid_kv.cache.spec import MambaSpec, StatePart
from hybrid_kv.engine.state_cursor import StateCursor
from hybrid_kv.engine.step_inputs import StepInputs, padded_size
from hybrid_kv.request import Request, ScheduledRequest
from hybrid_kv.sampling import SamplingParams

BLOCK = 4
NUM_ROWS = 8


@dataclass
class Row:
    """A row of the engine, and what its request runs in the step."""

    row: int
    computed: int
    num_tokens: int
    drafts: tuple[int, ...] = ()
    samples: bool = True
    overwrite: bool = False

    def item(self) -> ScheduledRequest:
        request = Request(str(self.row), list(range(40)), SamplingParams(), seed=0)
        request.row = self.row
        return ScheduledRequest(
            request=request,
            num_tokens=self.num_tokens,
            num_computed_tokens=self.computed,
            samples=self.samples,
            overwrite=self.overwrite,
            drafts=self.drafts,
        )


def cursors(mode: str | None = "all") -> StateCursor:
    """Cursors that tell every row from every other, at the places of a long last step."""
    spec = None
    if mode is not None:
        spec = MambaSpec(BLOCK, (StatePart("state", (1,), torch.int32),), mamba_cache_mode=mode)
    known = StateCursor(NUM_ROWS, spec)
    rows = np.arange(NUM_ROWS)
    known.advance(rows, 2 * rows, 10 + rows, rows % 3)
    return known


DECODES = (Row(5, 13, 1), Row(2, 9, 3, (7, 8)))
PREFILLS = (Row(0, 0, 6, overwrite=True), Row(7, 16, 2, samples=False))


def test_each_row_has_its_own_numbers() -> None:
    inputs = StepInputs.from_batch([row.item() for row in DECODES + PREFILLS], cursors(), (1, 2, 8))
    assert (inputs.num_reqs, inputs.num_reqs_padded, inputs.num_decodes) == (4, 4, 2)
    assert (inputs.num_tokens, inputs.num_tokens_padded, inputs.num_decode_tokens) == (12, 12, 4)
    assert inputs.rows.tolist() == inputs.padded_rows.tolist() == [5, 2, 0, 7]
    assert inputs.new_owners == [2]
    assert inputs.query_lens.tolist() == [1, 3, 6, 2]
    assert inputs.num_computed_tokens.tolist() == [13, 9, 0, 16]
    # Positions 13; 9 to 11; 0 to 5; 16 and 17.
    assert inputs.state_block_idx.tolist() == [3, 2, 1, 4]
    assert inputs.prev_state_block_idx.tolist() == [15, 12, 10, 17]
    assert inputs.window_rows.tolist() == [2, 2, 0, 1]
    assert inputs.num_gained.tolist() == [13 - 10, 9 - 4, 0, 16 - 14]


def test_each_token_has_its_row_and_its_position() -> None:
    batch = DECODES + PREFILLS
    inputs = StepInputs.from_batch([row.item() for row in batch], cursors(), ())
    tokens = [(row.row, row.computed + i) for row in batch for i in range(row.num_tokens)]
    assert list(zip(inputs.token_rows.tolist(), inputs.positions.tolist(), strict=True)) == tokens


def test_padding_is_neutral_and_only_in_a_step_of_decodes() -> None:
    inputs = StepInputs.from_batch([row.item() for row in DECODES], cursors(), (1, 4, 8))
    assert (inputs.num_reqs, inputs.num_reqs_padded, inputs.num_decodes) == (2, 4, 4)
    assert (inputs.num_tokens, inputs.num_tokens_padded, inputs.num_decode_tokens) == (4, 6, 6)
    assert inputs.rows.tolist() == [5, 2]
    assert inputs.padded_rows[2:].tolist() == [-1, -1]
    assert inputs.query_lens[2:].tolist() == [1, 1]
    for values in (
        inputs.num_computed_tokens,
        inputs.state_block_idx,
        inputs.prev_state_block_idx,
        inputs.window_rows,
        inputs.num_gained,
    ):
        assert values[:2].all() and values[2:].tolist() == [0, 0]


@pytest.mark.parametrize(("mode", "blocks"), [(None, [0, 0]), ("none", [0, 0]), ("align", [3, 2])])
def test_current_blocks_are_those_of_the_mode(mode: str | None, blocks: list[int]) -> None:
    inputs = StepInputs.from_batch([row.item() for row in DECODES], cursors(mode), ())
    assert inputs.state_block_idx.tolist() == blocks


def test_the_cursors_are_only_read() -> None:
    known = cursors()
    inputs = StepInputs.from_batch([row.item() for row in DECODES], known, ())
    for values in (inputs.prev_state_block_idx, inputs.window_rows, inputs.num_gained):
        values += 100
    fresh = cursors()
    for name in ("state_block_idx", "window_row", "begin"):
        assert getattr(known, name).tolist() == getattr(fresh, name).tolist()


def test_a_step_is_padded_to_the_next_captured_size() -> None:
    assert [padded_size(n, (1, 2, 4)) for n in range(1, 7)] == [1, 2, 4, 4, 5, 6]
