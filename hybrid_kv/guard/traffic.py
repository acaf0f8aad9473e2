"""Seeded traffic: engine settings that cover each other pairwise, requests that share prefixes, and drafts by script.

A *scenario* is one engine configuration, its requests in waves (each sent when the one before has ended) and the
disturbances beside them. Scenario 0, 1, … of a run are, in this order: the *forced* ones of `guard.patterns`, each built
so that one pattern must happen; a covering design of `FACTORS`, in which every pair of levels occurs, and every triple
of `TRIPLES`; and random draws for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.backend import BackendContext, FlashAttentionBackend, MultipleOf, TorchBackend, register_backend
from hybrid_kv.engine.sampling import SamplingParams, sample
from hybrid_kv.engine.scheduler import Request
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle


@register_backend
class SmallBlocksFirst(TorchBackend):
    """`(num_blocks, 2, …)` with kernel blocks so small that short requests cross many of them."""

    name = "GUARD_BLOCKS_FIRST"

    @classmethod
    def get_supported_kernel_block_sizes(cls, context: BackendContext) -> Sequence[int | MultipleOf]:
        return [2, 4]


@register_backend
class SmallKVFirst(FlashAttentionBackend):
    """`(2, num_blocks, …)` with the same small kernel blocks."""

    name = "GUARD_KV_FIRST"

    @classmethod
    def get_supported_kernel_block_sizes(cls, context: BackendContext) -> Sequence[int | MultipleOf]:
        return [2, 4]


Cell = dict[str, Any]  # a level of each factor

FACTORS: dict[str, tuple[Any, ...]] = {
    # `attention`: prefix caching without Mamba layers.
    "mode": ("none", "align", "all", "attention"),
    "drafts": ("none", "ngram", "right", "wrong", "mixed", "boundary"),
    "K": (0, 1, 2, 3, 4, 5, 6, 7),
    "layers": ("M*", "M*MM*", "**M", "MMM*M", "*M", "**", "MM"),
    "backend": (SmallBlocksFirst.name, SmallKVFirst.name, "TORCH", "FLASH_ATTN", "FLASHINFER"),
    "split": ("one", "several"),  # kernel blocks per manager block
    "budget": ("tiny", "small", "large"),  # tokens per step
    "pool": ("tight", "roomy"),
    "captured": ((), (4,), (1, 2, 4, 8), (3, 6)),
    "preemption": ("unforced", "forced"),
    "sampling": ("greedy", "mixed"),
    "salts": (1, 2),
    "schedule": ("sync", "async"),
    "offload": ("off", "host"),
}
TRIPLES = ("mode", "drafts", "preemption", "budget")
_BLOCK_SIZES = {
    (SmallBlocksFirst.name, "one"): (4,),
    (SmallKVFirst.name, "one"): (4,),
    (SmallBlocksFirst.name, "several"): (6, 8, 12, 16),
    (SmallKVFirst.name, "several"): (6, 8, 12, 16),
    ("TORCH", "one"): (4, 7, 8, 12),
    ("FLASH_ATTN", "one"): (16, 32),
    ("FLASHINFER", "one"): (16, 32),
    ("FLASHINFER", "several"): (48,),
}


def allowed(cell: Cell) -> bool:
    """Whether the engine has such a configuration; factors that `cell` lacks may be anything."""
    mode, layers = cell.get("mode"), cell.get("layers")
    if layers is not None and mode is not None and (mode == "attention") != ("M" not in layers) and mode != "none":
        return False
    if cell.get("K") == 0 and cell.get("drafts", "none") != "none":
        return False
    if mode == "none" and cell.get("offload") == "host":
        return False
    backend, split = cell.get("backend"), cell.get("split")
    if layers == "MM" and split == "several":
        return False
    if backend is not None and split is not None and (backend, split) not in _BLOCK_SIZES:
        return False
    # A state of K drafts outgrows a page of four tokens, and the block is raised to two kernel blocks.
    small = backend in (SmallBlocksFirst.name, SmallKVFirst.name) and split == "one" and layers != "MM"
    hybrid = mode in ("align", "all") or (layers is not None and "M" in layers)
    return not (small and hybrid and cell.get("K", 0) > 3)


def _complete(cell: Cell, rng: np.random.Generator, order: Iterable[str] | None = None) -> Cell | None:
    """A random allowed cell that agrees with `cell`, if there is one."""
    cell = dict(cell)
    for name in rng.permutation([name for name in FACTORS if name not in cell]).tolist() if order is None else order:
        levels = [level for level in FACTORS[name] if allowed({**cell, name: level})]
        if not levels:
            return None
        cell[name] = levels[int(rng.integers(len(levels)))]
    return cell if allowed(cell) else None


def combinations_of(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    """The pairs of levels, and the triples among `TRIPLES`, that a scenario of this cell exercises."""
    names = [(name, cell[name]) for name in FACTORS]
    found: set[tuple[tuple[str, Any], ...]] = set(combinations(names, 2))
    return found | set(combinations([(name, cell[name]) for name in TRIPLES], 3))


@cache
def required_combinations() -> frozenset[tuple[tuple[str, Any], ...]]:
    """All pairs and triples that any configuration has."""
    wanted = [names for names in combinations(FACTORS, 2)] + [names for names in combinations(TRIPLES, 3)]
    rng = np.random.default_rng(0)
    found = set()
    for names in wanted:
        for levels in product(*(FACTORS[name] for name in names)):
            chosen = tuple(zip(names, levels, strict=True))
            if allowed(dict(chosen)) and any(_complete(dict(chosen), rng) for _ in range(20)):
                found.add(chosen)
    return frozenset(found)


@cache
def design() -> tuple[Cell, ...]:
    """A covering design of `FACTORS`: greedily, each row from an uncovered combination and the best of 12 completions."""
    rng = np.random.default_rng(1)
    # A set of tuples with strings has another order in each process.
    missing = dict.fromkeys(sorted(required_combinations(), key=lambda chosen: (-len(chosen), repr(chosen))))
    rows: list[Cell] = []
    while missing:
        first = dict(next(iter(missing)))
        candidates = [cell for _ in range(12) if (cell := _complete(first, rng)) is not None]
        best = max(candidates, key=lambda cell: sum(chosen in missing for chosen in combinations_of(cell)), default=None)
        if best is None:
            continue
        for chosen in combinations_of(best):
            missing.pop(chosen, None)
        rows.append(best)
    return tuple(rows)


@dataclass(frozen=True)
class Event:
    """A disturbance before step `first`, and again every `every` steps (0: once).

    preempt: the youngest running request. abort: a running one, its step under way. drop: a waiting or running one
    between two steps. evict: the oldest published block.
    """

    what: Literal["preempt", "abort", "drop", "evict"]
    first: int
    every: int = 0

    def is_due(self, step: int) -> bool:
        """Whether it happens before this step."""
        late = step - self.first
        return late == 0 or (late > 0 and self.every > 0 and late % self.every == 0)


@dataclass(frozen=True)
class Scenario:
    """One engine configuration, its requests and what disturbs them."""

    seed: int
    layers: str
    options: dict[str, Any]
    prompts: list[list[int]]
    params: list[SamplingParams]
    waves: tuple[int, ...] = ()  # requests sent together; () is all at once
    drafts: str = "none"  # none, ngram, or a script of `ScriptedProposer`
    events: tuple[Event, ...] = ()
    forced: str = ""  # the pattern that it was built for
    cell: Cell = field(default_factory=dict)

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        name = f"scenario {self.seed}" + (f" ({self.forced})" if self.forced else "")
        return f"{name}: {self.layers}, {options}, {self.drafts} drafts, {len(self.prompts)} requests"


class AnswerBook:
    """What each request must become, whatever runs beside it: the oracle's answers, each computed once."""

    def __init__(self, layers: str) -> None:
        self.model = ExactModel(ExactConfig(pattern=layers))
        self._oracle = ExactOracle(self.model)
        self._answers: dict[tuple[Any, ...], list[int]] = {}

    def without_stop(self, prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> list[int]:
        """The answer as if no token ended it; nothing for a prompt that cannot run."""
        length = min(params.max_tokens, max_model_len - len(prompt))
        if length <= 0 or not prompt:
            return []
        assert params.seed is not None or params.is_greedy

        def choose(logits: Any, position: int) -> int:
            if params.is_greedy:
                return int(np.argmax(logits))
            row = torch.from_numpy(logits).double().unsqueeze(0)
            return sample(row, [params], [params.seed or 0], [position])[0]

        noise = () if params.is_greedy else (params.temperature, params.top_k, params.top_p, params.seed)
        key = (tuple(prompt), noise)
        if len(self._answers.get(key, ())) < length:
            self._answers[key] = self._oracle.generate(prompt, length, (), choose)
        return self._answers[key][:length]

    def answer(self, prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> list[int]:
        """The answer up to its first stop token."""
        tokens = self.without_stop(prompt, params, max_model_len)
        stops = (i + 1 for i, token in enumerate(tokens) if token in params.stop_token_ids)
        return tokens[: next(stops, len(tokens))]


@cache
def answer_book(layers: str) -> AnswerBook:
    """One per model and process."""
    return AnswerBook(layers)


class ScriptedProposer:
    """Drafts that are right exactly as far as the script says: a pure function of the request and its known tokens.

    right: K right ones. wrong: K wrong ones. mixed: any number, right up to any place. ragged: all right, their number
    runs through K, 0, 1, 2, …. boundary: right up to a block boundary if K reaches it, wrong behind it; beyond: right
    up to the first token behind one. rotate: request i has i % (K + 1) right ones and wrong ones behind them.

    Args:
        sequences: prompt and answer of each request, by its number; stop tokens ignored.
        block_size: of the boundaries.
    """

    def __init__(self, script: str, K: int, sequences: Sequence[Sequence[int]], block_size: int, vocab_size: int) -> None:
        self.script, self.K, self.block_size, self.vocab_size = script, K, block_size, vocab_size
        self._sequences = sequences

    def propose(
        self, requests: Sequence[Request], token_ids: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> list[list[int]]:
        """See `engine.runner.Proposer`; what the engine believes to be the request's tokens is not looked at."""
        return [self.drafts(int(r.request_id), n) for r, n in zip(requests, num_tokens.tolist(), strict=True)]

    def drafts(self, number: int, num_tokens: int) -> list[int]:
        """Drafts behind the first `num_tokens` tokens of a request."""
        sequence = self._sequences[number]
        count, right = self._counts(number, num_tokens, (hash((number, num_tokens)) >> 3) % 1009)
        # Behind the end of the answer no draft is right or wrong.
        own = [*sequence[num_tokens : num_tokens + count], *range(count)][:count]
        return [token if j < right else (token + 1 + j) % self.vocab_size for j, token in enumerate(own)]

    def _counts(self, number: int, num_tokens: int, noise: int) -> tuple[int, int]:
        K = self.K
        if self.script == "mixed":
            return noise % (K + 1), noise // 11 % (K + 1)
        if self.script == "ragged":
            return (num_tokens * K + number) % (K + 1), K
        # The step starts at the last known token, so it ends on a boundary with this many right drafts.
        to_boundary = -num_tokens % self.block_size
        right = {
            "right": K,
            "wrong": 0,
            "boundary": to_boundary,
            "beyond": to_boundary + 1,
            "rotate": number % (K + 1),
        }[self.script]
        return K, right


def draw_scenario(seed: int, vocab_size: int = 97) -> Scenario:
    """Scenario number `seed % SCENARIOS_PER_RUN` of run `seed // SCENARIOS_PER_RUN`."""
    from hybrid_kv.guard.patterns import FORCED

    number = seed % SCENARIOS_PER_RUN
    rng = np.random.default_rng(seed)
    if number < len(FORCED):
        return list(FORCED.values())[number](seed, rng)
    number -= len(FORCED)
    cell = design()[number] if number < len(design()) else None
    while cell is None:
        cell = _complete({}, rng)
    return _random_scenario(seed, cell, rng, vocab_size)


SCENARIOS_PER_RUN = 2**20


def _random_scenario(seed: int, cell: Cell, rng: np.random.Generator, vocab_size: int) -> Scenario:
    layers, mode, K = cell["layers"], cell["mode"], cell["K"]
    block_size = int(rng.choice(_BLOCK_SIZES[cell["backend"], cell["split"]]))
    if layers == "MM":
        block_size = int(rng.choice([8, 12, 16]))
    prompts = _prompts(rng, int(rng.integers(6, 13)), block_size, vocab_size)
    greedy, salts = cell["sampling"] == "greedy", cell["salts"]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 24)),
            stop_token_ids=tuple(rng.integers(0, vocab_size, size=8).tolist()) if rng.random() < 0.3 else (),
            # Residues are logits of up to 2^31; this temperature leaves a few hundred million of them in play.
            temperature=0.0 if greedy or i % 2 else 2e8,
            seed=int(rng.integers(-(2**63), 2**63)),
            cache_salt=f"tenant {rng.integers(salts)}",
        )
        for i in range(len(prompts))
    ]
    if not greedy:
        params[0] = SamplingParams(max_tokens=12, temperature=2e8, seed=seed)
    params[-1] = SamplingParams(max_tokens=20, seed=0)  # long enough for drafts, whatever the draw
    max_model_len = max(max(map(len, prompts)) + 1, int(rng.integers(62, 96)))
    if rng.random() < 0.3:
        prompts[2] = rng.integers(0, vocab_size, size=max_model_len).tolist()
    # Everything comes twice: the second time much of it is in the cache, and the order is another one.
    again = rng.permutation(len(prompts)).tolist()
    waves = (len(prompts), len(prompts))
    prompts, params = prompts + [prompts[i] for i in again], params + [params[i] for i in again]

    max_num_seqs = int(rng.choice([2, 3, 5, 8, 16]))
    budget = {"tiny": int(rng.choice([4, 5, 7, 9])), "small": int(rng.choice([16, 33])), "large": 256}[cell["budget"]]
    if cell["budget"] == "tiny":
        max_num_seqs = min(max_num_seqs, budget)
    options: dict[str, Any] = {
        "attention_backend": cell["backend"],
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "captured_batch_sizes": cell["captured"],
        "device": "cpu",
        **cache_options(mode, K, cell["drafts"]),
        "async_scheduling": cell["schedule"] == "async",
    }
    if layers == "MM":
        del options["block_size"]  # There is no attention block to size.
        if mode != "none":
            options["mamba_block_size"] = block_size
    if cell["offload"] == "host":
        options["kv_offload_bytes"] = int(rng.choice([600, 2000, 2**20]))
    if seed % 8 == 3:
        options["sanitize"] = True
    # An upper bound: as if every layer were a group of its own.
    longest = min(max_model_len, max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True)))
    columns = -(-longest // block_size)
    state = {"none": 1, "align": 2, "all": columns, "attention": 0}[mode] + K
    per_request = layers.count("M") * state + layers.count("*") * columns
    factor = rng.uniform(1.0, 2.5) if cell["pool"] == "tight" else max_num_seqs
    options["num_blocks"] = 1 + int(per_request * factor)
    events = []
    if cell["preemption"] == "forced":
        events.append(Event("preempt", 3, int(rng.choice([4, 5, 9]))))
    if rng.random() < 0.3:
        events.append(Event(("abort", "drop")[int(rng.integers(2))], int(rng.integers(2, 9)), 13))
    return Scenario(seed, layers, options, prompts, params, waves, cell["drafts"], tuple(events), cell=cell)


def cache_options(mode: str, K: int, drafts: str) -> dict[str, Any]:
    """Engine options of the levels of three factors."""
    options: dict[str, Any] = {
        "mamba_cache_mode": "none" if mode == "attention" else mode,
        "enable_prefix_caching": mode != "none",
        "num_speculative_tokens": K,
    }
    if drafts == "ngram":
        options |= {"speculative_method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return options


def _prompts(rng: np.random.Generator, count: int, block_size: int, vocab_size: int) -> list[list[int]]:
    """Prompts of 1 to 60 tokens: prefixes of one text with tails of their own, some of them on the edges of blocks."""
    base = rng.integers(0, vocab_size, size=60)
    base[20:40] = np.tile(base[20:24], 5)  # for n-grams to find
    lengths = rng.integers(1, 61, size=count)
    # Random lengths seldom hit the edges, so a few requests are placed on them.
    lengths[0] = rng.integers(1, 3)
    lengths[1] = min(60, block_size * int(rng.integers(1, 4)))
    lengths[-2] = min(60, block_size * int(rng.integers(1, 4)) + 1)
    lengths[-1] = max(20, lengths[-1])
    prompts = []
    for length in lengths:
        shared = int(rng.integers(0, length + 1)) if rng.random() < 0.7 else 0
        tail = rng.integers(0, vocab_size, size=length - shared)
        prompts.append([*base[:shared].tolist(), *tail.tolist()])
    return prompts
