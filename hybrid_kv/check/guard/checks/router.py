"""A router's predictions of an engine's prefix cache, from its events alone, against its hits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hybrid_kv.check.guard.play import play_seeds
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.scenario import (
    SmallBlocksFirst,
    SmallKVFirst,
    answer_book,
    cache_options,
    has_attention,
    num_states,
)
from hybrid_kv.engine.events import CacheEvents, EventLog, KnownCache
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig
from hybrid_kv.sampling import SamplingParams

LAYERS = ("M*", "*M", "M*M", "M", "*", "M~*", "=*")
MAX_MODEL_LEN = 96
ROUNDS = 14
SEEN = (
    "hits",
    "evictions",
    "resets",
    "missed events",
    "snapshots",
    "other salts",
    "hits of several blocks",
    "again",
)


class Routed:
    """An engine in a pool that is too small for all requests, and a router that gets its KV events.

    Attributes:
        seen: how often each of `SEEN` happened.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        layers = rng.choice(LAYERS)
        mode = rng.choice(["align", "all"]) if num_states(layers) else "attention"
        num_drafts = rng.choice([0, 2])
        drafts = "ngram" if num_drafts else "none"
        setting: dict[str, Any] = cache_options(mode, num_drafts, drafts)
        setting |= {
            "attention_backend": rng.choice([SmallBlocksFirst.name, SmallKVFirst.name]),
            "max_num_batched_tokens": rng.choice([12, 64]),
            "max_num_seqs": rng.choice([1, 4]),
            # 80 tokens in three groups, with states for two drafts, take 34.
            "num_blocks": rng.choice([36, 44]),
        }
        block_size = "block_size" if has_attention(layers) else "mamba_block_size"
        setting[block_size] = rng.choice([8, 12, 16])
        self.name = f"seed {seed}, {layers}: {setting}"
        self.llm = LLM(
            answer_book(layers).model, device="cpu", max_model_len=MAX_MODEL_LEN, **setting
        )
        self.log = EventLog(self.llm)
        self.known = KnownCache(self.log.groups, self.log.hit_granularity)
        self.is_whole = True
        self.shared = [[rng.randrange(ExactConfig.vocab_size) for _ in range(60)] for _ in range(2)]
        self.heard: list[CacheEvents] = []
        self.seen: Counter[str] = Counter()

    def problems(self) -> Iterator[str]:
        """Yield what is wrong; nothing if all is well."""
        rng = self.rng
        llm = self.llm
        for _ in range(ROUNDS):
            if rng.random() < 0.4:
                self._generate([self._prompt() for _ in range(3)])
            if rng.random() < 0.1:
                llm.reset_prefix_cache()
                self.seen["resets"] += 1
            self._hear()
            published = set(llm.manager.pool.published_keys())
            if self.known.keys - published or (self.is_whole and self.known.keys != published):
                num_wrong = len(self.known.keys ^ published)
                yield f"{num_wrong} of {len(published)} blocks are known wrongly"
            prompt = self._prompt()
            salt = rng.choice(["", "", "", "other"])
            self.seen["predictions"] += 1
            predicted = self.known.predict(prompt, salt)
            (restored,) = self._generate([prompt], salt)
            if predicted > restored or (self.is_whole and predicted != restored):
                yield f"{predicted} of {len(prompt)} tokens are predicted, {restored} restored"
            self.seen["hits"] += predicted > 0
            self.seen["hits of several blocks"] += predicted > self.log.hit_granularity
            self.seen["other salts"] += bool(salt)
        self.seen["evictions"] += llm.manager.pool.num_evictions

    def _hear(self) -> None:
        if self.rng.random() < 0.15:
            self.log.take()
            self.is_whole = False
            self.seen["missed events"] += 1
        if not self.is_whole and self.rng.random() < 0.5:
            self.heard.append(self.log.snapshot())
            self.is_whole = True
            self.seen["snapshots"] += 1
        else:
            self.heard.append(self.log.take())
        self.known.apply(self.heard[-1])
        if self.rng.random() < 0.3:
            # The last events or older ones come once more: they say nothing new.
            self.known.apply(self.rng.choice(self.heard))
            self.seen["again"] += 1

    def _prompt(self) -> list[int]:
        unshared = [
            self.rng.randrange(ExactConfig.vocab_size) for _ in range(self.rng.choice([1, 5, 12]))
        ]
        return (
            self.rng.choice(self.shared)[: self.rng.choice([0, 8, 17, 24, 31, 48, 60])] + unshared
        )

    def _generate(self, prompts: list[list[int]], salt: str = "") -> list[int]:
        """Return the number of cached tokens of each prompt."""
        params = SamplingParams(max_tokens=self.rng.choice([1, 9]), cache_salt=salt)
        outputs = self.llm.generate(prompts, params, progress=False)
        assert not any(output.error for output in outputs), [output.error for output in outputs]
        return [output.cached_tokens for output in outputs]


@check("router", quick=8, full=32, long=160, seconds=0.12, place=38)
def check_router(run: Run) -> Iterator[CheckResult]:
    """Check that every prompt finds what was predicted, or at least that after missed events."""
    yield play_seeds(run, Routed, SEEN, "prefix hits predicted wrongly", "predictions")
