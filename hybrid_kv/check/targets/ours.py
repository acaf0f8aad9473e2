"""Our engine as a target: the control whose every bug can be injected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import hybrid_kv
from hybrid_kv.check.targets.target import (
    CAPABILITIES,
    COUNTERS,
    NUM_LIKELIEST,
    Answer,
    Ask,
    Kind,
    TargetError,
    by_token,
)
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams

LEVELS: dict[str, dict[str, dict[str, Any]]] = {
    "prefix": {
        "off": {},
        "align": {"mamba_cache_mode": "align"},
        "all": {"mamba_cache_mode": "all"},
    },
    "spec": {
        "none": {},
        "ngram3": {
            "speculative_method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
        },
        "mtp3": {"speculative_method": "mtp", "num_speculative_tokens": 3},
        "mtp1": {"speculative_method": "mtp", "num_speculative_tokens": 1},
    },
    "chunk": {"whole": {}}
    | {size: {"max_num_batched_tokens": int(size)} for size in ("17", "100")},
    "blocks": {"ample": {}, "tight": {"tight": True}},
    # Requests that run at a time, at most
    "rows": {"8": {}} | {number: {"max_num_seqs": int(number)} for number in ("1", "16")},
    # FlashInfer's: attention takes a block in parts of 16, 32 or 64 tokens
    "layout": {"torch": {}, "flashinfer": {"attention_backend": "FLASHINFER"}},
    "scheme": {"slots": {}, "recompute": {"state_scheme": "recompute"}},
    "async": {"off": {}, "on": {"async_scheduling": True}},
    "dtype": {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}},
    "offload": {"none": {}, "host": {"kv_offload_bytes": 2**26}},
}
MAX_MODEL_LEN = 2048
ROOM = 640  # tokens that a tight pool holds: two of the longest requests, where six run
MOST_IDLE_STEPS = 64  # in a row in which no request gets a token further: an engine that hangs


def options_of(folder: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `LLM` for a setting, without the checkpoint.

    Raises:
        ConfigError: the engine does not know the setting or the model.
    """
    options: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": MAX_MODEL_LEN,
    }
    for factor, levels in LEVELS.items():
        options |= levels[settings.get(factor, next(iter(levels)))]
    if options.pop("tight", False):
        options["max_model_len"] = ROOM
        options["num_blocks"] = 1 + LLM(folder, **options).plan.config.max_blocks_per_request(ROOM)
    return options


class _Progress:
    """The tokens that all requests have, looked at after each step."""

    def __init__(self) -> None:
        self._tokens = (0, 0)
        self._idle_steps = 0

    def check(self, groups: Iterable[Sequence[Request]]) -> None:
        """Look at the tokens that are computed and drawn by now.

        Raises:
            TargetError: they are the same after MOST_IDLE_STEPS steps.
        """
        requests = [request for group in groups for request in group]
        computed = sum(request.num_computed_tokens for request in requests)
        tokens = computed, sum(len(request.output_token_ids) for request in requests)
        self._idle_steps = self._idle_steps + 1 if tokens == self._tokens else 0
        self._tokens = tokens
        if self._idle_steps == MOST_IDLE_STEPS:
            raise TargetError(f"no request is a token further after {MOST_IDLE_STEPS} steps")


class Ours:
    """See `targets.target.Target`.

    Args:
        llm: a ready engine, instead of one of these settings.
    """

    name, version, can = "ours", hybrid_kv.__version__, frozenset(CAPABILITIES) - {"steps"}

    def __init__(self, folder: str, settings: Mapping[str, str], llm: LLM | None = None) -> None:
        self.settings: Mapping[str, str] = dict(settings)
        self.llm = LLM(folder, **options_of(folder, settings)) if llm is None else llm
        self.longest: int = self.llm.config.scheduler.max_model_len
        self._counts: Counter[str] = Counter()

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        """See `Target.ask`.

        Raises:
            TargetError: the engine hangs.
        """
        llm = self.llm
        groups: dict[int, list[Request]] = {}
        errors: dict[int, str] = {}
        waiting, undisturbed = list(range(len(requests))), 0
        progress = _Progress()
        while True:
            complete = len(errors) + sum(
                all(one.is_finished for one in group) for group in groups.values()
            )
            for i in [i for i in waiting if requests[i].after <= complete]:
                waiting.remove(i)
                try:
                    groups[i] = self._send(requests[i])
                except ConfigError as error:
                    errors[i] = str(error)
            if not llm.scheduler.has_requests:
                if not waiting:
                    break
                continue
            known = sum(
                len(request.output_token_ids) for group in groups.values() for request in group
            )
            if preempt_every and known - undisturbed >= preempt_every:
                undisturbed = known
                llm.reset_prefix_cache()
                for request in llm.scheduler.running[::-1]:
                    llm.scheduler.preempt(request)
            for i, request in [(i, one) for i, group in groups.items() for one in group]:
                limit = requests[i].abort_after
                if limit is not None and len(request.output_token_ids) >= limit:
                    llm.abort(request.request_id)
            llm.step()
            progress.check(groups.values())
        return [
            self._answer(groups[i]) if i in groups else Answer((), error=errors[i])
            for i in range(len(requests))
        ]

    def _send(self, ask: Ask) -> list[Request]:
        group = []
        for i in range(ask.n):
            params = SamplingParams(
                ask.max_tokens,
                ask.temperature,
                top_k=ask.top_k,
                top_p=ask.top_p,
                seed=None if ask.seed is None else ask.seed + i,
                stop=ask.stop,
                cache_salt=ask.salt,
                ignore_eos=not ask.stop,
                logprobs=NUM_LIKELIEST if ask.logprobs else None,
                prompt_logprobs=NUM_LIKELIEST if ask.score else None,
            )
            request = self.llm.make_request(ask.prompt, params)
            self.llm.scheduler.add(request)
            group.append(request)
        return group

    def _answer(self, group: list[Request]) -> Answer:
        for request in group:
            self._counts["hits"] += request.hit.num_tokens
            self._counts["verifications"] += request.num_verifications
            self._counts["drafts"] += request.num_draft_tokens
            self._counts["accepted"] += request.num_accepted_draft_tokens
            self._counts["preemptions"] += request.num_preemptions
        first, *others = group
        return Answer(
            tuple(first.output_token_ids),
            first.hit.num_tokens,
            by_token(first.output_token_ids, first.logprobs),
            tuple(tuple(one.output_token_ids) for one in others),
            prompt_logprobs=by_token(first.prompt_token_ids[1:], first.prompt_logprobs),
        )

    def counters(self) -> Mapping[str, float]:
        """See `Target.counters`."""
        return {name: float(self._counts[name]) for name in COUNTERS}

    def reset(self) -> None:
        """See `Target.reset`."""
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """See `Sleeper.sleep`."""
        self.llm.sleep()
        self.llm.wake_up()

    def close(self) -> None:
        """See `Target.close`."""


KIND = Kind("ours", {factor: tuple(levels) for factor, levels in LEVELS.items()}, Ours)
