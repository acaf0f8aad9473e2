"""A recurrence goes on from what it has stored: all tokens at once are one after the other."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.kernels.common.rounding import StateRounding
from hybrid_kv.kernels.ssd import selective_state_update
from hybrid_kv.kernels.state_codec import StateCodec
from hybrid_kv.models.mixers.rounded import RoundedStates, WantedBlocks

ROWS, LENGTH, SHAPE = 2, 3, (2, 3, 8)
NOISE = StateRounding(seed=1, philox_rounds=5)
CODECS = [
    StateCodec(torch.float16, NOISE),
    StateCodec(torch.int8),
    StateCodec(torch.float8_e4m3fn, NOISE),
]


def blocks_of(codec: StateCodec, layer: str = "layers.0") -> RoundedStates:
    """Ten blocks; a state before the first token in blocks 1 and 2."""
    g = torch.Generator().manual_seed(0)
    parts = codec.encode(torch.randn(10, *SHAPE, generator=g), torch.arange(10), 0)
    return RoundedStates(codec, parts, layer)


def run(states: RoundedStates, first: int, last: int, source: torch.Tensor) -> torch.Tensor:
    """Run tokens `first … last - 1` of both rows.

    The states after token t go to blocks 3 + t and 6 + t.
    """
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, LENGTH, 2, 3, generator=g)
    dt = torch.rand(ROWS, LENGTH, 2, generator=g)
    key, query = (torch.randn(ROWS, LENGTH, 1, 8, generator=g) for _ in range(2))
    x, dt, key, query = (values[:, first:last] for values in (x, dt, key, query))
    return states.run(
        selective_state_update,
        states.read(source),
        (x, dt, -torch.ones(2), key, query, torch.ones(2)),
        torch.tensor([[5], [9]]) + torch.arange(first, last),
        WantedBlocks.of_every_token(torch.tensor([[3], [6]]) + torch.arange(first, last)),
    )


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_tokens_together_leave_what_they_leave_one_by_one(codec: StateCodec) -> None:
    together, apart = blocks_of(codec), blocks_of(codec)
    y = run(together, 0, LENGTH, torch.tensor([1, 2]))
    outputs = []
    source = torch.tensor([1, 2])
    for t in range(LENGTH):
        outputs.append(run(apart, t, t + 1, source))
        source = torch.tensor([3, 6]) + t
    assert torch.equal(y, torch.cat(outputs, 1))
    for part, expected in zip(together.views, apart.views, strict=True):
        assert torch.equal(part.view(torch.int8), expected.view(torch.int8))


def test_layers_have_noise_of_their_own() -> None:
    first, second = (blocks_of(CODECS[0], layer) for layer in ("layers.0", "layers.1"))
    for states in (first, second):
        run(states, 0, 1, torch.tensor([1, 2]))
    assert not torch.equal(first.views[0], second.views[0])
