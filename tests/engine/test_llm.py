"""The user's entry: order, ends, errors."""

import pytest

from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.sampling import SamplingParams
from hybrid_kv.models.exact import ExactModel, ExactOracle

PROMPTS = [[1, 2, 3], [4] * 9, [5, 6], [7, 8, 9, 10]]


class Letters:
    """Token t is one letter, or two for every third token, so that strings cross token boundaries."""

    def __init__(self, eos_token_id=None):
        self.eos_token_id = eos_token_id

    def encode(self, text):
        return [ord(letter) % 97 for letter in text]

    def decode(self, token_ids):
        return "".join(chr(0x4E00 + t) * (2 if t % 3 == 0 else 1) for t in token_ids)


def engine(tokenizer=None, **options):
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": 40, "block_size": 4} | options
    return LLM(ExactModel(), tokenizer=tokenizer, device="cpu", **options)


def oracle(prompt, max_tokens):
    return ExactOracle(ExactModel()).generate(prompt, max_tokens)


def one(llm, prompt=PROMPTS[0], **params):
    return llm.generate([prompt], SamplingParams(**params), progress=False)[0]


def test_outputs_come_in_the_order_of_the_prompts_and_each_has_its_length():
    params = [SamplingParams(max_tokens=n) for n in (12, 1, 5, 3)]
    outputs = engine().generate(PROMPTS, params, progress=False)
    assert [o.prompt_token_ids for o in outputs] == PROMPTS
    assert [o.token_ids for o in outputs] == [oracle(p, s.max_tokens) for p, s in zip(PROMPTS, params, strict=True)]
    assert {o.finish_reason for o in outputs} == {"length"}
    assert {o.error for o in outputs} == {None}


def test_max_model_len_ends_a_request():
    output = one(engine(max_model_len=10), max_tokens=50)
    assert output.finish_reason == "length"
    assert output.token_ids == oracle(PROMPTS[0], 7)


def test_a_stop_string_across_tokens_cuts_the_text_before_it():
    tokenizer = Letters()
    tokens = oracle(PROMPTS[0], 12)
    text = tokenizer.decode(tokens)
    before = tokenizer.decode(tokens[:5])
    stop = (before[-1] + tokenizer.decode(tokens[5:7]))[:3]
    output = one(engine(tokenizer), max_tokens=12, stop=("never", stop))
    assert output.finish_reason == "stop"
    assert output.text == text[: text.index(stop)]
    assert len(output.token_ids) < 12
    assert output.token_ids == tokens[: len(output.token_ids)]


def test_eos_ends_the_text_unless_ignored():
    tokens = oracle(PROMPTS[0], 12)
    eos = next(t for i, t in enumerate(tokens) if i > 2 and t not in tokens[:i])
    at = tokens.index(eos)
    llm = engine(Letters(eos))
    output = one(llm, max_tokens=12)
    assert (output.finish_reason, output.token_ids) == ("stop", tokens[: at + 1])
    assert output.text == Letters().decode(tokens[:at])
    ignored = one(llm, max_tokens=12, ignore_eos=True)
    assert (ignored.finish_reason, ignored.token_ids) == ("length", tokens)
    stopped = one(engine(), max_tokens=12, stop_token_ids=(eos,))
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", tokens[: at + 1])


def test_invalid_prompts_become_errors_and_the_others_are_right():
    bad = [[], [1] * 40, [97], [-1], "text"]
    outputs = engine().generate([*bad, *PROMPTS], SamplingParams(max_tokens=4), progress=False)
    assert [o.finish_reason for o in outputs] == ["error"] * len(bad) + ["length"] * len(PROMPTS)
    words = ["empty", "40 tokens", "token 97 is outside", "token -1 is outside", "no tokenizer"]
    for output, word in zip(outputs, words, strict=False):
        assert word in (output.error or "")
        assert output.token_ids == []
    assert [o.token_ids for o in outputs[len(bad) :]] == [oracle(prompt, 4) for prompt in PROMPTS]


def test_texts_are_encoded_and_kept():
    output = one(engine(Letters()), "abc", max_tokens=2)
    assert (output.prompt, output.prompt_token_ids) == ("abc", [0, 1, 2])
    assert output.token_ids == oracle([0, 1, 2], 2)


def test_the_engine_is_as_good_as_new_after_an_interrupt():
    llm = engine()

    def interrupt(llm):
        if llm.num_steps == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=6), progress=False, on_step=interrupt)
    assert not llm.scheduler.has_requests
    llm.scheduler.check_integrity()
    assert llm.manager.pool.num_free_blocks == llm.plan.usable_blocks
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6), progress=False)
    assert [o.token_ids for o in outputs] == [oracle(prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_blokcs": 9}, "does not know num_blokcs"),
        ({"cache": {}}, "by their own names"),
        ({"max_num_batched_tokens": 2}, "max_num_batched_tokens=2 is below max_num_seqs=3"),
        ({"num_blocks": 2}, "give it at least"),
        ({"mamba_cache_mode": "align"}, "can be planned but not run yet"),
        ({"captured_batch_sizes": (4, 2)}, "must rise"),
        ({"attention_backend": "NOPE"}, "'NOPE'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        engine(**options)


def test_one_parameter_set_per_prompt():
    with pytest.raises(ConfigError, match="4 prompts but 1 sampling"):
        engine().generate(PROMPTS, [SamplingParams()], progress=False)


def test_no_prompts_no_outputs():
    assert engine().generate([], progress=False) == []


def test_the_bar_can_be_switched_off(capsys):
    llm = engine()
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), progress=False)
    assert capsys.readouterr().err == ""
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), progress=True)
    assert "4/4" in capsys.readouterr().err


def test_a_prompt_of_the_wrong_type_leaves_nothing_behind():
    llm = engine()
    with pytest.raises(TypeError):
        llm.generate([[1, 2], None], progress=False)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), progress=False)
    assert len(output.token_ids) == 2


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_that_is_not_supported_is_refused(device):
    with pytest.raises(ConfigError, match="use auto, cpu or cuda"):
        LLM(ExactModel(), device=device)


def test_stop_strings_without_a_tokenizer_are_an_error_of_that_request():
    outputs = engine().generate([[1], [2]], [SamplingParams(stop="x"), SamplingParams(max_tokens=1)], progress=False)
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    assert "need a tokenizer" in outputs[0].error
