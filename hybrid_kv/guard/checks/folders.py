"""One folder of stored blocks, two engines that differ in one setting: nobody reads what is not his.

And a folder whose files are damaged: what is lost with them is computed again, and no block is held for it. And one
that is full, that others use too, or whose disk is: see `guard.shelf`, and `guard.tiers` for one beside host memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from hybrid_kv.cache.backend import BackendContext, MultipleOf, register_backend
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.engine.llm import LLM
from hybrid_kv.guard.play import unwarned
from hybrid_kv.guard.poison import poison
from hybrid_kv.guard.registry import CheckResult, Run, check
from hybrid_kv.guard.scenario import SmallBlocksFirst, SmallKVFirst
from hybrid_kv.guard.shelf import looks_wrong, play_shelf
from hybrid_kv.guard.tiers import play_tiers
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
NUM_EVENTS = 300
NUM_FETCHES = 30  # and stores, for each size of host memory


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


@unwarned()
def _play_damaged(
    folder: str, mode: str, num_blocks: int, prompts: Sequence[list[int]], rng: np.random.Generator
) -> tuple[str, int]:
    """What is wrong, and how many blocks were found damaged: before each round a bit of half the files is flipped."""
    model = ExactModel(ExactConfig(pattern="M*"))
    llm = LLM(
        model, device="cpu", num_blocks=num_blocks, max_num_seqs=1, max_model_len=96, kv_offload_folder=folder,
        attention_backend=SmallBlocksFirst.name, block_size=8, mamba_cache_mode=mode,
    )  # fmt: skip
    poison(llm)
    oracle, tier = ExactOracle(model), llm.manager.offload
    assert tier is not None
    if error := _fail_to_load(llm, prompts):
        return f"mode {mode}{error}", 0
    for _ in range(8):
        for file in sorted(file for file in Path(folder).rglob("*") if file.is_file()):
            if rng.random() < 0.5:
                data = file.read_bytes()
                file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        outputs = llm.generate(prompts, SamplingParams(max_tokens=NUM_NEW), progress=False)
        if any(output.token_ids != oracle.generate(output.prompt_token_ids, NUM_NEW) for output in outputs):
            return f"mode {mode}: an answer behind damaged files is wrong", tier.stats.misses
        try:
            llm.manager.check_integrity()
        except AssertionError as error:
            return f"mode {mode}, behind damaged files: {error}", tier.stats.misses
    return "", tier.stats.misses


def _fail_to_load(llm: LLM, prompts: Sequence[list[int]]) -> str:
    """A copy to the device fails in the middle of a step: the error comes out, and no block stays behind."""
    params = SamplingParams(max_tokens=NUM_NEW)
    llm.generate(prompts, params, progress=False)
    llm.reset_prefix_cache()
    try:
        with patch.object(KVOffload, "load", side_effect=RuntimeError("a copy fails")):
            llm.generate(prompts, params, progress=False)
        return ": void, no block was loaded"
    except RuntimeError:
        pass
    try:
        llm.manager.check_integrity()
    except AssertionError as error:
        return f", behind a copy to the device that fails: {error}"
    return ""


def _play_shelf(rng: np.random.Generator) -> tuple[str, dict[str, int]]:
    """The first thing that is wrong with a folder to which things happen, and how often what must happen did."""
    with tempfile.TemporaryDirectory() as folder:
        # Looks that cost less than the time between them, and more.
        for tick in (0.25, 1.0):
            if wrong := looks_wrong(Path(folder) / str(tick), tick):
                return wrong, {}
        return play_shelf(Path(folder) / "blocks", rng, NUM_EVENTS)


def _play_full(prompts: Sequence[list[int]]) -> str:
    """What is wrong with the files that an engine leaves in a folder that ends with one of them, or a byte before."""
    size = 0
    for num_files, less in ((None, 0), (6, 0), (6, 1)):
        limit = None if num_files is None else num_files * size - less
        with tempfile.TemporaryDirectory() as folder:
            _play(folder, {**BASE, "kv_offload_folder_bytes": limit}, prompts)
            files = [file.stat().st_size for file in Path(folder).rglob("*.kv")]
        size = max(files, default=0)
        if num_files is None and (len(files) < 8 or min(files) < size):
            return f"void: an engine leaves {len(files)} files, or not all of {size} B"
        if num_files is not None and len(files) != num_files - less:
            return f"{len(files)} files of {size} B in kv_offload_folder_bytes={limit}"
    return ""


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
    damaged, num_lost = list[str](), 0
    for mode, num_blocks in (("align", 14), ("all", 18)):  # room for one request and some of another
        with tempfile.TemporaryDirectory() as folder:
            error, lost = _play_damaged(folder, mode, num_blocks, prompts, rng)
        num_lost += lost
        if error:
            damaged.append(error)
    if not num_lost:
        damaged.append("void: no damaged block was wanted")
    strange, happened = _play_shelf(rng)
    with tempfile.TemporaryDirectory() as folder, unwarned():
        strange = strange or _play_full(prompts) or play_tiers(Path(folder), rng, NUM_FETCHES)
    seconds = time.perf_counter() - begin
    return [
        CheckResult(
            "folders", "engines that read another one's blocks", not wrong, len(wrong), "settings", "0", run.amount,
            seconds, wrong[0] if wrong else "", {"seed": run.seed}, {"loaded_blocks": num_loaded},
        ),
        CheckResult(
            "folders", "engines that damaged files disturb", not damaged, len(damaged), "settings", "0", 2,
            0.0, damaged[0] if damaged else "", {"seed": run.seed}, {"lost_blocks": num_lost},
        ),
        CheckResult(
            "folders", "events that leave other files than due", not strange, int(bool(strange)), "operations", "0",
            NUM_EVENTS, 0.0, strange, {"seed": run.seed}, happened,
        ),
    ]  # fmt: skip
