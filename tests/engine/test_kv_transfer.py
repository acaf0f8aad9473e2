"""A request goes on in another engine as if that had computed its prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import SmallBlocksFirst
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams
from tests.models.tiny_nemotron import Characters

MODEL = ExactModel(ExactConfig(pattern="M*M"))
ORACLE = ExactOracle(MODEL)
PROMPT = [(7 * i + 3) % ExactConfig.vocab_size for i in range(24)]
GUARD_MODEL = Path(__file__).parents[2] / "hybrid_kv" / "check" / "guard_model"


def engine(model: ExactModel = MODEL, **options: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "num_blocks": 60,
        "max_num_seqs": 3,
        "max_model_len": 96,
        "block_size": 8,
        "attention_backend": SmallBlocksFirst.name,
        "mamba_cache_mode": "align",
        "sanitize": True,
    }
    llm = LLM(model, **defaults | options)
    poison(llm)
    return llm


def begin(llm: LLM, prompt: list[int], num_tokens: int = 1, **params: Any) -> Request:
    """A request that has so many tokens of its answer."""
    request = llm.add_request(prompt, SamplingParams(**{"max_tokens": 10} | params))
    while len(request.output_token_ids) < num_tokens:
        llm.step()
    return request


def end(llm: LLM) -> None:
    while llm.scheduler.has_requests:
        llm.step()
    llm.scheduler.check_integrity()


def num_held(llm: LLM) -> int:
    return llm.manager.pool.num_blocks - 1 - llm.manager.pool.num_free_blocks


def test_what_goes_over_lives_on_when_its_blocks_are_used_again() -> None:
    prefill, decode = engine(), engine()
    kv_transfer = prefill.send_request(begin(prefill, PROMPT))
    for buffer in prefill.runner.raw_buffers:
        buffer.fill_(77)
    first, second = decode.receive_request(kv_transfer), engine(mamba_cache_mode="none")
    again = second.receive_request(kv_transfer)
    end(decode)
    end(second)
    assert first.output_token_ids == again.output_token_ids == ORACLE.generate(PROMPT, 10)
    assert kv_transfer.output_token_ids == ORACLE.generate(PROMPT, 1)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_state_on_a_boundary_is_published_where_the_request_goes_on(
    mode: str, is_async: bool
) -> None:
    prefill, decode = engine(), engine(mamba_cache_mode=mode, async_scheduling=is_async)
    decode.receive_request(prefill.send_request(begin(prefill, PROMPT, max_tokens=4)))
    end(decode)
    later = decode.add_request([*PROMPT, 5], SamplingParams(max_tokens=5))
    end(decode)
    assert later.hit.num_tokens == 24
    assert later.output_token_ids == ORACLE.generate([*PROMPT, 5], 5)


def test_without_room_it_waits_and_an_abort_leaves_nothing() -> None:
    prefill, decode = engine(), engine(max_num_seqs=1)
    running = begin(decode, PROMPT[:5])
    waiting, dropped = (
        decode.receive_request(prefill.send_request(begin(prefill, PROMPT))) for _ in range(2)
    )
    decode.step()
    assert list(decode.scheduler.waiting) == [waiting, dropped]
    decode.abort(dropped.request_id)
    end(decode)
    assert num_held(decode) == 0 and dropped.output_token_ids == waiting.output_token_ids[:1]
    assert running.output_token_ids == ORACLE.generate(PROMPT[:5], 10)
    assert waiting.output_token_ids == ORACLE.generate(PROMPT, 10)


def test_logprobs_go_over() -> None:
    prefill, decode, alone = engine(), engine(), engine()
    wanted = {"logprobs": 2, "prompt_logprobs": 1}
    request = decode.receive_request(prefill.send_request(begin(prefill, PROMPT, **wanted)))
    end(decode)
    expected = begin(alone, PROMPT, num_tokens=10, **wanted)
    assert (
        request.logprobs == expected.logprobs
        and request.prompt_logprobs == expected.prompt_logprobs
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"weights": "others"},
            "with another model, dtype or rounding of states; give both engines the same",
        ),
        (
            {"layers": {}},
            r"layer layers.0 is not in the engine .* give both engines its speculative_method",
        ),
        ({"prompt_token_ids": [1] * 96}, "max_model_len is 96"),
        ({"params": SamplingParams(stop=["x"])}, "stop strings need a tokenizer"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(change: dict[str, Any], text: str) -> None:
    prefill, decode = engine(), engine()
    kv_transfer = prefill.send_request(begin(prefill, PROMPT))
    with pytest.raises(ConfigError, match=text):
        decode.receive_request(replace(kv_transfer, **change))
    assert not decode.scheduler.has_requests and num_held(decode) == 0


def test_a_state_in_another_dtype_is_refused_and_both_are_named() -> None:
    prefill, decode = engine(), engine()
    kv_transfer = prefill.send_request(begin(prefill, PROMPT))
    window, state = kv_transfer.layers["layers.0"]
    other = kv_transfer.layers | {"layers.0": (window, state.to(torch.int16))}
    with pytest.raises(
        ConfigError, match=r"int32 \[3, \d+\], int16 .*, this engine caches int32 \[3, \d+\], int32"
    ):
        decode.receive_request(replace(kv_transfer, layers=other))


def test_a_model_without_a_name_for_its_weights_is_refused() -> None:
    class Nameless(ExactModel):
        fingerprint = ""

    prefill = engine(Nameless(ExactConfig(pattern="M*")))
    request = begin(prefill, PROMPT)
    with pytest.raises(ConfigError, match=r"weights of this Nameless .* text `fingerprint`"):
        prefill.send_request(request)
    end(prefill)
    assert len(request.output_token_ids) == 10


def test_only_a_running_request_with_a_token_can_be_handed_over() -> None:
    prefill = engine(max_num_batched_tokens=16)
    request = prefill.add_request(PROMPT, SamplingParams(max_tokens=2))
    with pytest.raises(HybridKVError, match="request 0 is not running here"):
        prefill.send_request(request)
    prefill.step()
    with pytest.raises(
        HybridKVError, match="no token of its answer yet, 16 of its 24 tokens are computed"
    ):
        prefill.send_request(request)
    prefill.abort(request.request_id)
    with pytest.raises(HybridKVError, match="not running"):
        prefill.send_request(request)
    end(prefill)
    with pytest.raises(HybridKVError, match="not running"):
        prefill.send_request(request)


def test_one_that_the_step_in_flight_ends_stays_and_a_step_says_so() -> None:
    prefill = engine(async_scheduling=True)
    sent = (PROMPT[:7], 1), ([4], 3)
    request, other = (
        prefill.add_request(prompt, SamplingParams(max_tokens=n)) for prompt, n in sent
    )
    prefill.step()
    with pytest.raises(HybridKVError, match="ends with the step in flight"):
        prefill.send_request(request)
    assert prefill.send_request(other).output_token_ids == ORACLE.generate([4], 1)
    assert prefill.step() == [(request, "length")]
    assert request.output_token_ids == ORACLE.generate(PROMPT[:7], 1)
    end(prefill)
    assert num_held(prefill) == 0


# The guard model: floats, a draft head, and states that `recompute` keeps in two planes.


def trained(**options: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "dtype": "float64",
        "block_size": 48,
        "max_model_len": 112,
        "mamba_cache_mode": "align",
        "num_blocks": 40,
        "max_num_seqs": 1,
    }
    llm = LLM(GUARD_MODEL, tokenizer=Characters(), **defaults | options)
    poison(llm)
    return llm


def test_a_head_whose_keys_were_never_computed_is_refused() -> None:
    prefill, decode = trained(), trained(speculative_method="mtp", num_speculative_tokens=1)
    with pytest.raises(ConfigError, match=r"layer mtp.* give both engines its speculative_method"):
        decode.receive_request(prefill.send_request(begin(prefill, [5, 6, 7])))
