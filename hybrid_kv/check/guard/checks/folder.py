"""Folders of stored blocks that several engines share, of other weights or other layouts.

The weights have one geometry, the layouts one page. What an engine finds there must be what it
would have computed itself, so a block's file tells weights and layout; and an equal engine finds it
again.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any

from hybrid_kv.check.guard.exactness import Alone
from hybrid_kv.check.guard.play import unwarned
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.scenario import SmallBlocksFirst, SmallKVFirst, cache_options
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.sampling import SamplingParams

FAMILIES = "bamba", "falcon_h1", "lfm2", "nemotron_h", "qwen3_5_text", "zamba2"  # with K and V
# Kernel blocks of 4 tokens, and of a whole block: another part of a page holds K.
LAYOUTS = (SmallBlocksFirst.name, "TORCH"), (SmallKVFirst.name, "FLASHINFER")
NUM_NEW = 8


@check(
    "folder",
    quick=1,
    full=3,
    long=6,
    seconds=3.5,
    place=38,
    needs="safetensors tokenizers transformers",
)
def check_folder(run: Run) -> Iterator[CheckResult]:
    """Run exact models, then checkpoints of a family, in turn in each layout."""
    wrong = list[str]()
    num_engines = 0
    for i in range(run.amount):
        for play in (_exact_models, _checkpoints):
            with tempfile.TemporaryDirectory() as folder, unwarned():
                problems = list(play(run.seed + i, folder))
            wrong += filter(None, problems)
            num_engines += len(problems)
        run.progress(1)
    yield CheckResult(
        "engines misled by a shared folder",
        len(wrong),
        "",
        "0",
        num_engines,
        wrong[0] if wrong else "",
        {"seed": run.seed},
    )


def _exact_models(seed: int, folder: str) -> Iterator[str]:
    """Yield what is wrong in each engine, or nothing."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=NUM_NEW)
    mode = rng.choice(["align", "all"])
    layers = rng.choice(["M*", "*M", "T*", "M*MM*"])
    prompts = [[rng.randrange(97) for _ in range(length)] for length in (17, 33, 40)]
    every = list(product((0, 1), LAYOUTS[seed % len(LAYOUTS)]))
    for weights, layout in [*every, every[0]]:
        model = ExactModel(ExactConfig(layers, seed=weights))
        llm = LLM(
            model,
            device="cpu",
            attention_backend=layout,
            block_size=16,
            num_blocks=60,
            max_model_len=96,
            kv_offload_folder=folder,
            **cache_options(mode, 0, "none"),
        )
        poison(llm)
        outputs = llm.generate(prompts, params, progress=False)
        due = [ExactOracle(model).generate(prompt, NUM_NEW) for prompt in prompts]
        num_wrong = sum(
            output.token_ids != tokens for output, tokens in zip(outputs, due, strict=True)
        )
        where = f"{layers}, mode {mode}, weights {weights}, {layout}"
        yield f"{where}: {num_wrong} requests got other tokens" if num_wrong else ""
    assert llm.manager.offload is not None
    has_hits = llm.manager.offload.stats.folder_hits
    yield "" if has_hits else f"{where}: no block is found again by an equal engine"


def _checkpoints(seed: int, folder: str) -> Iterator[str]:
    """Yield the same for random checkpoints, given as folders and as objects."""
    from hybrid_kv.models.random_checkpoint import quiet, write_checkpoint

    family = FAMILIES[seed % len(FAMILIES)]
    (layout, other) = LAYOUTS[seed % len(LAYOUTS)]
    cell: dict[str, Any] = {
        "mamba_cache_mode": ("align", "all")[seed // 2 % 2],
        "kv_offload_folder": folder,
    }
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second, quiet():
        for weights, path in enumerate((first, second)):
            write_checkpoint(family, path, seed=weights)
        both = Alone(first, seed, max_tokens=4), Alone(second, seed, max_tokens=4)
        for kind in ("folder", "object"):
            for alone, backend in ((both[0], layout), (both[1], layout), (both[0], other)):
                compared = alone.check({**cell, "attention_backend": backend})
                yield (
                    f"{family} as {kind}, {backend}: {compared.problem}" if compared.problem else ""
                )
            for alone in both:
                alone.given = alone.model
