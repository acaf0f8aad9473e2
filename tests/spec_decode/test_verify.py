"""Verified tokens: the same as without drafts, and distributed as the target says.

The target is a Markov chain over 5 tokens, so that the distribution of the first two tokens is
known exactly. All seeds are fixed: every p-value is always the same number. What the statistics
must notice is injected as wrong
    verifiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chisquare

from hybrid_kv.sampling import SamplingParams, apply_top_k_top_p
from tests.draws import sampled, verified

Verifier = Callable[..., list[list[int]]]

VOCAB, START, FIRST, NUM_SEEDS = 5, 2, 11, 8_000
# [token before, token]
CHAIN = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 0.8
RANDOM = SamplingParams(temperature=0.9)
PARAMS = (
    RANDOM,
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(temperature=1.0, top_p=0.8),
)
DRAFTS = ([0], [1], [2], [3], [4], [3, 0], [1, 1, 2], [4, 2, 0, 1])


def distribution(params: SamplingParams) -> torch.Tensor:
    """[token before, token] float64, by the definition of temperature, top-k and top-p."""
    scaled = CHAIN.double() / params.temperature
    k, p = (
        torch.full((VOCAB,), params.top_k),
        torch.full((VOCAB,), params.top_p, dtype=torch.float64),
    )
    return apply_top_k_top_p(scaled, k, p).softmax(-1)


def logits_of(tokens: list[int] | list[list[int]]) -> torch.Tensor:
    return CHAIN[torch.tensor(tokens)]


def steps(
    verifier: Verifier,
    drafts: list[int],
    params: SamplingParams,
    length: int = 2,
    num_seeds: int = NUM_SEEDS,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return a request's first `length` tokens per seed, and the first step's accepted drafts."""
    tokens = [[] for _ in range(num_seeds)]
    accepted = None
    while rows := [r for r in range(num_seeds) if len(tokens[r]) < length]:
        before = [tokens[r][-1] if tokens[r] else START for r in rows]
        logits = logits_of([[b, *drafts] for b in before]).flatten(0, 1)
        positions = [FIRST + len(tokens[r]) for r in rows]
        gained = verifier(logits, [drafts] * len(rows), [params] * len(rows), rows, positions)
        accepted = accepted or [len(g) - 1 for g in gained]
        for r, new in zip(rows, gained, strict=True):
            tokens[r] += new
    return np.array([t[:length] for t in tokens]), np.array(accepted)


def p_value(observed: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """Chi-square over what can occur; 0 when something occurred that cannot."""
    counts = np.bincount(observed, minlength=len(probabilities))
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    return float(chisquare(counts[possible], probabilities[possible] * len(observed)).pvalue)


def p_values(verifier: Verifier, drafts: list[int], params: SamplingParams) -> tuple[float, float]:
    """Of the first token, and of the first two as a pair."""
    p = distribution(params).numpy()
    tokens, _ = steps(verifier, drafts, params)
    pairs = (p[START][:, None] * p).flatten()
    return p_value(tokens[:, 0], p[START]), p_value(tokens[:, 0] * VOCAB + tokens[:, 1], pairs)


@pytest.mark.parametrize("drafts", [[], *DRAFTS], ids=str)
@pytest.mark.parametrize("params", PARAMS, ids=["temperature", "top_k", "top_p"])
def test_tokens_follow_the_target(params: SamplingParams, drafts: list[int]) -> None:
    assert min(p_values(verified, drafts, params)) > 1e-3


@pytest.mark.parametrize("params", PARAMS, ids=["temperature", "top_k", "top_p"])
def test_a_draft_is_accepted_with_its_probability(params: SamplingParams) -> None:
    p = distribution(params).numpy()
    assert any(p[START] == 0) == (params is not RANDOM)
    for drafts in DRAFTS:
        _, accepted = steps(verified, drafts, params, length=1)
        chain = np.cumprod(
            [p[before, draft] for before, draft in zip([START, *drafts], drafts, strict=False)]
        )
        exactly = np.append(-np.diff(np.append(1.0, chain)), chain[-1])  # j drafts and not j + 1
        assert p_value(accepted, exactly) > 1e-3


def textbook(
    acceptance: Callable[
        [npt.NDArray[np.float64]], npt.NDArray[np.float64 | np.bool_]
    ] = lambda p: p,
    without_draft: bool = True,
) -> Verifier:
    """Sample a draft by rejection as the papers have it, with its own random numbers.

    Or by a wrong variant.
    """

    def verifier(
        logits: torch.Tensor,
        drafts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
    ) -> list[list[int]]:
        rng = np.random.default_rng(positions[0])
        n, draft = len(seeds), torch.tensor(drafts)
        first, bonus = (
            (logits.double() / params[0].temperature).softmax(-1).view(n, 2, VOCAB).unbind(1)
        )
        accepted = rng.random(n) < acceptance(first.gather(1, draft).numpy().ravel())
        residual = first.scatter(1, draft, 0) if without_draft else first

        def draw(p: torch.Tensor) -> list[int]:
            cumulative = (p / p.sum(-1, keepdim=True)).cumsum(-1).numpy()
            return np.minimum((rng.random((n, 1)) > cumulative).sum(-1), VOCAB - 1).tolist()

        rows = zip(accepted, drafts, draw(residual), draw(bonus), strict=True)
        return [[*d, b] if a else [r] for a, d, r, b in rows]

    return verifier


def same_noise(
    logits: torch.Tensor,
    drafts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> list[list[int]]:
    """The noise of a request's first position for all of them."""
    count = 1 + len(drafts[0])
    owner = [r for r in range(len(seeds)) for _ in range(count)]
    own = sampled(
        logits, [params[0]] * len(logits), [seeds[r] for r in owner], [FIRST] * len(logits)
    )
    return [
        own[r * count : r * count + (own[r * count] == drafts[r][0]) + 1] for r in range(len(seeds))
    ]


def keep_the_rest(
    logits: torch.Tensor,
    drafts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> list[list[int]]:
    """Tokens drawn behind a rejected draft are kept."""
    count = 1 + len(drafts[0])
    owner = [r for r in range(len(seeds)) for _ in range(count)]
    at = [positions[r] + j for r in range(len(seeds)) for j in range(count)]
    own = sampled(logits, [params[0]] * len(logits), [seeds[r] for r in owner], at)
    return [own[r * count : (r + 1) * count] for r in range(len(seeds))]


WRONG = {
    "accepts what is likely enough": textbook(lambda p: p > 0.25),
    "accepts too often": textbook(lambda p: 1.2 * p),
    "replaces with the target's whole distribution": textbook(without_draft=False),
    "same noise at every position": same_noise,
    "keeps what was drawn behind a rejection": keep_the_rest,
}


@pytest.mark.parametrize("draft", range(VOCAB))
def test_the_statistics_let_the_textbook_pass(draft: int) -> None:
    assert min(p_values(textbook(), [draft], RANDOM)) > 1e-3


@pytest.mark.parametrize("name", WRONG)
def test_the_statistics_notice_a_wrong_verifier(name: str) -> None:
    assert max(min(p_values(WRONG[name], [draft], RANDOM)) for draft in range(VOCAB)) < 1e-6


def test_same_tokens_as_without_drafts() -> None:
    """Random, greedy and truncated requests in a batch, with 0 to 4 drafts, half of them right."""
    rng = np.random.default_rng(3)
    params = [SamplingParams(), *PARAMS, SamplingParams(temperature=2.0, top_k=4, top_p=0.9)] * 20
    num_rows, length, seeds = len(params), 12, rng.integers(0, 2**40, len(params)).tolist()
    alone = [[START] for _ in params]
    for position in range(length):
        drawn = sampled(
            logits_of([t[-1] for t in alone]), params, seeds, [FIRST + position] * num_rows
        )
        for tokens, token in zip(alone, drawn, strict=True):
            tokens.append(token)
    drafted = [[START] for _ in params]
    gains = set()
    while rows := [r for r in range(num_rows) if len(drafted[r]) <= length]:
        drafts = []
        for r in rows:
            right = alone[r][len(drafted[r]) :][: rng.integers(0, 5)]
            drafts.append([t if rng.random() < 0.8 else int(rng.integers(VOCAB)) for t in right])
        before = [
            token for r, d in zip(rows, drafts, strict=True) for token in (drafted[r][-1], *d)
        ]
        positions = [FIRST + len(drafted[r]) - 1 for r in rows]
        gained = verified(
            logits_of(before),
            drafts,
            [params[r] for r in rows],
            [seeds[r] for r in rows],
            positions,
        )
        for r, d, new in zip(rows, drafts, gained, strict=True):
            gains.add((len(d), len(new)))
            drafted[r] += new
    assert [t[: length + 1] for t in drafted] == alone
    assert gains == {(k, n) for k in range(5) for n in range(1, k + 2)}, "a pattern did not occur"


def greedy(chain: list[list[int]], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """`chain[r]` is what the target wants after each of the row's tokens."""
    logits = torch.nn.functional.one_hot(torch.tensor([t for row in chain for t in row]), 7).float()
    n = len(drafts)
    return verified(logits, drafts, [SamplingParams()] * n, [0] * n, [5] * n)


def test_greedy_by_hand() -> None:
    chain = [[1], [1, 2], [1, 2], [3, 4, 5], [3, 4, 5], [3, 4, 5]]
    drafts = [[], [1], [6], [3, 4], [3, 6], [6, 4]]
    assert greedy(chain, drafts) == [[1], [1, 2], [1], [3, 4, 5], [3, 4], [3]]
    assert greedy([[1, 2]], [(1,)]) == [[1, 2]]


def test_rows_of_logits_must_match() -> None:
    with pytest.raises(ValueError, match="3 rows of logits for 2 tokens"):
        greedy([[1, 2, 3]], [[1]])
