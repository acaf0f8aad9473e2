"""States that are rounded after each token and stored with scales, on the integer model.

What rounding adds depends on the engine's seed and on the token's position, the scale on the state:
a scale that did not travel, a seed that follows rows or requests, and a position that does not
survive a hit, a preemption, drafts or a hand-over all give other tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_kv.cache.modes import MODES
from hybrid_kv.check.guard.play import play_seeds
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.registry import CheckResult, Run, check
from hybrid_kv.check.guard.scenario import (
    ScriptedProposer,
    SmallBlocksFirst,
    SmallKVFirst,
    cache_options,
    has_attention,
)
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.sampling import SamplingParams

LAYERS = ("E*", "*E", "E", "EM*", "E~*", "EE*")
SCRIPTS = ("mixed", "right", "rotate")
MAX_MODEL_LEN = 96
SEEN = (
    "compared",
    "hits",
    "preemptions",
    "loaded blocks",
    "handed over",
    "rejected drafts",
    "accepted drafts",
    "other seeds",
)
# Per engine: its requests, with what they shall answer, in the order of their numbers.
_Requests = list[tuple[list[int], list[int]]]


class RoundedPlay:
    """Engines whose states are rounded with one seed, and requests that go through both.

    Attributes:
        seen: how often each of `SEEN` happened.
    """

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self._layers = rng.choice(LAYERS)
        # Seeds of a run follow each other: not chance decides that each of `SEEN` happens.
        self._number = seed
        self._seed = 5 * (seed % 2)
        self._model = ExactModel(ExactConfig(pattern=self._layers))
        self._oracle = ExactOracle(self._model, self._seed)
        self._requests: tuple[_Requests, _Requests] = [], []
        self.name = f"seed {seed}, {self._layers}"
        self._engines = [self._engine(requests) for requests in self._requests]
        shared = self._tokens(33)
        lengths = [(33, 3), (24, 5), (33, 1), (0, rng.choice([1, 17]))]
        self._prompts = [shared[:n] + self._tokens(extra) for n, extra in lengths]
        self.seen: Counter[str] = Counter({"other seeds": self._seed})

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(ExactConfig.vocab_size) for _ in range(count)]

    def _engine(self, requests: _Requests) -> LLM:
        rng = self._rng
        has_tier = self._number % 3 == 0 and requests is self._requests[0]
        mode = rng.choice([mode for mode in MODES if MODES[mode].keeps_states or not has_tier])
        num_drafts = rng.choice([1, 3]) if self._number % 4 else 0
        setting: dict[str, Any] = cache_options(mode, num_drafts, "none")
        setting |= {
            "mamba_ssm_cache_dtype": "int8",
            "enable_mamba_cache_stochastic_rounding": True,
            "seed": self._seed,
            "async_scheduling": rng.random() < 0.3,
            "attention_backend": rng.choice([SmallBlocksFirst.name, SmallKVFirst.name]),
            "max_num_batched_tokens": rng.choice([12, 64]),
            "max_num_seqs": rng.choice([2, 4]),
            "num_blocks": 90,
        }
        if has_tier:
            setting["kv_offload_bytes"] = 2**20
        size = rng.choice([8, 16])
        setting["block_size" if has_attention(self._layers) else "mamba_block_size"] = size
        if num_drafts:
            setting["proposer"] = _Following(SCRIPTS[self._number % 3], requests)
            setting["proposer"].num_drafts = num_drafts
        self.name += f", {setting}"
        llm = LLM(self._model, device="cpu", max_model_len=MAX_MODEL_LEN, **setting)
        poison(llm)
        return llm

    def problems(self) -> Iterator[str]:
        """Yield what is wrong: all prompts at once, again, and handed over; nothing if all is well.

        Before the second time the device forgets what the host has.
        """
        first, _ = self._engines
        order = [*range(len(self._prompts))]
        yield from self._run(order)
        if first.manager.offload is not None:
            first.reset_prefix_cache()
        yield from self._run(order[::-1])
        if first.manager.offload is not None:
            self.seen["loaded blocks"] += first.manager.offload.stats.loaded_blocks
        yield from self._hand_over(self._rng.choice(order))

    def _run(self, order: Sequence[int]) -> Iterator[str]:
        params = SamplingParams(max_tokens=self._rng.choice([3, 9]), ignore_eos=True)
        prompts = [self._prompts[i] for i in order]
        answers = [self._oracle.generate(prompt, params.max_tokens) for prompt in prompts]
        self._requests[0].extend(zip(prompts, answers, strict=True))
        outputs = self._engines[0].generate(prompts, params, progress=False, on_step=self._preempt)
        for i, output, answer in zip(order, outputs, answers, strict=True):
            self.seen["compared"] += 1
            self.seen["hits"] += output.cached_tokens > 0
            accepted = output.num_accepted_draft_tokens
            self.seen["accepted drafts"] += accepted
            self.seen["rejected drafts"] += output.num_draft_tokens - accepted
            if output.token_ids != answer:
                yield f"prompt {i}: {output.error or output.token_ids}, not {answer}"

    def _preempt(self, llm: LLM) -> None:
        if llm.num_steps % 5 == 4 and len(llm.scheduler.running) > 1:
            llm.scheduler.preempt(llm.scheduler.running[-1])
            self.seen["preemptions"] += 1

    def _hand_over(self, i: int) -> Iterator[str]:
        first, second = self._engines
        prompt = self._prompts[i]
        answer = self._oracle.generate(prompt, 12)
        for requests in self._requests:
            requests.append((prompt, answer))
        request = first.add_request(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
        while len(request.output_token_ids) < 3:
            first.step()
        if len(request.output_token_ids) >= 12:
            return
        arrived = second.receive_request(first.send_request(request))
        while second.has_work:
            second.step()
        self.seen["compared"] += 1
        self.seen["handed over"] += 1
        if arrived.output_token_ids != answer:
            yield f"prompt {i}, handed over: {arrived.output_token_ids}, not {answer}"


class _Following(ScriptedProposer):
    """A scripted proposer of requests that are yet to come."""

    def __init__(self, script: str, requests: _Requests) -> None:
        super().__init__(script, 0, [], [], 8, ExactConfig.vocab_size)
        self._requests = requests

    def drafts(self, number: int, num_tokens: int) -> list[int]:
        self._sequences = [[*prompt, *answer] for prompt, answer in self._requests]
        self._prompts = [len(prompt) for prompt, _ in self._requests]
        return super().drafts(number, num_tokens)


@check("rounded states", quick=6, full=32, long=160, seconds=0.15, place=39)
def check_rounded_states(run: Run) -> Iterator[CheckResult]:
    """Check that rounded states give the oracle's tokens wherever they are computed or restored."""
    yield play_seeds(run, RoundedPlay, SEEN, "wrong tokens, rounded states", "compared")
