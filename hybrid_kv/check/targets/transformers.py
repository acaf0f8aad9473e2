"""transformers' own `generate` and its continuous batching, in this process.

It is an engine like any other, not the oracle. Padding on the right is left out: `generate` warns
that it gives other answers, and it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_kv.check.targets.exact import is_exact
from hybrid_kv.check.targets.target import NUM_LIKELIEST, Answer, Ask, Inside, Kind, Known, by_token
from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import first_line
from hybrid_kv.models.random_checkpoint import quiet
from hybrid_kv.models.transformers_cache import cache_argument, cache_of
from hybrid_kv.sampling import token_logprobs

FACTORS = {
    "prefix": ("off", "kept"),  # kept: a caller goes on with the cache that `generate` returned
    "cache": ("dynamic", "static", "offloaded", "offloaded_static"),
    "chunk": ("whole", "17"),  # prefill_chunk_size
    # Drafts of the prompt, or of the same model with a little noise on its weights.
    "spec": ("none", "lookup3", "draft2"),
    "batch": ("one", "left", "continuous"),  # one after another, padded on the left, paged
    "beams": ("1", "4"),  # of the tokens that the search took, each must have its log-probability
}
INSIDE = Inside(
    {factor: levels for factor, levels in FACTORS.items() if factor != "beams"}
    | {"cache": ("dynamic", "static")},
    (
        "cache=static chunk=17",
        "prefix=kept chunk=17",
        "prefix=kept cache=static",
        "batch=left",
        "batch=left cache=static chunk=17",
    ),
    # Drafts are for windows that can be rolled back, continuous batching for attention alone.
    {
        "short_conv": ("spec=lookup3,draft2", "prefix=kept spec=lookup3"),
        "attention": ("batch=continuous chunk=17",),
    },
)
RELEASES = ("5.23.0", "5.24.0")
KNOWN = (
    *(Known(release, "transformers_kept_chunked", ("prefix", "spec")) for release in RELEASES),
    # A kept cache serves what goes on with all of it, and only once.
    *(Known(release, "prefix=kept", ("prefix",), words="cached stayed 0") for release in RELEASES),
)
MAX_MODEL_LEN, EXACT_LONGEST = 2048, 640
NOISE = 0.05  # of a weight's own size: a draft model that is right often, not always
# `generate` moves an offloaded cache by CUDA's streams alone.
REFUSALS = ("ValueError", "NotImplementedError", "AssertionError: Torch not compiled with CUDA")
SEARCH = {"num_beams": 4, "length_penalty": 0.0}
Kept = dict[tuple[int, ...], Any]  # caches by the tokens that they hold


class Transformers:
    """See `targets.target.Target`."""

    name = "transformers"

    def __init__(self, folder: str, settings: Mapping[str, str]) -> None:
        import transformers

        self.version: str = transformers.__version__
        self.settings: Mapping[str, str] = dict(settings)
        self._level = {
            factor: settings.get(factor, levels[0]) for factor, levels in FACTORS.items()
        }
        batch = self._level["batch"]
        if batch != "one" and (self._level["prefix"], self._level["spec"]) != ("off", "none"):
            raise ConfigError(
                f"batch={batch}: caches are kept and drafts are made for one request; use batch=one"
            )
        self._beams = int(self._level["beams"])
        if self._beams > 1 and (batch, self._level["prefix"], self._level["spec"]) != (
            "one",
            "off",
            "none",
        ):
            raise ConfigError(
                f"beams={self._beams}: a search has no drafts, batch or kept cache; leave them out"
            )
        self._model = _load(folder)
        is_exact = hasattr(self._model, "echo")
        self.longest = EXACT_LONGEST if is_exact else MAX_MODEL_LEN
        self._drafting: dict[str, Any] = {}
        if self._level["spec"] == "lookup3":
            self._drafting = {"prompt_lookup_num_tokens": 3}
        elif self._level["spec"] == "draft2":
            draft = _noisy(_load(folder))
            draft.generation_config.num_assistant_tokens = 2
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            self._drafting = {"assistant_model": draft}
        self._kept: Kept = {}
        self._counts: Counter[str] = Counter()
        further = (
            ["batch"]
            if batch != "one"
            else ["logprobs"]
            if self._beams > 1
            else ["logprobs", "seed", "n"]
        )
        self.can = frozenset({"cached", "reset", *further}) - ({"logprobs"} if is_exact else set())
        self._ask_once()

    def _ask_once(self) -> None:
        """Raise the refusals of a setting, which come with the first request."""
        (answer,) = self.ask([Ask((1, 2, 3, 4), max_tokens=2)])
        self._kept, self._counts = {}, Counter()
        if answer.error.startswith(REFUSALS):
            raise ConfigError(f"{self.name}: {answer.error}")

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        """See `Target.ask`; a batch is complete before the next one starts."""
        together = {"one": self._one, "left": self._padded, "continuous": self._continuous}[
            self._level["batch"]
        ]
        answers: dict[int, Answer] = {}
        for ready in _in_turns(requests, self._level["batch"] == "one"):
            try:
                with quiet():
                    found = together([requests[i] for i in ready])
            except Exception as error:
                found = [Answer((), error=f"{type(error).__name__}: {first_line(error)}")] * len(
                    ready
                )
            answers |= zip(ready, found, strict=True)
        return [answers[i] for i in range(len(requests))]

    def _one(self, requests: Sequence[Ask]) -> list[Answer]:
        (ask,) = requests
        cache, num_cached = self._take(ask.prompt)
        if ask.seed is not None:
            torch.manual_seed(ask.seed)
        prompts = torch.tensor([ask.prompt])
        with self._counted_drafts():
            done = self._generate(
                prompts, torch.ones_like(prompts), ask, cache=cache, **self._drafting
            )
        rows = [tuple(row) for row in done.sequences[:, len(ask.prompt) :].tolist()]
        if self._level["prefix"] == "kept" and ask.n == 1:
            self._kept[(*ask.prompt, *rows[0][:-1])] = cache_of(done)
        self._counts["hits"] += num_cached
        if self._beams > 1:
            # At each step the row of the beam that the answer then went on from.
            logits = [
                step[[beam]]
                for step, beam in zip(done.logits, done.beam_indices[0].tolist(), strict=False)
            ]
            return [Answer(rows[0], num_cached, _logprobs(rows[0], logits), is_greedy=False)]
        return [Answer(rows[0], num_cached, _logprobs(rows[0], done.logits or ()), tuple(rows[1:]))]

    def _padded(self, requests: Sequence[Ask]) -> list[Answer]:
        longest = max(len(ask.prompt) for ask in requests)
        rows = [[0] * (longest - len(ask.prompt)) + list(ask.prompt) for ask in requests]
        mask = [[0] * (longest - len(ask.prompt)) + [1] * len(ask.prompt) for ask in requests]
        most = max(requests, key=lambda ask: ask.max_tokens)
        done = self._generate(torch.tensor(rows), torch.tensor(mask), most)
        new = done.sequences[:, longest:].tolist()
        return [
            Answer(tuple(row[: ask.max_tokens]), 0) for ask, row in zip(requests, new, strict=True)
        ]

    def _continuous(self, requests: Sequence[Ask]) -> list[Answer]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        done = self._model.generate_batch(
            [list(ask.prompt) for ask in requests],
            GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=max(ask.max_tokens for ask in requests),
                do_sample=False,
                eos_token_id=-1,
            ),
            ContinuousBatchingConfig(
                page_size=16, num_blocks=256, max_batch_tokens=self._chunk or 512
            ),
        )
        outputs = list(done.values())
        return [
            Answer(tuple(one.generated_tokens[: ask.max_tokens]), error=one.error or "")
            for ask, one in zip(requests, outputs, strict=True)
        ]

    @property
    def _chunk(self) -> int | None:
        return None if self._level["chunk"] == "whole" else int(self._level["chunk"])

    def _generate(self, prompts: torch.Tensor, mask: torch.Tensor, ask: Ask, **extra: Any) -> Any:
        from transformers import GenerationConfig

        sampled = {
            "do_sample": True,
            "temperature": ask.temperature,
            "num_return_sequences": ask.n,
            "top_k": 0,
        }
        own = self._level["cache"] == "dynamic" or extra.get("cache") is not None
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=ask.max_tokens,
            pad_token_id=0,
            prefill_chunk_size=self._chunk,
            cache_implementation=None if own else self._level["cache"],
            return_dict_in_generate=True,
            output_logits=ask.logprobs or self._beams > 1,
            **(SEARCH if self._beams > 1 else {}),
            **(sampled if ask.temperature else {"do_sample": False}),
        )
        if (cache := extra.pop("cache", None)) is not None:
            extra[cache_argument(self._model.forward)] = cache
        return self._model.generate(prompts, attention_mask=mask, generation_config=config, **extra)

    def _take(self, prompt: tuple[int, ...]) -> tuple[Any, int]:
        """Return the cache that holds most of a prompt, without its last token, and its length.

        It can be continued once.
        """
        held = [
            tokens
            for tokens in self._kept
            if len(tokens) < len(prompt) and tokens == prompt[: len(tokens)]
        ]
        if held:
            tokens = max(held, key=len)
            return self._kept.pop(tokens), len(tokens)
        if self._level["prefix"] == "kept" and "static" in self._level["cache"]:
            # The cache of one call is as long as that call; who continues brings a longer one.
            from transformers import StaticCache

            offloading = self._level["cache"].startswith("offloaded")
            return StaticCache(
                self._model.config, max_cache_len=MAX_MODEL_LEN, offloading=offloading
            ), 0
        return None, 0

    @contextmanager
    def _counted_drafts(self) -> Iterator[None]:
        """Count what candidate generators propose, and how much of it is accepted."""
        made: Callable[..., Any] = self._model._get_candidate_generator

        def counted(*args: Any, **kwargs: Any) -> Any:
            generator = made(*args, **kwargs)
            propose, learn = generator.get_candidates, generator.update_candidate_strategy

            def get_candidates(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                candidates, logits = propose(input_ids, *args, **kwargs)
                self._counts["drafts"] += candidates.shape[1] - input_ids.shape[1]
                return candidates, logits

            def update(input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
                self._counts["accepted"] += int(num_matches)
                learn(input_ids, scores, num_matches)

            generator.get_candidates, generator.update_candidate_strategy = get_candidates, update
            return generator

        self._model._get_candidate_generator = counted
        try:
            yield
        finally:
            del self._model._get_candidate_generator

    def counters(self) -> Mapping[str, float]:
        """See `Target.counters`."""
        return {counter: float(self._counts[counter]) for counter in ("hits", "drafts", "accepted")}

    def reset(self) -> None:
        """See `Target.reset`, and `Target.close`."""
        self._kept = {}

    close = reset


def _in_turns(requests: Sequence[Ask], one_by_one: bool) -> list[list[int]]:
    """Return the turns of an engine that takes no request before all that run are complete.

    Each is a list of requests of the round that are answered together.

    Args:
        one_by_one: it never answers several together.
    """
    waiting, turns = list(range(len(requests))), list[list[int]]()
    while waiting:
        complete = len(requests) - len(waiting)
        ready = [i for i in waiting if requests[i].after <= complete] or waiting[:1]
        turns.append(ready[:1] if one_by_one else ready)
        waiting = [i for i in waiting if i not in turns[-1]]
    return turns


def _load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            if is_exact(folder):
                from hybrid_kv.check.targets.transformers_exact import ExactForCausalLM

                model: Any = ExactForCausalLM(folder).eval()  # type: ignore[no-untyped-call]
            else:
                load = AutoModelForCausalLM.from_pretrained
                model = load(folder, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"transformers does not load {folder}: {first_line(error)}") from None
    model.generation_config.eos_token_id = None  # answers are as long as they may be
    return model


def _noisy(model: Any) -> Any:
    """Return the model with its weights a little off; an exact model draws half as often."""
    if hasattr(model, "echo"):
        model.echo *= 2
        return model
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                torch.randn(weight.shape, generator=g), alpha=NOISE * float(weight.abs().mean())
            )
    return model


def _logprobs(
    tokens: Sequence[int], logits: Sequence[torch.Tensor]
) -> tuple[Mapping[int, float], ...]:
    rows = (
        token_logprobs(row, [token], NUM_LIKELIEST)[0]
        for token, row in zip(tokens, logits, strict=False)
    )
    return by_token(tokens, rows)


KIND = Kind(
    "transformers", FACTORS, Transformers, inside=INSIDE, known=KNOWN, apart=("batch", "beams")
)
