"""Seeded random traffic, and the patterns that it must force.

A *scenario* is one engine configuration with its requests. A run in which a pattern never happened (no preemption, no
padded row, …) says nothing about it, so each scenario counts what happened, and a check without it is void.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_kv.cache.backend import (
    BackendContext,
    FlashAttentionBackend,
    MultipleOf,
    TorchBackend,
    register_backend,
)
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.engine.sampling import SamplingParams


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


BACKENDS = (SmallBlocksFirst.name, SmallKVFirst.name, "TORCH", "FLASH_ATTN", "FLASHINFER")
PATTERNS = ("M*", "M*MM*", "**M", "MMM*M", "*M", "**", "MM")

# What a differential run must have seen, and what it means.
REQUIRED = {
    "chunked_prefill": "a prompt computed in several steps",
    "preemption": "a running request lost its blocks",
    "recomputed_output": "generated tokens were recomputed after a preemption",
    "mixed_step": "decodes and prefills in one step",
    "padded_rows": "a decode step padded to a captured size",
    "row_reuse": "a row of the block tables got a new owner",
    "block_reuse": "a block got a new owner",
    "kernel_split": "one manager block is several kernel blocks",
    "kv_first": "layout (2, num_blocks, …)",
    "blocks_first": "layout (num_blocks, 2, …)",
    "several_groups": "more cache groups than layer kinds",
    "short_prompt": "a prompt shorter than the convolution window",
    "one_token_prefill": "a prefill of one token",
    "exact_block": "a prompt that is a multiple of the block size",
    "stop_token": "a request ended by a stop token",
    "waiting": "a request that waited for a row or for blocks",
    "sampled": "a request with a temperature",
    "max_model_len": "a request that ended because it reached max_model_len",
    "refused": "a prompt that can never run, beside others that do",
    "attention_only": "a model without Mamba layers",
    "mamba_only": "a model without attention layers",
}


@dataclass(frozen=True)
class Scenario:
    """One engine configuration and its requests; everything follows from `seed`."""

    seed: int
    pattern: str
    options: dict[str, Any]
    prompts: list[list[int]]
    params: list[SamplingParams]
    force_preemption_every: int  # steps; 0 never

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"scenario {self.seed}: {self.pattern}, {options}, {len(self.prompts)} requests"


def draw_scenario(seed: int, vocab_size: int = 97) -> Scenario:
    """A scenario of 8 to 24 requests of 1 to 60 prompt tokens."""
    rng = np.random.default_rng(seed)
    backend = BACKENDS[int(rng.integers(len(BACKENDS)))]
    small = backend.startswith("GUARD") or backend == "TORCH"
    block_size = int(rng.choice([4, 6, 8, 12, 16] if small else [16, 32, 48, 96]))
    pattern = PATTERNS[int(rng.integers(len(PATTERNS)))]
    num_requests = int(rng.integers(8, 25))
    lengths = rng.integers(1, 61, size=num_requests)
    # Random lengths seldom hit the edges, so a few requests are placed on them.
    lengths[0] = rng.integers(1, 3)
    lengths[1] = max(block_size, 4) * rng.integers(1, 3) if block_size <= 24 else 48
    prompts = [rng.integers(0, vocab_size, size=length).tolist() for length in lengths]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 24)),
            stop_token_ids=tuple(rng.integers(0, vocab_size, size=8).tolist()) if rng.random() < 0.3 else (),
            # Residues are logits of up to 2^31; this temperature leaves a few hundred million of them in play.
            temperature=float(rng.choice([0, 0, 0, 2e8])),
            seed=int(rng.integers(-(2**63), 2**63)),
        )
        for _ in prompts
    ]
    max_model_len = max(lengths.max() + 1, int(rng.integers(62, 96)))
    if rng.random() < 0.3:
        prompts[2] = rng.integers(0, vocab_size, size=max_model_len).tolist()
    longest = min(max_model_len, max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True)))
    max_num_seqs = int(rng.choice([2, 3, 5, 8, 16]))
    # An upper bound: as if every layer were a group of its own.
    per_request = pattern.count("M") + pattern.count("*") * -(-longest // block_size)
    roomy = rng.random() < 0.4
    num_blocks = 1 + int(per_request * (max_num_seqs if roomy else rng.uniform(1.0, 2.5)))
    options = {
        "attention_backend": backend,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(max_num_seqs, int(rng.choice([4, 7, 16, 33, 64, 256]))),
        "max_model_len": int(max_model_len),
        "captured_batch_sizes": ((), (4,), (1, 2, 4, 8), (3, 6))[int(rng.integers(4))],
        "device": "cpu",
    }
    if "*" not in pattern:
        del options["block_size"]  # there is no attention block to size
    force = int(rng.choice([0, 0, 5, 9]))
    return Scenario(seed, pattern, options, prompts, params, force)


class Observer:
    """Counts the patterns that happen, checks integrity and accounting, and disturbs the engine, before every step."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.seen: Counter[str] = Counter()
        self._row_owner: dict[int, str] = {}
        self._block_owner: dict[int, str] = {}

    def __call__(self, llm: LLM) -> None:
        scheduler = llm.scheduler
        scheduler.check_integrity()
        queue = [int(request.request_id) for request in (*scheduler.running, *scheduler.waiting)]
        if queue != sorted(queue):
            raise AssertionError(f"first come, first served is broken: {queue}")
        self._account(llm)
        self._count_last_step(llm)
        every = self.scenario.force_preemption_every
        if every and llm.num_steps % every == every - 1 and len(scheduler.running) > 1:
            scheduler.preempt(scheduler.running[-1])
        # Each step computes a token of the oldest request, and a request is preempted only for an older one.
        tokens = sum(len(prompt) + s.max_tokens for prompt, s in zip(*self._requests(), strict=True))
        limit = 10 * tokens * max(1, every)
        if llm.num_steps > limit:
            raise AssertionError(f"no end after {limit} steps: livelock")

    def _requests(self) -> tuple[list[list[int]], list[SamplingParams]]:
        return self.scenario.prompts, self.scenario.params

    def _account(self, llm: LLM) -> None:
        """A running request holds exactly the blocks of its computed tokens: not one more, not one less."""
        for request in llm.scheduler.running:
            for group, ids in zip(llm.plan.config.groups, llm.manager.block_ids(request.request_id), strict=True):
                expected = group.spec.max_blocks_per_request(request.num_computed_tokens)
                if len(ids) != expected:
                    raise AssertionError(
                        f"request {request.request_id} holds {len(ids)} blocks of {type(group.spec).__name__} after "
                        f"{request.num_computed_tokens} tokens; {expected} are due"
                    )
                for block in ids.tolist():
                    if self._block_owner.get(block, request.request_id) != request.request_id:
                        self.seen["block_reuse"] += 1
                    self._block_owner[block] = request.request_id

    def _count_last_step(self, llm: LLM) -> None:
        batch = llm.runner.batch
        if not batch:
            return
        decodes = sum(item.is_decode for item in batch)
        self.seen["mixed_step"] += 0 < decodes < len(batch)
        self.seen["padded_rows"] += decodes == len(batch) and llm.runner.padded_size(decodes) > decodes
        for item in batch:
            request = item.request
            prompt = len(request.prompt_token_ids)
            self.seen["chunked_prefill"] += 0 < item.num_computed_tokens < prompt
            self.seen["one_token_prefill"] += item.num_tokens == 1 and item.num_computed_tokens == 0
            if item.overwrite:
                row = request.row
                self.seen["row_reuse"] += self._row_owner.get(row, request.request_id) != request.request_id
                self._row_owner[row] = request.request_id
                self.seen["recomputed_output"] += bool(request.num_preemptions and len(request.output_token_ids) > 1)
        self.seen["waiting"] += bool(llm.scheduler.waiting)

    def finish(self, llm: LLM, outputs: Sequence[RequestOutput]) -> None:
        """Count what only the end shows."""
        llm.scheduler.check_integrity()
        limit = llm.config.scheduler.max_model_len
        lengths = [len(output.prompt_token_ids) + len(output.token_ids) for output in outputs]
        self.seen["max_model_len"] += sum(length == limit for length in lengths)
        self.seen["refused"] += sum(output.finish_reason == "error" for output in outputs)
        self.seen["sampled"] += sum(params.temperature > 0 for params in self.scenario.params)
        self.seen["attention_only"] += "M" not in self.scenario.pattern
        self.seen["mamba_only"] += "*" not in self.scenario.pattern
        block_size = llm.plan.sizes.block_size
        self.seen["preemption"] += sum(output.num_preemptions for output in outputs)
        self.seen["stop_token"] += sum(output.finish_reason == "stop" for output in outputs)
        self.seen["kernel_split"] += any(
            group.spec.block_size > group.kernel_block_size for group in llm.runner.groups if not group.backend.is_ssm()
        )
        kv_first = any(not g.backend.is_ssm() and g.backend.get_kv_dim() == 0 for g in llm.runner.groups)
        self.seen["kv_first" if kv_first else "blocks_first"] += 1
        self.seen["several_groups"] += len(llm.runner.groups) > 2
        self.seen["short_prompt"] += sum(len(prompt) < 3 for prompt in self.scenario.prompts)
        self.seen["exact_block"] += sum(len(prompt) % block_size == 0 for prompt in self.scenario.prompts)
