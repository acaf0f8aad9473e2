"""Log-probabilities of the same tokens, with and without a hit of the prefix cache.

Each prompt is a second turn: a question with its answer, and the question again. It is answered
twice, *cold*, where nothing of it is cached, and *warm*, where the first turn is. The tokens of
both answers are then forced: the engine scores prompt and answer as one prompt, which it computes
without its cache. How far decode and scoring are apart in cold answers is the noise of kernels and
batches, measured in the same run; warm answers may not be further apart.

The divergence of a token is exp(d) - 1 - d, d the log-probability when scored minus that when
generated: an estimate of the KL divergence that is never negative (J. Schulman, Approximating KL
Divergence, 2020), the one of SGLang's tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_kv.check.ci import Verdict
from hybrid_kv.check.guard_model import embedded
from hybrid_kv.check.targets.ours import Ours
from hybrid_kv.check.targets.target import Answer, Ask, Target, TargetError
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.measure.accuracy.acceptance import PASSED
from hybrid_kv.measure.accuracy.target_model import start_target
from hybrid_kv.measure.accuracy.tasks import prompts as task_prompts
from hybrid_kv.measure.results import Row
from hybrid_kv.models.loader import load_tokenizer

PROMPTS = 32
MAX_TOKENS = 64
MIN_PROMPTS = (
    8  # fewer cannot show a difference: half to the power of their number is the smallest p
)
ALPHA = 0.01
# A hit may cut a prompt's chunks elsewhere, which is no error; errors are 7 to 300 times the noise
MAX_RATIO = 2.0
ROUNDING = 1e-12  # nats: what float64 leaves of a log-probability
# KL per token that float32 leaves at most: healthy engines 1e-12, where chunks end elsewhere more
# than that; what a broken cache adds begins at 1e-4
FLOAT32_NOISE = 1e-10
# Nats below the likeliest token; greedy decoding writes no such token, whatever the rounding
UNLIKELY = 1.0
MAX_UNLIKELY = 0.001
NEEDED = {
    "cached": "says how much it cached",
    "logprobs": "gives log-probabilities",
    "score": "scores a prompt",
}


@dataclass(frozen=True)
class Passage:
    """An answer and its scoring.

    `kl` is the mean over its tokens; `num_unlikely` counts tokens that are no greedy choice.
    """

    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    kl: float
    num_unlikely: int


@dataclass(frozen=True)
class Divergence:
    """Cold and warm answers to the same prompts, in order.

    `max_kl` is an absolute limit, or None.
    """

    task: str
    params: Mapping[str, Any]
    cold: tuple[Passage, ...]
    warm: tuple[Passage, ...]
    max_kl: float | None = None

    @property
    def kl(self) -> float:
        """Per token, of warm answers."""
        return _mean_kl(self.warm)

    @property
    def noise(self) -> float:
        """Per token, of cold answers."""
        return _mean_kl(self.cold)

    @property
    def hit_rate(self) -> float:
        """Share of the warm prompts' tokens that came from the cache."""
        return sum(passage.num_cached_tokens for passage in self.warm) / sum(
            passage.num_prompt_tokens for passage in self.warm
        )

    @property
    def num_tokens(self) -> int:
        """Forced tokens of warm answers."""
        return sum(passage.num_tokens for passage in self.warm)

    @property
    def unlikely_share(self) -> float:
        """Share of all tokens that are more than `UNLIKELY` below the likeliest."""
        every = [*self.cold, *self.warm]
        return sum(passage.num_unlikely for passage in every) / sum(
            passage.num_tokens for passage in every
        )

    @cached_property
    def p(self) -> float:
        """One-sided chance of such a distance if a prompt's two answers swap at random.

        Exact up to 13 prompts.
        """
        from scipy.stats import permutation_test

        pairs = [[passage.kl for passage in run] for run in (self.warm, self.cold)]
        if pairs[0] == pairs[1]:
            return 1.0
        result = permutation_test(
            pairs,
            _difference,
            permutation_type="samples",
            alternative="greater",
            random_state=0,
            vectorized=True,
        )
        return float(result.pvalue)

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the divergence and on the tokens."""
        return [self._kl_verdict(), self._token_verdict()]

    def _kl_verdict(self) -> Verdict:
        name = "cached log-probabilities"
        figures = (
            f"KL {self.kl:.3g} per token from the cache, {self.noise:.3g} without it, p = "
            f"{self.p:.2g}"
        )
        if not any(passage.num_cached_tokens for passage in self.warm):
            return Verdict(
                name,
                "void",
                "no token came from the prefix cache, so nothing was compared; is it on?",
            )
        read = sum(passage.num_cached_tokens for passage in self.cold)
        if read:
            return Verdict(
                name, "void", f"answers that should be cold read {read} tokens from the cache"
            )
        if self.max_kl is not None and self.kl > self.max_kl:
            return Verdict(name, "failed", f"{figures}; the limit is {self.max_kl:g}")
        if self.p <= ALPHA and self.kl > MAX_RATIO * max(self.noise, FLOAT32_NOISE):
            return Verdict(name, "failed", f"{figures}: the cache changes what the model says")
        return Verdict(name, "ok", figures)

    def _token_verdict(self) -> Verdict:
        figures = (
            f"{self.unlikely_share:.2%} of the tokens are {UNLIKELY:g} nat or more below the "
            "likeliest"
        )
        word = "failed" if self.unlikely_share > MAX_UNLIKELY else "ok"
        why = f"{figures}: greedy decoding did not choose them" if word == "failed" else figures
        return Verdict("greedy tokens", word, why)  # type: ignore[arg-type]

    def rows(self) -> list[Row]:
        """Return the run as rows of the results file."""
        kl_verdict, token_verdict = (PASSED[verdict.word] for verdict in self.verdicts)
        shared: dict[str, Any] = {"params": self.params, "n": self.num_tokens}
        return [
            Row(
                "accuracy",
                self.task,
                "cached_kl",
                self.kl,
                better="lower",
                verdict=kl_verdict,
                **shared,
            ),
            Row("accuracy", self.task, "uncached_kl", self.noise, **shared),
            Row(
                "accuracy",
                self.task,
                "unlikely_tokens",
                self.unlikely_share,
                "share",
                better="lower",
                verdict=token_verdict,
                **shared,
            ),
        ]

    def summary(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "task": self.task,
            "params": dict(self.params),
            "prompts": len(self.warm),
            "tokens": self.num_tokens,
            "cached_kl": self.kl,
            "uncached_kl": self.noise,
            "p": self.p,
            "p_method": "one-sided permutation test, warm and cold answers of a prompt swapped",
            "prefix_hit_rate": self.hit_rate,
            "unlikely_tokens": self.unlikely_share,
            "verdicts": {
                verdict.name: {"word": verdict.word, "message": verdict.message}
                for verdict in self.verdicts
            },
        }

    def print(self) -> None:
        """Print the lines for people."""
        print(
            f"{len(self.warm)} prompts, {self.num_tokens:,} forced tokens; "
            f"{self.hit_rate:.1%} of the warm prompts' tokens came from the cache"
        )
        for verdict in self.verdicts:
            print(f"{verdict.name}: {verdict.word}: {verdict.message}")


def evaluate(
    model: str | None = None,
    target: str | None = None,
    task: str = "gsm8k_synth",
    seed: int = 0,
    num_prompts: int = PROMPTS,
    gsm8k_dir: str | None = None,
    max_tokens: int = MAX_TOKENS,
    max_kl: float | None = None,
    **engine_options: Any,
) -> Divergence:
    """Compare an engine's cached answers to questions of a task with its uncached ones.

    Args:
        model, target, task, seed, gsm8k_dir, engine_options: as for `run.evaluate`.

    Raises:
        ConfigError, TargetError: as `measure`; the task, the model or an option cannot be used.
    """
    texts = task_prompts(task, seed, num_prompts, gsm8k_dir)
    folder = embedded(model)
    tokenizer = load_tokenizer(folder)
    if target is None:
        engine_options = {"mamba_cache_mode": "align"} | engine_options  # else nothing is cached
    params = {
        "model": Path(folder).name,
        "task": task,
        "seed": seed,
        "prompts": num_prompts,
        "max_tokens": max_tokens,
        **engine_options,
    }
    if target is None:
        engine: Target = Ours(str(folder), {}, LLM(folder, **engine_options))
    elif engine_options:
        raise ConfigError(
            f"target {target}: {next(iter(engine_options))} is for this engine alone; leave it out"
        )
    else:
        engine = start_target(target, folder, caches=True)
        params["target"] = f"{engine.name} {engine.version}"
    try:
        prompts = [tokenizer.encode(text) for text in texts]
        return measure(engine, prompts, task, params, max_tokens, max_kl)
    finally:
        engine.close()


def measure(
    target: Target,
    prompts: Sequence[Sequence[int]],
    task: str,
    params: Mapping[str, Any],
    max_tokens: int = MAX_TOKENS,
    max_kl: float | None = None,
) -> Divergence:
    """Compare an engine's cached answers with its uncached ones.

    Args:
        prompts: token ids of the first turns.
        max_tokens: of each answer.

    Raises:
        ConfigError: the engine cannot show what is needed, or there are too few prompts that it can
            take.
        TargetError: it failed at a request.
    """
    lacks = [text for name, text in NEEDED.items() if name not in target.can]
    if not {"salt", "reset"} & target.can:
        lacks.append("keeps a request from the cache by a salt or a reset")
    if lacks:
        raise ConfigError(
            f"target {target.name}: there is no sign that it {lacks[0]}, which this comparison "
            "needs"
        )
    fitting = [tuple(turn) for turn in prompts if 2 * (len(turn) + max_tokens) <= target.longest]
    if len(fitting) < MIN_PROMPTS:
        raise ConfigError(
            f"{len(fitting)} of {len(prompts)} prompts fit twice, with their answers, into the "
            f"{target.longest} tokens of a request; {MIN_PROMPTS} are needed: more prompts, "
            "shorter answers or a larger max_model_len"
        )
    first = _answers(target, [Ask(turn, max_tokens) for turn in fitting])
    turns = [(*turn, *answer.token_ids, *turn) for turn, answer in zip(fitting, first, strict=True)]
    cold = _cold(target, turns, max_tokens)
    _answers(target, [Ask(turn, max_tokens) for turn in fitting])  # a reset may have forgotten them
    warm = _answers(target, [Ask(turn, max_tokens, logprobs=True) for turn in turns])
    return Divergence(
        task, params, _passages(target, turns, cold), _passages(target, turns, warm), max_kl
    )


def _cold(target: Target, turns: Sequence[tuple[int, ...]], max_tokens: int) -> list[Answer]:
    if "salt" in target.can:
        salted = [
            Ask(turn, max_tokens, logprobs=True, salt=f"cold {i}") for i, turn in enumerate(turns)
        ]
        return _answers(target, salted)
    answers = []
    for turn in turns:
        target.reset()
        answers += _answers(target, [Ask(turn, max_tokens, logprobs=True)])
    return answers


def _answers(target: Target, asks: Sequence[Ask]) -> list[Answer]:
    answers = target.ask(asks)
    refused = [answer.error for answer in answers if answer.error]
    if refused:
        raise TargetError(
            f"{target.name} failed at {len(refused)} of {len(asks)} requests; the first: "
            f"{refused[0]}"
        )
    return answers


def _passages(
    target: Target, turns: Sequence[tuple[int, ...]], answers: Sequence[Answer]
) -> tuple[Passage, ...]:
    texts = [(*turn, *answer.token_ids) for turn, answer in zip(turns, answers, strict=True)]
    scored = _answers(target, [Ask(text, 1, score=True) for text in texts])
    return tuple(
        _passage(turn, answer, score.prompt_logprobs[len(turn) - 1 :])
        for turn, answer, score in zip(turns, answers, scored, strict=True)
    )


def _passage(turn: Sequence[int], answer: Answer, scores: Sequence[Mapping[int, float]]) -> Passage:
    tokens = answer.token_ids
    if not len(tokens) == len(scores) == len(answer.logprobs) > 0:
        raise TargetError(
            f"{len(tokens)} tokens came with {len(answer.logprobs)} log-probabilities and "
            f"{len(scores)} when scored"
        )
    scored = np.array([row[token] for token, row in zip(tokens, scores, strict=True)])
    generated = np.array([row[token] for token, row in zip(tokens, answer.logprobs, strict=True)])
    likeliest = np.array([max(row.values()) for row in scores])
    apart = scored - generated
    apart[np.abs(apart) < ROUNDING] = 0.0
    return Passage(
        num_tokens=len(tokens),
        num_prompt_tokens=len(turn),
        num_cached_tokens=answer.cached_tokens or 0,
        kl=float((np.expm1(apart) - apart).mean()),
        num_unlikely=int((likeliest - scored >= UNLIKELY).sum()),
    )


def _mean_kl(passages: Sequence[Passage]) -> float:
    total = sum(passage.kl * passage.num_tokens for passage in passages)
    return total / sum(passage.num_tokens for passage in passages)


def _difference(warm: npt.NDArray[np.float64], cold: npt.NDArray[np.float64], axis: int) -> Any:
    return np.mean(warm - cold, axis=axis)
