"""The error budget of stored states: how far they drift from float64, and how far they may.

    python -m bench.drift [--tokens 100000]

A state decays by `a` and gains a random outer product each token, as in a layer of Mamba-2, so that
its elements have variance 1. One copy is in float64, the other is rounded after each token. With
`q` what rounding may move an element by, the error obeys `e <- a e + (at most q)`: it is bounded by
`q / (1 - a)` however long the text is, and where rounding is right on average its variance by `(q /
2)^2 / (1 - a^2)`. Both sums are followed token by token with the true `q` of each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, repeat

import torch

from bench.harness.arguments import ArgumentParser
from hybrid_kv.errors import run_command
from hybrid_kv.kernels.common.rounding import StateRounding
from hybrid_kv.kernels.state_codec import (
    StateCodec,
    largest_error,
    round_states,
    rounding_noise,
)

ROWS, SIZE = 2, 32
AT_ONCE = 500  # tokens
DECAYS = (0.9, 0.99, 0.999, 0.9999)
NOISE = StateRounding(seed=0, philox_rounds=5)
FORMS = tuple(
    StateCodec(dtype, rounding)
    for dtype in (torch.float16, torch.int8, torch.float8_e4m3fn)
    for rounding in (None, NOISE)
)


@dataclass(frozen=True)
class Drift:
    """The drift of one decay.

    Attributes:
        error: root of the mean square of an element's error, over all tokens.
        worst: the largest error over its bound at that token.
        deviation: root of the mean of the variance's bound; 0 for rounding to the nearest value.
        bias: by how much the state is too small, a share of its root mean square.
    """

    decay: float
    error: float
    worst: float
    deviation: float
    bias: float


def drift(codec: StateCodec, num_tokens: int, seed: int = 0) -> list[Drift]:
    """Return the drift of states [decays, ROWS, SIZE] over so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    decay = torch.tensor(DECAYS, dtype=torch.float64).view(-1, 1, 1)
    gain = (1 - decay**2).sqrt()
    exact = torch.zeros(len(DECAYS), ROWS, SIZE, dtype=torch.float64)
    rounded = exact.clone()
    bound = torch.zeros(len(DECAYS), ROWS, 1, dtype=torch.float64)
    variance = bound.clone()
    sums = torch.zeros(4, len(DECAYS), dtype=torch.float64)
    worst = torch.zeros(len(DECAYS), dtype=torch.float64)
    noise = _noise(codec, exact.shape)
    for _ in range(num_tokens):
        x, B = (torch.randn(n, generator=generator).double() for n in (ROWS, SIZE))
        update = gain * x[:, None] * B
        exact = decay * exact + update
        moved = decay * rounded + update
        rounded = codec.decode(round_states(moved, codec.dtype, next(noise))).double()
        error = rounded - exact
        limit = _limits(codec, moved)
        bound = decay * bound + limit
        variance = decay**2 * variance + limit**2 / 4
        worst = worst.maximum((error.abs() / bound).flatten(1).amax(1))
        means = (error**2, variance, -error * exact, exact**2)
        sums += torch.stack([values.flatten(1).mean(1) for values in means])
    square, spread, lost, power = sums / num_tokens
    if codec.rounding is None:
        spread = torch.zeros_like(spread)
    columns = (square.sqrt(), worst, spread.sqrt(), lost / power)
    return [
        Drift(*values)
        for values in zip(DECAYS, *(column.tolist() for column in columns), strict=True)
    ]


def _noise(codec: StateCodec, shape: torch.Size) -> Iterator[torch.Tensor | None]:
    """Yield the noise of token after token, computed for many of them at a time."""
    if codec.rounding is None:
        yield from repeat(None)
        return
    for first in count(0, AT_ONCE):
        positions = torch.arange(first, first + AT_ONCE)
        yield from rounding_noise((AT_ONCE, *shape), positions, codec.rounding, stream=0)


def _limits(codec: StateCodec, states: torch.Tensor) -> torch.Tensor:
    """Return how far rounding may move an element of each row, [decays, ROWS, 1]."""
    peaks = states.abs().amax(-1, keepdim=True)
    # Conversion to float32 comes first, and a scale and a product are rounded to it.
    return largest_error(codec.dtype, peaks, codec.rounding) + peaks * 2.0**-22


def table(num_tokens: int) -> Iterator[str]:
    """Yield the lines of a table: a row for each form, a column for each decay."""
    heads = [f"a = {decay}" for decay in DECAYS]
    yield "| stored as | " + " | ".join(heads) + " | state lost | largest over bound |"
    yield "|---|" + "--:|" * (len(DECAYS) + 2)
    for codec in FORMS:
        drifts = drift(codec, num_tokens)
        cells = [f"{100 * row.error:.2g} %" for row in drifts]
        dtype = str(codec.dtype).removeprefix("torch.")
        name = dtype if codec.rounding is None else f"{dtype}, stochastic"
        cells.append(f"{100 * drifts[-1].bias:.1f} %")
        cells.append(f"{max(row.worst for row in drifts):.2f}")
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = ArgumentParser("python -m bench.drift", __doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of the text")
    for line in table(parser.parse_args().tokens):
        print(line, flush=True)


if __name__ == "__main__":
    run_command(main)
