"""The order of loss in a full pool: the least recently used blocks first, of these the deepest.

A wrong order costs hits and nothing else: every token stays right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import BlockKey
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.scenario import SmallBlocksFirst, answer_book, cache_options
from hybrid_kv.engine.llm import LLM
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.sampling import SamplingParams

BLOCK = 8
NUM_NEW = 4


class EvictionCase(NamedTuple):
    """Layers in a cache mode. `gives_back`: states come and go in the middle of a request."""

    mode: str
    layers: str
    gives_back: bool = False


KINDS = (
    EvictionCase("attention", "**"),
    EvictionCase("all", "M*"),
    EvictionCase("align", "M*MM*", gives_back=True),
)
Key = tuple[int, tuple[int, ...]]  # group, tokens up to the end of the block


@dataclass
class Held:
    """A request's block; `is_whole`: it holds what its key says."""

    key: Key
    is_whole: bool = False


class LeastRecentlyUsed:
    """A pool that serves one request after the other, as lists: no ids, no reference counts.

    Args:
        has_states: of each group.

    Attributes:
        idle: what can be found and no request holds, the next to be lost first.
        num_lost: blocks that could have been found again.
    """

    def __init__(self, num_blocks: int, has_states: Sequence[bool], gives_back: bool) -> None:
        self.num_lost = 0
        self._num_plain = num_blocks - 1
        self._has_states = has_states
        self._gives_back = gives_back
        self.idle: list[Key] = []

    def run(self, tokens: Sequence[int], num_prompt: int) -> int:
        """Serve a request that ends with these tokens; return how much of its prompt was cached.

        The last token is not cached.
        """
        groups = range(len(self._has_states))
        keys = [
            [(g, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + BLOCK, BLOCK)]
            for g in groups
        ]
        hit = (num_prompt - 1) // BLOCK
        while hit and not all(
            keys[g][block_idx] in self.idle for g, block_idx in self._of_hit(hit)
        ):
            hit -= 1
        junction = self._attended(keys, (num_prompt - 1) // BLOCK) * BLOCK
        held = [
            {
                block_idx: Held(keys[g][block_idx], is_whole=True)
                for of, block_idx in self._of_hit(hit)
                if of == g
            }
            for g in groups
        ]
        for blocks in held:
            for block in blocks.values():
                self.idle.remove(block.key)
        given_back: list[Key] = []
        lengths = [hit] * len(groups)
        computed = hit * BLOCK
        for end in self._steps(computed, num_prompt, len(tokens) - 1, junction):
            is_first = computed == hit * BLOCK
            for blocks in [] if is_first else self._giving_back(held):
                gone = [block_idx for block_idx in blocks if block_idx < (computed - 1) // BLOCK]
                given_back += self._release([blocks.pop(block_idx) for block_idx in gone])
            logical_blocks = cdiv(end, BLOCK)
            for g, blocks in enumerate(held):
                first = self._first_new(g, lengths[g], logical_blocks)
                for block_idx in range(first, logical_blocks):
                    blocks[block_idx] = Held(keys[g][block_idx])
                self._take(logical_blocks - first)
                lengths[g] = logical_blocks
            whole = range(end // BLOCK)
            computed = end
            for blocks, is_states in zip(held, self._has_states, strict=True):
                for block_idx, block in blocks.items():
                    left = not (is_states and self._gives_back) or (block_idx + 1) * BLOCK == end
                    block.is_whole |= block_idx in whole and left
        last = self._release([blocks[block_idx] for blocks in held for block_idx in sorted(blocks)])
        used = [*(key for key in given_back if key in self.idle), *last]
        used.sort(key=lambda key: len(key[1]), reverse=True)  # the deepest first
        self.idle = [key for key in self.idle if key not in used] + used
        return hit * BLOCK

    def _first_new(self, group: int, length: int, logical_blocks: int) -> int:
        """Return the first logical block that a step takes; none is taken that it jumps over."""
        if self._has_states[group] and self._gives_back:
            return max(length, logical_blocks - 1)
        return length

    def _attended(self, keys: Sequence[Sequence[Key]], most: int) -> int:
        """Return how many of the first blocks every group of attention has, at most `most`."""
        attention = [
            keys[g][:most] for g, is_states in enumerate(self._has_states) if not is_states
        ]
        columns = list(zip(*attention, strict=True))
        lost = (i for i, column in enumerate(columns) if not set(column) <= set(self.idle))
        return next(lost, len(columns))

    def _steps(self, begin: int, num_prompt: int, end: int, junction: int) -> list[int]:
        """Return where the steps of a request end.

        A chunk ends where a repeated prompt could go on, and where attention has more than states
        have, if states are kept there.
        """
        last = (num_prompt - 1) // BLOCK * BLOCK
        chunks = sorted({place for place in (junction, last) if begin < place})
        return [*(chunks if self._gives_back else []), *range(num_prompt, end + 1)]

    def _giving_back(self, held: Sequence[dict[int, Held]]) -> list[dict[int, Held]]:
        return [
            blocks
            for blocks, is_states in zip(held, self._has_states, strict=True)
            if is_states and self._gives_back
        ]

    def _take(self, count: int) -> None:
        plain = min(count, self._num_plain)
        self._num_plain -= plain
        self.num_lost += count - plain
        del self.idle[: count - plain]

    def _release(self, blocks: Sequence[Held]) -> list[Key]:
        """Return the keys that can be found from now on; what is there already is not kept."""
        findable = [block.key for block in blocks if block.is_whole and block.key not in self.idle]
        self._num_plain += len(blocks) - len(findable)
        self.idle += findable
        return findable

    def _of_hit(self, depth: int) -> list[tuple[int, int]]:
        """Return the groups and logical blocks that a hit of so many blocks needs.

        Of states it is the last one.
        """
        return [
            (group, block_idx)
            for group, is_states in enumerate(self._has_states)
            for block_idx in range(max(0, depth - 1) if is_states else 0, depth)
        ]


@check("eviction", quick=6, full=20, seconds=0.1, place=36)
def check_eviction(run: Run) -> Iterator[CheckResult]:
    """Send requests with common beginnings one after the other to a pool that holds about two."""
    wrong = list[str]()
    num_cached = 0
    num_lost = 0
    count = 0
    for trial in range(run.amount):
        kind = KINDS[trial % len(KINDS)]
        rng = np.random.default_rng((run.seed, trial))
        book = answer_book(kind.layers)
        num_blocks = int(rng.integers(14, 26))
        where = f"mode {kind.mode}, {num_blocks} blocks, trial {trial}"
        llm = LLM(
            book.model,
            device="cpu",
            attention_backend=SmallBlocksFirst.name,
            block_size=BLOCK,
            max_num_seqs=1,
            max_model_len=64,
            num_blocks=num_blocks,
            **cache_options(kind.mode, 0, "none"),
        )
        poison(llm)
        has_states = [group.backend.is_ssm() for group in llm.runner.groups]
        engine = llm.manager.pool
        pool = LeastRecentlyUsed(num_blocks, has_states, kind.gives_back)
        names: dict[BlockKey | None, Key] = {}
        texts = rng.integers(0, 97, size=(3, 40))
        texts[1, : int(rng.integers(8, 33))] = texts[0, 0]
        for _ in range(10):
            prompt = texts[rng.integers(3), : rng.integers(9, 41)].tolist()
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=NUM_NEW), progress=False)
            tokens = [*prompt, *output.token_ids]
            due = pool.run(tokens, len(prompt))
            count += 1
            num_cached += due
            ends = enumerate(BlockHashes().chain(BLOCK, tokens, len(tokens)), 1)
            names |= {
                (g, name): (g, tuple(tokens[: n * BLOCK]))
                for n, name in ends
                for g in range(len(has_states))
            }
            if output.cached_tokens != due:
                wrong.append(
                    f"{where}: request {output.request_id} finds {output.cached_tokens} "
                    f"of its {len(prompt)} tokens cached, {due} are due"
                )
            elif [
                names.get(engine.key_of(block)) for block in engine.idle_blocks().tolist()
            ] != pool.idle:
                wrong.append(
                    f"{where}: blocks behind request {output.request_id} "
                    "are not in the order of their use"
                )
            elif engine.num_evictions != pool.num_lost:
                wrong.append(
                    f"{where}: {engine.num_evictions} evictions "
                    f"are counted, {pool.num_lost} blocks were lost"
                )
        num_lost += pool.num_lost
        run.progress(1)
    void = "" if num_cached and num_lost else "void: no hit, or no eviction"
    yield CheckResult(
        "LRU order violations",
        len(wrong),
        "requests",
        "0",
        count,
        wrong[0] if wrong else void,
        {"seed": run.seed},
        {"cached_tokens": num_cached, "evictions": num_lost},
    )
