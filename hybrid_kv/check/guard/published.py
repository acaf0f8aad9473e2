"""The prefixes that a cache without eviction would have, re-implemented without the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

from hybrid_kv.attention.rollback import RecomputeSpec
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, window_of
from hybrid_kv.check.guard.step import Prefix, Ran, Track
from hybrid_kv.engine.llm import LLM
from hybrid_kv.kernels.common.integers import cdiv


def recompute_of(spec: KVCacheSpec) -> RecomputeSpec | None:
    """Return the ring of a group of states in scheme `recompute`; None for any other group."""
    return (
        spec.rollback
        if isinstance(spec, MambaSpec) and isinstance(spec.rollback, RecomputeSpec)
        else None
    )


def states_behind(spec: MambaSpec, is_async: bool) -> int:
    """Return how many logical blocks before the last one may have a block, in mode align."""
    recompute = recompute_of(spec)
    if recompute is None:
        return 1
    # The last token of a step is at most so far behind the state that the step, or the one in
    # flight, starts from.
    longest = 1 + recompute.num_speculative_tokens  # tokens of a step
    furthest = min(recompute.ring_len, spec.block_size + 2 * longest - 1) + longest * is_async
    return cdiv(furthest, spec.block_size)


def longest_hit(
    specs: Sequence[KVCacheSpec], num_tokens: int, is_there: Callable[[int, int], bool]
) -> int:
    """Return the longest prefix that can be restored of the first `num_tokens` tokens.

    The last token is excluded. A prefix can be restored if all its K and V are there, those of a
    sliding window as far as the next token sees them, and the states at its end.

    Args:
        is_there: gets a spec's number and the end of a block.
    """
    unit = lcm(*(spec.block_size for spec in specs))
    best = 0
    for end in range(unit, num_tokens, unit):
        is_whole = True
        for number, spec in enumerate(specs):
            size = spec.block_size
            window = window_of(spec)
            is_full = not isinstance(spec, MambaSpec) and window is None
            first = end if isinstance(spec, MambaSpec) else end - unit + size
            if window is not None:
                # The end of the block that the window begins in.
                first = max(0, end - window + 1) // size * size + size
            if not all(is_there(number, block_end) for block_end in range(first, end + 1, size)):
                if is_full:
                    return best
                is_whole = False
        best = end if is_whole else best
    return best


def longest_attended(
    specs: Sequence[KVCacheSpec], num_tokens: int, is_there: Callable[[int, int], bool]
) -> int:
    """Return the longest prefix, the last token excluded, of which full attention has all blocks.

    0 without full attention. The arguments are those of `longest_hit`.
    """
    full = [
        number
        for number, spec in enumerate(specs)
        if not isinstance(spec, MambaSpec) and window_of(spec) is None
    ]
    unit = lcm(*(spec.block_size for spec in specs))
    best = 0
    for end in range(unit, num_tokens if full else 0, unit):
        if not all(
            is_there(number, block_end)
            for number in full
            for block_end in range(
                end - unit + specs[number].block_size, end + 1, specs[number].block_size
            )
        ):
            break
        best = end
    return best


class PublishedPrefixes:
    """The prefixes that a cache without eviction has: K/V of each block, and each mode's states.

    Attributes:
        is_sparse: states and windows stay only where a prompt is resumed.
        late: prefixes whose states scheme `recompute` wrote a step late, cleared or not.
        unit: tokens between two places at which a hit can end.
    """

    def __init__(self, llm: LLM) -> None:
        specs = [group.spec for group in llm.plan.config.groups]
        self._specs = list(dict.fromkeys(specs))
        self.late: set[Prefix] = set()
        self.unit = lcm(*(spec.block_size for spec in specs))
        self._interval = llm.config.cache.prefix_cache_retention_interval
        self.is_sparse = self._interval is not None and any(
            isinstance(spec, MambaSpec) or window_of(spec) is not None for spec in specs
        )
        self._seen: set[tuple[int, Prefix]] = set()

    def clear(self) -> None:
        """Forget all prefixes."""
        self._seen.clear()

    def is_resumed_at(self, track: Track, boundary: int) -> bool:
        """Return whether a request leaves at a boundary what a hit reads of states and windows."""
        if not self.is_sparse:
            return True
        if boundary in ((track.prompt - 1) // self.unit * self.unit, track.junction):
            return True
        if not self._interval:
            return False
        last = boundary + self.unit - 1  # before the next boundary
        return last // self._interval * self._interval >= boundary

    def keeps(self, track: Track, spec: KVCacheSpec, end: int) -> bool:
        """Return whether a hit at some boundary reads a request's block that ends here."""
        window = window_of(spec)
        if isinstance(spec, MambaSpec):
            return self.is_resumed_at(track, end)
        if window is None:
            return True
        first = -(-end // self.unit) * self.unit
        # The last boundary whose window reaches back to the block's last token.
        last = end + window - 2
        boundaries = range(first, last + 1, self.unit)
        return any(self.is_resumed_at(track, boundary) for boundary in boundaries)

    def add(self, ran: Ran) -> None:
        """Add the blocks that a step has completed."""
        before = ran.track.base  # the same in all groups of states
        for kind, spec in enumerate(self._specs):
            first = ran.item.num_computed_tokens // spec.block_size
            recompute = recompute_of(spec)
            if isinstance(spec, MambaSpec) and recompute is not None:
                if not ran.is_prefill:
                    ran.track.base = before
                    self._recompute(ran, kind, spec, recompute)
                    continue
                ran.track.base = ran.end
            ends = [
                spec.block_size * (block_idx + 1)
                for block_idx in range(first, ran.end // spec.block_size)
            ]
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align" and ran.is_prefill:
                ends = [end for end in ends if end == ran.end]
            self._seen.update(
                (kind, ran.track.prefix(end)) for end in ends if self.keeps(ran.track, spec, end)
            )

    def _recompute(self, ran: Ran, kind: int, spec: MambaSpec, recompute: RecomputeSpec) -> None:
        """Add the state that a decode writes before it runs.

        It is the state at the boundary that the decode finds passed, or one that empties the ring.
        """
        track = ran.track
        n = ran.item.num_computed_tokens
        boundary = (track.base // spec.block_size + 1) * spec.block_size
        if spec.mamba_cache_mode != "none" and n >= boundary:
            self._write(track, kind, spec, boundary)
        elif (
            n - track.base + ran.item.num_tokens + 1 + recompute.num_speculative_tokens
            > recompute.ring_len
        ):
            track.base = n

    def _write(self, track: Track, kind: int, spec: MambaSpec, boundary: int) -> None:
        track.base = boundary
        if self.keeps(track, spec, boundary):
            self.late.add(track.prefix(boundary))
            self._seen.add((kind, track.prefix(boundary)))

    def end(self, track: Track, num_tokens: int) -> None:
        """Write what a request has completed, before it gives up its blocks."""
        before = track.base
        for kind, spec in enumerate(self._specs):
            if (
                isinstance(spec, MambaSpec)
                and recompute_of(spec) is not None
                and spec.mamba_cache_mode != "none"
            ):
                track.base = before
                boundary = (track.base // spec.block_size + 1) * spec.block_size
                if track.base and boundary <= num_tokens:
                    self._write(track, kind, spec, boundary)

    def hit(self, track: Track, num_tokens: int) -> int:
        """Return how many of a request's first tokens can be restored."""

        def is_there(kind: int, end: int) -> bool:
            return (kind, track.prefix(end)) in self._seen

        return longest_hit(self._specs, num_tokens, is_there)
