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


IsThere = Callable[[int, int], bool]


def longest_hit_at_units(
    specs: Sequence[KVCacheSpec],
    num_tokens: int,
    unit: int,
    is_there: IsThere,
    is_at_hand: IsThere,
) -> int:
    """Return the longest prefix, a multiple of `unit` tokens, that can be restored.

    The last token is excluded. Where a prefix ends inside a block, a state must be that after
    exactly its tokens; of K and V a copy of the block's first part will do, or the whole block.

    Args:
        unit: of `prefix_match_unit`.
        is_there: gets a spec's number and the end of a block or of a part of it.
        is_at_hand: the same, on the device alone, from where parts are copied.
    """

    def is_restored(number: int, end: int) -> bool:
        spec = specs[number]
        size = spec.block_size
        if isinstance(spec, MambaSpec):
            return (is_at_hand if end % size else is_there)(number, end)
        window = window_of(spec)
        begin = 0 if window is None else max(0, end - window + 1)
        ends = range(begin // size * size + size, end + 1, size)
        if not all(is_there(number, block_end) for block_end in ends):
            return False
        if end % size == 0 or begin == end:
            return True
        block_end = cdiv(end, size) * size
        is_whole = block_end < num_tokens and is_at_hand(number, block_end)
        return is_whole or is_at_hand(number, end)

    lengths = range((num_tokens - 1) // unit * unit, 0, -unit)
    numbers = range(len(specs))
    hits = (end for end in lengths if all(is_restored(number, end) for number in numbers))
    return next(hits, 0)


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
        unit: tokens between two boundaries of all groups.
        match_unit: tokens between two places at which a hit can end inside of blocks; None: there
            are none.
    """

    def __init__(self, llm: LLM) -> None:
        specs = [group.spec for group in llm.plan.config.groups]
        self._specs = list(dict.fromkeys(specs))
        self.late: set[Prefix] = set()
        self.unit = lcm(*(spec.block_size for spec in specs))
        self.match_unit = llm.config.cache.prefix_match_unit
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
        resumed = self.left_inside(track)
        if resumed - window + 1 < end <= resumed:
            return True
        first = -(-end // self.unit) * self.unit
        # The last boundary whose window reaches back to the block's last token.
        last = end + window - 2
        boundaries = range(first, last + 1, self.unit)
        return any(self.is_resumed_at(track, boundary) for boundary in boundaries)

    def left_inside(self, track: Track) -> int:
        """Return after how many tokens, inside of blocks, a prompt leaves something; 0: nowhere."""
        if self.match_unit is None:
            return 0
        end = (track.prompt - 1) // self.match_unit * self.match_unit
        return end if end % self.unit else 0

    def add(self, ran: Ran) -> None:
        """Add the blocks that a step has completed."""
        inside = self.left_inside(ran.track)
        begin = ran.item.num_computed_tokens
        if ran.is_prefill and begin < inside <= begin + ran.item.num_tokens:
            self._seen.update(
                (kind, ran.track.prefix(inside))
                for kind, spec in enumerate(self._specs)
                if isinstance(spec, MambaSpec) or inside % spec.block_size
            )
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

        if self.match_unit is not None:
            return longest_hit_at_units(
                self._specs, num_tokens, self.match_unit, is_there, is_there
            )
        return longest_hit(self._specs, num_tokens, is_there)
