"""Seeded traffic: engine settings that cover each other pairwise, and their requests.

A *scenario* is one engine configuration, its requests in waves (each sent when the one before has
ended) and the events that disturb them. Scenario 0, 1, … of a run are, in this order: the *forced*
ones of `guard.forced`, each built so that one pattern must happen; a covering design of `FACTORS`,
in which every pair of levels occurs, and every triple of `TRIPLES`; and random draws for ever.

A *swarm* has no forced ones and no design. Each batch of its seeds has a random half of all levels,
and of what else may happen (Groce et al. 2012, Swarm Testing): what is left meets more often, and
what would hide a bug is often absent.

Modes, schemes and layouts of states are those that are registered when this module is imported: a
new one is drawn without a change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations, product
from typing import Any, Literal

import numpy as np

from hybrid_kv.attention.rollback import SCHEMES, rollback_spec
from hybrid_kv.cache.modes import MODES
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    MambaSpec,
    SlotsSpec,
    with_block_size,
    with_rollback,
)
from hybrid_kv.check.guard.forced import FORCED, VOCAB, Draw
from hybrid_kv.check.guard.scenario import (
    Cell,
    Disturbance,
    Scenario,
    SmallBlocksFirst,
    SmallKVFirst,
    answer_book,
    cache_options,
    has_attention,
    num_states,
)
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.recompute import shortest_ring_len
from hybrid_kv.models.exact import PARTS
from hybrid_kv.sampling import SamplingParams

# "*#+": layers of one group whose pages differ. "L": latents. "~", "=": sliding windows; next to
# "+" in larger blocks.
_LAYERS = (
    "M*",
    "M*MM*",
    "**M",
    "MMM*M",
    "*M",
    "**",
    "MM",
    "M+*M",
    "*#+",
    "ML",
    "M~*",
    "M=+",
    "=~*",
    "~",
)

FACTORS: dict[str, tuple[Any, ...]] = {
    # `attention`: prefix caching without Mamba layers.
    "mode": (*MODES, "attention"),
    "drafts": ("none", "ngram", "right", "wrong", "mixed", "boundary"),
    "K": (0, 1, 2, 3, 4, 5, 6, 7),
    "layers": (*_LAYERS, *(f"{letter}*" for letter in PARTS if letter not in "".join(_LAYERS))),
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
    "scheme": tuple(SCHEMES),
}
TRIPLES = ("mode", "drafts", "preemption", "budget", "scheme")
# How often it happens, whatever the cell: to a request (the first three), or in a scenario.
CHANCES = {"stop": 0.3, "shared": 0.7, "second turn": 0.5, "long": 0.3, "abort": 0.3, "reset": 0.1}
CHANCES |= {
    "one row": 0.05,
    "prompt logprobs": 0.3,
    "lose": 0.2,
    "third turn": 0.25,
    "retain": 0.25,
    "K by requests": 0.25,
    "unit": 0.35,
}  # in a scenario, drawn last
_BLOCK_SIZES = {
    (SmallBlocksFirst.name, "one"): (4,),
    (SmallKVFirst.name, "one"): (4,),
    (SmallBlocksFirst.name, "several"): (6, 8, 12, 16),
    (SmallKVFirst.name, "several"): (6, 8, 12, 16),
    ("TORCH", "one"): (4, 7, 8, 12, 16),
    ("FLASH_ATTN", "one"): (16, 32),
    ("FLASHINFER", "one"): (16, 32),
    ("FLASHINFER", "several"): (48,),
}


@dataclass(frozen=True)
class Features:
    """The levels that random scenarios are drawn from, and how often each other event happens."""

    levels: Mapping[str, tuple[Any, ...]]
    chances: Mapping[str, float]


def allowed(cell: Cell) -> bool:
    """Return whether an engine can have such a configuration; missing factors may be anything."""
    mode = cell.get("mode")
    layers = cell.get("layers")
    has_states = layers is None or num_states(layers) > 0
    if (
        layers is not None
        and mode is not None
        and not _is_stateless(mode)
        and (mode != "attention") != has_states
    ):
        return False
    if not _takes(cell.get("scheme", "slots"), mode, has_states):
        return False
    if cell.get("K") == 0 and cell.get("drafts", "none") != "none":
        return False
    if _is_stateless(mode) and cell.get("offload") == "host":
        return False
    backend = cell.get("backend")
    split = cell.get("split")
    is_lone = layers is not None and not has_attention(layers)
    if is_lone and split == "several":
        return False
    if backend is not None and split is not None and (backend, split) not in _BLOCK_SIZES:
        return False
    num_drafts = cell.get("K", 0)
    has_small_blocks = (
        backend in (SmallBlocksFirst.name, SmallKVFirst.name) and split == "one" and not is_lone
    )
    is_hybrid = _keeps_states(mode) or (layers is not None and has_states)
    if (
        has_small_blocks
        and is_hybrid
        and _smallest_block(mode, num_drafts, cell.get("schedule"), cell.get("scheme")) > 4
    ):
        return False
    # Else the block is raised to two kernel blocks.
    return not (has_small_blocks and is_hybrid and not _fits(layers or "M*", num_drafts, 4))


@cache
def _pages(layers: str, num_drafts: int, block_size: int) -> tuple[int, int]:
    """Return the bytes of the largest state with drafts, and of the largest attention page.

    A model without states, or without attention, has 0 of them.

    Args:
        num_drafts: of a verify step.
        block_size: tokens of the attention page.
    """
    specs = answer_book(layers).model.layer_specs.values()
    states = [
        with_rollback(spec, SlotsSpec(num_drafts)).page_size_bytes
        for spec in specs
        if isinstance(spec, MambaSpec)
    ]
    pages = [
        with_block_size(spec, block_size).page_size_bytes
        for spec in specs
        if isinstance(spec, FullAttentionSpec)
    ]
    return max(states, default=0), max(pages, default=0)


def _fits(layers: str, num_drafts: int, block_size: int) -> bool:
    """Return whether an attention page of `block_size` tokens holds a state of so many drafts."""
    state, page = _pages(layers, num_drafts, block_size)
    return state <= page


@cache
def _takes(scheme: str, mode: str | None, has_states: bool) -> bool:
    """Return whether a scheme can be used in a mode, as the scheme itself says."""
    layers = "M*" if has_states and mode != "attention" else "**"
    specs = list(answer_book(layers).model.layer_specs.values())
    cache_mode = mode if mode in MODES else "none"
    config = CacheConfig(mamba_cache_mode=cache_mode, state_scheme=scheme)
    try:
        rollback_spec(config, num_speculative_tokens=0, is_async=False, specs=specs)
    except ConfigError:
        return False
    return True


def _keeps_states(mode: str | None) -> bool:
    return mode in MODES and MODES[mode].keeps_states


def _is_stateless(mode: str | None) -> bool:
    """Return whether this is a mode of states that keeps none; attention alone is no such mode."""
    return mode in MODES and not MODES[mode].keeps_states


def _is_late(scheme: str | None) -> bool:
    return scheme is not None and SCHEMES[scheme].spec_type.writes_late


def _smallest_block(
    mode: str | None, num_drafts: int, schedule: str | None, scheme: str | None
) -> int:
    """Return the smallest block size that a configuration allows.

    A verify step must not pass two boundaries; where logical blocks are given back, nor may two
    steps in flight.
    """
    gives_back = mode in MODES and MODES[mode].gives_back
    late = num_drafts if gives_back and schedule == "async" and not _is_late(scheme) else 0
    return 1 + num_drafts + late if _keeps_states(mode) else 1


def _complete(
    cell: Cell, rng: np.random.Generator, factors: Mapping[str, tuple[Any, ...]] = FACTORS
) -> Cell | None:
    """Draw an allowed cell of these levels that agrees with `cell`; None if the draw met none."""
    cell = dict(cell)
    for name in rng.permutation([name for name in FACTORS if name not in cell]).tolist():
        levels = [level for level in factors[name] if allowed({**cell, name: level})]
        if not levels:
            return None
        cell[name] = levels[int(rng.integers(len(levels)))]
    return cell if allowed(cell) else None


def combinations_of(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    """Return the pairs of levels, and the triples among `TRIPLES`, that a cell has."""
    levels = [(name, cell[name]) for name in FACTORS]
    pairs: set[tuple[tuple[str, Any], ...]] = set(combinations(levels, 2))
    return pairs | set(combinations([(name, cell[name]) for name in TRIPLES], 3))


@cache
def required_combinations() -> frozenset[tuple[tuple[str, Any], ...]]:
    """Return all pairs and triples that any configuration has."""
    factors = [*combinations(FACTORS, 2), *combinations(TRIPLES, 3)]
    rng = np.random.default_rng(0)
    required = set()
    for names in factors:
        for levels in product(*(FACTORS[name] for name in names)):
            chosen = tuple(zip(names, levels, strict=True))
            if allowed(dict(chosen)) and any(_complete(dict(chosen), rng) for _ in range(20)):
                required.add(chosen)
    return frozenset(required)


@cache
def design() -> tuple[Cell, ...]:
    """Return a covering design of `FACTORS`.

    Each row starts from a combination that is not covered yet, and is the best of 12 draws.
    """
    rng = np.random.default_rng(3)
    # A set of tuples with strings has another order in each process.
    ordered = sorted(required_combinations(), key=lambda chosen: (-len(chosen), repr(chosen)))
    missing = dict.fromkeys(ordered)

    def num_covered(cell: Cell) -> int:
        return sum(chosen in missing for chosen in combinations_of(cell))

    rows: list[Cell] = []
    while missing:
        first = dict(next(iter(missing)))
        draws = [_complete(first, rng) for _ in range(12)]
        candidates = [cell for cell in draws if cell is not None]
        best = max(candidates, key=num_covered, default=None)
        if best is None:
            continue
        for chosen in combinations_of(best):
            missing.pop(chosen, None)
        rows.append(best)
    return tuple(rows)


def rows_with(levels: Mapping[str, Any]) -> list[int]:
    """Return the numbers of a run's scenarios that are rows of the design with these levels."""
    return [i for i, cell in enumerate(design(), len(FORCED)) if has_levels(cell, levels)]


def has_levels(cell: Cell, levels: Mapping[str, Any]) -> bool:
    """Return whether a cell, complete or not, has all of these levels, which may be texts."""
    return all(str(cell.get(name)) == str(level) for name, level in levels.items())


def draw_scenario(seed: int) -> Scenario:
    """Draw scenario number `seed % SCENARIOS_PER_RUN` of run `seed // SCENARIOS_PER_RUN`."""
    number = seed % SCENARIOS_PER_RUN
    if number < len(FORCED):
        return list(FORCED.values())[number](Draw(seed))
    number -= len(FORCED)
    cell = design()[number] if number < len(design()) else None
    rng = np.random.default_rng(seed)
    while cell is None:
        cell = _complete({}, rng)
    return _random_scenario(seed, cell, rng)


SCENARIOS_PER_RUN = 2**20


def draw_swarm_scenario(seed: int) -> Scenario:
    """Draw scenario number `seed` of all swarms.

    Its features are those of batch `seed // SEEDS_PER_BATCH`.
    """
    features = draw_features(seed // SEEDS_PER_BATCH)
    rng = np.random.default_rng((seed, 1))
    cell = None
    while cell is None:
        cell = _complete({}, rng, features.levels)
    return _random_scenario(seed, cell, rng, features.chances)


SEEDS_PER_BATCH = 16


@lru_cache(maxsize=1)
def draw_features(batch: int) -> Features:
    """Draw the features of a batch of a swarm.

    Half of all levels, at least one of each factor, and such that some engine can have them. Each
    other event happens never, or twice as often.
    """
    rng = np.random.default_rng((batch, 2))
    while True:
        levels = {
            name: tuple(level for level in FACTORS[name] if rng.random() < 0.5) for name in FACTORS
        }
        if all(levels.values()) and any(_complete({}, rng, levels) for _ in range(20)):
            return Features(
                levels,
                {name: min(1.0, 2 * rng.integers(2) * chance) for name, chance in CHANCES.items()},
            )


@dataclass
class _Requests:
    """The requests of a scenario, as far as they are drawn."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    waves: tuple[int, ...]
    max_model_len: int

    @property
    def longest(self) -> int:
        """Return the most tokens that a request can have."""
        ends = (
            len(prompt) + params.max_tokens
            for prompt, params in zip(self.prompts, self.params, strict=True)
        )
        return min(self.max_model_len, max(ends))


def _random_scenario(
    seed: int, cell: Cell, rng: np.random.Generator, chances: Mapping[str, float] = CHANCES
) -> Scenario:
    """Draw a scenario of a cell. The steps take the numbers of `rng` in turn: their order stays."""
    block_size = _draw_block_size(rng, cell)
    requests = _draw_requests(seed, cell, rng, block_size, chances)
    options = _draw_options(cell, rng, block_size, requests.max_model_len)
    if seed % 8 == 3:
        options["sanitize"] = True
    options["num_blocks"] = _draw_num_blocks(
        cell, rng, block_size, requests.longest, options["max_num_seqs"]
    )
    events = _draw_events(cell, rng, chances)
    # Drawn last: without them the scenario is as it was.
    if rng.random() < chances["one row"]:
        options["max_num_seqs"] = 1
    if rng.random() < chances["prompt logprobs"]:
        requests.params[-1] = replace(requests.params[-1], logprobs=1, prompt_logprobs=1)
    if cell["offload"] == "host" and rng.random() < chances["lose"]:
        events.append(Disturbance("lose", int(rng.integers(2, 20)), 5))
    if rng.random() < chances["third turn"]:
        _repeat_in_turn(requests)
    if not _is_stateless(cell["mode"]) and rng.random() < chances["retain"]:
        options["prefix_cache_retention_interval"] = int(rng.choice([0, 0, 16, 40]))
    if cell["K"] and rng.random() < chances["K by requests"]:
        first, middle, last = rng.integers(0, cell["K"] + 1, size=3).tolist()
        options["num_speculative_tokens_per_batch_size"] = (
            (1, 1, first),
            (2, 3, middle),
            (4, 4, last),
        )
    mode = MODES.get(cell["mode"])
    if mode is not None and mode.takes_match_unit and rng.random() < chances["unit"]:
        units = [unit for unit in (1, 2, 3, 4, 8) if block_size % unit == 0 and unit < block_size]
        options["prefix_match_unit"] = int(rng.choice(units))
        options["num_blocks"] += 2 * len(cell["layers"])
    return Scenario(
        seed,
        cell["layers"],
        options,
        requests.prompts,
        requests.params,
        requests.waves,
        cell["drafts"],
        tuple(events),
        cell=cell,
    )


def _draw_block_size(rng: np.random.Generator, cell: Cell) -> int:
    is_lone = not has_attention(cell["layers"])
    sizes = (8, 12, 16) if is_lone else _BLOCK_SIZES[cell["backend"], cell["split"]]
    smallest = _smallest_block(cell["mode"], cell["K"], cell["schedule"], cell["scheme"])
    return int(rng.choice([size for size in sizes if size >= smallest]))


def _draw_requests(
    seed: int, cell: Cell, rng: np.random.Generator, block_size: int, chances: Mapping[str, float]
) -> _Requests:
    """Draw prompts and sampling parameters, and the same requests again."""
    prompts = _prompts(rng, int(rng.integers(6, 13)), block_size, chances["shared"])
    is_greedy = cell["sampling"] == "greedy"
    params = [
        _draw_params(cell, rng, i, is_greedy or i % 2 == 1, chances["stop"])
        for i in range(len(prompts))
    ]
    if not is_greedy:
        params[0] = SamplingParams(max_tokens=12, temperature=2e8, seed=seed)
    params[-1] = SamplingParams(max_tokens=20, seed=0)  # long enough for drafts, whatever the draw
    max_model_len = max(max(map(len, prompts)) + 1, int(rng.integers(62, 96)))
    if rng.random() < chances["long"]:
        prompts[2] = rng.integers(0, VOCAB, size=max_model_len).tolist()
    waves = (len(prompts), len(prompts))
    prompts, params = _twice(
        rng, cell["layers"], prompts, params, max_model_len, chances["second turn"]
    )
    return _Requests(prompts, params, waves, max_model_len)


def _draw_params(
    cell: Cell, rng: np.random.Generator, number: int, is_greedy: bool, stop: float
) -> SamplingParams:
    """Draw the parameters of a request; `stop`: how often it may end at a token."""
    return SamplingParams(
        max_tokens=int(rng.integers(1, 24)),
        stop_token_ids=tuple(rng.integers(0, VOCAB, size=8).tolist())
        if rng.random() < stop
        else (),
        # Residues are logits of up to 2^31; this temperature leaves a few hundred million of them
        # in play.
        temperature=0.0 if is_greedy else 2e8,
        seed=int(rng.integers(-(2**63), 2**63)),
        cache_salt=f"tenant {rng.integers(cell['salts'])}",
        logprobs={2: 0, 3: 3}.get(number),
    )


def _draw_options(
    cell: Cell, rng: np.random.Generator, block_size: int, max_model_len: int
) -> dict[str, Any]:
    """Draw the engine options of a cell, but for the size of its pool."""
    layers = cell["layers"]
    max_num_seqs = int(rng.choice([2, 3, 5, 8, 16]))
    budgets = {
        "tiny": int(rng.choice([4, 5, 7, 9])),
        "small": int(rng.choice([16, 33])),
        "large": 256,
    }
    budget = budgets[cell["budget"]]
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
        **cache_options(cell["mode"], cell["K"], cell["drafts"]),
        "async_scheduling": cell["schedule"] == "async",
        "state_scheme": cell["scheme"],
    }
    if not has_attention(layers):
        del options["block_size"]  # There is no attention block to size.
        if not _is_stateless(cell["mode"]):
            options["mamba_block_size"] = block_size
    if cell["offload"] == "host":
        block_bytes = max(_pages(layers, cell["K"], block_size))
        options["kv_offload_bytes"] = block_bytes * int(rng.choice([5, 16, 8000]))
    if _is_late(cell["scheme"]):
        shortest = shortest_ring_len(1 + cell["K"])
        lengths = [None, shortest, shortest + 1, shortest + 5]
        options["recompute_ring_len"] = lengths[int(rng.integers(4))]
    return options


def _draw_num_blocks(
    cell: Cell, rng: np.random.Generator, block_size: int, longest: int, max_num_seqs: int
) -> int:
    """Draw the size of the pool.

    A request's need is bounded as if every layer were a group of its own.

    Args:
        longest: tokens of a request.
    """
    layers = cell["layers"]
    logical_blocks = cdiv(longest, block_size)
    mode = MODES.get(cell["mode"])
    states = 0
    if mode is not None:
        states = mode.held_at_most(mode.num_logical_blocks(longest, block_size), 1)
    if _is_late(cell["scheme"]):
        states += 2 * (mode is not None and mode.gives_back)
    else:
        states += cell["K"]
    num_attention = len(layers) - num_states(layers)
    per_request = num_states(layers) * states + num_attention * logical_blocks
    factor = rng.uniform(1.0, 2.5) if cell["pool"] == "tight" else max_num_seqs
    return 1 + int(per_request * factor)


def _draw_events(
    cell: Cell, rng: np.random.Generator, chances: Mapping[str, float]
) -> list[Disturbance]:
    events = []
    if cell["preemption"] == "forced":
        events.append(Disturbance("preempt", 3, int(rng.choice([4, 5, 9]))))
    if rng.random() < chances["abort"]:
        kinds: tuple[Literal["abort", "drop"], ...] = ("abort", "drop")
        events.append(Disturbance(kinds[int(rng.integers(2))], int(rng.integers(2, 9)), 13))
    if not _is_stateless(cell["mode"]) and rng.random() < chances["reset"]:
        step = int(rng.integers(2, 20))
        events.append(Disturbance("reset" if step % 3 else "sleep", step))
    return events


def _repeat_in_turn(requests: _Requests) -> None:
    """Send half of the repeated requests a second time, in turn with the others."""
    first, repeated = requests.waves
    num_twice = (first + 1) // 2
    order = [*range(first + num_twice), *range(first, first + repeated - num_twice)]
    requests.prompts = [requests.prompts[i] for i in order]
    requests.params = [requests.params[i] for i in order]
    requests.waves = (first, num_twice, first - num_twice)


def draw_trio(seed: int) -> tuple[Scenario, Scenario, Scenario]:
    """Draw one traffic three times: with drafts and cache, without drafts, and without cache.

    The pool has room for all of it. Each wave starts in one step, so that a wave finds what the
    wave before has left, however fast that was.
    """
    d = Draw(seed)
    mode = ("align", "all", "attention")[seed % 3]
    num_drafts = d.number(1, 8)
    prompts = _prompts(d.rng, 8, 16)
    params = [SamplingParams(max_tokens=d.number(1, 24), seed=i) for i in range(len(prompts))]
    layers = "**" if mode == "attention" else "M*MM*"
    waves = (len(prompts), len(prompts))
    prompts, params = _twice(d.rng, layers, prompts, params, 96)

    def variant(mode: str, num_drafts: int) -> Scenario:
        return d.scenario(
            prompts,
            params,
            modes=(mode,),
            layers=layers,
            num_drafts=num_drafts,
            drafts="mixed",
            waves=waves,
            block_size=16,
            attention_backend=SmallKVFirst.name,
            num_blocks=2000,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            captured_batch_sizes=(1, 2, 4, 8, 16),
            async_scheduling=seed % 2 == 1,
        )

    return variant(mode, num_drafts), variant(mode, 0), variant("none", num_drafts)


def _twice(
    rng: np.random.Generator,
    layers: str,
    prompts: list[list[int]],
    params: list[SamplingParams],
    max_model_len: int,
    chance: float = CHANCES["second turn"],
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return all requests, then all again in another order; some of these as a second turn.

    The repeated ones come when much of their prefix is cached.
    """
    book = answer_book(layers)
    order = rng.permutation(len(prompts)).tolist()
    again = []
    for i in order:
        prompt = prompts[i]
        if rng.random() < chance and len(prompt) < max_model_len:
            answer = book.answer(prompt, params[i], max_model_len)
            prompt = [
                *prompt,
                *answer[: rng.integers(len(answer) + 1)],
                *rng.integers(0, VOCAB, 3).tolist(),
            ]
        again.append(prompt[: max(len(prompts[i]), max_model_len - 1)])
    return prompts + again, params + [params[i] for i in order]


def _prompts(
    rng: np.random.Generator, count: int, block_size: int, chance: float = CHANCES["shared"]
) -> list[list[int]]:
    """Draw prompts of 1 to 60 tokens.

    They are prefixes of one text with different tails; some end on the edges of blocks.
    """
    base = rng.integers(0, VOCAB, size=60)
    base[20:40] = np.tile(base[20:24], 5)  # for n-grams to find
    lengths = rng.integers(1, 61, size=count)
    # Random lengths seldom hit the edges, so a few requests are placed on them.
    lengths[0] = rng.integers(1, 3)
    lengths[1] = min(60, block_size * int(rng.integers(1, 4)))
    lengths[-2] = min(60, block_size * int(rng.integers(1, 4)) + 1)
    lengths[-1] = max(40, lengths[-1])  # several chunks of every budget but the largest
    prompts = []
    for length in lengths:
        shared = int(rng.integers(0, length + 1)) if rng.random() < chance else 0
        tail = rng.integers(0, VOCAB, size=length - shared)
        prompts.append([*base[:shared].tolist(), *tail.tolist()])
    return prompts
