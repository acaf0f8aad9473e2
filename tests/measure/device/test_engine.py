"""The engine on the pretend device: the CPU's tokens, and the lines of planted mistakes."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bench.device import METRICS, OFFLOAD, QUICK, UNITS, Step, missed, played, steps
from hybrid_kv.attention.mamba import MambaMetadata, MambaMetadataBuilder
from hybrid_kv.check.guard_model import FOLDERS
from hybrid_kv.engine import runner
from hybrid_kv.engine.llm import LLM
from hybrid_kv.kernels.common.upload import Staged
from hybrid_kv.measure.device import DeviceError, pretend_gpu
from hybrid_kv.sampling import SamplingParams

HERE = "/".join(Path(__file__).parts[-2:])
PROMPTS = [[5, 9, 3, 40, 7, 7, 12], [11, 3, 70, 4]]


def tokens(folder: Path, device: str, **options: Any) -> list[list[int]]:
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 6, "num_blocks": 16}
    llm = LLM(folder, device=device, kernels="torch", attention_backend="TORCH", **sizes, **options)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True), progress=False)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(("family", "mode"), [*zip(FOLDERS, ("align", "all"), strict=True)])
def test_tokens_are_those_of_the_cpu(family: str, mode: str) -> None:
    options = {"mamba_cache_mode": mode, "enable_prefix_caching": mode != "none"}
    wanted = tokens(FOLDERS[family], "cpu", **options)
    with pretend_gpu() as gpu:
        assert tokens(FOLDERS[family], "cuda:0", **options) == wanted
    assert gpu.counts()["launch"] > 1000


def test_every_kind_of_step_is_counted() -> None:
    config = ("torch", "align", "slots", 0)
    assert {step.kind for step in played(*config)} == {*QUICK["step"]}
    for kind in QUICK["step"]:
        counts = steps(0, *config, kind)
        assert (set(counts) == set(UNITS)) == (kind == "decode") and counts["launches"].value > 0
        if kind in OFFLOAD:
            assert counts["waits"].value == 0
        else:
            assert counts["uploads"].value == 1 and (kind != "decode" or counts["waits"].value == 1)


def test_a_target_that_is_missed_is_named() -> None:
    step = Step("decode", {kind: 2 for kind, _ in METRICS.values()}, (), "stale")
    names = ("waits", "uploads", "launches_of_tables")
    assert missed("decode", [step]) == ["stale", *(f"2 {name}, target 1" for name in names)]


# ---- planted mistakes ----


def found_in(mistake: FunctionType, line: int) -> str:
    """Where the device's complaint, or what it noted, names the planted line."""
    return f"{HERE}:{mistake.__code__.co_firstlineno + line} "


def test_an_index_that_is_left_on_the_cpu_is_found() -> None:
    build = MambaMetadataBuilder.build

    def left(self: MambaMetadataBuilder, *args: Any) -> Staged[MambaMetadata]:
        arrays, make = build(self, *args)

        def made(*moved: torch.Tensor) -> MambaMetadata:
            built = make(*moved)
            object.__setattr__(built, "window_indices", built.window_indices.cpu())
            return built

        return arrays, made

    refused = pytest.raises(
        DeviceError, match="index_select: tensors of cuda:0 together with some of the CPU"
    )
    with pretend_gpu() as gpu, patch.object(MambaMetadataBuilder, "build", left), refused:
        tokens(FOLDERS["nemotron_h"], "cuda:0")
    assert any(
        event.kind == "wait" and event.where.startswith(found_in(left, 5)) for event in gpu.events
    )


WAITS = {
    "copy": lambda positions: positions.tolist(),
    "copy of memory that is not pinned": (
        lambda positions: torch.arange(3).to(positions.device, non_blocking=True)
    ),
    "index on the CPU": lambda positions: positions[torch.tensor([0])],
}


def test_a_hidden_wait_is_found() -> None:
    verify = runner.verify

    def planted(logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        for mistake in WAITS.values():
            mistake(logits.argmax(-1))
        return verify(logits, *args)

    with pretend_gpu() as gpu, patch.object(runner, "verify", planted):
        tokens(FOLDERS["nemotron_h"], "cuda:0")
    for what, mistake in WAITS.items():
        waits = [
            event
            for event in gpu.events
            if event.kind == "wait" and event.where.startswith(found_in(mistake, 0))
        ]
        assert waits and {event.operation for event in waits} == {what}
