"""One folder of stored blocks, two engines that differ in one setting: nobody reads what is not his."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybrid_kv.cache.backend import BackendContext, MultipleOf, register_backend
from hybrid_kv.engine.llm import LLM
from hybrid_kv.guard.poison import poison
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.guard.scenario import SmallBlocksFirst, SmallKVFirst
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.sampling import SamplingParams


@register_backend
class BlocksOfTwo(SmallBlocksFirst):
    """The same layout in smaller kernel blocks."""

    name = "GUARD_BLOCKS_OF_TWO"

    @classmethod
    def get_supported_kernel_block_sizes(cls, context: BackendContext) -> Sequence[int | MultipleOf]:
        return [2]


BASE: dict[str, Any] = {
    "attention_backend": SmallBlocksFirst.name, "block_size": 8, "mamba_cache_mode": "all", "state_scheme": "slots",
    "layers": "M*", "weights": 0,
}  # fmt: skip
OTHERS: tuple[tuple[str, Any], ...] = (
    ("attention_backend", SmallKVFirst.name),
    ("attention_backend", BlocksOfTwo.name),
    ("block_size", 16),
    ("state_scheme", "replay"),
    ("mamba_cache_mode", "align"),
    ("layers", "*M"),
    ("weights", 1),
)
NUM_NEW = 6


def _play(folder: str, setting: dict[str, Any], prompts: Sequence[list[int]]) -> tuple[int, int]:
    """How many answers are wrong, and how many blocks came from the folder."""
    options = dict(setting)
    model = ExactModel(ExactConfig(pattern=options.pop("layers"), seed=options.pop("weights")))
    llm = LLM(
        model, device="cpu", num_blocks=400, max_num_seqs=4, max_model_len=96, kv_offload_folder=folder, **options
    )  # fmt: skip
    poison(llm)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=NUM_NEW), progress=False)
    oracle = ExactOracle(model)
    wrong = sum(output.token_ids != oracle.generate(output.prompt_token_ids, NUM_NEW) for output in outputs)
    assert llm.manager.offload is not None
    return wrong, llm.manager.offload.stats.loaded_blocks


@check("folders", quick=len(OTHERS), full=len(OTHERS), seconds=0.1, place=38)
def check_folders(run: Run) -> list[CheckResult]:
    """Both engines write and both read again, in turn: every answer is right, and each finds its own blocks."""
    begin = time.perf_counter()
    rng = np.random.default_rng(run.seed)
    prompts = [rng.integers(0, ExactConfig.vocab_size, size=length).tolist() for length in (40, 33, 17)]
    wrong, num_loaded = list[str](), 0
    for name, value in OTHERS[: run.amount]:
        with tempfile.TemporaryDirectory() as folder:
            for turn, setting in enumerate((BASE, {**BASE, name: value}) * 2):
                differ, loaded = _play(folder, setting, prompts)
                num_loaded += loaded
                who = f"engines that differ in {name} ({BASE[name]}, {value}): {name}={setting[name]}"
                if differ:
                    wrong.append(f"{who} has {differ} wrong answers")
                elif turn > 1 and not loaded:
                    wrong.append(f"void: {who} finds none of its own blocks")
        run.progress(1)
    return [
        CheckResult(
            "folders", "engines that read another one's blocks", not wrong, len(wrong), "settings", "0", run.amount,
            time.perf_counter() - begin, wrong[0] if wrong else "", {"seed": run.seed}, {"loaded_blocks": num_loaded},
        )
    ]  # fmt: skip
