"""Engines that share a folder restore their own blocks; damage costs time, the limit holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.cache.backend import BackendContext, MultipleOf, register_backend
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import SmallBlocksFirst, SmallKVFirst
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle

PROMPTS = [
    np.random.default_rng(0).integers(0, ExactConfig.vocab_size, size=n).tolist()
    for n in (40, 33, 17)
]
PARAMS = SamplingParams(max_tokens=6)


@register_backend
class BlocksOfTwo(SmallBlocksFirst):
    """The same layout in smaller kernel blocks."""

    name = "TEST_BLOCKS_OF_TWO"

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, context: BackendContext
    ) -> Sequence[int | MultipleOf]:
        return [2]


BASE: dict[str, Any] = {
    "attention_backend": SmallBlocksFirst.name,
    "block_size": 8,
    "mamba_cache_mode": "all",
    "state_scheme": "slots",
    "layers": "M*",
    "weights": 0,
    "num_blocks": 400,
    "max_num_seqs": 4,
}


def engine(folder: Path, **changes: Any) -> tuple[LLM, ExactOracle]:
    options = BASE | changes
    model = ExactModel(ExactConfig(pattern=options.pop("layers"), seed=options.pop("weights")))
    llm = LLM(model, device="cpu", max_model_len=96, kv_offload_folder=str(folder), **options)
    poison(llm)
    return llm, ExactOracle(model)


def check(llm: LLM, oracle: ExactOracle) -> int:
    """All answers are right; returns the number of blocks that came from the folder so far."""
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [output.token_ids for output in outputs] == [
        oracle.generate(prompt, 6) for prompt in PROMPTS
    ]
    llm.manager.check_integrity()
    assert llm.manager.offload is not None
    return llm.manager.offload.stats.loaded_blocks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_backend", SmallKVFirst.name),
        ("attention_backend", BlocksOfTwo.name),
        ("block_size", 16),
        ("state_scheme", "recompute"),
        ("mamba_cache_mode", "align"),
        ("layers", "*M"),
        ("weights", 1),
    ],
)
def test_engines_that_differ_in_one_setting_share_no_block(
    name: str, value: Any, tmp_path: Path
) -> None:
    settings = ({}, {name: value}) * 2
    loaded = [check(*engine(tmp_path, **changes)) for changes in settings]
    assert not any(loaded[:2]) and all(loaded[2:])


# one request, and some of another
@pytest.mark.parametrize(("mode", "num_blocks"), [("align", 14), ("all", 18)])
def test_blocks_of_damaged_files_are_computed_again(
    mode: str, num_blocks: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    llm, oracle = engine(tmp_path, mamba_cache_mode=mode, num_blocks=num_blocks, max_num_seqs=1)
    check(llm, oracle)
    for _ in range(8):
        llm.reset_prefix_cache()
        for file in sorted(file for file in tmp_path.rglob("*.kv") if rng.random() < 0.5):
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        check(llm, oracle)
    assert llm.manager.offload is not None and llm.manager.offload.stats.misses


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_copy_to_the_device_that_fails_leaves_no_block_behind(mode: str, tmp_path: Path) -> None:
    llm, oracle = engine(tmp_path, mamba_cache_mode=mode)
    check(llm, oracle)
    llm.reset_prefix_cache()
    with (
        patch.object(KVOffload, "load", side_effect=RuntimeError("a copy fails")),
        pytest.raises(RuntimeError, match="a copy fails"),
    ):
        llm.generate(PROMPTS, PARAMS, progress=False)
    llm.manager.check_integrity()
    assert check(llm, oracle)


def test_the_limit_of_a_folder_holds_to_the_byte(tmp_path: Path) -> None:
    def sizes(name: str, limit: int | None) -> list[int]:
        check(*engine(tmp_path / name, kv_offload_folder_bytes=limit))
        return [file.stat().st_size for file in (tmp_path / name).rglob("*.kv")]

    every = sizes("all", None)
    assert len(every) >= 8 and len({*every}) == 1
    assert len(sizes("six", 6 * every[0])) == 6
    assert len(sizes("five", 6 * every[0] - 1)) == 5
