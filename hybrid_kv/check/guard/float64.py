"""A checkpoint's forward pass in float64, by transformers: the oracle of trained models' logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """A mode in which float64 tensors stay float64 where transformers casts to float32.

    transformers means float32 as a higher precision there. What starts as float32, such as the
    angles of RoPE, stays.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if value is torch.float32 else value for value in args]
            options = {
                name: torch.float64 if value is torch.float32 else value
                for name, value in options.items()
            }
        return func(*args, **options)


def float64_pass(folder: str | Path) -> Callable[[Tensor], Tensor]:
    """Return a function from token ids to logits, on the CPU, without a cache.

    The ids are [batch, tokens], the logits [batch, tokens, vocab_size].
    """
    from transformers import AutoModelForCausalLM

    from hybrid_kv.models.random_checkpoint import quiet

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
    model.eval()  # type: ignore[no-untyped-call]

    def logits(ids: Tensor) -> Tensor:
        with quiet(), torch.inference_mode(), KeepFloat64():
            whole: Tensor = model(ids, use_cache=False).logits
        return whole

    return logits
