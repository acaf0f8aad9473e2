"""Seeded traffic: engine settings that cover each other pairwise, requests that share prefixes, and drafts by script.

A *scenario* is one engine configuration, its requests in waves (each sent when the one before has ended) and the
disturbances beside them. Scenario 0, 1, … of a run are, in this order: the *forced* ones of `guard.forced`, each
built so that one pattern must happen; a covering design of `FACTORS`, in which every pair of levels occurs, and every
triple of `TRIPLES`; and random draws for ever.

A *swarm* has no forced ones and no design. Each batch of its seeds has a random half of all levels, and of what happens
beside them (Groce et al. 2012, Swarm Testing): what is left meets more often, and what would hide a bug is often away.

Modes, schemes and layouts of states are those that are registered when this module is imported: one that is new is
drawn without a change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations, product
from typing import Any

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
    Event,
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

# "*#+": layers of one group whose pages differ. "L": latents. "~", "=": sliding windows; next to "+" in larger blocks.
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
# Beside a cell: how often to a request (the first three), or in a scenario.
CHANCES = {"stop": 0.3, "shared": 0.7, "second turn": 0.5, "long": 0.3, "abort": 0.3, "reset": 0.1}
CHANCES |= {
    "one row": 0.05,
    "prompt logprobs": 0.3,
    "lose": 0.2,
    "third turn": 0.25,
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
    """What random scenarios are drawn from: levels by factor, and how often what happens beside them."""

    levels: Mapping[str, tuple[Any, ...]]
    chances: Mapping[str, float]


def allowed(cell: Cell) -> bool:
    """Whether the engine has such a configuration; factors that `cell` lacks may be anything."""
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
    K = cell.get("K", 0)
    small = backend in (SmallBlocksFirst.name, SmallKVFirst.name) and split == "one" and not is_lone
    hybrid = _keeps_states(mode) or (layers is not None and has_states)
    if small and hybrid and _smallest_block(mode, K, cell.get("schedule"), cell.get("scheme")) > 4:
        return False
    # Else the block is raised to two kernel blocks.
    return not (small and hybrid and not _fits(layers or "M*", K, 4))


@cache
def _pages(layers: str, K: int, block_size: int) -> tuple[int, int]:
    """Bytes of the largest state of K drafts, and of the largest attention page of so many tokens; 0: there is none."""
    specs = answer_book(layers).model.layer_specs.values()
    states = [
        with_rollback(spec, SlotsSpec(K)).page_size_bytes
        for spec in specs
        if isinstance(spec, MambaSpec)
    ]
    pages = [
        with_block_size(s, block_size).page_size_bytes
        for s in specs
        if isinstance(s, FullAttentionSpec)
    ]
    return max(states, default=0), max(pages, default=0)


def _fits(layers: str, K: int, block_size: int) -> bool:
    """Whether an attention page of so many tokens holds a state of K drafts."""
    states, attention = _pages(layers, K, block_size)
    return states <= attention


@cache
def _takes(scheme: str, mode: str | None, has_states: bool) -> bool:
    """Whether a scheme can be used in a mode: it says so itself."""
    specs = answer_book(
        "M*" if has_states and mode != "attention" else "**"
    ).model.layer_specs.values()
    try:
        rollback_spec(
            CacheConfig(mamba_cache_mode=mode if mode in MODES else "none", state_scheme=scheme),
            0,
            False,
            [*specs],
        )
    except ConfigError:
        return False
    return True


def _keeps_states(mode: str | None) -> bool:
    return mode in MODES and MODES[mode].keeps_states


def _is_stateless(mode: str | None) -> bool:
    """A mode of states that keeps none; attention alone is no such mode."""
    return mode in MODES and not MODES[mode].keeps_states


def _is_late(scheme: str | None) -> bool:
    return scheme is not None and SCHEMES[scheme].spec_type.writes_late


def _smallest_block(mode: str | None, K: int, schedule: str | None, scheme: str | None) -> int:
    """A verify step must not pass two boundaries; where logical blocks are given back, nor may two steps in flight."""
    gives_back = mode in MODES and MODES[mode].gives_back
    late = K if gives_back and schedule == "async" and not _is_late(scheme) else 0
    return 1 + K + late if _keeps_states(mode) else 1


def _complete(
    cell: Cell, rng: np.random.Generator, factors: Mapping[str, tuple[Any, ...]] = FACTORS
) -> Cell | None:
    """A random allowed cell of these levels that agrees with `cell`, if there is one."""
    cell = dict(cell)
    for name in rng.permutation([name for name in FACTORS if name not in cell]).tolist():
        levels = [level for level in factors[name] if allowed({**cell, name: level})]
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
    wanted = [names for names in combinations(FACTORS, 2)] + [
        names for names in combinations(TRIPLES, 3)
    ]
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
    """A covering design of `FACTORS`: each row starts from an uncovered combination and is the best of 12."""
    rng = np.random.default_rng(3)
    # A set of tuples with strings has another order in each process.
    missing = dict.fromkeys(
        sorted(required_combinations(), key=lambda chosen: (-len(chosen), repr(chosen)))
    )
    rows: list[Cell] = []
    while missing:
        first = dict(next(iter(missing)))
        candidates = [cell for _ in range(12) if (cell := _complete(first, rng)) is not None]
        best = max(
            candidates,
            key=lambda cell: sum(chosen in missing for chosen in combinations_of(cell)),
            default=None,
        )
        if best is None:
            continue
        for chosen in combinations_of(best):
            missing.pop(chosen, None)
        rows.append(best)
    return tuple(rows)


def rows_with(levels: Mapping[str, Any]) -> list[int]:
    """The scenarios of a run that are rows of the design with these levels, by number."""
    return [i for i, cell in enumerate(design(), len(FORCED)) if has_levels(cell, levels)]


def has_levels(cell: Cell, levels: Mapping[str, Any]) -> bool:
    """Whether a cell, or part of one, has all of these levels, which may be texts."""
    return all(str(cell.get(name)) == str(level) for name, level in levels.items())


def draw_scenario(seed: int) -> Scenario:
    """Scenario number `seed % SCENARIOS_PER_RUN` of run `seed // SCENARIOS_PER_RUN`."""
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
    """Scenario number `seed` of all swarms; its features are those of batch `seed // SEEDS_PER_BATCH`."""
    features = draw_features(seed // SEEDS_PER_BATCH)
    rng = np.random.default_rng((seed, 1))
    cell = None
    while cell is None:
        cell = _complete({}, rng, features.levels)
    return _random_scenario(seed, cell, rng, features.chances)


SEEDS_PER_BATCH = 16


@lru_cache(maxsize=1)
def draw_features(batch: int) -> Features:
    """The features of a batch of a swarm: half of all levels, one of each factor at least, that some engine can have.

    What happens beside them happens never, or twice as often.
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


def _random_scenario(
    seed: int, cell: Cell, rng: np.random.Generator, chances: Mapping[str, float] = CHANCES
) -> Scenario:
    layers = cell["layers"]
    mode = cell["mode"]
    K = cell["K"]
    is_lone = not has_attention(layers)
    late = _is_late(cell["scheme"])
    sizes = (8, 12, 16) if is_lone else _BLOCK_SIZES[cell["backend"], cell["split"]]
    smallest = _smallest_block(mode, K, cell["schedule"], cell["scheme"])
    block_size = int(rng.choice([size for size in sizes if size >= smallest]))
    prompts = _prompts(rng, int(rng.integers(6, 13)), block_size, chances["shared"])
    greedy = cell["sampling"] == "greedy"
    salts = cell["salts"]
    stop = chances["stop"]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 24)),
            stop_token_ids=tuple(rng.integers(0, VOCAB, size=8).tolist())
            if rng.random() < stop
            else (),
            # Residues are logits of up to 2^31; this temperature leaves a few hundred million of them in play.
            temperature=0.0 if greedy or i % 2 else 2e8,
            seed=int(rng.integers(-(2**63), 2**63)),
            cache_salt=f"tenant {rng.integers(salts)}",
            logprobs={2: 0, 3: 3}.get(i),
        )
        for i in range(len(prompts))
    ]
    if not greedy:
        params[0] = SamplingParams(max_tokens=12, temperature=2e8, seed=seed)
    params[-1] = SamplingParams(max_tokens=20, seed=0)  # long enough for drafts, whatever the draw
    max_model_len = max(max(map(len, prompts)) + 1, int(rng.integers(62, 96)))
    if rng.random() < chances["long"]:
        prompts[2] = rng.integers(0, VOCAB, size=max_model_len).tolist()
    waves: tuple[int, ...] = (len(prompts), len(prompts))
    prompts, params = _twice(rng, layers, prompts, params, max_model_len, chances["second turn"])

    max_num_seqs = int(rng.choice([2, 3, 5, 8, 16]))
    budget = {
        "tiny": int(rng.choice([4, 5, 7, 9])),
        "small": int(rng.choice([16, 33])),
        "large": 256,
    }[cell["budget"]]
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
        "state_scheme": cell["scheme"],
    }
    if is_lone:
        del options["block_size"]  # There is no attention block to size.
        if not _is_stateless(mode):
            options["mamba_block_size"] = block_size
    if cell["offload"] == "host":
        options["kv_offload_bytes"] = max(_pages(layers, K, block_size)) * int(
            rng.choice([5, 16, 8000])
        )
    if late:
        shortest = shortest_ring_len(1 + K)
        options["recompute_ring_len"] = [None, shortest, shortest + 1, shortest + 5][
            int(rng.integers(4))
        ]
    if seed % 8 == 3:
        options["sanitize"] = True
    # An upper bound: as if every layer were a group of its own.
    longest = min(
        max_model_len, max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True))
    )
    logical_blocks = cdiv(longest, block_size)
    state = 0
    if policy := MODES.get(mode):
        state = policy.held_at_most(policy.num_logical_blocks(longest, block_size), 1)
    state += 2 * (policy is not None and policy.gives_back) if late else K
    per_request = num_states(layers) * state + (len(layers) - num_states(layers)) * logical_blocks
    factor = rng.uniform(1.0, 2.5) if cell["pool"] == "tight" else max_num_seqs
    options["num_blocks"] = 1 + int(per_request * factor)
    events = []
    if cell["preemption"] == "forced":
        events.append(Event("preempt", 3, int(rng.choice([4, 5, 9]))))
    if rng.random() < chances["abort"]:
        events.append(Event(("abort", "drop")[int(rng.integers(2))], int(rng.integers(2, 9)), 13))
    if not _is_stateless(mode) and rng.random() < chances["reset"]:
        step = int(rng.integers(2, 20))
        events.append(Event("reset" if step % 3 else "sleep", step))
    # Drawn last: without them the scenario is as it was.
    if rng.random() < chances["one row"]:
        options["max_num_seqs"] = 1
    if rng.random() < chances["prompt logprobs"]:
        params[-1] = replace(params[-1], logprobs=1, prompt_logprobs=1)
    if cell["offload"] == "host" and rng.random() < chances["lose"]:
        events.append(Event("lose", int(rng.integers(2, 20)), 5))
    if rng.random() < chances["third turn"]:
        # What comes again comes twice, in turn with others.
        first = waves[0]
        again = (waves[0] + 1) // 2
        order = [*range(first + again), *range(first, first + waves[1] - again)]
        prompts = [prompts[i] for i in order]
        params = [params[i] for i in order]
        waves = (first, again, first - again)
    return Scenario(
        seed, layers, options, prompts, params, waves, cell["drafts"], tuple(events), cell=cell
    )


def draw_trio(seed: int) -> tuple[Scenario, Scenario, Scenario]:
    """One traffic with drafts and cache, without drafts, and without cache, in a pool with room for all of it.

    Each wave starts in one step, so that what it finds is what the wave before has left, however fast that was.
    """
    d = Draw(seed)
    mode = ("align", "all", "attention")[seed % 3]
    K = d.number(1, 8)
    prompts = _prompts(d.rng, 8, 16)
    params = [SamplingParams(max_tokens=d.number(1, 24), seed=i) for i in range(len(prompts))]
    layers = "**" if mode == "attention" else "M*MM*"
    waves = (len(prompts), len(prompts))
    prompts, params = _twice(d.rng, layers, prompts, params, 96)

    def variant(mode: str, K: int) -> Scenario:
        return d.scenario(
            prompts,
            params,
            modes=(mode,),
            layers=layers,
            K=K,
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

    return variant(mode, K), variant(mode, 0), variant("none", K)


def _twice(
    rng: np.random.Generator,
    layers: str,
    prompts: list[list[int]],
    params: list[SamplingParams],
    max_model_len: int,
    chance: float = CHANCES["second turn"],
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Everything comes again, in another order, when much of it is in the cache; some of it as a second turn."""
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
    """Prompts of 1 to 60 tokens: prefixes of one text with tails of their own, some of them on the edges of blocks."""
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
