"""The common design of exact checkpoints: channels, embedding, norms, the table in each MLP.

The hidden state is a word of bits, each +1 or -1. A mixer reads bits out of its cache and adds them
up in one sum for each bit of the word; the MLP after it flips bits by these sums and permutes
them. All numbers are small integers times powers of two, so that each product and each sum of them
is exact, in any order.

Two channels of 2^60 decide every root mean square alone: a norm multiplies by a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WIDTH = 512  # with two constants, the mean square is a power of 4 and its root a power of two
CONSTANT = 2.0**60
ROOT_MEAN_SQUARE = 2.0**56  # CONSTANT * sqrt(2 / WIDTH)
# exp(-1024) is 0 in float64, too; sigmoid is then 0 or 1, softplus and SiLU are 0 or the identity
SATURATED = 1024.0

VOCABULARY = 256
CODE_BITS = 8  # of the word: a token's code
# Of the code: only 64 tokens are ever likeliest, so that texts repeat and n-grams guess right
LIKELY_BITS = 6
NUM_SHARES = 4  # of the tokens; those of the first have a settled successor, in the second
NUM_BITS = 10  # of the word
NUM_FACTS = 64  # further random bits of the last token, which no layer changes
NUM_ADDRESSES = 32
RANGE = 28  # of a sum; beyond, the table is constant
MARGIN = 256.0  # of a logit, for each bit that differs
NUM_UNITS = 640  # of an MLP: the table needs 600


@dataclass(frozen=True)
class Channels:
    """The channels of a hidden state."""

    one: int = 0  # CONSTANT before a norm, 1 after it
    second: int = 1  # the same; no weight reads it
    first: int = 2  # 1 at the first token of a text, else 0
    settled: int = 3  # 1 if the token has a settled successor, else 0
    successor: int = 4  # CODE_BITS, that successor's code, or zeros
    bit: int = successor + CODE_BITS  # NUM_BITS, the word
    sum: int = bit + NUM_BITS  # one for each bit
    fact: int = sum + NUM_BITS  # NUM_FACTS
    address: int = fact + NUM_FACTS  # NUM_ADDRESSES, one-hot

    def sources(self) -> list[int]:
        """Return all channels of +1 and -1; those of the word are three times as likely."""
        word = [self.bit + i for i in range(NUM_BITS)]
        return 3 * word + [self.fact + i for i in range(NUM_FACTS)]


CHANNELS = Channels()


class Choices:
    """Random choices of a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def below(self, limit: int) -> int:
        """Return an integer in [0, limit)."""
        return int(torch.randint(limit, (1,), generator=self._generator))

    def order(self, count: int) -> list[int]:
        """Return a permutation of `range(count)`."""
        return torch.randperm(count, generator=self._generator).tolist()

    def sign(self) -> float:
        """Return +1 or -1."""
        return 1.0 - 2.0 * self.below(2)

    def signs(self, *shape: int) -> torch.Tensor:
        """Return float32 of +1 and -1."""
        return 1.0 - 2.0 * torch.randint(2, shape, generator=self._generator).float()

    def sources(self, count: int) -> list[int]:
        """Return different channels of +1 and -1."""
        pool = CHANNELS.sources()
        chosen = list[int]()
        for i in self.order(len(pool)):
            if pool[i] not in chosen:
                chosen.append(pool[i])
        return chosen[:count]

    def source(self) -> int:
        """Return a channel of +1 and -1."""
        return self.sources(1)[0]


def code_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return the codes [n, CODE_BITS] float32 of +1 and -1 of [n] int64 tokens.

    The likely tokens have +1 after LIKELY_BITS.
    """
    bits = (tokens[:, None] >> torch.arange(CODE_BITS)) & 1
    return 2.0 * bits.float() - 1.0


def codes(draw: Choices) -> torch.Tensor:
    """Return the codes [VOCABULARY, CODE_BITS] of all tokens, all of them different."""
    return code_of(torch.tensor(draw.order(VOCABULARY)))


def embedding(code: torch.Tensor, draw: Choices) -> torch.Tensor:
    """Return the embedding [VOCABULARY, WIDTH].

    Some tokens have a settled successor, which has none itself: a wrong cache shows at one of two
    tokens, and drafts are right now and then.
    """
    at = CHANNELS
    rows = torch.zeros(VOCABULARY, WIDTH)
    rows[:, [at.one, at.second]] = CONSTANT
    rows[:, at.bit : at.bit + CODE_BITS] = code
    rows[:, at.bit + CODE_BITS : at.bit + NUM_BITS] = draw.signs(VOCABULARY, NUM_BITS - CODE_BITS)
    rows[:, at.fact : at.fact + NUM_FACTS] = draw.signs(VOCABULARY, NUM_FACTS)
    for token, place in enumerate(draw.order(VOCABULARY)):
        rows[token, at.address + place % NUM_ADDRESSES] = 1.0
    likely = (code[:, LIKELY_BITS:] > 0).all(1)
    for tokens in (likely.nonzero()[:, 0], (~likely).nonzero()[:, 0]):
        settled, free, *_ = tokens[draw.order(len(tokens))].chunk(NUM_SHARES)
        rows[settled, at.settled] = 1.0
        rows[settled, at.successor : at.successor + CODE_BITS] = code[free]
    return rows


def head(code: torch.Tensor) -> torch.Tensor:
    """Return the weight [VOCABULARY, WIDTH] of `lm_head`.

    The logit of the token whose code is the word is highest, by MARGIN or more.
    """
    rows = torch.zeros(VOCABULARY, WIDTH)
    rows[:, CHANNELS.bit : CHANNELS.bit + CODE_BITS] = MARGIN / 2 * code
    return rows


def norm() -> torch.Tensor:
    """Return the weight [WIDTH] of a norm that makes the constant channels 1, and no more."""
    weight = torch.full((WIDTH,), ROOT_MEAN_SQUARE)
    weight[[CHANNELS.one, CHANNELS.second]] = ROOT_MEAN_SQUARE / CONSTANT
    return weight


def final_norm(is_tied: bool) -> torch.Tensor:
    """Return the weight [WIDTH] of the last norm: only the code is left.

    Args:
        is_tied: the embedding is `lm_head`, too: the margin is here.
    """
    weight = torch.zeros(WIDTH)
    weight[CHANNELS.bit : CHANNELS.bit + CODE_BITS] = ROOT_MEAN_SQUARE * (
        MARGIN / 2 if is_tied else 1.0
    )
    return weight


def spread(num_outputs: int, draw: Choices) -> torch.Tensor:
    """Return the weight [WIDTH, num_outputs] of a mixer's last projection.

    Each output is added to, or taken from, one of the sums.
    """
    weight = torch.zeros(WIDTH, num_outputs)
    for place, output in enumerate(draw.order(num_outputs)):
        weight[CHANNELS.sum + place % NUM_BITS, output] = draw.sign()
    return weight


@dataclass(frozen=True)
class MLP:
    """Weights of `down(silu(gate(x)) * up(x))`.

    `gate` and `up` are [NUM_UNITS, WIDTH], `down` is [WIDTH, NUM_UNITS].
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class _Units:
    """The hidden units of an MLP: each adds `weight * relu(condition) * source` to a channel."""

    def __init__(self) -> None:
        self.mlp = MLP(
            torch.zeros(NUM_UNITS, WIDTH),
            torch.zeros(NUM_UNITS, WIDTH),
            torch.zeros(WIDTH, NUM_UNITS),
        )
        self._count = 0

    def add(self, condition: dict[int, float], source: int, target: int, weight: float) -> None:
        """Add a unit.

        Args:
            condition: integers by channel; their sum is an integer.
        """
        for channel, factor in condition.items():
            self.mlp.gate[self._count, channel] = SATURATED * factor
        self.mlp.up[self._count, source] = 1.0
        self.mlp.down[target, self._count] = weight / SATURATED
        self._count += 1


def _flip(total: int) -> float:
    """Return the sign of a bit at a sum: +, +, -, - again and again, constant beyond RANGE."""
    return 1.0 if max(-RANGE, min(RANGE, total)) % 4 < 2 else -1.0


def table(draw: Choices) -> MLP:
    """Return an MLP that flips each bit by its sum, permutes the word and clears the sums."""
    at = CHANNELS
    units = _Units()
    for i, origin in enumerate(draw.order(NUM_BITS)):
        target = at.bit + i
        source = at.bit + origin
        total = at.sum + i
        _add_table(units, {}, source, target, total)
        units.add({at.one: 1.0}, target, target, -1.0)
        units.add({at.one: 1.0}, total, total, -1.0)
    return units.mlp


def last_table(draw: Choices) -> MLP:
    """Return a `table` whose code is that of the settled successor, or of a likely token."""
    at = CHANNELS
    units = _Units()
    order = draw.order(NUM_BITS)
    for i in range(CODE_BITS):
        target = at.bit + i
        if i < LIKELY_BITS:
            _add_table(units, {at.settled: -4.0 * RANGE}, at.bit + order[i], target, at.sum + i)
        else:
            units.add({at.one: 1.0, at.settled: -1.0}, at.one, target, 1.0)
        units.add({at.one: 1.0}, at.successor + i, target, 1.0)
        units.add({at.one: 1.0}, target, target, -1.0)
    return units.mlp


def successor_table() -> MLP:
    """Return the MLP of a draft head's guess: the settled successor, where there is one."""
    at = CHANNELS
    units = _Units()
    for i in range(CODE_BITS):
        target = at.bit + i
        units.add({at.one: 1.0}, at.successor + i, target, 1.0)
        units.add({at.settled: 1.0}, target, target, -1.0)
    return units.mlp


def _add_table(
    units: _Units, inhibition: dict[int, float], source: int, target: int, total: int
) -> None:
    """Add units that make `_flip(total) * source`.

    It is a sum of ReLUs with a knot wherever the slope changes.
    """
    units.add({CHANNELS.one: 1.0, **inhibition}, source, target, _flip(-RANGE))
    last = 0.0
    for knot in range(-RANGE, RANGE + 1):
        slope = _flip(knot + 1) - _flip(knot)
        if slope != last:
            units.add(
                {total: 1.0, CHANNELS.one: float(-knot), **inhibition}, source, target, slope - last
            )
        last = slope
