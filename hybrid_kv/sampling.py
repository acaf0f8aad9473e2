"""From logits to tokens, and how likely these are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from hybrid_kv.config import ConfigError, is_int, require_int
from hybrid_kv.kernels.common.upload import Staged

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingParams:
    """The parameters by which one request is continued.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole vocabulary. `seed` makes the
    request reproducible whatever runs with it; without one it is derived from the engine's seed and
    the request's number. `stop` strings end the text before their first occurrence. Cached prefixes
    are shared only among requests of one `cache_salt` (an adapter's name, a tenant).

    `logprobs` and `prompt_logprobs` ask for the log-probability of each token of the answer and of
    the prompt, and of so many of the likeliest tokens. What comes from the prefix cache has no
    logits, so a request with `prompt_logprobs` does not read it (as in vLLM).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # Types too: the parameters of a request must not fail in a step, where it would take the
        # other requests along.
        require_int(self, 1, "max_tokens")
        require_int(self, 0, "top_k", "logprobs", "prompt_logprobs")
        self._check_types()
        self._check_ranges()
        object.__setattr__(self, "stop", self._stop_strings())
        object.__setattr__(self, "stop_token_ids", self._stop_tokens())

    def _check_types(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise ConfigError(f"{name}={value!r} must be a number")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        if not isinstance(self.cache_salt, str):
            raise ConfigError(
                f"cache_salt={self.cache_salt!r} must be a text; the empty one is the default"
            )

    def _check_ranges(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be finite and >= 0")
        if self.top_k >= 2**31:
            raise ConfigError(f"top_k={self.top_k} must be in [0, 2**31); 0 keeps all")
        if self.seed is not None and not (is_int(self.seed) and -(2**63) <= self.seed < 2**63):
            raise ConfigError(f"seed={self.seed!r} must be an integer and must fit in 64 bits")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be in (0, 1]")

    def _stop_strings(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else _entries("stop", self.stop)
        if not all(isinstance(entry, str) for entry in stop):
            raise ConfigError(f"stop={self.stop!r} must be texts; tokens go into stop_token_ids")
        if "" in stop:
            raise ConfigError("an empty stop string would end every text at once")
        return stop

    def _stop_tokens(self) -> tuple[int, ...]:
        stop_token_ids = _entries("stop_token_ids", self.stop_token_ids)
        if not all(is_int(entry) for entry in stop_token_ids):
            raise ConfigError(
                f"stop_token_ids={self.stop_token_ids!r} must be integers; texts go into stop"
            )
        return stop_token_ids

    @property
    def is_greedy(self) -> bool:
        """True for temperatures that differ from 0 by overflow alone (vLLM's `_SAMPLING_EPS`)."""
        return self.temperature < 1e-5

    @property
    def reads_prefix_cache(self) -> bool:
        """True if a hit may spare the request a part of its prompt."""
        return self.prompt_logprobs is None


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a token's probability, and the likeliest tokens with theirs.

    The best comes first. They are of the model's own distribution: before temperature, top-k and
    top-p.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Return how likely each token was, in float32 or the logits' own wider dtype.

    Args:
        logits: [num_tokens, vocab_size], those that each token was drawn from.
        num_top: of the likeliest tokens; all of a smaller vocabulary.
    """
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    best = logprobs.topk(min(num_top, logits.shape[-1]))
    rows = zip(
        logprobs.gather(1, chosen)[:, 0].tolist(),
        best.indices.tolist(),
        best.values.tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(value, tuple(zip(ids, values, strict=True))) for value, ids, values in rows
    ]


def _entries(name: str, value: object) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r} must be a tuple, such as ({value!r},)")
    return tuple(value or ())


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return a bijection of 32 bits with low bias: lowbias32 of Wellons' hash prospector."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _MASK32
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _MASK32
    return x ^ (x >> 16)


def uniform_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return uniform numbers in (0, 1), a pure function of (seed, position, token).

    A counter instead of a generator's state: nothing to save when a request is preempted, and the
    same draw in any batch.

    Args:
        seeds, positions: [num_rows] int64.

    Returns:
        [num_rows, vocab_size] float64.
    """
    token = torch.arange(vocab_size, device=seeds.device)
    # One half of the seed after the other: a sum of two hashes would be the same for both orders.
    row = _mix(_mix(seeds & _MASK32) + (seeds >> 32) & _MASK32)
    row = _mix(row + positions & _MASK32)
    return (_mix(row.unsqueeze(1) ^ _mix(token)).double() + 0.5) / 2**32


def apply_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return the logits with those that may not be drawn set to -inf.

    Kept is, of the `top_k` largest, the smallest set with probability `top_p`.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    keep &= probabilities.cumsum(-1) - probabilities < top_p[:, None]
    return torch.full_like(logits, -torch.inf).scatter(
        -1, order, ordered.masked_fill(~keep, -torch.inf)
    )


class Draws(NamedTuple):
    """The parameters that rows of logits are sampled with, where any is drawn at random.

    [num_rows] each, on their device.

    Attributes:
        filters: True if any has a top_k or top_p.
        positions: that the sampled tokens will have.
        is_random: the other rows are greedy.
    """

    filters: bool
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    is_random: torch.Tensor


def _greedy() -> None:
    return None


def stage_draws(
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    first_positions: Sequence[int],
    counts: Sequence[int] = (1,),
) -> Staged[Draws | None]:
    """Stage the sampling of so many rows of logits for each of these, from its first position on.

    None if all are greedy.
    """
    if all(p.is_greedy for p in params):
        return (), _greedy
    each = (
        np.array([1.0 if p.is_greedy else p.temperature for p in params], dtype=np.float64),
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([p.top_p for p in params], dtype=np.float64),
        np.array(seeds, dtype=np.int64),
        np.array(first_positions, dtype=np.int64),
        np.array([not p.is_greedy for p in params]),
    )
    arrays = [array.repeat(counts) for array in each]
    arrays[4] += np.concatenate(
        [np.arange(count) for count in np.broadcast_to(counts, len(params))]
    )
    filters = any(p.top_k > 0 or p.top_p < 1 for p in params)
    return arrays, partial(Draws, filters)


def sample(logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    """Return one token per row: the argmax of the logits, or of them with Gumbel noise.

    The noise is added to `logits / temperature`.

    Args:
        logits: [num_rows, vocab_size].

    Returns:
        [num_rows] int64, on their device.
    """
    greedy = logits.argmax(-1)
    if draws is None:
        return greedy
    scaled = logits.double() / draws.temperature[:, None]
    if draws.filters:
        scaled = apply_top_k_top_p(scaled, draws.top_k, draws.top_p)
    noise = uniform_noise(draws.seeds, draws.positions, logits.shape[-1])
    drawn = (scaled - torch.log(-torch.log(noise))).argmax(-1)
    return torch.where(draws.is_random, drawn, greedy)
