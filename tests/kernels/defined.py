"""The guard's definitions as oracles: of tensors, in float64."""

from collections.abc import Callable

import torch

from hybrid_kv.guard.definitions import Floats


def defined(
    recurrence: Callable[..., tuple[Floats, Floats]], *operands: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The outputs of one row's tokens, and the state after each."""
    outputs, states = recurrence(*(part.cpu().double().numpy() for part in operands))
    return torch.from_numpy(outputs), [*torch.from_numpy(states)]
