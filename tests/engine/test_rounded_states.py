"""Engines with states in float16, int8 and fp8: the same bits however a state came about.

Activations are in float64, so that products of other shapes differ by too little to be seen after
rounding.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.attention import mamba
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.check.guard.exactness import preempting
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import ScriptedProposer
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel
from hybrid_kv.models.interface import Model
from hybrid_kv.models.random_checkpoint import quiet, write_checkpoint
from hybrid_kv.sampling import SamplingParams
from hybrid_kv.sanitizer import SanitizerError

NUM_NEW, K = 6, 3
PARAMS = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
FORMS = [("float16", True), ("int8", False), ("fp8", True)]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_num_seqs": 4,
    "max_model_len": 128,
}


def form(dtype: str, stochastic: bool) -> dict[str, Any]:
    rounding = {"enable_mamba_cache_stochastic_rounding": True, "mamba_cache_philox_rounds": 5}
    return {"mamba_ssm_cache_dtype": dtype, **(rounding if stochastic else {})}


@dataclass(frozen=True)
class Alone:
    """A model whose states are rounded, and its answer to each prompt alone."""

    model: Model
    options: dict[str, Any]
    prompts: list[list[int]]
    answers: list[list[int]]

    def engine(self, drafts: str = "", **options: Any) -> LLM:
        if drafts:
            sequences = [p + a for p, a in zip(self.prompts, self.answers, strict=True)] * 2
            lengths = [len(prompt) for prompt in self.prompts] * 2
            options["num_speculative_tokens"] = K
            options["proposer"] = ScriptedProposer(
                drafts, K, sequences, lengths, 8, self.model.vocab_size
            )
        llm = LLM(self.model, **OPTIONS, **self.options, **options)
        poison(llm)
        return llm


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for model_type in ("mamba2", "qwen3_next"):
        folders[model_type] = tmp_path_factory.mktemp(model_type)
        with quiet():
            write_checkpoint(model_type, folders[model_type])
    return folders


@cache
def alone(folder: Path, dtype: str, stochastic: bool) -> Alone:
    options = form(dtype, stochastic)
    llm = LLM(folder, **OPTIONS, **options)
    rng = random.Random(0)
    shared = [rng.randrange(1, llm.model.vocab_size) for _ in range(34)]
    prompts = [[*shared, 3], [*shared[:33], 5, 7], shared[:9]]
    answers = [llm.generate([p], PARAMS, progress=False)[0].token_ids for p in prompts]
    return Alone(llm.model, options, prompts, answers)


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next"])
@pytest.mark.parametrize(("dtype", "stochastic"), FORMS)
@pytest.mark.parametrize(
    "settings",
    [
        {"mamba_cache_mode": "align", "max_num_batched_tokens": 13, "kv_offload_bytes": 2**24},
        {"mamba_cache_mode": "all", "drafts": "mixed", "async_scheduling": True},
    ],
    ids=["offload", "drafts"],
)
def test_answers_are_those_alone(
    checkpoints: dict[str, Path],
    model_type: str,
    dtype: str,
    stochastic: bool,
    settings: dict[str, Any],
) -> None:
    case = alone(checkpoints[model_type], dtype, stochastic)
    llm = case.engine(**settings, sanitize=True)
    preempted = preempting(4)
    first = llm.generate(case.prompts, PARAMS, progress=False, on_step=preempted)
    if llm.manager.offload is not None:
        llm.reset_prefix_cache()
    again = llm.generate(case.prompts, PARAMS, progress=False)
    for outputs in (first, again):
        assert [output.token_ids for output in outputs] == case.answers
    assert any(output.cached_tokens for output in again)
    assert any(output.num_preemptions for output in first)


@pytest.mark.parametrize(("dtype", "stochastic"), FORMS)
def test_states_are_equal_to_the_bit(
    checkpoints: dict[str, Path], dtype: str, stochastic: bool
) -> None:
    """Of one chunk and decodes, of chunks of five tokens in another row, and of verify steps."""
    case = alone(checkpoints["mamba2"], dtype, stochastic)
    found = []
    for options, others in (
        ({}, 0),
        ({"max_num_batched_tokens": 5}, 2),
        ({"drafts": "right", "mamba_cache_mode": "all"}, 2),
    ):
        llm = case.engine(**options)
        *_, request = (llm.add_request(prompt, PARAMS) for prompt in case.prompts[-1 - others :])
        while len(request.output_token_ids) < 2 + K:
            llm.step()
        assert len(request.output_token_ids) == 2 + K
        layers = llm.send_request(request).layers
        found.append([part for parts in layers.values() for part in parts[1:]])
    for states in found[1:]:
        for part, expected in zip(states, found[0], strict=True):
            assert torch.equal(part.view(torch.int8), expected.view(torch.int8))


def test_the_sanitizer_names_a_scale_that_a_copy_leaves_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What vllm#48412 was about, of states."""
    copy = mamba.postprocess_mamba

    def without_scales(
        copies: Any, table: Any, layers: Any, spec: MambaSpec, copies_states: bool
    ) -> None:
        before = [parts[-1].clone() for parts in layers]
        copy(copies, table, layers, spec, copies_states)
        for parts, scale in zip(layers, before, strict=True):
            parts[-1].copy_(scale)

    monkeypatch.setattr("hybrid_kv.engine.runner.postprocess_mamba", without_scales)
    model = ExactModel(ExactConfig("E*"))
    prompt = [*range(1, 7)]
    expected = LLM(model, device="cpu").generate([prompt], PARAMS, progress=False)[0].token_ids
    proposer = ScriptedProposer("right", K, [[*prompt, *expected]], [6], 8, model.vocab_size)
    llm = LLM(
        model,
        device="cpu",
        proposer=proposer,
        num_speculative_tokens=K,
        mamba_cache_mode="all",
        block_size=8,
        sanitize=True,
    )
    with pytest.raises(SanitizerError, match="did not arrive in every layer"):
        llm.generate([prompt], PARAMS, progress=False)


def test_an_engine_with_another_seed_refuses_a_request() -> None:
    options = {"device": "cpu", **form("int8", stochastic=True)}
    first, second = (LLM(ExactModel(ExactConfig("E*")), **options, seed=seed) for seed in (0, 1))
    request = first.add_request([1, 2, 3], PARAMS)
    first.step()
    with pytest.raises(ConfigError, match="another model, dtype or rounding of states"):
        second.receive_request(first.send_request(request))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_mamba_cache_stochastic_rounding": True}, "'auto' is not rounded; give float16"),
        (
            form("bfloat16", stochastic=True),
            "mamba_ssm_cache_dtype='bfloat16' is not rounded; give float16, int8 or fp8",
        ),
        ({"mamba_cache_philox_rounds": 5}, "mamba_cache_philox_rounds=5 is of stochastic rounding"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not a dtype"),
    ],
)
def test_what_cannot_be_rounded_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**options)


@pytest.mark.parametrize("pattern", ["E*", "M*"])
def test_a_scheme_that_does_not_store_each_state_is_refused(pattern: str) -> None:
    options = form("int8", stochastic=True) | {"state_scheme": "recompute"}
    with pytest.raises(ConfigError, match='"recompute" does not store the state after each token'):
        LLM(ExactModel(ExactConfig(pattern)), device="cpu", **options)


def test_kernels_that_do_not_round_are_refused() -> None:
    with pytest.raises(ConfigError, match="kernels='triton' stores states as they are computed"):
        LLM(ExactModel(), device="cpu", mamba_ssm_cache_dtype="int8", kernels="triton")
