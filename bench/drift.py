"""The error budget of stored states: how far they drift from float64, and how far they may.

    python -m bench.drift [--tokens 100000]

A state decays by `a` and gains a random outer product each token, as in a layer of Mamba-2, so that
its elements have variance 1. One copy is in float64, the other is rounded after each token. With
`q` what rounding may move an element by, the error obeys `e <- a e + (at most q)`: it is bounded by
`q / (1 - a)` however long the text is, and where rounding is right on average its variance by `(q /
2)^2 / (1 - a^2)`. Both sums are followed token by token with the true `q` of each row.

Logits are read from the states of all decays: `W y` with `y = S C`, a random C for each token and a
random W for all. Those of one decay, which the error of its states bounds: by `|W| e |C|`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

ROWS, SIZE, VOCAB = 2, 32, 50
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
        logit_error: root of the mean square of a logit's error, a share of that of a logit.
        logit_worst: the largest error of a logit over its bound at that token.
        other_tokens: share of tokens after which another logit is the largest.
    """

    decay: float
    error: float
    worst: float
    deviation: float
    bias: float
    logit_error: float
    logit_worst: float
    other_tokens: float


@dataclass
class StateCopies:
    """Two copies of states [decays, ROWS, SIZE], and the bounds of their errors [decays, ROWS, 1].

    Each is that after the last token.
    """

    exact: torch.Tensor
    rounded: torch.Tensor
    bound: torch.Tensor
    variance: torch.Tensor


def drift(codec: StateCodec, num_tokens: int, seed: int = 0) -> list[Drift]:
    """Return the drift of states over so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.zeros(len(DECAYS), ROWS, SIZE, dtype=torch.float64)
    row = torch.zeros(len(DECAYS), ROWS, 1, dtype=torch.float64)
    copies = StateCopies(state, state, row, row)
    readout = torch.randn(VOCAB, ROWS, generator=generator).double()
    sums = torch.zeros(7, len(DECAYS), dtype=torch.float64)
    worst = torch.zeros(2, len(DECAYS), dtype=torch.float64)
    for first in range(0, num_tokens, AT_ONCE):
        count = min(AT_ONCE, num_tokens - first)
        x, B, C = (torch.randn(count, n, generator=generator).double() for n in (ROWS, SIZE, SIZE))
        exact, rounded, bound, variance = follow(codec, copies, first, x[:, :, None] * B[:, None])
        error = rounded - exact
        logits, moved = (torch.einsum("vr,tdrs,ts->dtv", readout, S, C) for S in (exact, error))
        limit = torch.einsum("vr,tdr,t->dtv", readout.abs(), bound[..., 0], C.abs().sum(-1))
        others = logits.argmax(-1) != (logits + moved).argmax(-1)
        by_state = error**2, variance, -error * exact, exact**2
        sums[:4] += torch.stack([values.mean((2, 3)).sum(0) for values in by_state])
        by_logit = moved**2, logits**2
        sums[4:6] += torch.stack([values.mean(-1).sum(-1) for values in by_logit])
        sums[6] += others.sum(-1)
        ratios = (error.abs() / bound).amax((0, 2, 3)), (moved.abs() / limit).amax((1, 2))
        worst = worst.maximum(torch.stack(ratios))
    square, spread, lost, power, logit_square, logit_power, others = sums / num_tokens
    if codec.rounding is None:
        spread = torch.zeros_like(spread)
    columns = square.sqrt(), worst[0], spread.sqrt(), lost / power
    of_logits = (logit_square / logit_power).sqrt(), worst[1], others
    listed = (column.tolist() for column in (*columns, *of_logits))
    return [Drift(*values) for values in zip(DECAYS, *listed, strict=True)]


def follow(
    codec: StateCodec, copies: StateCopies, first: int, updates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take both copies on by some tokens, and return what they and their bounds were after each.

    Args:
        first: position of the first token.
        updates: [num_tokens, ROWS, SIZE], before their gain.

    Returns:
        States [num_tokens, decays, ROWS, SIZE], exact and rounded; bounds of the error and of its
        variance [num_tokens, decays, ROWS, 1].
    """
    decay = torch.tensor(DECAYS, dtype=torch.float64).view(-1, 1, 1)
    gained = (1 - decay**2).sqrt() * updates[:, None]
    noise: Sequence[torch.Tensor | None] = [None] * len(gained)
    if codec.rounding is not None:
        positions = torch.arange(first, first + len(gained))
        noise = list(rounding_noise(gained.shape, positions, codec.rounding, stream=0))
    peaks, rounded = [], []
    for update, drawn in zip(gained, noise, strict=True):
        moved = torch.addcmul(update, decay, copies.rounded)
        copies.rounded = codec.decode(round_states(moved, codec.dtype, drawn)).double()
        peaks.append(moved.abs().amax(-1, keepdim=True))
        rounded.append(copies.rounded)
    limits = _limits(codec, torch.stack(peaks))
    exact = _decayed(copies.exact, decay, gained)
    bound = _decayed(copies.bound, decay, limits)
    variance = _decayed(copies.variance, decay**2, limits**2 / 4)
    copies.exact, copies.bound, copies.variance = exact[-1], bound[-1], variance[-1]
    return exact, torch.stack(rounded), bound, variance


def _decayed(last: torch.Tensor, decay: torch.Tensor, gained: torch.Tensor) -> torch.Tensor:
    """Return `s <- decay s + gained` after each token, from `last` on; the shape of `gained`."""
    values = []
    for gain in gained:
        last = torch.addcmul(gain, decay, last)
        values.append(last)
    return torch.stack(values)


def _limits(codec: StateCodec, peaks: torch.Tensor) -> torch.Tensor:
    """Return how far rounding may move an element of each row; `peaks`: its largest, that shape."""
    # Conversion to float32 comes first, and a scale and a product are rounded to it.
    return largest_error(codec.dtype, peaks, codec.rounding) + peaks * 2.0**-22


def tables(num_tokens: int) -> tuple[list[str], list[str]]:
    """Return the lines of two tables, of states and of logits: a row for each form."""
    heads = " | ".join(f"a = {decay}" for decay in DECAYS)
    rule = "|---|" + "--:|" * (len(DECAYS) + 2)
    of_states = [f"| stored as | {heads} | state lost | largest over bound |", rule]
    of_logits = [f"| stored as | {heads} | other token | largest over bound |", rule]
    for codec in FORMS:
        drifts = drift(codec, num_tokens)
        dtype = str(codec.dtype).removeprefix("torch.")
        name = dtype if codec.rounding is None else f"{dtype}, stochastic"
        states = [_percent(row.error) for row in drifts]
        logits = [_percent(row.logit_error) for row in drifts]
        states.append(f"{100 * drifts[-1].bias:.1f} %")
        logits.append(f"{100 * drifts[-1].other_tokens:.1f} %")
        states.append(f"{max(row.worst for row in drifts):.2f}")
        logits.append(f"{max(row.logit_worst for row in drifts):.2f}")
        of_states.append(f"| {name} | {' | '.join(states)} |")
        of_logits.append(f"| {name} | {' | '.join(logits)} |")
    return of_states, of_logits


def _percent(share: float) -> str:
    """Return a share with two digits that count: 0.15 %, 2,100 %."""
    return f"{float(f'{100 * share:.2g}'):,g} %"


def main() -> None:
    """Print the tables."""
    parser = ArgumentParser("python -m bench.drift", __doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of the text")
    of_states, of_logits = tables(parser.parse_args().tokens)
    print(*of_states, "", *of_logits, sep="\n")


if __name__ == "__main__":
    run_command(main)
