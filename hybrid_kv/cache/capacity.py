"""The number of requests of given lengths that a pool holds at once, counted ahead.

A request of p prompt and n output tokens computes `p + n - 1`: the last token is sampled, never
cached. It gets its first output token from the last chunk of its prompt, and one from each decode,
which schedules K drafts next to it, as far as outputs are left; no draft is accepted, so that it
runs as long as it can. Prompts share no prefix. Offload, asynchronous scheduling and the tokens
that a draft head writes ahead are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt

from hybrid_kv.cache.spec import KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec
from hybrid_kv.errors import ConfigError
from hybrid_kv.kernels.common.integers import cdiv

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Capacity:
    """The capacity for requests that come one after the other, and then again from the first.

    Attributes:
        num_refused: of the given requests, those that the engine rejects; they are left out of all
            else.
        num_fit: how many, from the first on, fit at once when each holds the most that it ever
            will: none of so many is preempted, whenever they started.
        most_blocks: what one of them holds then, on average.
        running_blocks: what one of them holds at a random moment, averaged over the steps of all.
    """

    num_refused: int
    num_fit: int
    most_blocks: float
    running_blocks: float


def capacity(
    config: KVCacheConfig, prompts: Ints, outputs: Ints, max_model_len: int, num_drafts: int
) -> Capacity:
    """Return how many requests of these lengths fit into `config.num_blocks` blocks.

    One of the blocks is the null block.

    Args:
        config: the groups as the manager counts (`CachePlan.counted`).
        prompts, outputs: [N], tokens, each at least 1. An answer ends where the request has
            `max_model_len` tokens; a prompt of so many is rejected, and so is a request that never
            fits.
        num_drafts: K.

    Raises:
        ConfigError: all are rejected.
    """
    usable = config.num_blocks - 1
    num_given = len(prompts)
    short = prompts < max_model_len
    outputs = np.minimum(outputs, max_model_len - prompts)[short]
    prompts = prompts[short]
    most = most_blocks(config, prompts, outputs)
    fits = most <= usable
    if not fits.any():
        raise ConfigError(
            f"none of {num_given} requests has a prompt below {max_model_len} tokens and fits in "
            f"{usable} blocks; "
            "raise --max-model-len or give the cache more memory"
        )
    prompts = prompts[fits]
    outputs = outputs[fits]
    most = most[fits]
    ends = np.cumsum(most)
    rounds, left = divmod(usable, int(ends[-1]))
    return Capacity(
        num_refused=num_given - len(most),
        num_fit=rounds * len(most) + int(np.searchsorted(ends, left, side="right")),
        most_blocks=float(most.mean()),
        running_blocks=int(block_steps(config, prompts, outputs, num_drafts).sum())
        / int(outputs.sum()),
    )


def most_blocks(config: KVCacheConfig, prompts: Ints, outputs: Ints) -> Ints:
    """Return the most blocks that each request ever holds, [N].

    By these the manager decides whether one can ever fit.
    """
    lengths, places = np.unique(prompts + outputs - 1, return_inverse=True)
    return np.array(
        [config.max_blocks_per_request(length) for length in lengths.tolist()], dtype=np.int64
    )[places]


def block_steps(config: KVCacheConfig, prompts: Ints, outputs: Ints, num_drafts: int) -> Ints:
    """Return the blocks that each request holds, summed over the steps of its outputs, [N].

    Exact but for scheme `recompute` in mode `align`: when a state is written there depends on the
    accepted drafts, so its logical blocks are counted as freed at the latest possible step.
    """
    specs = [group.layer_specs[0] for group in config.groups]
    unit = lcm(*(spec.block_size for spec in specs))
    starts, places = np.unique(prompts, return_inverse=True)
    in_prefill = [
        sum(_held_in_prefill(spec, start, unit) for spec in specs) for start in starts.tolist()
    ]
    total = np.array(in_prefill, dtype=np.int64)[places]
    for spec in specs:
        total += _held_in_decodes(spec, prompts, outputs - 1, num_drafts)
    return total


def _held_in_prefill(spec: KVCacheSpec, num_tokens: int, unit: int) -> int:
    """Return the blocks held in the last chunk of a prompt.

    It begins at the last boundary that a hit of the same prompt could reach. A prompt is taken to
    be one chunk for a sliding window as far as a step may be so long.
    """
    if isinstance(spec, SlidingWindowSpec):
        step = spec.max_step_tokens or num_tokens
        start = (num_tokens - 1) // step * step
        return cdiv(num_tokens, spec.block_size) - spec.first_needed(start)
    if not isinstance(spec, MambaSpec):
        return cdiv(num_tokens, spec.block_size)
    mode = spec.mode
    block_size = spec.block_size
    logical_blocks = mode.num_logical_blocks(num_tokens, block_size)
    if not mode.keeps_states:
        return logical_blocks + spec.num_speculative_blocks
    start = (num_tokens - 1) // unit * unit
    before = start // block_size
    kept = before - mode.first_needed(start, block_size) if start else 0
    return kept + mode.num_blocks(logical_blocks - before, is_decode=False)


def _held_in_decodes(spec: KVCacheSpec, prompts: Ints, decodes: Ints, num_drafts: int) -> Ints:
    """Return the blocks held, summed over `decodes` steps after each prompt, [N].

    The step after c tokens ends at `min(c + 1 + K, last)`.

    What a step holds depends on c and its end alone, so that a sum over steps is a difference of
    sums over lengths.
    """
    last = prompts + decodes
    lengths = np.arange(int(last.max()) + 1)
    logical_blocks = _logical_blocks(spec, lengths)
    up_to = np.cumsum(logical_blocks)
    total = up_to[last] - up_to[np.minimum(prompts + num_drafts, last)]
    total += np.minimum(num_drafts, decodes) * logical_blocks[last]
    if isinstance(spec, MambaSpec):
        given_back = np.cumsum(_given_back(spec, lengths))
        total += (
            spec.num_speculative_blocks * decodes - given_back[last - 1] + given_back[prompts - 1]
        )
    elif isinstance(spec, SlidingWindowSpec):
        begins = np.maximum(lengths - spec.sliding_window + 1, 0)
        given_back = np.cumsum(begins // spec.block_size)
        total += given_back[prompts - 1] - given_back[last - 1]
    return total


def _logical_blocks(spec: KVCacheSpec, lengths: Ints) -> Ints:
    if isinstance(spec, MambaSpec):
        return spec.mode.num_logical_blocks(lengths, spec.block_size)
    return -(-lengths // spec.block_size)


def _given_back(spec: MambaSpec, computed: Ints) -> Ints:
    """Return the logical blocks that a decode after `computed` tokens has freed."""
    mode = spec.mode
    rollback = spec.rollback
    block_size = spec.block_size
    if mode.gives_back and rollback.writes_late:
        behind = rollback.most_logical_blocks_behind(block_size)
        return np.maximum(mode.num_logical_blocks(computed + 1, block_size) - 1 - behind, 0)
    return mode.first_needed(np.maximum(computed, 1), block_size)
