"""Philox 4x32 (Salmon et al., 2011), a random number generator without a state.

Equal counters and keys give equal numbers wherever and whenever they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

DEFAULT_ROUNDS = 10
_WORD = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def philox(counter: Sequence[torch.Tensor], seed: int, rounds: int) -> list[torch.Tensor]:
    """Return four random words of 32 bits for each counter.

    Args:
        counter: four words each, int64 tensors whose shapes broadcast.
        seed: of which 64 bits are the key.
        rounds: DEFAULT_ROUNDS pass all tests of randomness; fewer cost less.

    Returns:
        Four int64 tensors, in [0, 2^32).
    """
    words = list(torch.broadcast_tensors(*counter))
    keys = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(rounds):
        # A product of two words wraps to 64 bits, sign included; its halves are the right ones.
        first, second = words[0] * _FACTORS[0], words[2] * _FACTORS[1]
        words = [
            _high(second) ^ words[1] ^ keys[0],
            second & _WORD,
            _high(first) ^ words[3] ^ keys[1],
            first & _WORD,
        ]
        keys = [key + step & _WORD for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return words


def _high(product: torch.Tensor) -> torch.Tensor:
    return product >> 32 & _WORD
