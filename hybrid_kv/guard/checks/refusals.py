"""Settings just inside and just outside of what is allowed: the one runs, the other is refused with its reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.guard.play import unwarned
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.guard.scenario import SmallBlocksFirst, answer_book
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.replay import shortest_ring_len
from hybrid_kv.models.exact import ExactModel
from hybrid_kv.sampling import SamplingParams

BLOCK = 8
NUM_NEW = 6


class Neighbours(NamedTuple):
    """Two settings that differ by one step. `prompt` is the length of the prompt that is tried."""

    what: str
    inside: dict[str, Any]
    outside: dict[str, Any]
    reason: str  # what the error must say
    prompt: tuple[int, int] = (12, 12)


def neighbours(rng: np.random.Generator) -> Iterator[Neighbours]:
    """All borders that a user can cross."""
    for mode, layers in product(("align", "all"), ("M*", "*M")):
        drafts = {"mamba_cache_mode": mode, "speculative_method": "ngram", "layers": layers}
        yield Neighbours(
            f"drafts of a block, mode {mode}, layers {layers}", {**drafts, "num_speculative_tokens": BLOCK - 1},
            {**drafts, "num_speculative_tokens": BLOCK}, f"needs Mamba blocks of at least {BLOCK + 1} tokens, not 8",
        )  # fmt: skip
    late = {"mamba_cache_mode": "align", "speculative_method": "ngram", "async_scheduling": True}
    yield Neighbours(
        "drafts of half a block, one step late", {**late, "num_speculative_tokens": BLOCK // 2 - 1},
        {**late, "num_speculative_tokens": BLOCK // 2}, f"needs Mamba blocks of at least {BLOCK + 1} tokens, not 8",
    )  # fmt: skip
    yield Neighbours(
        "as many stages as rows", {"max_num_seqs": 3, "pipeline_parallel_size": 3},
        {"max_num_seqs": 3, "pipeline_parallel_size": 4}, "pipeline_parallel_size=4 is above max_num_seqs=3",
    )  # fmt: skip
    yield Neighbours(
        "one step late in a pipeline", {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2,
        "async_scheduling": True}, "async_scheduling needs pipeline_parallel_size=1, not 2",
    )  # fmt: skip
    K = int(rng.integers(1, 7))
    ring = {"state_scheme": "replay", "speculative_method": "ngram", "num_speculative_tokens": K}
    shortest = shortest_ring_len(1 + K)
    yield Neighbours(
        f"a ring for K = {K}", {**ring, "replay_ring_len": shortest}, {**ring, "replay_ring_len": shortest - 1},
        f"is too short for num_speculative_tokens={K}, which needs {shortest}",
    )  # fmt: skip
    replayed = {"state_scheme": "replay"}
    yield Neighbours("a scheme for states", replayed, {**replayed, "layers": "**"}, "the model has no Mamba layer")
    for kind in "gdn_attention", "mamba1":
        silent = {**replayed, "silent_kind": kind}
        yield Neighbours(
            f"states of {kind} that nothing can run again", {**silent, "layers": "W*"}, {**silent, "layers": "M*"},
            f'state_scheme="replay" is for Mamba-2 layers, not {kind}; use slots',
        )  # fmt: skip
    yield Neighbours(
        "offload of the prefix cache", {"mamba_cache_mode": "all", "kv_offload_bytes": 4096},
        {"mamba_cache_mode": "none", "kv_offload_bytes": 4096}, "keeps blocks of the prefix cache, which is off",
    )  # fmt: skip
    yield Neighbours("states of a cache", {"mamba_cache_mode": "align"}, {
        "mamba_cache_mode": "align", "enable_prefix_caching": False}, "turns off; use mode none",
    )  # fmt: skip
    for size, inside in ((2 * BLOCK, {"mamba_cache_mode": "all"}), (BLOCK // 2, {"mamba_block_size": BLOCK})):
        aligned = {"mamba_cache_mode": "align", "mamba_block_size": size}
        yield Neighbours(
            f"Mamba blocks of {size} tokens", {**aligned, **inside}, aligned,
            f"cannot be kept: mode align needs the attention block size {BLOCK}",
        )  # fmt: skip
    for most in 64, 65, 90:
        reason = f"the prompt has {most} tokens, max_model_len is 64"
        yield Neighbours("a prompt and one token", {}, {}, reason, (63, most))
    yield Neighbours("a prompt", {}, {}, "the prompt is empty", (1, 0))
    lookup = {"speculative_method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    yield Neighbours(
        "n-grams of one length", {**lookup, "prompt_lookup_min": 3}, {**lookup, "prompt_lookup_min": 4},
        "prompt_lookup_min=4 is above prompt_lookup_max=3",
    )  # fmt: skip
    length = int(rng.integers(10, 40))
    columns = cdiv(length + NUM_NEW - 1, BLOCK)  # the last token is never cached
    for mode, states in (("none", 1), ("align", min(2, columns)), ("all", columns)):
        own = {"mamba_cache_mode": mode, "num_blocks": 1 + states + columns}
        yield Neighbours(
            f"the last block of a request, mode {mode}", own, {**own, "num_blocks": states + columns},
            f"tokens never fit in {states + columns - 1} cache blocks", (length, length),
        )  # fmt: skip


def _error(setting: dict[str, Any], prompt: int) -> str:
    """What an engine of this kind, or the answer to a prompt of this length, says is wrong; empty if it runs."""
    options = {
        "device": "cpu", "attention_backend": SmallBlocksFirst.name, "block_size": BLOCK, "num_blocks": 200,
        "max_num_seqs": 2, "max_model_len": 64, "layers": "M*", **setting,
    }  # fmt: skip
    book = answer_book(options.pop("layers"))
    model = _silent(book.model, kind) if (kind := options.pop("silent_kind", "")) else book.model
    params = SamplingParams(max_tokens=NUM_NEW)
    try:
        (output,) = LLM(model, **options).generate([list(range(prompt))], params, progress=False)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # It got in, and broke something.
        return f"{type(error).__name__}: {error}"
    if output.error is None and output.token_ids != book.answer(list(range(prompt)), params, 64):
        return "it runs, and its answer is wrong"
    return output.error or ""


def _taken_twice() -> Iterator[str]:
    """A request waits or runs once, and never again when it has ended."""
    llm = LLM(answer_book("M*").model, device="cpu", block_size=BLOCK, num_blocks=200, max_model_len=64)
    request = llm.add_request([1, 2, 3], SamplingParams(max_tokens=1))
    for what in ("waits", "has ended"):
        try:
            llm.scheduler.add(request)
            yield f"a request that {what} is taken again"
        except ConfigError:
            pass
        while llm.has_work:
            llm.step()


def _silent(model: ExactModel, kind: str) -> ExactModel:
    """The same model of layers of this kind, which do not say what a token feeds to their states."""
    silent, specs = copy(model), model.layer_specs.items()
    silent.layer_specs = {
        name: replace(spec, inputs=(), mamba_type=kind) if isinstance(spec, MambaSpec) else spec for name, spec in specs
    }
    return silent


@check("refusals", quick=1, full=4, seconds=0.3, place=15)
@unwarned()
def check_refusals(run: Run) -> list[CheckResult]:
    """`run.amount` draws of the numbers that are free."""
    begin = time.perf_counter()
    rng = np.random.default_rng(run.seed)
    wrong, count = list[str](), 0
    for _ in range(run.amount):
        for one in neighbours(rng):
            count += 1
            inside, outside = _error(one.inside, one.prompt[0]), _error(one.outside, one.prompt[1])
            if inside:
                wrong.append(f"{one.what}: {one.inside} is refused: {inside}")
            if one.reason not in outside:
                wrong.append(
                    f"{one.what}: {one.outside} must be refused because {one.reason!r}: {outside or 'it runs'}"
                )
        wrong += _taken_twice()
        run.progress(1)
    return [
        CheckResult(
            "refusals", "settings on the wrong side of what is allowed", not wrong, len(wrong), "settings", "0",
            2 * count, time.perf_counter() - begin, wrong[0] if wrong else "", {"seed": run.seed},
        )
    ]  # fmt: skip
