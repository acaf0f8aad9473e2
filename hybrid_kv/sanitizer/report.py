"""What a broken rule is reported with: the request, its group, the block, and what happened to it."""

from __future__ import annotations

from collections import deque

import numpy as np

from hybrid_kv.config import CheckFailedError
from hybrid_kv.sanitizer.shadow import HASH, ORIGIN, TOKENS, Array, Shadow

NUM_EVENTS = 4096  # kept for reports
NUM_LINES = 6  # of a block's history, the last ones


class SanitizerError(CheckFailedError, AssertionError):
    """The first broken `rule`; the message has the request, the group, the block and its history."""

    def __init__(self, rule: str, report: str) -> None:
        super().__init__(report)
        self.rule = rule


class History:
    """The last events of all blocks, and the names of the requests that wrote them."""

    def __init__(self) -> None:
        self.names: list[str] = []  # of requests, by serial number
        # Step, kind, group, block ids, names of requests, and which of them each block belongs to (None: all of them).
        self._events: deque[tuple[int, str, int, Array, list[str], Array | None]] = deque(maxlen=NUM_EVENTS)

    def log(
        self, step: int, kind: str, shadow: Shadow | None, blocks: Array, names: list[str], rows: Array | None = None
    ) -> None:
        """`rows`: of each block, the place of its request in `names`; None: all blocks are the first one's."""
        self._events.append((step, kind, -1 if shadow is None else shadow.id, blocks, names, rows))

    def of(self, block: int) -> list[str]:
        """The last events of a block, a line each."""
        lines = []
        for step, kind, group, blocks, names, rows in self._events:
            found = np.flatnonzero(blocks == block)
            if len(found):
                who = names if rows is None else dict.fromkeys(names[row] for row in rows[found].tolist())
                where = f", group {group}" if group >= 0 else ""
                lines.append(f"step {step}: {kind} by request {', '.join(who)}{where}")
        return lines[-NUM_LINES:]

    def holds(self, entry: Array) -> str:
        """An entry of a shadow in words."""
        if not entry[HASH]:
            return "nothing"
        step, serial = divmod(int(entry[ORIGIN]), 1 << 32)
        return f"the first {entry[TOKENS]} tokens of request {self.names[serial]} (step {step})"
