"""The lm-eval model against the plain engine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hybrid_kv.check.guard_model import FOLDER as GUARD_MODEL
from hybrid_kv.check.guard_model import problems
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.sampling import SamplingParams
from tests.measure.accuracy.lm import engine_model, instance

PROMPTS = [item.prompt for item in problems.eval_set(3, 4, shots=1)]
GREEDY = {"until": ["Question:", "</s>"], "do_sample": False, "temperature": 0.0}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(GUARD_MODEL, max_num_seqs=4, max_model_len=512, device="cpu")


@pytest.fixture
def lm(llm: LLM) -> Any:
    return engine_model(llm=llm, progress=False)


def requests(*arguments: tuple[str, dict[str, Any]]) -> list[Any]:
    return [
        instance("generate_until", (prompt, dict(kwargs)), i)
        for i, (prompt, kwargs) in enumerate(arguments)
    ]


def test_same_text_as_the_engine(lm: Any, llm: LLM) -> None:
    plain = llm.generate(
        PROMPTS, SamplingParams(max_tokens=24, stop=("Question:", "</s>")), progress=False
    )
    steps = llm.num_steps
    texts = lm.generate_until(
        requests(*((prompt, GREEDY | {"max_gen_toks": 24}) for prompt in PROMPTS))
    )
    assert texts == [output.text for output in plain]
    assert len(set(texts)) > 1
    assert [lm.outputs["toy", i][0].token_ids for i in range(4)] == [
        output.token_ids for output in plain
    ]
    # In one call, so that they share their steps.
    assert llm.num_steps - steps < sum(len(output.token_ids) for output in plain)


def test_every_stop_string_counts(lm: Any) -> None:
    (whole,) = lm.generate_until(requests((PROMPTS[0], {"until": [], "max_gen_toks": 12})))
    late, early = whole[-2:], whole[3:5]
    for until in (early, [late, early], [early, late], ["</s>", early]):
        (text,) = lm.generate_until(requests((PROMPTS[0], {"until": until, "max_gen_toks": 12})))
        assert text == whole[: whole.find(early)]


def test_max_gen_toks_and_its_default(lm: Any) -> None:
    lm.max_gen_toks = 3
    lm.generate_until(
        requests((PROMPTS[0], {"until": []}), (PROMPTS[0], {"until": [], "max_gen_toks": 5}))
    )
    assert [len(lm.outputs["toy", i][0].token_ids) for i in range(2)] == [3, 5]


def test_sampling(lm: Any) -> None:
    def sampled(**kwargs: Any) -> list[str]:
        return lm.generate_until(
            requests(*[(PROMPTS[0], {"until": [], "max_gen_toks": 12} | kwargs)] * 4)
        )

    hot = {"do_sample": True, "temperature": 5.0}
    assert len(set(sampled(**hot))) > 1  # repeats of a question differ
    assert sampled(**hot) == sampled(**hot)
    assert sampled(**hot, seed=1) != sampled(**hot, seed=2)
    assert len(set(sampled(do_sample=False, temperature=5.0))) == 1
    assert lm.sampling_params({"do_sample": True}, 0).temperature == 1.0
    params = lm.sampling_params(
        {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9}, 0
    )
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.9)


def test_refused_request_is_no_silent_answer(lm: Any, caplog: pytest.LogCaptureFixture) -> None:
    texts = lm.generate_until(
        requests((PROMPTS[0] * 20, GREEDY), (PROMPTS[1], GREEDY | {"max_gen_toks": 2}))
    )
    assert texts[0] == "[invalid]" != texts[1] != ""
    assert "max_model_len" in str(lm.outputs["toy", 0][0].error)
    assert lm.outputs["toy", 1][0].error is None
    assert "1 of 2 requests could not run" in caplog.text and "max_model_len" in caplog.text


def test_an_unknown_generation_option_says_what_is_known(lm: Any) -> None:
    with pytest.raises(ConfigError, match="num_beams not supported; use"):
        lm.sampling_params({"num_beams": 2}, 0)


def test_registered_and_made_from_the_command_lines_arguments(lm: Any) -> None:
    from lm_eval.api.registry import get_model

    cls = get_model("hybrid_kv")
    assert cls is type(lm)
    # What lm-eval's command line passes when the user gives neither a batch size nor a device.
    defaults = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}
    made = cls.create_from_arg_string(
        f"pretrained={GUARD_MODEL},max_num_seqs=2,max_model_len=256", defaults
    )
    assert (made.llm.config.scheduler.max_num_seqs, made.llm.config.scheduler.max_model_len) == (
        2,
        256,
    )


def test_registering_hides_no_model_of_lm_evals() -> None:
    # In a fresh process: here, other tests have filled the registry.
    code = (
        "import hybrid_kv.measure.accuracy.lm_eval_model; from lm_eval.api.registry "
        "import model_registry"
    )
    code += "; print(*model_registry)"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert {"hybrid_kv", "hf", "vllm"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("max_num_seks=2", "does not know max_num_seks"),
        ("pretrained=/nowhere/at/all", "/nowhere/at/all does not exist"),
    ],
)
def test_bad_model_args(lm: Any, arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.create_from_arg_string(arguments)
