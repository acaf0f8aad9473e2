"""transformers as an engine: its caches, batches and drafts, what it refuses, and what it gets wrong."""

import random
import runpy
import sys
from dataclasses import replace

import pytest
import torch
from transformers import Cache

from hybrid_kv.config import ConfigError
from hybrid_kv.models.random_checkpoint import fill, quiet, write_checkpoint
from hybrid_kv.probes.judge import Judge
from hybrid_kv.probes.oracle import Oracle
from hybrid_kv.probes.registry import Round
from hybrid_kv.probes.reproducer import Case
from hybrid_kv.targets import transformers
from hybrid_kv.targets.target import Ask

RNG = random.Random(0)
PROMPTS = [tuple(RNG.randrange(1, 101) for _ in range(length)) for length in (30, 7, 1, 18)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lfm2")
    return str(folder), write_checkpoint("lfm2", folder)


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    """A model that transformers batches continuously."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    fill(model, seed=0)
    with quiet():
        model.save_pretrained(folder)
    return str(folder), model


def continued(model, prompt, num_new=12):
    """Greedy, the whole text anew for each token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_new):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize(
    "settings",
    [{}, {"batch": "left"}, {"cache": "static", "batch": "left"}, {"chunk": "17"}, {"spec": "lookup3"}],
    ids=lambda settings: "-".join(settings.values()) or "plain",
)
def test_answers_are_those_of_the_whole_text(hybrid, settings):
    folder, model = hybrid
    answers = transformers.start(folder, settings).ask([Ask(prompt) for prompt in PROMPTS])
    assert [answer.token_ids for answer in answers] == [continued(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_second_turn_goes_on_with_the_cache_of_the_first(hybrid, cache):
    folder, model = hybrid
    target = transformers.start(folder, {"prefix": "kept", "cache": cache})
    (first,) = target.ask([Ask(PROMPTS[0])])
    again = (*PROMPTS[0], *first.token_ids, 5, 6, 7)
    (second,) = target.ask([Ask(again)])
    assert second.token_ids == continued(model, again)
    # The answer's last token was drawn, not computed with.
    assert second.cached_tokens == target.counters()["hits"] == len(PROMPTS[0]) + 11
    target.reset()
    assert target.ask([Ask(again)])[0].cached_tokens == 0


def test_a_second_turn_of_a_model_without_attention(tmp_path):
    """Its cache has another name."""
    model = write_checkpoint("mamba2", tmp_path)
    target = transformers.start(str(tmp_path), {"prefix": "kept"})
    (first,) = target.ask([Ask(PROMPTS[1])])
    again = (*PROMPTS[1], *first.token_ids, 5, 6, 7)
    (second,) = target.ask([Ask(again)])
    assert (second.token_ids, second.cached_tokens) == (continued(model, again), len(PROMPTS[1]) + 11)


def test_drafts_of_a_model_are_accepted_and_rejected(attention):
    folder, model = attention
    target = transformers.start(folder, {"spec": "draft2"})
    for prompt in PROMPTS:
        assert target.ask([Ask(prompt)])[0].token_ids == continued(model, prompt)
    counters = target.counters()
    assert 0 < counters["accepted"] < counters["drafts"]


def judged(folder, settings):
    judge = Judge(Oracle(folder))
    judge.oracle.rounds(PROMPTS[0])
    answers = transformers.start(folder, settings).ask([Ask(prompt) for prompt in PROMPTS])
    return answers, [judge.judge(Ask(prompt), one, None).verdict for prompt, one in zip(PROMPTS, answers, strict=True)]


def test_a_search_is_judged_by_its_log_probabilities(hybrid, monkeypatch):
    folder, model = hybrid
    answers, verdicts = judged(folder, {"beams": "4"})
    assert verdicts == ["right"] * 4 and all(len(answer.logprobs) == 12 for answer in answers)
    assert [answer.token_ids for answer in answers] != [continued(model, prompt) for prompt in PROMPTS]
    # Beams that go on with the cache of another one.
    monkeypatch.setattr(Cache, "reorder_cache", lambda self, beam_idx: None)
    assert "wrong" in judged(folder, {"beams": "4"})[1]


def test_continuous_batching_answers_as_alone(attention):
    folder, model = attention
    answers = transformers.start(folder, {"batch": "continuous"}).ask([Ask(prompt) for prompt in PROMPTS])
    assert [answer.token_ids for answer in answers] == [continued(model, prompt) for prompt in PROMPTS]


def test_log_probabilities_and_scores_are_those_of_the_whole_text(hybrid):
    folder, model = hybrid
    target = transformers.start(folder, {})
    (answer,) = target.ask([Ask(PROMPTS[0], logprobs=True)])
    text = (*PROMPTS[0], *answer.token_ids)
    with torch.inference_mode():
        expected = model(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
    for position, (token, given) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True), len(PROMPTS[0]) - 1):
        assert len(given) >= 5
        assert given[token] == pytest.approx(float(expected[position, token]), abs=1e-4)
    assert target.score(text) == pytest.approx(
        [float(expected[i, token]) for i, token in enumerate(text[1:])], abs=1e-4
    )


def test_a_seed_repeats_a_draw(hybrid):
    asks = [Ask(PROMPTS[0], temperature=1.0, seed=seed, n=2) for seed in (7, 7, 8)]
    first, again, other = transformers.start(hybrid[0], {}).ask(asks)
    assert (first.token_ids, first.others) == (again.token_ids, again.others)
    assert first.token_ids not in (*first.others, other.token_ids)


def test_what_transformers_refuses_is_one_line(hybrid, tmp_path):
    folder, _ = hybrid
    with pytest.raises(ConfigError, match="Invalid layer type: conv"):
        transformers.start(folder, {"batch": "continuous"})
    with pytest.raises(ConfigError, match="use batch=one"):
        transformers.start(folder, {"batch": "left", "prefix": "kept"})
    with pytest.raises(ConfigError, match="a search has no drafts"):
        transformers.start(folder, {"beams": "4", "prefix": "kept"})
    with pytest.raises(ConfigError, match="does not load"):
        transformers.start(str(tmp_path), {})


def test_an_error_of_one_request_is_its_answer(hybrid):
    bad, good = transformers.start(hybrid[0], {}).ask([Ask((5, 100_000)), Ask(PROMPTS[1])])
    assert bad.error.startswith("IndexError") and not bad.token_ids
    assert good.token_ids == continued(hybrid[1], PROMPTS[1])


def second_turn(model, settings, **fields):
    """A case of a prompt that goes on with an answer; `expected` is what is right."""
    first, begin = PROMPTS[1], continued(model, PROMPTS[1])
    again = (*first, *begin, 5, 6, 7)
    rounds = (Round((Ask(first),)), Round((Ask(PROMPTS[3]), Ask(again, max_tokens=7))))
    told = {"index": 1, "expected": continued(model, again, 7), "got": (), "margin": 0.1, "logprob": None}
    told |= {"most_cached": None, "limit": 1e-3, "problem": 'a "wrong" token.'} | fields
    return Case("transformers", "5", "lfm2", settings, "repeat", rounds=rounds, **told)


def run_script(case, folder, tmp_path, monkeypatch, capsys):
    """Exit code, and what it prints."""
    text = transformers.script(case)
    assert len(text.splitlines()) <= 36
    path = tmp_path / "script.py"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", [str(path), folder])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path), run_name="__main__")
    return int(left.value.code), capsys.readouterr().out


def test_the_script_of_a_known_bug_ends_with_1(hybrid, tmp_path, monkeypatch, capsys):
    """Chunks compute what a kept cache holds a second time."""
    folder, model = hybrid
    case = second_turn(model, {"prefix": "kept", "chunk": "17"})
    assert len(transformers.script(case).splitlines()) <= 30
    code, out = run_script(case, folder, tmp_path, monkeypatch, capsys)
    assert code == 1 and f"expected {list(case.expected)}" in out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix": "kept"},
        {"prefix": "kept", "cache": "static"},
        {"batch": "left", "cache": "static"},
        {"batch": "continuous"},
        {"spec": "draft2"},
        {"spec": "lookup3", "chunk": "17"},
    ],
    ids=lambda settings: "-".join(settings.values()) or "plain",
)
def test_the_script_of_what_is_right_ends_with_0(hybrid, attention, settings, tmp_path, monkeypatch, capsys):
    folder, model = attention if settings.get("batch") == "continuous" else hybrid
    code, out = run_script(second_turn(model, settings), folder, tmp_path, monkeypatch, capsys)
    assert code == 0 and "got" in out


def test_a_script_tells_a_wrong_log_probability_and_too_many_cached_tokens(hybrid, tmp_path, monkeypatch, capsys):
    folder, model = hybrid
    (answer,) = transformers.start(folder, {}).ask([Ask(PROMPTS[0], logprobs=True)])
    fields = {"rounds": (Round((Ask(PROMPTS[0]),)),), "index": 0, "expected": answer.token_ids[:1]}
    right = answer.logprobs[0][answer.token_ids[0]]
    for logprob, expected in ((right, 0), (right + 0.1, 1)):
        case = replace(second_turn(model, {}), logprob=logprob, **fields)
        assert run_script(case, folder, tmp_path, monkeypatch, capsys)[0] == expected
    (searched,) = transformers.start(folder, {"beams": "4"}).ask([Ask(PROMPTS[0])])
    fields["expected"] = searched.token_ids[:3]
    case = replace(second_turn(model, {"beams": "4"}), logprob=searched.logprobs[2][searched.token_ids[2]], **fields)
    assert run_script(case, folder, tmp_path, monkeypatch, capsys)[0] == 0
    for most, expected in ((18, 0), (17, 1)):
        case = second_turn(model, {"prefix": "kept"}, most_cached=most)
        assert run_script(case, folder, tmp_path, monkeypatch, capsys)[0] == expected
    assert transformers.script(second_turn(model, {"cache": "offloaded"})) is None
