"""Which states and windows stay in the prefix cache: those from which a prompt is resumed.

A state is as large as hundreds of tokens of K and V, and a hit reads one of them. *Dense* retention
keeps one at each boundary, so that a pool is full of states that nobody reads. *Sparse* retention
keeps those of the *resume points* of a request alone:

- the last boundary of its prompt, which the same prompt resumes at (all of its tokens but the last
  one may come from the cache);
- the *junction*, if it has one: where attention has more of its prompt than states or windows have.
  An earlier request has computed the same prefix and kept nothing there; what two prompts share, a
  third one will, too (Marconi, arXiv:2411.19379);
- with an interval of n tokens, the last boundary before or at each multiple of n.

K and V of full attention are always kept: a hit needs all of them. It is vLLM's
`prefix_cache_retention_interval` (`v1/core/single_type_kv_cache_manager.py`, release 0.32).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The boundaries whose states and windows are published.

    Args:
        interval: tokens between boundaries that are kept for every request; 0: none of these;
            None: each boundary is kept.
        unit: tokens; every hit is a multiple of it.
    """

    interval: int | None
    unit: int

    def longest_kept(self, num_tokens: int, resume_points: Sequence[int]) -> int:
        """Return the last kept boundary among the first `num_tokens` tokens; 0 if there is none."""
        if self.interval is None:
            return num_tokens // self.unit * self.unit
        return max(self._kept(1, num_tokens, resume_points), default=0)

    def kept_blocks(
        self,
        blocks: range,
        block_size: int,
        num_tail_blocks: int | None,
        resume_points: Sequence[int],
    ) -> Sequence[int]:
        """Return those of a group's completed blocks that are published, in their order.

        Args:
            blocks: logical blocks.
            num_tail_blocks: from how many blocks before its end a prefix is restored; None: from
                all of them.
            resume_points: of the request, in tokens; a hit ends at the boundary before each.
        """
        if not blocks or self.interval is None or num_tail_blocks is None:
            return blocks
        first = (blocks.start + 1) * block_size
        last = (blocks.stop - 1 + num_tail_blocks) * block_size
        kept: set[int] = set()
        for boundary in self._kept(first, last, resume_points):
            end = boundary // block_size
            kept.update(range(max(blocks.start, end - num_tail_blocks), min(blocks.stop, end)))
        return sorted(kept)

    def _kept(self, first: int, last: int, resume_points: Sequence[int]) -> Iterator[int]:
        """Yield the kept boundaries from `first` to `last`, in any order, some twice."""
        marks = list(resume_points)
        if self.interval:
            # The boundary before a multiple lies less than a unit before it.
            marks += range(first // self.interval * self.interval, last + self.unit, self.interval)
        for mark in marks:
            boundary = mark // self.unit * self.unit
            if first <= boundary <= last:
                yield boundary
