"""Provenance in the exact model's cache inside vLLM: the first wrong read has a name.

Each page entry and each state has two numbers more: how many tokens it stands for and a hash of
them. They are channels of the model's own tensors, so that vLLM's copies take them along. What they
ought to be follows from the token ids and positions that vLLM's runner believes. Asynchronous steps
are not followed: their token ids are not on the CPU.

A wrong read also gets the lines of vLLM that handed over its block: who allocated, shared or freed
it last, and who filled, moved or swapped the row of the block table.
"""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PRIME = 2**31 - 1
THROUGH = ("block_pool.py", "block_table.py", os.path.basename(__file__))  # their callers know why


class VllmSanitizer:
    """Compares marks with what they ought to be, before they are read, and writes new ones.

    Attributes:
        found: what was wrong, the first thing first.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._runner: Any = None
        self._hashes = torch.empty(0)
        powers = [1]
        while len(powers) < 4096:
            powers.append(powers[-1] * 31337 % PRIME)
        self._powers = torch.tensor(powers)
        begin = GPUModelRunner.__init__

        def begin_and_keep(runner: Any, *arguments: Any, **named: Any) -> None:
            begin(runner, *arguments, **named)
            self._runner = runner

        GPUModelRunner.__init__ = begin_and_keep
        self._handed: dict[tuple[str, int], str] = {}  # by block or row, who did it last
        blocks: Callable[..., Iterable[Any]] = lambda given, _: given  # noqa: E731
        self._follow(BlockPool, "get_new_blocks", "allocated", lambda _, made: made)
        self._follow(BlockPool, "touch", "shared", blocks)
        self._follow(BlockPool, "free_blocks", "freed", blocks)
        self._follow(BlockTable, "append_row", "filled", lambda _, row_idx, __: [row_idx])
        self._follow(BlockTable, "move_row", "moved", lambda _, tgt, __: [tgt])
        self._follow(BlockTable, "swap_row", "swapped", lambda src, tgt, _: [src, tgt])

    def _follow(
        self, owner: Any, name: str, verb: str, touched: Callable[..., Iterable[Any]]
    ) -> None:
        """Keep the line that calls a method.

        `touched` gets its arguments and what it returns, and makes blocks or rows of them.
        """
        method = getattr(owner, name)

        def follow(this: Any, *arguments: Any) -> Any:
            # Some arguments come as iterators.
            arguments = tuple(one if isinstance(one, int) else list(one) for one in arguments)
            made = method(this, *arguments)
            frame = sys._getframe(1)
            while os.path.basename(frame.f_code.co_filename) in THROUGH and frame.f_back:
                frame = frame.f_back
            line = f"{verb} at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            for one in touched(*arguments, made):
                self._handed[
                    "row" if isinstance(one, int) else "block", getattr(one, "block_id", one)
                ] = line
            return made

        setattr(owner, name, follow)

    def step(self, positions: torch.Tensor) -> None:
        """Note the tokens of a step, by their positions, before its layers run."""
        batch = self._runner.input_batch
        longest = int(positions.max()) + 1
        ids = torch.from_numpy(batch.token_ids_cpu[: batch.num_reqs, :longest]).long()
        sums = ((ids + 1) * self._powers[:longest] % PRIME).cumsum(1) % PRIME
        self._hashes, self._positions = torch.nn.functional.pad(sums, (1, 0)), positions
        self._starts = torch.from_numpy(
            self._runner.query_start_loc.np[: batch.num_reqs + 1]
        ).long()

    def marks_of(self, row: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the marks [..., 2] of the first `lengths` tokens of the batch's rows."""
        return torch.stack([lengths, self._hashes[row, lengths]], -1)

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the row in the batch of each token of the step."""
        return torch.searchsorted(self._starts[1:], tokens, right=True).clamp(
            max=len(self._starts) - 2
        )

    def pages(
        self,
        layer: str,
        marks: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        window: int | None = None,
    ) -> None:
        """Mark what a step wrote to `slots` [num_tokens], and check all that its rows read.

        Args:
            marks: [blocks, block size, 2].
            table: blocks [rows, columns].
            window: tokens that a query sees; None: all.
        """
        size, n = marks.shape[1], len(slots)
        row = self.rows_of(torch.arange(n))
        real = slots >= 0
        written = self.marks_of(row, self._positions[:n] + 1)[real]
        marks[slots[real] // size, slots[real] % size] = written.to(marks.dtype)
        ends = (self._positions[self._starts[1:] - 1] + 1).tolist()
        firsts = self._positions[self._starts[:-1]].tolist()
        for i, (first, end) in enumerate(zip(firsts, ends, strict=True)):
            begin = 0 if window is None else max(first + 1 - window, 0)
            got = marks[table[i, : -(-end // size)].long()].flatten(0, 1)[:end].long()
            want = self.marks_of(torch.full((end,), i), torch.arange(1, end + 1))
            wrong = (got != want).any(1)
            wrong[:begin] = False
            for place in wrong.nonzero()[:1].flatten().tolist():
                block = int(table[i, place // size])
                where = f"slot {place % size} of block {block}"
                # Attention's blocks may be smaller.
                pool = block * self._runner.kv_cache_config.num_blocks // len(marks)
                self._report(
                    layer, i, place, got[place].tolist(), want[place].tolist(), where, pool
                )

    def states(
        self,
        layer: str,
        marks: torch.Tensor,
        first: torch.Tensor,
        lengths: torch.Tensor,
        columns: torch.Tensor,
        accepted: torch.Tensor | None,
        seen: torch.Tensor | None,
    ) -> None:
        """Check the states that rows read, and mark those that they write, see `VllmMamba.advance`.

        Args:
            marks: [blocks, 2].
            first: the first token of each row in the step.
        """
        rows, done = self.rows_of(first), self._positions[first]
        want = self.marks_of(rows, done).tolist()
        for i in range(len(lengths)):
            row, begin = int(rows[i]), int(done[i])
            if seen is None or bool(seen[i]):
                block = int(columns[i, 0 if accepted is None else int(accepted[i]) - 1])
                self._report(
                    layer, row, begin, marks[block].tolist(), want[i], f"state {block}", block
                )
            elif begin:
                self._report(layer, row, begin, [0, 1], want[i], "no state")
        for i, length in enumerate(lengths.tolist()):
            last = columns.shape[1] > 1
            for j in range(length) if last else [length - 1]:
                mark = self.marks_of(rows[i], done[i] + j + 1)
                marks[int(columns[i, j if last else 0])] = mark.to(marks.dtype)

    def _report(
        self,
        layer: str,
        row: int,
        place: int,
        got: list[int],
        want: list[int],
        read: str,
        block: int = -1,
    ) -> None:
        if got == want:
            return
        rule = (
            f"stands for {got[0]} tokens, not {want[0]}"
            if got[0] != want[0]
            else "is of another history"
        )
        if not 0 <= got[0] < len(self._powers):
            rule = "is read before it was written"
        request = self._runner.input_batch.req_ids[row].split("-")[0]
        by = [
            f"{kind} {number} was {self._handed[kind, number]}"
            for kind, number in (("block", block), ("row", row))
            if (kind, number) in self._handed
        ]
        self.found.append(
            "; ".join([f"{layer}, request {request}, token {place}: {read} {rule}", *by])
        )
