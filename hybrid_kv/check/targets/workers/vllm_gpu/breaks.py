"""The exact model's layers as places where vLLM's breakable graphs break.

vLLM's attention operators are such places.
"""

from __future__ import annotations

from typing import Any

import torch


def mark(layer: Any) -> None:
    """Let a class of layers run outside of a graph that may break; once that is enabled."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    forward = layer.forward

    def run_into(out: torch.Tensor, this: Any, *inputs: torch.Tensor) -> None:
        out.copy_(forward(this, *inputs))

    breaking = eager_break_during_capture(run_into)

    def run(this: Any, *inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(inputs[0])
        breaking(out, this, *inputs)
        return out

    layer.forward = run
