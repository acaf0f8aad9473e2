"""Rounding of stored states; without torch, for plans."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateRounding:
    """Stochastic rounding of the states that are stored (vllm!35753).

    The random numbers are a function of this, the layer, the position of the token and the element.
    No request, row or block is in it: whoever computes or takes over a state gets the same one.

    Attributes:
        seed: at most 64 bits.
        philox_rounds: of the generator Philox.
    """

    seed: int
    philox_rounds: int
