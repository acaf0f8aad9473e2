"""Logits of every token that an engine computes, not only of those that it samples from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hybrid_kv.attention.undo import UndoStep
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.sampling import SamplingParams


class HiddenRecorder:
    """A model that keeps every step's hidden states, so that logits of *all* tokens can be compared."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.mamba_chunk_size = model.mamba_chunk_size
        self.layer_specs = model.layer_specs
        self.hidden = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        self.hidden = self._model(input_ids, positions, context)
        return self.hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the model's."""
        logits: torch.Tensor = self._model.compute_logits(hidden)
        return logits

    def fold(self, steps: dict[str, UndoStep], context: ForwardContext) -> None:
        """As the model's."""
        self._model.fold(steps, context)


def record_logits(
    llm: LLM,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    params: SamplingParams,
    disturb: Callable[[LLM], None] | None = None,
) -> Iterator[tuple[RequestOutput, torch.Tensor]]:
    """Each request's output, and the logits [num_computed, vocab_size] that the engine computed for its tokens.

    They are those of its last tokens but one: what came from the cache has none, and nothing follows the last token. A
    token that was computed twice (after a preemption, or first as another token's draft) keeps its last logits.
    """
    recorder = HiddenRecorder(llm.runner.model)
    rows: dict[str, dict[int, torch.Tensor]] = {}

    def harvest(llm: LLM) -> None:
        start = 0
        for item in llm.runner.batch:
            logits = recorder.compute_logits(recorder.hidden[start : start + item.num_tokens])
            start += item.num_tokens
            own = rows.setdefault(item.request.request_id, {})
            own.update(
                zip(range(item.num_computed_tokens, item.num_computed_tokens + item.num_tokens), logits, strict=True)
            )
        if disturb is not None:
            disturb(llm)

    plain = llm.runner.model
    llm.runner.model = recorder
    llm.runner.batch = []
    try:
        outputs = llm.generate(prompts, params, progress=False, on_step=harvest)
        disturb = None
        harvest(llm)
    finally:
        llm.runner.model = plain
    for output in outputs:
        own = rows[output.request_id]
        # Behind the last computed token lie drafts that were rejected.
        end = len(output.prompt_token_ids) + len(output.token_ids) - 1
        yield output, torch.stack([own[i] for i in range(min(own), end)])
