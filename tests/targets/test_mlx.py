"""mlx-lm in its own environment: its caches, its batches, its drafts, and what it refuses."""

import random
import subprocess

import pytest
import torch

from hybrid_kv.config import ConfigError
from hybrid_kv.models.random_checkpoint import fill, quiet, write_checkpoint
from hybrid_kv.probes.registry import Round
from hybrid_kv.probes.reproducer import Case
from hybrid_kv.targets import mlx
from hybrid_kv.targets.remote import python_of
from hybrid_kv.targets.target import Ask
from hybrid_kv.targets.workers.mlx import Kept, as_on_the_hub

RNG = random.Random(0)
PROMPTS = [tuple(RNG.randrange(1, 101) for _ in range(length)) for length in (30, 7, 1, 18)]


@pytest.fixture(scope="module", autouse=True)
def installed():
    try:
        python_of("mlx", "mlx_lm")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lfm2")
    return folder, write_checkpoint("lfm2", folder)


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    """A model whose caches can be trimmed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, dtype="float32")
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
    model = LlamaForCausalLM(config).eval()
    fill(model, seed=0)
    with quiet():
        model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def started(request):
    def start(folder, **settings):
        target = mlx.start(str(folder), settings)
        request.addfinalizer(target.close)
        return target

    return start


def continued(model, prompt, num_new=12):
    """Greedy, the whole text anew for each token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_new):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.fixture(scope="module")
def turns(hybrid):
    """Requests of two turns and their answers."""
    known = {prompt: continued(hybrid[1], prompt) for prompt in PROMPTS}
    second = [(*prompt, *answer, 5, 6, 7) for prompt, answer in known.items()]
    return PROMPTS, second, known | {prompt: continued(hybrid[1], prompt) for prompt in second}


@pytest.mark.parametrize(
    ("prefix", "batch"),
    [("off", "together"), ("kept", "one"), ("saved", "together"), ("lru", "one"), ("lru", "together")],
)
def test_a_second_turn_goes_on_with_the_cache_of_the_first(hybrid, started, turns, prefix, batch):
    target = started(hybrid[0], prefix=prefix, batch=batch, chunk="17")
    first, second, expected = turns
    for prompts in (first, second):
        answers = target.ask([Ask(prompt) for prompt in prompts])
        assert [answer.token_ids for answer in answers] == [expected[prompt] for prompt in prompts]
    assert all((answer.cached_tokens > 0) == (prefix != "off") for answer in answers)
    assert (target.counters()["hits"] > 0) == (prefix != "off")
    target.reset()
    assert target.ask([Ask(second[0])])[0].cached_tokens == 0


@pytest.fixture(scope="module")
def plain(hybrid):
    target = mlx.start(str(hybrid[0]), {})
    yield target
    target.close()


def test_log_probabilities_and_scores_are_those_of_transformers(hybrid, plain):
    model, target = hybrid[1], plain
    (answer,) = target.ask([Ask(PROMPTS[0], logprobs=True)])
    text = (*PROMPTS[0], *answer.token_ids)
    with torch.inference_mode():
        expected = model(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
    for position, (token, given) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True), len(PROMPTS[0]) - 1):
        assert len(given) >= 5
        assert given[token] == pytest.approx(float(expected[position, token]), abs=1e-4)
    scores = [float(expected[i, token]) for i, token in enumerate(text[1:])]
    assert target.score(text) == pytest.approx(scores, abs=1e-3)


@pytest.mark.parametrize("batch", ["one", "together"])
def test_an_aborted_request_ends_and_leaves_the_others_alone(hybrid, started, turns, batch):
    target = started(hybrid[0], prefix="lru", batch=batch)
    prompts, _, expected = turns
    asks = [Ask(prompts[0], abort_after=3), Ask(prompts[1]), Ask(prompts[0], after=2)]
    aborted, other, again = target.ask(asks)
    assert aborted.token_ids == expected[prompts[0]][:3]
    assert other.token_ids == expected[prompts[1]]
    assert again.token_ids == expected[prompts[0]] or again.error


def test_drafts_are_accepted_and_rejected(attention, started):
    folder, model = attention
    target = started(folder, spec="draft2", prefix="kept")
    for prompt in PROMPTS:
        assert target.ask([Ask(prompt)])[0].token_ids == continued(model, prompt)
    counters = target.counters()
    assert 0 < counters["accepted"] < counters["drafts"]


def test_what_mlx_lm_refuses_is_one_line(hybrid, started, tmp_path):
    with pytest.raises(ConfigError, match="can be trimmed, not with ArraysCache, KVCache"):
        started(hybrid[0], spec="draft2")
    write_checkpoint("zamba2", tmp_path)
    with pytest.raises(ConfigError, match="Model type zamba2 not supported"):
        started(tmp_path)


def test_a_seed_repeats_a_draw(plain):
    answers = plain.ask([Ask(PROMPTS[0], temperature=1.0, seed=seed) for seed in (7, 7, 8)])
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids


def test_a_kept_cache_serves_only_what_begins_with_it():
    kept = Kept()
    kept.give([1, 2, 3], "a")
    assert kept.take([1, 2, 4, 5]) == (None, 0)
    assert kept.take([1, 2, 3]) == (None, 0), "something must be left to compute"
    assert kept.take([1, 2, 3, 4]) == ("a", 3)
    assert kept.take([1, 2, 3, 4]) == (None, 0), "it has been gone on with"


def test_infinity_is_a_number_again():
    limit = [0.0, {"__float__": "Infinity"}]
    config = {"model_type": "mamba2", "expand": 2, "hidden_size": 8, "time_step_limit": limit}
    assert as_on_the_hub(config)["time_step_limit"] == [0.0, float("inf")]


def case_of(settings, rounds, expected=(), **fields):
    told = {"index": 0, "got": (), "margin": 0.1, "logprob": None, "most_cached": None, "limit": 1e-3} | fields
    told |= {"problem": "an error", "expected": expected, "rounds": tuple(Round((Ask(p, n),)) for p, n in rounds)}
    return Case("mlx", "0.32.2", "lfm2", settings, "repeat", **told)


def run_script(case, folder, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(mlx.script(case))
    done = subprocess.run(
        [python_of("mlx", "mlx_lm"), str(path), str(folder)], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_the_script_of_a_known_bug_ends_with_1(hybrid, tmp_path):
    """A prompt that is a cached one leaves nothing to compute."""
    prompt = PROMPTS[1]
    case = case_of({"prefix": "lru", "batch": "together"}, [(prompt, 1), (prompt[:-1], 1)])
    assert len(mlx.script(case).splitlines()) <= 30
    code, out = run_script(case, hybrid[0], tmp_path)
    assert code == 1 and "has an empty prompt" in out


@pytest.mark.parametrize("settings", [{"prefix": "kept"}, {"prefix": "lru", "batch": "together"}])
def test_the_script_of_what_is_right_ends_with_0(hybrid, turns, settings, tmp_path):
    firsts, seconds, right = turns
    rounds = [(firsts[0], 12), (seconds[0], 6)]
    case = case_of(settings, rounds, right[seconds[0]][:6], most_cached=None)
    code, out = run_script(case, hybrid[0], tmp_path)
    assert code == 0 and f"expected {list(case.expected)}" in out
    case = case_of(settings, rounds, (*right[seconds[0]][:5], 0))
    assert run_script(case, hybrid[0], tmp_path)[0] == 1


def test_what_a_script_cannot_play_has_none():
    plain = case_of({}, [(PROMPTS[0], 1)])
    assert mlx.script(plain)
    for settings in ({"spec": "draft2"}, {"prefix": "saved"}):
        assert mlx.script(case_of(settings, [(PROMPTS[0], 1)])) is None
