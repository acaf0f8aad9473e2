"""Hidden states of every token that the engine computes, for whoever wants more logits than the sampled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_kv.engine.llm import LLM
from hybrid_kv.request import ScheduledRequest
from hybrid_kv.watch import Watcher

Seen = Callable[[ScheduledRequest, torch.Tensor], None]


class _Recorder(Watcher):
    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._batch: Sequence[ScheduledRequest] = ()
        self._hidden = torch.empty(0)

    def keep(self, model: torch.nn.Module, inputs: Any, hidden: torch.Tensor) -> None:
        """The model's forward hook."""
        self._hidden = hidden

    def on_step(self, batch: Sequence[ScheduledRequest], *_: Any) -> None:
        self._batch = batch

    def on_commit(self, tokens: Sequence[Sequence[int]]) -> None:
        start = 0
        for item in self._batch:
            self._seen(item, self._hidden[start : start + item.num_tokens])
            start += item.num_tokens


@contextmanager
def recorded(llm: LLM, seen: Seen) -> Iterator[None]:
    """Show what each step computes, as long as the context lasts.

    What came from the cache is not computed. A token may be computed twice: after a preemption, or first as a draft.

    Args:
        seen: called at the end of a step for each of its requests, with the hidden states [item.num_tokens, …] of the
            tokens from `item.num_computed_tokens` on; `llm.model.compute_logits` makes logits of them.
    """
    assert isinstance(llm.model, torch.nn.Module)
    recorder = _Recorder(seen)
    hook = llm.model.register_forward_hook(recorder.keep)
    llm.watchers.append(recorder)
    try:
        yield
    finally:
        llm.watchers.remove(recorder)
        hook.remove()
