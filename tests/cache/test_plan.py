"""Plans against what follows from layers, flags and memory, and a transcription of vLLM 0.22."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from math import ceil, lcm
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.attention.rollback import RecomputeSpec
from hybrid_kv.cache.backend import (
    BackendContext,
    FlashAttentionBackend,
    Mamba2Backend,
    _SSMBackend,
    get_backend,
)
from hybrid_kv.cache.layout import allocate_raw_buffers
from hybrid_kv.cache.modes import MODES
from hybrid_kv.cache.plan import (
    BlockSizes,
    CachePlan,
    describe,
    plan_cache,
    update_block_size_for_backend,
)
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlotsSpec,
    StatePart,
    window_and_states,
    with_rollback,
)
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.models.shapes import model_shape
from tests.model_configs import CONFIGS, NEMOTRON_3_NANO

QWEN = "Qwen/Qwen3-Next-80B-A3B"
MAX_MODEL_LEN = 131072


def plan_of(name: str, platform: str, mode: str = "none", k: int = 0) -> CachePlan:
    cache = CacheConfig(num_blocks=4096, mamba_cache_mode=mode)
    shape = model_shape(CONFIGS[name], cache=cache, num_speculative_tokens=k)
    context, backend = (
        BackendContext.for_layers(platform, shape.layers),
        get_backend("auto", platform),
    )
    return plan_cache(shape.layers, cache, backend, context, MAX_MODEL_LEN, shape.mamba_chunk_size)


def vllm_022_sizes(
    config: dict[str, Any], platform: str, mode: str, k: int
) -> tuple[int, int, int, int]:
    """(block size, Mamba block size, state bytes, padded page), from the rules of vLLM 0.22.

    `platforms/interface.py` (`update_block_size_for_backend`, `_align_hybrid_block_size`),
    `platforms/xpu.py` (gated delta net), `layers/mamba/mamba_utils.py` (state shapes), with
    FlashAttention (`backends/flash_attn.py`).
    """
    bf16 = 2
    if config["model_type"] == "qwen3_next":
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        conv = (config["linear_conv_kernel_dim"] - 1 + k) * (2 * keys + values) * bf16
        ssm = values * config["linear_key_head_dim"] * bf16
    elif config["model_type"] == "nemotron_h":
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        conv = (
            (config["conv_kernel"] - 1 + k)
            * (inner + 2 * config["n_groups"] * config["ssm_state_size"])
            * bf16
        )
        ssm = inner * config["ssm_state_size"] * 4
    else:
        inner = config["mamba_expand"] * config["hidden_size"]
        conv_dim = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
        conv = (config["mamba_d_conv"] - 1 + k) * conv_dim * bf16
        ssm = inner * config["mamba_d_state"] * bf16
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    state, token = conv + ssm, 2 * config["num_key_value_heads"] * head_dim * bf16
    preferred = 64 if platform == "xpu" else 16
    if mode == "all":
        chunk = config.get("mamba_chunk_size") or config.get("chunk_size") or 2048
        unit = lcm(chunk, preferred)
        block = unit * ceil(ceil(state / token) / unit)
    else:
        block = preferred * ceil(state / (preferred * token))
    block = max(block, preferred)
    if platform == "xpu" and config["model_type"] == "qwen3_next":
        block = 64 * ceil(block / 64)
    return block, MAX_MODEL_LEN if mode == "none" else block, state, block * token


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("platform", ["cuda", "xpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_vllm_022(name: str, platform: str, mode: str, k: int) -> None:
    plan = plan_of(name, platform, mode, k)
    sizes = plan.sizes
    found = sizes.block_size, sizes.mamba_block_size, sizes.mamba_state_bytes, sizes.page_size_bytes
    assert found == vllm_022_sizes(CONFIGS[name], platform, mode, k)
    assert {group.spec.page_size_bytes for group in plan.config.groups} == {sizes.page_size_bytes}


def test_vllm_37467_a_state_space_backend_is_never_queried_for_a_block_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def query(cls: type, *_: object) -> int:
        raise AssertionError(f"{cls.__name__} was queried for a block size")

    monkeypatch.setattr(_SSMBackend, "get_preferred_block_size", classmethod(query))
    monkeypatch.setattr(_SSMBackend, "get_supported_kernel_block_sizes", classmethod(query))
    for name in (NEMOTRON_3_NANO, QWEN):
        for platform in ("cuda", "xpu", "cpu"):
            plan_of(name, platform)
    assert Mamba2Backend.is_ssm()
    assert not FlashAttentionBackend.is_ssm()


# Any layers and flags.

TOKEN_BYTES = 2 * 4 * 2  # of K and V of a layer: one head of 4 elements in bf16
WAY_OUT = re.compile(r": give it at least (\d+) (blocks|B of memory)$")
# kernels that take any multiple of so many tokens
MULTIPLES = {"TORCH": 1, "CPU_ATTN": 16, "FLASH_ATTN": 16}
# of FlashInfer, and of FlashAttention beside float32 states (flash-attention#1974)
FIXED = (64, 32, 16)


def cdiv(a: Any, b: int) -> Any:
    return -(-a // b)


@dataclass(frozen=True)
class Drawn:
    """A model of states and attention in two stages, its flags, and what a plan of it should say.

    `ring` is the length of the recompute scheme's rings; `memory` says whether it pays for them,
    and for how much more than `wanted` blocks. Without it these are given by their number.
    """

    mode: Annotated[str, st.sampled_from([*MODES])]
    backend: Annotated[
        str, st.sampled_from(["TORCH", "TORCH", "FLASH_ATTN", "FLASHINFER", "CPU_ATTN"])
    ]
    platform: Annotated[str, st.sampled_from(["cuda", "xpu", "cpu"])]
    num_states: Annotated[int, st.integers(0, 8)]
    num_attention: Annotated[int, st.integers(1, 8)]
    width: Annotated[int, (st.sampled_from([2, 8]) | st.integers(1, 80)).map(lambda n: 2 * n)]
    is_delta: bool
    ring: Annotated[int | None, st.none() | st.integers(20, 40)]
    k: Annotated[int, st.integers(0, 3)]
    rows: Annotated[int, st.integers(0, 64)]
    given: Annotated[int | None, st.none() | st.sampled_from([1, 16, 48, 64]) | st.integers(1, 200)]
    given_states: Annotated[
        int | None, st.none() | st.integers(1, 60) | st.sampled_from([16, 64, 128, 256])
    ]
    chunk: Annotated[int | None, st.sampled_from([None, 16, 32]) | st.integers(1, 60)]
    limit: Annotated[int, st.integers(1, 3000)]
    ranks: Annotated[int, st.integers(1, 3)]
    cut: Annotated[int, st.integers(0, 15)]
    wanted: Annotated[int, st.integers(1, 12) | st.integers(1, 60) | st.integers(1, 4000)]
    memory: Annotated[
        tuple[bool, int] | None,
        st.none() | st.tuples(st.booleans(), st.sampled_from([0, -1]) | st.integers(0, 1000)),
    ]

    def __post_init__(self) -> None:
        if not self.num_states:
            object.__setattr__(self, "given_states", None)

    @property
    def state_bytes(self) -> int:
        """A window of 2 + K rows in bf16 and a float32 state."""
        return ((2 + self.k) * 2 * self.width * 2 + self.width * 4 * 4) * (self.num_states > 0)

    @property
    def ring_bytes(self) -> int:
        return (self.ring or 0) * 3 * self.width * 2 * (self.num_states > 0)

    @property
    def layers(self) -> dict[str, KVCacheSpec]:
        parts = window_and_states(
            ((2, 2 * self.width), torch.bfloat16), ((self.width, 4), torch.float32)
        )
        kind, inputs = (
            "gdn_attention" if self.is_delta else "mamba2",
            (StatePart("x", (3, self.width), torch.bfloat16),),
        )
        rollback = SlotsSpec(self.k) if self.ring is None else RecomputeSpec(self.k, self.ring)
        state = with_rollback(MambaSpec(1, parts, mamba_type=kind, inputs=inputs), rollback)
        attention = FullAttentionSpec(1, 1, 4, torch.bfloat16)
        states = {f"s{i}": state for i in range(self.num_states)}
        return states | {f"a{i}": attention for i in range(self.num_attention)}

    @property
    def groups(self) -> list[list[str]]:
        """Return the layers of a group: as many as the rarer kind has.

        Or as the other has, if that is less than 1.5 times as many.
        """
        kinds = [[name for name in self.layers if name[0] == kind] for kind in "sa"]
        few, many = (choose(len(names) for names in kinds if names) for choose in (min, max))
        length = many if many < 1.5 * few else few
        return [
            names[i :: cdiv(len(names), length)]
            for names in kinds
            for i in range(cdiv(len(names), length))
        ]

    def kernel_block(self, size: int) -> int | None:
        """The largest that divides a block; None if none does."""
        if self.takes_multiples:
            return None if size % MULTIPLES[self.backend] else size
        return next((fixed for fixed in FIXED if size % fixed == 0), None)

    @property
    def takes_multiples(self) -> bool:
        return self.backend in MULTIPLES and not (self.backend == "FLASH_ATTN" and self.num_states)

    @property
    def unit(self) -> int:
        if self.given is not None:
            return self.given
        return (
            128
            if self.backend == "CPU_ATTN"
            else 64
            if (self.backend, self.platform) == ("FLASH_ATTN", "xpu")
            else 16
        )

    def aligned(self, mode: str, given_states: int | None) -> int:
        """Return the shortest block that holds a state and is allowed; 0 without a unit."""
        unit = self.unit
        if self.num_states and self.is_delta and self.platform == "xpu":
            unit = lcm(unit, 64)
        if MODES[mode].needs_unit and self.num_states:
            if (base := given_states or self.chunk) is None:
                return 0
            unit = lcm(unit, base)
        return next(size for size in count(unit, unit) if size * TOKEN_BYTES >= self.state_bytes)

    def held(self, name: str, size: int, lengths: Any) -> Any:
        """The blocks that a request of so many tokens holds at most in the group of this layer."""
        policy = MODES[self.mode]
        if name[0] == "a":
            return cdiv(lengths, size * self.ranks)
        logical_blocks = cdiv(lengths, size)
        most = logical_blocks if policy.keeps_states else lengths * 0 + 1
        if policy.gives_back:
            late = 1 if self.ring is None else min(self.ring, size - 1 + 2 * (1 + self.k))
            most = np.minimum(logical_blocks, 1 + cdiv(late, size))
        return most + (self.k if self.ring is None else 0)

    def stage_names(self) -> list[list[str]]:
        names = [*self.layers]
        cut = self.cut % len(names)
        return [names[:cut], names[cut:]]

    def stages(self, size: int) -> list[dict[str, Any]]:
        own = [
            [[name for name in group if name in names] for group in self.groups]
            for names in self.stage_names()
        ]
        pages = [max(map(len, groups)) for groups in own]
        return [
            {"layers": [*chain(*groups)], "block_bytes": size * TOKEN_BYTES * num_pages}
            for groups, num_pages in zip(own, pages, strict=True)
        ]

    def ring_row(self, stage: dict[str, Any]) -> int:
        return self.ring_bytes * sum(name[0] == "s" for name in stage["layers"])

    def pool(self, size: int) -> tuple[dict[str, int], int]:
        """The flag that sizes the pool, and the blocks that this affords."""
        if self.memory is None:
            return {"num_blocks": self.wanted}, self.wanted
        real = [stage for stage in self.stages(size) if stage["layers"]]
        block, (pays_rings, more) = max(stage["block_bytes"] for stage in real), self.memory
        memory = (
            self.wanted * block
            + more % block
            + pays_rings * max(self.rows * self.ring_row(s) for s in real)
        )
        left = [
            (max(0, memory - self.rows * self.ring_row(stage)), stage["block_bytes"])
            for stage in real
        ]
        return {"memory_bytes": memory}, min(rest // block for rest, block in left)

    def plan(self, **pool: int) -> CachePlan:
        cache = CacheConfig(self.given, self.given_states, self.mode, **pool)  # type: ignore[arg-type]
        layers, backend = self.layers, get_backend(self.backend, self.platform)
        context = BackendContext.for_layers(self.platform, layers)
        return plan_cache(
            layers,
            cache,
            backend,
            context,
            self.limit,
            self.chunk,
            self.rows,
            self.stage_names(),
            self.ranks,
        )

    def due(self, size: int, num_blocks: int) -> dict[str, Any]:
        """All metrics of the plan, without its notes."""
        usable, page, state = num_blocks - 1, size * TOKEN_BYTES, self.state_bytes
        held = sum(self.held(group[0], size, np.arange(1, self.limit + 1)) for group in self.groups)
        longest, num_slots = (
            int((held <= usable).sum()),
            max(map(len, self.groups)) * len(self.groups),
        )
        stages = [
            {**stage, "total_bytes": num_blocks * stage["block_bytes"]}
            for stage in self.stages(size)
        ]
        fullest = max(
            stages, key=lambda stage: stage["total_bytes"] + self.rows * self.ring_row(stage)
        )
        state_block = size if MODES[self.mode].keeps_states else self.given_states or self.limit
        rings = {
            "ring_len": self.ring,
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
            "groups": [
                {
                    "kind": ("gdn_attention" if self.is_delta else "mamba2")
                    if group[0][0] == "s"
                    else "attention",
                    "num_layers": len(group),
                    "layers": group,
                    "block_size": state_block if group[0][0] == "s" else size,
                    "page_sizes_bytes": [page] * len(group),
                    "kernel_block_size": state_block
                    if group[0][0] == "s"
                    else self.kernel_block(size),
                    "blocks_per_request": int(self.held(group[0], size, self.limit)),
                }
                for group in self.groups
            ],
            "num_buffers": max(map(len, self.groups)),
            "unused_layer_slots": num_slots - len(self.layers),
            "num_blocks": num_blocks,
            "total_bytes": fullest["total_bytes"],
            "stages": stages,
            "max_model_len": self.limit,
            "longest_request": longest,
            "blocks_per_request": int(held[-1]),
            "max_concurrency": round(usable / int(held[-1]), 2),
            "token_capacity": longest * usable // int(held[longest - 1]),
            **(rings if self.ring_bytes else {}),
        }

    def notes(self, due: dict[str, Any]) -> Iterator[str]:
        """How each note begins, `|` standing for its end."""
        size, state, policy = due["block_size"], self.state_bytes, MODES[self.mode]
        if self.given not in (None, size):
            yield f"--block-size {self.given} was raised to {size}: "
        if self.given_states and not policy.keeps_states:
            yield f"--mamba-block-size {self.given_states} changes nothing in mode {self.mode}: "
        elif self.given_states not in (None, size):
            yield f"--mamba-block-size {self.given_states} was raised to its multiple {size}, "
        if unused := due["unused_layer_slots"]:
            yield f"{unused} of {unused + len(self.layers)} layer slots are unused, "
        if (longest := due["longest_request"]) < self.limit:
            yield (
                f"no request longer than {longest} tokens fits; lower --max-model-len {self.limit} "
            )
        unit = lcm(*(group["block_size"] for group in due["groups"]), size * self.ranks)
        # A prompt of `limit - 1` tokens, the last of them computed, begins with none.
        if (not state or policy.keeps_states) and self.limit - 2 < unit:
            yield f"no prompt can hit the prefix cache: hits are multiples of {unit} tokens; "
        if state and policy.keeps_states and (page := due["page_size_bytes"]) > 2 * state:
            percent = f"{100 * (page / state - 1):.0f} %"
            note = (
                f"mode {self.mode} pads each Mamba state of {state} B by {percent}, to "
                f"the {page} B of {size} tokens"
            )
            note += " in attention"
            if (best := self.aligned("align", None) * TOKEN_BYTES) < page:
                note += (
                    "; --mamba-cache-mode align caches prefixes too and pads by "
                    f"{100 * (best / state - 1):.0f} %"
                )
            yield note + (" (vLLM 0.22 falls back to mode align for" if self.is_delta else "|")


@settings(max_examples=300)
@given(st.builds(Drawn))
def test_a_plan_says_what_follows_from_layers_flags_and_memory(drawn: Drawn) -> None:
    if drawn.kernel_block(drawn.unit) is None:
        allowed = (
            f"multiples of {MULTIPLES[drawn.backend]}" if drawn.takes_multiples else "16, 32, 64"
        )
        message = (
            f"block size {drawn.unit} does not fit {drawn.backend}, whose kernel "
            f"blocks are {allowed}"
        )
        assert rejected(drawn, num_blocks=10**6) == message
        return
    size = drawn.aligned(drawn.mode, drawn.given_states)
    if not size:
        assert rejected(drawn, num_blocks=10**6).startswith(
            f"mode {drawn.mode} needs a chunk size in config.json or "
        )
        return
    if drawn.mode == "align" and drawn.given_states not in (None, size):
        assert (
            f"{drawn.given_states} cannot be kept: mode align needs the attention block size {size}"
            in rejected(drawn, num_blocks=10**6)
        )
        return
    pool, num_blocks = drawn.pool(size)
    needed = int(sum(drawn.held(group[0], size, 1) for group in drawn.groups))
    if num_blocks - 1 < needed:
        error, block_bytes = (
            rejected(drawn, **pool),
            max(stage["block_bytes"] for stage in drawn.stages(size)),
        )
        blocks = f"the cache has {num_blocks} blocks of {block_bytes} B, one of them the null block"
        assert error.startswith(f"{blocks}, but a request of one token needs {needed}: ")
        way_out = WAY_OUT.search(error)
        assert way_out is not None and (way_out[2] == "blocks") == ("num_blocks" in pool)
        (flag,) = pool
        drawn.plan(**{flag: int(way_out[1])})
        rejected(drawn, **{flag: int(way_out[1]) - 1})
        return
    plan = drawn.plan(**pool)
    found, due = describe(plan), drawn.due(size, num_blocks)
    notes, begins = found.pop("notes"), [*drawn.notes(due)]
    assert found == due
    assert len(notes) == len(begins) and all(
        f"{note}|".startswith(begin) for note, begin in zip(notes, begins, strict=True)
    )
    taken = [buffer.nbytes for buffer in allocate_raw_buffers(plan.fullest, torch.device("meta"))]
    assert sum(taken) == plan.fullest.total_bytes


def rejected(drawn: Drawn, **pool: int) -> str:
    with pytest.raises(ConfigError) as caught:
        drawn.plan(**pool)
    return str(caught.value)


# Layers of one kind, and of several widths.


def attention(num_kv_heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(1, num_kv_heads, head_size=8, dtype=torch.float16)


STATE = MambaSpec(1, window_and_states(((3, 16), torch.float16), ((2, 8, 8), torch.float16)))
FLASH, CUDA = get_backend("FLASH_ATTN", "cuda"), BackendContext("cuda", float32_ssm_state=False)


def sizes_of(
    layers: dict[str, KVCacheSpec], chunk_size: int | None = 16, **wishes: Any
) -> BlockSizes:
    return update_block_size_for_backend(
        layers, CacheConfig(**wishes), FLASH, CUDA, 1000, chunk_size
    )


@pytest.mark.parametrize(
    ("mode", "given", "chunk", "due"),
    [
        ("none", None, None, 1000),
        ("none", 24, 16, 24),
        ("align", None, 16, 16),
        ("align", 96, None, 96),
        ("all", None, 16, 16),
        ("all", 24, 16, 24),
        ("all", None, None, None),
        ("align", None, None, None),
    ],
)
def test_a_lone_state_fills_its_page(
    mode: str, given: int | None, chunk: int | None, due: int | None
) -> None:
    wishes = {"mamba_cache_mode": mode, "mamba_block_size": given}
    if due is None:
        with pytest.raises(ConfigError, match="chunk size"):
            sizes_of({"m": STATE}, chunk, **wishes)
    else:
        assert sizes_of({"m": STATE}, chunk, **wishes) == BlockSizes(
            due, due, STATE.state_bytes, STATE.state_bytes
        )


@pytest.mark.parametrize(
    ("platform", "given", "ranks", "block_size"),
    [
        # GLM-5.3-Flash on eight to one GPUs.
        ("cuda", None, 8, 640),
        ("cuda", None, 4, 1152),
        ("cuda", None, 2, 2176),
        ("cuda", None, 1, 4352),
        ("xpu", None, 8, 640),
        ("cuda", 192, 8, 576),
        # The engine of this package.
        ("cpu", None, 8, 544),
    ],
)
def test_blocks_of_latent_attention_are_multiples_of_128_tokens_on_a_gpu(
    platform: str, given: int | None, ranks: int, block_size: int
) -> None:
    heads = 64 // ranks
    parts = window_and_states(
        ((3, 3 * 128 * heads), torch.bfloat16), ((heads, 128, 128), torch.float32)
    )
    layers: dict[str, KVCacheSpec] = {
        "latent": MLAAttentionSpec(1, 512, torch.bfloat16),
        "state": MambaSpec(1, parts, mamba_type="gdn_attention"),
    }
    backend, context = get_backend("auto", platform), BackendContext.for_layers(platform, layers)
    sizes = update_block_size_for_backend(
        layers, CacheConfig(block_size=given), backend, context, 10**6
    )
    assert sizes.block_size == block_size


@pytest.mark.parametrize(
    ("layers", "wishes", "message"),
    [
        ((), {}, "no layer"),
        ((attention(),), {"mamba_block_size": 16}, "no Mamba layer"),
        ((STATE,), {"block_size": 16}, "no attention layer"),
        (
            (attention(3), attention(2), STATE),
            {},
            r"\[64, 96\] bytes per token cannot share one pool with Mamba layers",
        ),
    ],
)
def test_flags_and_layers_that_do_not_go_together(
    layers: Sequence[KVCacheSpec], wishes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes_of({str(i): spec for i, spec in enumerate(layers)}, **wishes)


def test_a_plan_needs_a_size_and_context_parallel_ranks_attention() -> None:
    arguments = CacheConfig(num_blocks=9), FLASH, CUDA, 100, 128
    with pytest.raises(ConfigError, match="--num-blocks or --gpu-memory"):
        plan_cache({"m": STATE}, CacheConfig(), *arguments[1:])
    with pytest.raises(
        ConfigError, match="--decode-context-parallel-size 2: the model has no attention"
    ):
        plan_cache({"m": STATE}, *arguments, context_parallel=2)
    one_token = CacheConfig(num_blocks=2, mamba_block_size=1, mamba_cache_mode="all")
    plan_cache({"m": STATE}, one_token, *arguments[1:])


def test_narrower_attention_layers_get_longer_blocks_of_the_same_page() -> None:
    layers = {"wide": attention(4), "narrow": attention(1), "m": STATE}
    plan = plan_cache(
        layers, CacheConfig(mamba_cache_mode="align", num_blocks=100), FLASH, CUDA, 1000, 16
    )
    sizes = {
        name: group.spec.block_size for group in plan.config.groups for name in group.layer_names
    }
    assert sizes["wide"] == sizes["m"] == plan.sizes.block_size
    assert sizes["narrow"] == 4 * sizes["wide"]
    assert len({group.spec.page_size_bytes for group in plan.config.groups}) == 1


def test_attention_layers_alone_have_one_block_size_and_pages_of_their_own() -> None:
    layers: dict[str, KVCacheSpec] = {
        name: attention(heads) for name, heads in (("a", 2), ("b", 3), ("c", 2))
    }
    plan = plan_cache(layers, CacheConfig(memory_bytes=100_000), FLASH, CUDA, 1000)
    (group,) = describe(plan)["groups"]
    assert (group["layers"], group["block_size"], group["kernel_block_size"]) == (
        ["a", "b", "c"],
        16,
        16,
    )
    assert group["page_sizes_bytes"] == [16 * 64, 16 * 96, 16 * 64]
    assert (plan.sizes.block_size, plan.sizes.page_size_bytes) == (16, 16 * 96)
    assert plan.config.num_blocks == 100_000 // (16 * (64 + 96 + 64))
    assert plan.config.total_bytes == plan.config.num_blocks * 16 * (64 + 96 + 64)
    assert plan.unused_layer_slots == 0
