"""What is lost when the pool is full, request by request: the blocks that were used least recently, the deepest first.

A wrong order costs hits and nothing else: every token stays right.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hybrid_kv.engine.llm import LLM
from hybrid_kv.guard.poison import poison
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.guard.scenario import SmallBlocksFirst, answer_book, cache_options
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.sampling import SamplingParams

BLOCK = 8
NUM_NEW = 4
LAYERS = {"attention": "**", "all": "M*"}  # by mode; of mode align columns come and go in the middle of a request
Key = tuple[int, tuple[int, ...]]  # group, tokens up to the end of the block


class LeastRecentlyUsed:
    """A pool that serves one request after the other, as lists: no ids, no reference counts.

    Args:
        has_states: of each group.
    """

    def __init__(self, num_blocks: int, has_states: Sequence[bool]) -> None:
        self._num_plain = num_blocks - 1
        self._has_states = has_states
        self._idle: list[Key] = []  # the next to be lost first

    def run(self, tokens: Sequence[int], num_prompt: int) -> int:
        """Serve a request that ends with these tokens, the last one not cached; how much of its prompt was cached."""
        columns = cdiv(len(tokens) - 1, BLOCK)
        key = {
            (group, column): (group, tuple(tokens[: (column + 1) * BLOCK]))
            for group in range(len(self._has_states))
            for column in range(columns)
        }
        depth = (num_prompt - 1) // BLOCK
        while depth and not all(key[place] in self._idle for place in self._of_hit(depth)):
            depth -= 1
        held = [key[place] for place in self._of_hit(depth)] if depth else []
        self._idle = [one for one in self._idle if one not in held]
        new = [key[group, column] for group in range(len(self._has_states)) for column in range(depth, columns)]
        num_lost = max(0, len(new) - self._num_plain)
        self._num_plain -= len(new) - num_lost
        del self._idle[:num_lost]
        whole = [one for one in new if len(one[1]) <= len(tokens) - 1 and len(one[1]) % BLOCK == 0]
        kept = [one for one in (*held, *whole) if one not in self._idle]
        self._num_plain += len(held) + len(new) - len(kept)
        self._idle += sorted(kept, key=lambda one: (-len(one[1]), one[0]))
        return depth * BLOCK

    def _of_hit(self, depth: int) -> list[tuple[int, int]]:
        """Groups and columns that a hit of so many blocks needs: of states the last one."""
        return [
            (group, column)
            for group, is_states in enumerate(self._has_states)
            for column in range(depth - 1 if is_states else 0, depth)
        ]


@check("eviction", quick=4, full=20, seconds=0.15, place=36)
def check_eviction(run: Run) -> list[CheckResult]:
    """Requests one after the other, with beginnings in common, in a pool that holds about two of them."""
    begin = time.perf_counter()
    wrong, num_cached, num_evictions, count = list[str](), 0, 0, 0
    for trial in range(run.amount):
        mode, rng = list(LAYERS)[trial % 2], np.random.default_rng((run.seed, trial))
        book, num_blocks = answer_book(LAYERS[mode]), int(rng.integers(14, 26))
        llm = LLM(
            book.model, device="cpu", attention_backend=SmallBlocksFirst.name, block_size=BLOCK, max_num_seqs=1,
            max_model_len=64, num_blocks=num_blocks, **cache_options(mode, 0, "none"),
        )  # fmt: skip
        poison(llm)
        groups = [group.backend.is_ssm() for group in llm.runner.groups]
        pool, params = LeastRecentlyUsed(num_blocks, groups), SamplingParams(max_tokens=NUM_NEW)
        texts = rng.integers(0, 97, size=(3, 40))
        texts[1, : int(rng.integers(8, 33))] = texts[0, 0]
        for _ in range(10):
            prompt = texts[rng.integers(3), : rng.integers(9, 41)].tolist()
            (output,) = llm.generate([prompt], params, progress=False)
            due = pool.run([*prompt, *output.token_ids], len(prompt))
            count += 1
            num_cached += due
            if output.cached_tokens != due:
                wrong.append(
                    f"mode {mode}, {num_blocks} blocks, trial {trial}: request {output.request_id} finds "
                    f"{output.cached_tokens} of its {len(prompt)} tokens cached, {due} are due"
                )
        num_evictions += llm.manager.pool.num_evictions
        run.progress(1)
    void = "" if num_cached and num_evictions else "void: no hit, or no eviction"
    return [
        CheckResult(
            "eviction", "requests that find another prefix than the last used", not wrong and not void, len(wrong),
            "requests", "0", count, time.perf_counter() - begin, wrong[0] if wrong else void, {"seed": run.seed},
            {"cached_tokens": num_cached, "evictions": num_evictions},
        )
    ]  # fmt: skip
