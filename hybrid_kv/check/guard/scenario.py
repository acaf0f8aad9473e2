"""Scenarios, their expected answers, and scripted drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.backend import (
    BackendContext,
    FlashAttentionBackend,
    MultipleOf,
    TorchBackend,
    register_backend,
)
from hybrid_kv.cache.modes import MODES
from hybrid_kv.models.exact import (
    ATTENTION,
    STATEFUL,
    ExactConfig,
    ExactModel,
    ExactOracle,
    Residues,
)
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams, uniform_noise

Cell = dict[str, Any]  # a level of each factor of `guard.traffic`

# Drafts: none, those of n-grams, the scripts of `ScriptedProposer`, and those of the block drafter
# that a model has whose layers end with a letter of `BLOCK_HEADS`.
SCRIPTS = (
    "none",
    "ngram",
    "right",
    "wrong",
    "mixed",
    "ragged",
    "lapses",
    "boundary",
    "beyond",
    "rotate",
    "strange",
    "dflash",
)
# Tokens that identical prompts share: with a whole block in common, they would wait for each other.
COMMON = 7


@register_backend
class SmallBlocksFirst(TorchBackend):
    """`(num_blocks, 2, …)` with kernel blocks so small that short requests cross many of them."""

    name = "GUARD_BLOCKS_FIRST"

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, context: BackendContext
    ) -> Sequence[int | MultipleOf]:
        return [2, 4]


@register_backend
class SmallKVFirst(FlashAttentionBackend):
    """`(2, num_blocks, …)` with the same small kernel blocks."""

    name = "GUARD_KV_FIRST"

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, context: BackendContext
    ) -> Sequence[int | MultipleOf]:
        return [2, 4]


@dataclass(frozen=True)
class Disturbance:
    """An event before step `first`, and again every `every` steps (0: once).

    preempt: the youngest running request. abort: a running one, its step in flight. drop: a waiting
    or running one between two steps. evict: the oldest published block. reset: all published
    blocks; before an odd step all running requests are preempted, too. sleep: the engine releases
    its memory, and allocates it again. lose: what the step fetches from another tier is lost
    meanwhile.
    """

    what: Literal["preempt", "abort", "drop", "evict", "reset", "sleep", "lose"]
    first: int
    every: int = 0

    def is_due(self, step: int) -> bool:
        """Return whether it happens before this step."""
        late = step - self.first
        return late == 0 or (late > 0 and self.every > 0 and late % self.every == 0)


@dataclass(frozen=True)
class Scenario:
    """One engine configuration, its requests and what disturbs them."""

    seed: int
    layers: str
    options: dict[str, Any]
    prompts: list[list[int]]
    params: list[SamplingParams]
    waves: tuple[int, ...] = ()  # requests sent together; () is all at once
    drafts: str = "none"  # one of `SCRIPTS`
    events: tuple[Disturbance, ...] = ()
    cell: Cell = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return len(self.prompts)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all prompts."""
        return sum(map(len, self.prompts))

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        drafts = f"{self.drafts} drafts"
        num_requests = f"{self.num_requests} requests"
        return f"scenario {self.seed}: {self.layers}, {options}, {drafts}, {num_requests}"


class AnswerBook:
    """The oracle's answers to requests, whatever else runs with them; each is computed once."""

    def __init__(self, layers: str) -> None:
        self.model = ExactModel(ExactConfig(pattern=layers))
        self._oracle = ExactOracle(self.model)
        self._answers: dict[tuple[Any, ...], list[int]] = {}
        self._hidden: dict[tuple[int, ...], list[list[int]]] = {}

    def without_stop(
        self, prompt: Sequence[int], params: SamplingParams, max_model_len: int
    ) -> list[int]:
        """Return the answer as if no token ended it; nothing for a prompt that cannot run."""
        length = min(params.max_tokens, max_model_len - len(prompt))
        if length <= 0 or not prompt:
            return []
        assert params.seed is not None or params.is_greedy

        def choose(logits: Residues, position: int) -> int:
            return int(np.argmax(logits)) if params.is_greedy else drawn(logits, params, position)

        noise = (
            ()
            if params.is_greedy
            else (params.temperature, params.top_k, params.top_p, params.seed)
        )
        key = (tuple(prompt), noise)
        if len(self._answers.get(key, ())) < length:
            self._answers[key] = self._oracle.generate(prompt, length, choose)
        return self._answers[key][:length]

    def drafts(self, sequence: Sequence[int], num_tokens: int, num_drafts: int) -> list[int]:
        """Return what the model's block drafter guesses after the first tokens of a sequence."""
        key = tuple(sequence)
        if key not in self._hidden:
            self._hidden[key] = []
            self._oracle.generate(sequence, 1, hidden=self._hidden[key])
        before = num_tokens - 1
        return self._oracle.drafts(self._hidden[key][:before], sequence[before], num_drafts)

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probability of every token after those before it.

        Returns:
            [num_tokens - 1, vocab_size] float64.
        """
        rows: list[Residues] = []

        def follow(logits: Residues, position: int) -> int:
            rows.append(logits)
            return tokens[position]

        self._oracle.generate(tokens[:1], len(tokens) - 1, follow)
        return torch.from_numpy(np.array(rows)).double().log_softmax(-1)

    def answer(
        self, prompt: Sequence[int], params: SamplingParams, max_model_len: int
    ) -> list[int]:
        """Return the answer up to its first stop token."""
        tokens = self.without_stop(prompt, params, max_model_len)
        stops = (i + 1 for i, token in enumerate(tokens) if token in params.stop_token_ids)
        return tokens[: next(stops, len(tokens))]


def drawn(logits: Residues, params: SamplingParams, position: int) -> int:
    """Return the token that `params` draw, re-implemented.

    It is one of the `top_k` likeliest, and of these one of the fewest that reach `top_p`.
    """
    scaled = logits / params.temperature
    kept = np.argsort(-scaled, kind="stable")[: params.top_k or None]
    weights = np.exp(scaled[kept] - scaled[kept[0]])
    kept = kept[weights.cumsum() - weights < params.top_p * weights.sum()]
    noise = uniform_noise(torch.tensor([params.seed or 0]), torch.tensor([position]), len(logits))[
        0
    ].numpy()
    return int(kept[np.argmax(scaled[kept] - np.log(-np.log(noise[kept])))])


def num_states(layers: str) -> int:
    """Return how many of a pattern's layers have states."""
    return sum(letter in STATEFUL for letter in layers)


def has_attention(layers: str) -> bool:
    """Return whether any of a pattern's layers is attention."""
    return any(letter in ATTENTION for letter in layers)


answer_book = cache(AnswerBook)  # one per model and process


class ScriptedProposer:
    """Drafts that are right exactly as far as the script says.

    They are a pure function of the request and its known tokens. With K drafts: right: K right
    ones. wrong: K wrong ones. mixed: any number, right up to any place. ragged: all right, their
    number runs through K, 0, 1, K, 2. lapses: K wrong ones and none in turn. boundary: right up to
    a block boundary if K reaches it, wrong after it; beyond: right up to the first token after a
    boundary. rotate: request i has i % (K + 1) right ones and wrong ones after them. strange: K + 1
    right ones, and among them a number that is no token, or token 0.

    Args:
        num_drafts: K.
        sequences: prompt and answer of each request, by its number; stop tokens ignored.
        prompts: how many tokens of them are the prompt.
        block_size: of the boundaries.
    """

    def __init__(
        self,
        script: str,
        num_drafts: int,
        sequences: Sequence[Sequence[int]],
        prompts: Sequence[int],
        block_size: int,
        vocab_size: int,
    ) -> None:
        self.script = script
        self.num_drafts = num_drafts
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._sequences = sequences
        self._prompts = prompts

    def propose(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[npt.NDArray[np.int64]],
        num_tokens: npt.NDArray[np.int64],
    ) -> list[list[int]]:
        """Propose drafts for each request, as `engine.runner.Proposer`.

        The tokens that the engine believes to be the request's are not looked at.
        """
        return [
            self.drafts(int(request.request_id), count)
            for request, count in zip(requests, num_tokens.tolist(), strict=True)
        ]

    def drafts(self, number: int, num_tokens: int) -> list[int]:
        """Return the drafts after the first `num_tokens` tokens of a request."""
        sequence = self._sequences[number]
        count, num_right = self._counts(number, num_tokens)
        # After the end of the answer no draft is right or wrong.
        drafts = [*sequence[num_tokens : num_tokens + count], *range(count)][:count]
        if self.script == "strange":
            size = self.vocab_size
            place = num_tokens * 7919 % 1009 % (count + 1)
            drafts.insert(place, [-1, size, size + 7, 0, 0][(num_tokens + number) % 5])
            return drafts
        return [
            token if j < num_right else (token + 1 + j) % self.vocab_size
            for j, token in enumerate(drafts)
        ]

    def _counts(self, number: int, num_tokens: int) -> tuple[int, int]:
        """Return the number of drafts after so many tokens, and how many of them are right."""
        most = self.num_drafts
        if self.script == "mixed":
            noise = (num_tokens + 61 * self._prompts[number]) * 7919 % 1009
            return noise % (most + 1), noise // 11 % (most + 1)
        if self.script == "ragged":
            position = self._prompts[number] + 1
            lengths = [most, 0, 1, most, min(most, 2)]
            while position < num_tokens:
                position += 1 + lengths[0]
                lengths = lengths[1:] + lengths[:1]
            return lengths[0], most
        if self.script == "lapses":
            return most * ((num_tokens - self._prompts[number]) % 2), 0
        if self.script == "strange":
            return most + 1, most + 1
        # The step starts at the last known token, so it ends on a boundary with this many right.
        to_boundary = -num_tokens % self.block_size
        num_right = {
            "right": most,
            "wrong": 0,
            "boundary": to_boundary,
            "beyond": to_boundary + 1,
            "rotate": number % (most + 1),
        }[self.script]
        return most, num_right


def cache_options(mode: str, num_drafts: int, drafts: str) -> dict[str, Any]:
    """Return the engine options of the levels of three factors."""
    options: dict[str, Any] = {
        "mamba_cache_mode": "none" if mode == "attention" else mode,
        "enable_prefix_caching": mode not in MODES or MODES[mode].keeps_states,
        "num_speculative_tokens": num_drafts,
    }
    if drafts == "ngram":
        options |= {"speculative_method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if drafts == "dflash":
        options["speculative_method"] = "dflash"
    return options
