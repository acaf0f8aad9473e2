"""SGLang's runner of captured decode graphs on a CPU: a replay calls the captured function again.

The runner, its buckets, static buffers, padding, and the metadata for replays are SGLang's. A
function that is called again reads the same memory as a graph that is replayed; what a graph keeps
of Python's values, it computes anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend


class RepeatedForwards(BaseCudaGraphBackend):
    """A backend of graphs that are functions."""

    def __init__(self) -> None:
        self._forwards: dict[Any, Callable[[], Any]] = {}

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        """Do nothing around the captures."""
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """Keep the function of a shape, after one call, as a capture has."""
        forward_fn()
        if post_warmup_hook is not None:
            post_warmup_hook()
        self._forwards[shape_key] = forward_fn

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        """Return whether the shape was captured."""
        return shape_key in self._forwards

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        """Do nothing around a replay."""
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **_: Any) -> Any:
        """Return the output of the shape's function."""
        return self._forwards[shape_key]()

    def cleanup(self) -> None:
        """Forget all functions."""
        self._forwards.clear()


@contextmanager
def _no_stream(**_: Any) -> Iterator[Any]:
    yield SimpleNamespace(stream=None)


def install(model_runner: Any) -> None:
    """Let a model runner replay decodes and verifications, captured now."""
    replaced: Any = module
    replaced.resolve_decode_backend = lambda _: RepeatedForwards()
    replaced.graph_capture = _no_stream
    replaced.get_or_create_global_graph_capture_stream = lambda: None
    rows = model_runner.max_shared_logits_buffer_rows()
    model_runner.graph_shared_output = GraphSharedOutput(device=torch.device("cpu"), max_rows=rows)
    cpu: Any = torch.cpu
    cpu.is_current_stream_capturing = lambda: False
    mode: Any = ForwardMode
    mode.is_cpu_graph = mode.is_cuda_graph
    model_runner.decode_cuda_graph_runner = module.DecodeCudaGraphRunner(model_runner)
