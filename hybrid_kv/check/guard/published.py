"""Which prefixes a cache without eviction would have, re-implemented: the cache that is checked is not used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

from hybrid_kv.attention.rollback import RecomputeSpec
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, window_of
from hybrid_kv.check.guard.step import Prefix, Ran, Track
from hybrid_kv.engine.llm import LLM
from hybrid_kv.kernels.common.integers import cdiv


def recompute_of(spec: KVCacheSpec) -> RecomputeSpec | None:
    """The ring of a group of states in scheme `recompute`."""
    return (
        spec.rollback
        if isinstance(spec, MambaSpec) and isinstance(spec.rollback, RecomputeSpec)
        else None
    )


def states_behind(spec: MambaSpec, is_async: bool) -> int:
    """Mode align: logical blocks before a request's last one that may have a block."""
    if (recompute := recompute_of(spec)) is None:
        return 1
    # The last token of a step is at most so far behind the state that the step, or the one in flight, starts from.
    T = 1 + recompute.num_speculative_tokens
    furthest = min(recompute.ring_len, spec.block_size + 2 * T - 1) + T * is_async
    return cdiv(furthest, spec.block_size)


def longest_hit(
    specs: Sequence[KVCacheSpec], num_tokens: int, is_there: Callable[[int, int], bool]
) -> int:
    """The longest prefix of the first `num_tokens` tokens that can be restored, the last token excluded.

    Of it there are all K and V, those of a sliding window as far as the next token sees them, and the states at its
    end; `is_there` gets a spec's number and the end of a block.
    """
    unit = lcm(*(spec.block_size for spec in specs))
    best = 0
    for end in range(unit, num_tokens, unit):
        is_whole = True
        for number, spec in enumerate(specs):
            size, window = spec.block_size, window_of(spec)
            is_full = not isinstance(spec, MambaSpec) and window is None
            first = end if isinstance(spec, MambaSpec) else end - unit + size
            if window is not None:
                first = (
                    max(0, end - window + 1) // size * size + size
                )  # the end of the block that the window begins in
            if not all(is_there(number, part) for part in range(first, end + 1, size)):
                if is_full:
                    return best
                is_whole = False
        best = end if is_whole else best
    return best


class Published:
    """The prefixes that a cache without eviction has: K/V of each block, and the states that each mode keeps.

    Attributes:
        late: those of states that scheme `recompute` wrote a step late, cleared or not.
        unit: tokens between two places at which a hit can end.
    """

    def __init__(self, llm: LLM) -> None:
        specs = [group.spec for group in llm.plan.config.groups]
        self._specs = list(dict.fromkeys(specs))
        self.late: set[Prefix] = set()
        self.unit = lcm(*(spec.block_size for spec in specs))
        self._seen: set[tuple[int, Prefix]] = set()

    def clear(self) -> None:
        """Nothing can be found any more."""
        self._seen.clear()

    def add(self, ran: Ran) -> None:
        """A step has completed these blocks."""
        before = ran.track.base  # the same in all groups of states
        for kind, spec in enumerate(self._specs):
            first = ran.item.num_computed_tokens // spec.block_size
            if isinstance(spec, MambaSpec) and (recompute := recompute_of(spec)) is not None:
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
            self._seen.update((kind, ran.track.prefix(end)) for end in ends)

    def _recompute(self, ran: Ran, kind: int, spec: MambaSpec, recompute: RecomputeSpec) -> None:
        """A decode begins with writing the state at the boundary that it finds passed, or one that empties the ring."""
        track = ran.track
        n = ran.item.num_computed_tokens
        boundary = (track.base // spec.block_size + 1) * spec.block_size
        if spec.mamba_cache_mode != "none" and n >= boundary:
            self._write(track, kind, boundary)
        elif (
            n - track.base + ran.item.num_tokens + 1 + recompute.num_speculative_tokens
            > recompute.ring_len
        ):
            track.base = n

    def _write(self, track: Track, kind: int, boundary: int) -> None:
        track.base = boundary
        self.late.add(track.prefix(boundary))
        self._seen.add((kind, track.prefix(boundary)))

    def end(self, track: Track, num_tokens: int) -> None:
        """A request gives up its blocks after so many tokens: what it has completed is written first."""
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
                    self._write(track, kind, boundary)

    def hit(self, track: Track, num_tokens: int) -> int:
        """How many of a request's first tokens can be restored."""
        return longest_hit(
            self._specs, num_tokens, lambda kind, end: (kind, track.prefix(end)) in self._seen
        )
