"""Hidden states and logits of every token that the engine computes.

Sampling needs those of a few tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import ScheduledRequest
from hybrid_kv.sampling import SamplingParams

Seen = Callable[[ScheduledRequest, torch.Tensor], None]


class _Recorder(EngineObserver):
    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def on_hidden(self, batch: Sequence[ScheduledRequest], hidden: torch.Tensor) -> None:
        start = 0
        for item in batch:
            self._seen(item, hidden[start : start + item.num_tokens])
            start += item.num_tokens


@contextmanager
def recorded(llm: LLM, seen: Seen) -> Iterator[None]:
    """Show what each step computes, as long as the context lasts.

    What came from the cache is not computed. A token may be computed twice: after a preemption, or
    first as a draft.

    Args:
        seen: called in each step for each of its requests, with the hidden states [item.num_tokens,
            …] of the tokens from `item.num_computed_tokens` on; `llm.model.compute_logits` makes
            logits of them.
    """
    recorder = _Recorder(seen)
    llm.observers.append(recorder)
    try:
        yield
    finally:
        llm.observers.remove(recorder)


def record_logits(
    llm: LLM,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    disturb: Callable[[LLM], None] | None = None,
) -> Iterator[tuple[RequestOutput, torch.Tensor]]:
    """Yield each request's output and the logits [num_computed, vocab_size] of its tokens.

    They are those of its last tokens but one: what came from the cache has none, and nothing
    follows the last token. A token that was computed twice (after a preemption, or first as another
    token's draft) keeps its last logits.

    Args:
        disturb: called before every step.
    """
    rows: dict[str, dict[int, torch.Tensor]] = {}

    def seen(item: ScheduledRequest, hidden: torch.Tensor) -> None:
        logits = rows.setdefault(item.request.request_id, {})
        logits.update(enumerate(llm.model.compute_logits(hidden), item.num_computed_tokens))

    with recorded(llm, seen):
        outputs = llm.generate(prompts, params, progress=False, on_step=disturb)
    for output in outputs:
        logits = rows[output.request_id]
        # After the last computed token lie drafts that were rejected.
        end = len(output.prompt_token_ids) + len(output.token_ids) - 1
        yield output, torch.stack([logits[i] for i in range(min(logits), end)])
