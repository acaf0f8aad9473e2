"""The bricks of every model: projections, norms, MLPs, and a layer's context in a step.

A layer that reads and writes the paged cache (`models.attention`, `models.mixers`) knows its name;
the step's context knows everything else. Every mixer and MLP is called with (x, context).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.models.specs import LOOP

T = TypeVar("T")
PACKED_ELEMENTS = 1 << 17  # of a weight that is worth a packed copy
PACKED_ROWS = 8  # that the packed layout is chosen for; it takes any number


@dataclass(frozen=True)
class ForwardContext:
    """The context of a step, per layer name.

    Attributes:
        metadata: of the step.
        views: of the layer's cache.
        row_memory: memory of the rollback scheme for each row.
        kernels: the implementation of Mamba layers; attention layers find theirs in their metadata.
    """

    metadata: dict[str, Any]
    views: dict[str, tuple[torch.Tensor, ...]]
    row_memory: dict[str, Any] = field(default_factory=dict)
    kernels: Literal["torch", "triton"] = "torch"

    def of_loop(self, loop: int) -> ForwardContext:
        """Return the context of a pass number `loop` of layers that run several times.

        They find that pass's caches under their own names; it has none of other layers.
        """
        if loop == 0:
            return self
        end = f"{LOOP}{loop}"

        def own(of_caches: dict[str, T]) -> dict[str, T]:
            return {
                name.removesuffix(end): value
                for name, value in of_caches.items()
                if name.endswith(end)
            }

        return ForwardContext(
            own(self.metadata), own(self.views), own(self.row_memory), self.kernels
        )


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32; float64 stays.

    Activations are normed and scanned in float32 at least.
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def empty(*shape: int) -> nn.Parameter:
    """Return a weight without a value."""
    # Filled by the loader, which fails when a tensor is missing: initialising twice would only cost
    # time.
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Derived(Generic[T]):
    """A value that a layer computes from its weights alone.

    It is computed once, and again when a weight was replaced or changed in place.

    A change through `.data` goes unseen. Weights made in inference mode do not tell their changes:
    then it is computed every time.
    """

    def __init__(self, compute: Callable[..., T]) -> None:
        self._compute = compute
        self._key: list[Any] | None = None
        self._weights: tuple[torch.Tensor, ...] = ()
        self._value: T

    def __call__(self, *weights: torch.Tensor, **options: Any) -> T:
        """Return `compute(*weights, **options)`."""
        key = [*options.values()]
        try:
            for weight in weights:
                key += weight.data_ptr(), weight._version
        except RuntimeError:  # an inference tensor has no version
            return self._compute(*weights, **options)
        if key != self._key:
            # The weights are kept, so that no other one can come to lie at the address of one of
            # them.
            self._weights = tuple(weight.detach() for weight in weights)
            self._value = self._compute(*self._weights, **options)
            self._key = key
        return self._value

    def __reduce__(self) -> Any:
        # A copy computes its own: not every value can be copied or pickled.
        return Derived, (self._compute,)


def _rms_scale(
    weight: torch.Tensor, size: int, eps: float, centred: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the bias with which `_unit_rows` norms slices of `size` elements.

    `_unit_rows(x, bias) * scale` is `weight * x / sqrt(mean(x ** 2) + eps)`.
    """
    wide = upcast(weight) + 1 if centred else upcast(weight)
    return wide * size**0.5, wide.new_tensor((size * eps) ** 0.5)


def _unit_rows(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return `x / sqrt(sum(x ** 2) + bias ** 2)` over the last dimension.

    That is `F.rms_norm` in three passes for its six.
    """
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(bias)


class Leaf(nn.Module):
    """A layer of weights alone, called without a look for torch's hooks.

    A decode step makes many such calls.
    """

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.forward(*inputs)
        return out


class RMSNorm(Leaf):
    """Root-mean-square norm, `weight * x / rms(x)`.

    With `centred` it is `(1 + weight) * x / rms(x)` (Qwen3-Next).
    """

    def __init__(self, size: int, eps: float, centred: bool = False) -> None:
        super().__init__()
        self.weight = empty(size)
        self.eps = eps
        self.centred = centred
        self._scale = Derived(_rms_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = upcast(x)
        weight = self.weight
        if x.is_cuda:
            scale = upcast(weight) + 1 if self.centred else upcast(weight)
            return F.rms_norm(wide, weight.shape, scale, self.eps).to(x.dtype)
        scale, bias = self._scale(weight, size=x.shape[-1], eps=self.eps, centred=self.centred)
        return _unit_rows(wide, bias).mul_(scale).to(x.dtype)


class GatedRMSNorm(Leaf):
    """Mamba-2's output norm: `norm(x * silu(gate))`, each of `groups` slices by itself."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = empty(size)
        self.groups = groups
        self.eps = eps
        self._scale = Derived(_rms_scale)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = F.silu(upcast(gate)).mul_(x)
        grouped = gated.view(*gated.shape[:-1], self.groups, gated.shape[-1] // self.groups)
        if x.is_cuda:
            normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
            return (normed * upcast(self.weight)).to(gate.dtype)
        scale, bias = self._scale(self.weight, size=grouped.shape[-1], eps=self.eps)
        return _unit_rows(grouped, bias).flatten(-2).mul_(scale).to(gate.dtype)


class Linear(Leaf):
    """`x @ weight.T + bias`."""

    def __init__(self, size_in: int, size_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter = empty(size_out, size_in)
        self.bias = empty(size_out) if bias else None
        self._packed = Derived(_pack)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        # oneDNN's layout halves the time of 8 rows here, and of one row by a sixth; small weights
        # gain nothing.
        if (
            weight.numel() >= PACKED_ELEMENTS
            and x.is_cpu
            and torch.is_inference_mode_enabled()
            and _can_pack(weight)
        ):
            return torch.ops.mkldnn._linear_pointwise(
                x, self._packed(weight), self.bias, "none", [], ""
            )
        return F.linear(x, weight, self.bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """Reorder a weight into oneDNN's layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return packed


def _can_pack(weight: torch.Tensor) -> bool:
    # An inference tensor does not tell whether it was changed.
    return (
        weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and not weight.is_inference()
    )


class Adapted(nn.Module):
    """A projection that other layers have, too, and a product of low rank for each of its parts."""

    def __init__(self, shared: Linear, num_parts: int, rank: int) -> None:
        super().__init__()
        self._shared = (shared,)  # in a tuple: its weights are not this module's
        size_out, size_in = shared.weight.shape
        self.num_parts = num_parts
        self.down = Linear(size_in, num_parts * rank)
        self.up = Linear(rank, size_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.down(x).unflatten(-1, (self.num_parts, -1))
        up = self.up.weight.unflatten(0, (self.num_parts, -1))
        return self._shared[0](x) + torch.einsum("tpr,por->tpo", low, up).flatten(1)


class SquaredReluMLP(nn.Module):
    """`down(relu(up(x)) ** 2)`."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.down_proj(self.up_proj(x).relu_().square_())


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`; gate and up are one projection."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))
