"""Prefix hits of this engine and of another one for the same prompts, in settings that both have.

    python -m bench.peers.hits vllm [--python PYTHON] [--prompts 200] [--seed 0]
    python -m bench.peers.hits vllm --setting "chunk=40 retain=all" --out FILE.csv

Both run the same exact model, whose answers are equal, so that prompts can go on from them. Prompts
are sent one after the other: new, repeated, cut, continued, or with the beginning of an earlier
one. The caches are reset before a pool would evict. Of each prompt, both must take as many tokens
from the cache. The exit code is 1 where one differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness.arguments import ArgumentParser
from hybrid_kv.check.probes.run import text_of
from hybrid_kv.check.targets.exact import CYCLE, ECHO, ExactAnswers, model_of
from hybrid_kv.check.targets.kinds import for_model, kind_of, model_folder
from hybrid_kv.check.targets.ours import Ours
from hybrid_kv.check.targets.target import Ask, Target
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.errors import run_command
from hybrid_kv.measure.results import Row, append_rows
from hybrid_kv.models.exact import PRIME, ExactModel
from hybrid_kv.models.layers import ForwardContext

BLOCK = 16  # tokens, as engines run the exact model
LONGEST = 300  # tokens of a prompt
MOST_NEW = 24  # tokens of an answer
VOCABULARY = 90  # of prompts
ROUND = 25  # prompts until both caches are reset: 1,024 blocks hold them
SETTINGS = (
    *(
        f"retain={retain} chunk={chunk}"
        for retain in ("last", "all", "48")
        for chunk in ("whole", "40")
    ),
    "retain=last chunk=whole match=8",
    "retain=last chunk=40 match=8",
    "retain=all chunk=whole match=4",
)
# Options of this engine for levels of the other one's factors.
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("retain", "last"): {"prefix_cache_retention_interval": 0},
    ("retain", "all"): {},
    ("match", "block"): {},
    ("chunk", "whole"): {"max_num_batched_tokens": 2048},
}


class AnsweringModel(ExactModel):
    """An exact model that answers as it does inside other engines (`ExactAnswers`).

    Its hidden states are [num_tokens, width + 1] int64: the last number is the token itself.
    """

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        hidden = super().__call__(input_ids, positions, context)
        return torch.cat([hidden, input_ids[:, None].to(hidden.dtype)], dim=1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden[:, :-1].contiguous())
        tokens = hidden[:, -1]
        followers = tokens - tokens % CYCLE + (tokens + 1) % CYCLE
        rows = torch.nonzero(logits[:, 0] % ECHO != 0)[:, 0]
        logits[rows, followers[rows]] = PRIME
        return logits


def options_of(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `LLM` for levels by factor.

    Raises:
        ConfigError: this engine has no such level.
    """
    options: dict[str, Any] = {
        "device": "cpu",
        "mamba_cache_mode": "align",
        "enable_prefix_caching": True,
        "block_size": BLOCK,
        "num_blocks": 2**10,
        "max_num_seqs": 8,
        "max_model_len": 640,
    }
    for factor, level in settings.items():
        if (factor, level) in OPTIONS:
            options |= OPTIONS[factor, level]
        elif factor == "retain" and level.isdigit():
            options["prefix_cache_retention_interval"] = int(level)
        elif factor == "match" and level.isdigit():
            options["prefix_match_unit"] = int(level)
        elif factor == "chunk" and level.isdigit():
            options["max_num_batched_tokens"] = int(level)
        else:
            raise ConfigError(f"--setting {factor}={level}: this engine has no such level")
    return options


@dataclass
class Prompts:
    """Prompts, each drawn when the answers to those before it are known."""

    rng: np.random.Generator
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def _new(self, most: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(1, VOCABULARY, self.rng.integers(1, most + 1)).tolist())

    def draw(self) -> tuple[int, ...]:
        """Return the next prompt, of 2 to `LONGEST` tokens."""
        kind = self.rng.choice(["new", "same", "cut", "longer", "shared"])
        if kind == "new" or not self.texts:
            return (1, *self._new(LONGEST - 1))
        text = self.texts[self.rng.integers(len(self.texts))]
        if kind == "cut":
            text = text[: self.rng.integers(2, len(text) + 1)]
        elif kind == "longer":
            text += self._new(60)
        elif kind == "shared":
            text = text[: self.rng.integers(1, len(text) + 1)] + self._new(60)
        return text[:LONGEST]

    def add(self, text: tuple[int, ...]) -> None:
        """Take a prompt and its answer as what later prompts begin with."""
        self.texts += [text]


@dataclass(frozen=True)
class Difference:
    """A prompt of which the engines took different numbers of tokens from their caches."""

    number: int
    num_tokens: int
    ours: int
    theirs: int

    def __str__(self) -> str:
        return (
            f"prompt {self.number} of {self.num_tokens} tokens: {self.ours} here, "
            f"{self.theirs} there"
        )


def compare_hits(
    ours: Target, theirs: Target, answers: ExactAnswers, num_prompts: int, seed: int
) -> tuple[list[Difference], int]:
    """Return the prompts whose hits differ, and the tokens that all had from our cache.

    Raises:
        HybridKVError: an answer is wrong: prompts could not go on from it.
    """
    prompts = Prompts(np.random.default_rng(seed))
    differences = list[Difference]()
    num_cached = 0
    for number in range(num_prompts):
        if number % ROUND == 0:
            prompts.texts.clear()
            ours.reset()
            theirs.reset()
        prompt = prompts.draw()
        max_tokens = int(prompts.rng.integers(1, MOST_NEW + 1))
        right = tuple(answers.tokens(prompt, max_tokens))
        cached = []
        for engine in (ours, theirs):
            (answer,) = engine.ask([Ask(prompt, max_tokens)])
            if answer.error or answer.token_ids != right:
                raise HybridKVError(
                    f"prompt {number} in {engine.name}: {answer.error or answer.token_ids}, "
                    f"not {right}"
                )
            cached.append(answer.cached_tokens or 0)
        if cached[0] != cached[1]:
            differences.append(Difference(number, len(prompt), cached[0], cached[1]))
        num_cached += cached[0]
        prompts.add(prompt + right)
    return differences, num_cached


def settings_of(texts: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the levels by factor of texts such as `chunk=40 retain=all`.

    Raises:
        ConfigError: a word of one is no such pair.
    """
    for text in texts:
        pairs = [word.partition("=") for word in text.split()]
        for factor, _, level in pairs:
            if not level:
                raise ConfigError(f"--setting {text!r}: {factor!r} has no level; give factor=level")
        yield {factor: level for factor, _, level in pairs}


def main() -> int:
    parser = ArgumentParser("python -m bench.peers.hits", __doc__)
    parser.add_argument("engine", help="such as vllm")
    parser.add_argument("--python", type=Path, help="of an environment with the engine")
    parser.add_argument("--prompts", type=int, default=200, help="in each setting")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--setting", action="append", help="may be repeated; default: all")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="append rows to it")
    options = parser.parse_args()
    if options.prompts < 1:
        raise ConfigError(f"--prompts {options.prompts}: give at least 1")
    num_different = 0
    with model_folder("exact:mixed") as folder:
        kind = for_model(kind_of(options.engine, options.python), folder)
        model, answers = AnsweringModel(model_of(folder).config), ExactAnswers(folder)
        for settings in settings_of(options.setting or SETTINGS):
            ours = Ours(folder, settings, LLM(model, **options_of(settings)))
            theirs = kind.start(folder, {"runner": "cpu", "prefix": "align", **settings})
            try:
                differences, num_cached = compare_hits(
                    ours, theirs, answers, options.prompts, options.seed
                )
            finally:
                theirs.close()
            num_different += len(differences)
            setting = text_of(settings)
            print(
                f"{setting}: {len(differences)} of {options.prompts} prompts differ; "
                f"{num_cached:,} tokens from our cache",
                *differences[:5],
                sep="\n  ",
                flush=True,
            )
            if options.out is not None:
                params = {"engine": kind.name, "version": theirs.version, "setting": setting}
                row = Row(
                    "hits", "peers", "different", len(differences), "", params, n=options.prompts
                )
                append_rows(options.out, [row])
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(run_command(main))
