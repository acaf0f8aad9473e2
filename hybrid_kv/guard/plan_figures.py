"""What a user reads of a plan, or of why there is none, worked out from layers, flags and memory alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from math import lcm
from typing import Any

import numpy as np
import torch

from hybrid_kv.attention.undo import ReplaySpec
from hybrid_kv.cache.backend import BackendContext, get_backend
from hybrid_kv.cache.modes import MODES
from hybrid_kv.cache.plan import CachePlan, describe, plan_cache
from hybrid_kv.cache.spec import FullAttentionSpec, MambaSpec, StatePart, UndoSpec, window_and_states, with_undo
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.kernels.common.integers import cdiv

TOKEN_BYTES = 2 * 4 * 2  # of K and V of a layer: one head of 4 elements in bf16
WAY_OUT = re.compile(r": give it at least (\d+) (blocks|B of memory)$")


class Asked:
    """A model of states and attention in two stages, with flags and a size of its pool, all drawn.

    What a plan of it should say is in the attributes and methods; a block takes any number of tokens (`TORCH`).

    Attributes:
        size: tokens of an attention block; 0 where the flags name no unit for it.
        pool: the flag that gives the pool its size.
        num_blocks: that this affords.
        held: of requests of 1, 2 … tokens, the blocks that they hold.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.K, self.rows, self.ring_len, width, self.limit, self.context_parallel = (
            int(rng.integers(*ends)) for ends in ((0, 4), (0, 65), (20, 40), (1, 80), (1, 3000), (1, 4))
        )
        self.rows *= int(rng.integers(4) > 0)
        self.mode, self.policy = (name := str(rng.choice(list(MODES)))), MODES[name]
        self.is_replay, self.is_delta = (bool(draw) for draw in rng.integers(2, size=2))
        num_states, num_attention = int(rng.integers(0, 9)), int(rng.integers(1, 9))
        self.state_bytes = (2 + self.K) * 2 * width * 2 + width * 4 * 4 if num_states else 0
        self.ring_bytes = self.ring_len * 3 * width * 2 if self.is_replay and num_states else 0
        parts = window_and_states(((2, 2 * width), torch.bfloat16), ((width, 4), torch.float32))
        kind = "gdn_attention" if self.is_delta else "mamba2"
        state = MambaSpec(1, parts, mamba_type=kind, inputs=(StatePart("x", (3, width), torch.bfloat16),))
        undo = ReplaySpec(self.K, self.ring_len) if self.is_replay else UndoSpec(self.K)
        self.layers = {f"s{i}": with_undo(state, undo) for i in range(num_states)}
        self.layers |= {f"a{i}": FullAttentionSpec(1, 1, 4, torch.bfloat16) for i in range(num_attention)}
        self.groups = self._groups()
        self._draw_blocks(rng)
        if not self.size:
            return
        self.page = self.size * TOKEN_BYTES
        names, cut = [*self.layers], int(rng.integers(0, len(self.layers)))
        self.stages = [self._stage(names[:cut]), self._stage(names[cut:])]
        lengths = np.arange(1, self.limit + 1)
        self.held = sum(self._most(group[0], lengths) for group in self.groups)
        self._draw_pool(rng)

    def _groups(self) -> list[list[str]]:
        """As many layers in each as the rarer kind has, or as the other has if it has less than 1.5 times as many."""
        kinds = [[name for name in self.layers if name[0] == kind] for kind in "sa"]
        few, many = (choose(len(names) for names in kinds if names) for choose in (min, max))
        length = many if many < 1.5 * few else few
        return [names[i :: cdiv(len(names), length)] for names in kinds for i in range(cdiv(len(names), length))]

    def _draw_blocks(self, rng: np.random.Generator) -> None:
        """Twice a state is the most that is no much padding."""
        double = 2 * cdiv(self.state_bytes, TOKEN_BYTES) or 16
        self.given = [None, None, 1, double, int(rng.integers(1, 200))][rng.integers(5)]
        self.chunk = [None, 16, int(rng.integers(1, 60))][rng.integers(3)]
        self.given_states = [None, int(rng.integers(1, 60))][rng.integers(2)] if self.state_bytes else None
        if self.given_states is not None and self.policy.keeps_states and not self.policy.needs_unit:
            self.given_states = self.aligned(self.mode, None)  # no other is kept
        self.size = self.aligned(self.mode, self.given_states)

    def aligned(self, mode: str, given_states: int | None) -> int:
        """The shortest block that holds a state, of those that a mode allows; 0 if it needs a unit that is not."""
        unit = self.given or 16
        if MODES[mode].needs_unit and self.state_bytes:
            if (base := given_states or self.chunk) is None:
                return 0
            unit = lcm(unit, base)
        return next(size for size in count(unit, unit) if size * TOKEN_BYTES >= self.state_bytes)

    def _stage(self, names: Sequence[str]) -> dict[str, Any]:
        mine = [[name for name in group if name in names] for group in self.groups]
        return {"layers": [*chain(*mine)], "block_bytes": self.page * max(map(len, mine))}

    def _most(self, name: str, lengths: Any) -> Any:
        """What a request holds of the group of this layer."""
        if name[0] == "a":
            return cdiv(lengths, self.size * self.context_parallel)
        columns = cdiv(lengths, self.size)
        late = min(self.ring_len, self.size - 1 + 2 * (1 + self.K)) if self.is_replay else 1
        most = columns if self.policy.keeps_states else lengths * 0 + 1
        if self.policy.gives_back:
            most = np.minimum(columns, 1 + cdiv(late, self.size))
        return most + (0 if self.is_replay else self.K)

    def ring_row(self, stage: Mapping[str, Any]) -> int:
        return self.ring_bytes * sum(name[0] == "s" for name in stage["layers"])

    def _draw_pool(self, rng: np.random.Generator) -> None:
        """From too little to plenty; rings may be more than all blocks, and more than there is memory."""
        wanted, real = int(rng.integers(1, [12, 60, 4000][rng.integers(3)])), [s for s in self.stages if s["layers"]]
        self.pool, self.num_blocks = {"num_blocks": wanted}, wanted
        if rng.integers(2):
            bytes_of_rows = max(self.rows * self.ring_row(stage) for stage in real) * int(rng.integers(2))
            block = max(stage["block_bytes"] for stage in real)
            memory = wanted * block + bytes_of_rows + [0, int(rng.integers(1000)), block - 1][rng.integers(3)]
            self.pool = {"memory_bytes": memory}
            left = [(max(0, memory - self.rows * self.ring_row(stage)), stage["block_bytes"]) for stage in real]
            self.num_blocks = min(rest // block for rest, block in left)

    def plan(self, **pool: int) -> CachePlan:
        """With what is not the default alone."""
        cache = CacheConfig(self.given, self.given_states, self.mode, **pool)  # type: ignore[arg-type]
        names = [stage["layers"] for stage in self.stages] if self.size else [[*self.layers], []]
        more = {"mamba_chunk_size": self.chunk, "max_num_seqs": self.rows or None, "stages": names}
        more["context_parallel"] = self.context_parallel if self.context_parallel > 1 else None
        told: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
        return plan_cache(
            self.layers, cache, get_backend("TORCH", "cpu"), BackendContext("cpu", True), self.limit, **told
        )

    def notes(self, longest: int) -> list[str]:
        """How each note begins."""
        page, state, notes = self.page, self.state_bytes, []
        if self.given not in (None, self.size):
            notes.append(f"--block-size {self.given} was raised to {self.size}: ")
        if self.given_states and not self.policy.keeps_states:
            notes.append(f"--mamba-block-size {self.given_states} changes nothing in mode {self.mode}: ")
        elif self.given_states not in (None, self.size):
            notes.append(f"--mamba-block-size {self.given_states} was raised to its multiple {self.size}, ")
        slots = max(map(len, self.groups)) * len(self.groups)
        if slots > len(self.layers):
            notes.append(f"{slots - len(self.layers)} of {slots} layer slots are unused, ")
        if longest < self.limit:
            notes.append(f"no request longer than {longest} tokens fits; lower --max-model-len {self.limit} ")
        if state and self.policy.keeps_states and page > 2 * state:
            notes.append(
                f"mode {self.mode} pads each Mamba state of {state} B by {100 * (page / state - 1):.0f} %, to the "
                f"{page} B of {self.size} tokens in attention"
            )
            best = self.aligned("align", None) * TOKEN_BYTES
            if best < page:
                percent = f"{100 * (best / state - 1):.0f} %"
                notes[-1] += f"; --mamba-cache-mode align caches prefixes too and pads by {percent}"
            notes[-1] += " (vLLM 0.22 falls back to mode align for" if self.is_delta else "|"
        return notes

    def due(self) -> dict[str, Any]:
        """What is to be read but for the notes."""
        usable, (size, page, state) = self.num_blocks - 1, (self.size, self.page, self.state_bytes)
        longest = int((self.held <= usable).sum())
        stages = [{**stage, "total_bytes": self.num_blocks * stage["block_bytes"]} for stage in self.stages]
        fullest = max(stages, key=lambda stage: stage["total_bytes"] + self.rows * self.ring_row(stage))
        state_block = size if self.policy.keeps_states else self.given_states or self.limit
        groups = []
        for group in self.groups:
            is_state = group[0][0] == "s"
            block = state_block if is_state else size
            groups.append({
                "kind": ("gdn_attention" if self.is_delta else "mamba2") if is_state else "attention",
                "num_layers": len(group),
                "layers": group,
                "block_size": block,
                "page_sizes_bytes": [page] * len(group),
                "kernel_block_size": block,
                "blocks_per_request": int(self._most(group[0], self.limit)),
            })  # fmt: skip
        rings = {
            "ring_len": self.ring_len,
            "ring_bytes_per_row_and_layer": self.ring_bytes,
            "ring_bytes_per_row": self.ring_row(fullest),
            "ring_rows": self.rows,
            "ring_total_bytes": self.rows * self.ring_row(fullest),
        }
        return {
            "block_size": size,
            "mamba_block_size": state_block if state else None,
            "page_size_bytes": page,
            "mamba_state_bytes": state,
            "mamba_padding_percent": round(100 * (page - state) / state, 2) if state else 0.0,
            "groups": groups,
            "num_buffers": max(map(len, self.groups)),
            "unused_layer_slots": max(map(len, self.groups)) * len(self.groups) - len(self.layers),
            "num_blocks": self.num_blocks,
            "total_bytes": fullest["total_bytes"],
            "stages": stages,
            "max_model_len": self.limit,
            "longest_request": longest,
            "blocks_per_request": int(self.held[-1]),
            "max_concurrency": round(usable / int(self.held[-1]), 2),
            "token_capacity": longest * usable // int(self.held[longest - 1]),
            **(rings if self.ring_bytes else {}),
        }


def figures(rng: np.random.Generator) -> Iterator[str]:
    """Each figure and note that is not as it should be, or what is wrong with a refusal."""
    asked = Asked(rng)
    where = (
        f"mode {asked.mode}, {len(asked.layers)} layers in {len(asked.groups)} groups, {asked.context_parallel} ranks"
    )
    try:
        read = describe(asked.plan(**(asked.pool if asked.size else {"num_blocks": 100})))
    except ConfigError as error:
        yield from (f"{where}: {wrong}" for wrong in _refusal(asked, str(error)))
        return
    if not asked.size or asked.num_blocks - 1 < asked.held[0]:
        yield f"{where}: {asked.pool if asked.size else 'no chunk size'} is not refused"
        return
    due, notes = asked.due(), read.pop("notes")
    for name in read.keys() | due.keys():
        if read.get(name) != due.get(name):
            yield f"{where}: {name} {read.get(name)}, not {due.get(name)}"
    begins = asked.notes(due["longest_request"])
    if len(notes) != len(begins) or not all(map(str.startswith, (f"{note}|" for note in notes), begins)):
        yield f"{where}: it says {notes}, not {begins}"


def _refusal(asked: Asked, error: str) -> Iterator[str]:
    """It is due, and what it tells to give is enough, and no less is."""
    if not asked.size:
        if not error.startswith(f"mode {asked.mode} needs a chunk size in config.json or --mamba-block-size"):
            yield f"no chunk size: {error}"
        return
    needed, block_bytes = int(asked.held[0]), max(stage["block_bytes"] for stage in asked.stages)
    has = f"the cache has {asked.num_blocks} blocks of {block_bytes} B, one of them the null block, "
    due, found = f"{has}but a request of one token needs {needed}: ", WAY_OUT.search(error)
    flag, unit = ("num_blocks", "blocks") if "num_blocks" in asked.pool else ("memory_bytes", "B of memory")
    if asked.num_blocks > needed or not error.startswith(due) or found is None or found[2] != unit:
        yield f"{asked.pool}: {error}; not {due} … {unit}"
        return
    for given, is_enough in ((int(found[1]), True), (int(found[1]) - 1, False)):
        try:
            asked.plan(**{flag: given})
            refused = ""
        except ConfigError as again:
            refused = str(again)
        if is_enough == bool(refused):
            yield f"{asked.pool}: {error}; but with {given} {refused or 'it is planned'}"
