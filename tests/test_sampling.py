"""Sampling: the right distribution, and the same draw whatever runs beside a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.models.exact import ExactModel
from hybrid_kv.sampling import SamplingParams, uniform_noise
from tests.draws import sampled


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"stop": ("a", "")}, "empty stop string"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be an integer"),
        ({"top_k": None}, "top_k=None must be an integer"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"seed": 2**63}, "must fit in 64 bits"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"top_p": None}, "top_p=None must be a number"),
        ({"stop": 5}, "stop=5 must be a tuple"),
        ({"stop": (5,)}, r"stop=\(5,\) must be texts"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a tuple"),
        ({"stop_token_ids": "ab"}, "stop_token_ids='ab' must be integers"),
        ({"ignore_eos": None}, "ignore_eos=None must be"),
        ({"cache_salt": None}, "cache_salt=None must be a text"),
    ],
)
def test_impossible_values_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SamplingParams(**options)


def test_one_stop_string_is_not_its_letters() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]


def test_greedy_takes_the_first_of_equal_logits_also_beside_random_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 2)
    assert sampled(logits, [SamplingParams()] * 2, [1, 2], [5, 6]) == [1, 1]
    assert (
        sampled(logits, [SamplingParams(), SamplingParams(temperature=9.0)], [1, 2], [5, 6])[0] == 1
    )


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.8)])
def test_draws_follow_the_softmax(top_k: int, top_p: float) -> None:
    """20,000 draws over positions; the seed is fixed, so the p-value is always the same number."""
    logits, temperature, n = torch.tensor([1.2, 0.3, -0.5, 2.0, 0.9, -1.0]), 0.8, 20_000
    order = logits.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    probabilities = {
        t: float(p)
        for t, p in zip(kept, (logits[kept].double() / temperature).softmax(0), strict=True)
    }
    nucleus, mass = {}, 0.0
    for token, p in probabilities.items():
        if mass < top_p:
            nucleus[token] = p
        mass += p
    total = sum(nucleus.values())
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = torch.tensor(sampled(logits.expand(n, -1), [params] * n, [11] * n, list(range(n))))
    counts = drawn.bincount(minlength=len(logits))
    assert {t for t in range(len(logits)) if counts[t]} == set(nucleus)
    observed = [int(counts[t]) for t in nucleus]
    assert chisquare(observed, [n * p / total for p in nucleus.values()]).pvalue > 1e-3


def test_seeds_and_neighbouring_positions_are_independent() -> None:
    n = 20_000
    params = [SamplingParams(temperature=1.0)] * n
    logits = torch.zeros(n, 4)
    first = torch.tensor(sampled(logits, params, [1] * n, list(range(n))))
    for other in (
        torch.tensor(sampled(logits, params, [2] * n, list(range(n)))),
        torch.tensor(sampled(logits, params, [1 + 2**32] * n, list(range(n)))),
        first.roll(1),
    ):
        pairs = (first * 4 + other).bincount(minlength=16)
        assert chisquare(pairs.tolist()).pvalue > 1e-3


class Softened(ExactModel):
    """The exact model with logits of order one, so that a temperature leaves a choice."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) / 2**29


def run(
    prompts: Sequence[Sequence[int]], seeds: Sequence[int | None], **options: Any
) -> list[RequestOutput]:
    options = {"max_num_seqs": 8, "max_model_len": 64, "block_size": 4, "num_blocks": 200} | options
    llm = LLM(Softened(), device="cpu", **options)
    params = [
        SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=seed) for seed in seeds
    ]
    return llm.generate(prompts, params, progress=False)


def test_a_seeded_request_draws_the_same_alone_with_neighbours_and_preempted() -> None:
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [3, 2, 3, 8]]
    together = run(prompts, range(4))
    for i, prompt in enumerate(prompts):
        assert run([prompt], [i])[0].token_ids == together[i].token_ids
    assert run(prompts[:1], [77])[0].token_ids != together[0].token_ids
    small = run(prompts, range(4), num_blocks=24, max_num_batched_tokens=8)
    assert sum(output.num_preemptions for output in small) > 0
    assert [o.token_ids for o in small] == [o.token_ids for o in together]


def test_no_two_seeds_share_their_noise() -> None:
    seeds = torch.tensor([0, -1, 1, 5, 5 << 32, 1 << 32, 7 * (2**32 + 1), -(2**63)])
    noise = uniform_noise(seeds, torch.zeros(len(seeds), dtype=torch.int64), 64)
    assert len({tuple(row.tolist()) for row in noise}) == len(seeds)
    shifted = uniform_noise(seeds, torch.ones(len(seeds), dtype=torch.int64), 64)
    assert not (noise == shifted).all(1).any()
    # The next position of one seed is not the same position of the next seed.
    later = uniform_noise(torch.arange(50), torch.zeros(50, dtype=torch.int64), 8)
    moved = uniform_noise(torch.zeros(50, dtype=torch.int64), torch.arange(50), 8)
    assert len({tuple(row.tolist()) for row in (*later, *moved[1:])}) == 99


def test_tiny_temperatures_are_greedy() -> None:
    logits = torch.randn(4, 50)
    for temperature in (1e-310, 1e-6):
        params = [SamplingParams(temperature=temperature, top_p=0.9, seed=1)] * 4
        assert sampled(logits, params, [1] * 4, [0] * 4) == logits.argmax(-1).tolist()
