"""Layers that read and write the paged cache. A layer knows its name; the step's context knows everything else."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.attention.mamba import MambaMetadata
from hybrid_kv.attention.paged import AttentionPart, PagedAttentionMetadata
from hybrid_kv.attention.undo import UndoStep
from hybrid_kv.kernels.causal_conv1d import causal_conv1d, causal_conv1d_prefill, causal_conv1d_update, windows_at
from hybrid_kv.kernels.common.launch import FLOATS
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.strided import copy_blocks
from hybrid_kv.kernels.gated_norm import gated_rms_norm
from hybrid_kv.kernels.replay import (
    ReplayRing,
    ReplayStep,
    read_states,
    replay_flush,
    replay_flush_reference,
    replay_update,
    replay_update_reference,
    write_states,
)
from hybrid_kv.kernels.ssd import chunk_scan, chunk_scan_prefill, selective_state_update, selective_state_update_slots

T = TypeVar("T")
PACKED_ELEMENTS = 1 << 17  # of a weight that is worth a packed copy
PACKED_ROWS = 8  # that the packed layout is chosen for; it takes any number


@dataclass(frozen=True)
class ForwardContext:
    """Per layer name: this step's metadata, the views of the layer's cache, and what the undo scheme keeps for rows.

    `kernels`: what Mamba layers compute with; attention layers find it in their metadata.
    """

    metadata: dict[str, Any]
    views: dict[str, tuple[torch.Tensor, ...]]
    row_memory: dict[str, Any] = field(default_factory=dict)
    kernels: Literal["torch", "triton"] = "torch"


def upcast(x: torch.Tensor) -> torch.Tensor:
    """At least float32: half-precision activations are normed and scanned in float32, float64 stays float64."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _empty(*shape: int) -> nn.Parameter:
    # Filled by the loader, which fails when a tensor is missing: initialising twice would only cost time.
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Derived(Generic[T]):
    """What a layer computes from its weights alone: once, and again when one was replaced or changed in place.

    A change through `.data` goes unseen. Weights made in inference mode do not tell their changes: then it is computed
    every time.
    """

    def __init__(self, compute: Callable[..., T]) -> None:
        self._compute = compute
        self._key: list[Any] | None = None
        self._weights: tuple[torch.Tensor, ...] = ()
        self._value: T

    def __call__(self, *weights: torch.Tensor, **how: Any) -> T:
        """`compute(*weights, **how)`."""
        key = [*how.values()]
        try:
            for weight in weights:
                key += weight.data_ptr(), weight._version
        except RuntimeError:  # an inference tensor has no version
            return self._compute(*weights, **how)
        if key != self._key:
            # The weights are kept, so that no other one can come to lie at the address of one of them.
            self._weights = tuple(weight.detach() for weight in weights)
            self._key, self._value = key, self._compute(*self._weights, **how)
        return self._value

    def __reduce__(self) -> Any:
        return Derived, (self._compute,)  # a copy computes its own: not every value can be copied or pickled


def _rms_scale(weight: torch.Tensor, size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What to multiply `x / hypot(norm(x), bias)` with, and the bias: `rms_normed` of slices of `size` elements."""
    wide = upcast(weight)
    return wide * size**0.5, wide.new_tensor((size * eps) ** 0.5)


def _unit_rows(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(sum(x ** 2) + bias ** 2)` over the last dimension: `F.rms_norm` in three passes for its six."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm, `weight * x / rms(x)`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _empty(size)
        self.eps = eps
        self._scale = Derived(_rms_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, weight = upcast(x), self.weight
        if x.is_cuda:
            return F.rms_norm(wide, weight.shape, upcast(weight), self.eps).to(x.dtype)
        scale, bias = self._scale(weight, size=x.shape[-1], eps=self.eps)
        return _unit_rows(wide, bias).mul_(scale).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """`norm(x * silu(gate))`, each of `groups` slices normalised by itself (Mamba-2's output norm)."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = _empty(size)
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


class Linear(nn.Module):
    """`x @ weight.T + bias`."""

    def __init__(self, size_in: int, size_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter = _empty(size_out, size_in)
        self.bias = _empty(size_out) if bias else None
        self._packed = Derived(_pack)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        # oneDNN's layout halves the time of 8 rows here, and of one row by a sixth; small weights gain nothing.
        if weight.numel() >= PACKED_ELEMENTS and x.is_cpu and torch.is_inference_mode_enabled() and _can_pack(weight):
            return torch.ops.mkldnn._linear_pointwise(x, self._packed(weight), self.bias, "none", [], "")
        return F.linear(x, weight, self.bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """In oneDNN's layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return packed


def _can_pack(weight: torch.Tensor) -> bool:
    # An inference tensor does not tell whether it was changed.
    return weight.dtype == torch.float32 and torch.backends.mkldnn.is_available() and not weight.is_inference()


class PagedAttention(nn.Module):
    """Grouped-query attention without positional encoding: order comes from the Mamba layers."""

    def __init__(self, name: str, hidden_size: int, num_heads: int, num_kv_heads: int, head_size: int) -> None:
        super().__init__()
        self.name = name
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.head_size = head_size
        self.qkv_proj = Linear(hidden_size, sum(self.heads) * head_size)
        self.o_proj = Linear(num_heads * head_size, hidden_size)

    def forward(self, x: torch.Tensor, context: ForwardContext, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Stores K and V of all tokens; attends for those at `wanted`, the queries of the metadata. None: all."""
        metadata: PagedAttentionMetadata = context.metadata[self.name]
        key_cache, value_cache = context.views[self.name]
        dtype = key_cache.dtype
        query, key, value = self.qkv_proj(x).to(dtype).view(len(x), -1, self.head_size).split(self.heads, dim=1)
        metadata.compute.store(key, value, key_cache, value_cache, metadata.slot_mapping)
        if wanted is not None:
            query = query[wanted]
        outputs = []
        for part in metadata.parts:
            rows = part.rows.padded(query[part.start : part.start + part.num_tokens])
            outputs.append(part.rows.flat(self.attend(rows, key_cache, value_cache, part)))
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.o_proj(mixed.flatten(1).to(x.dtype))

    def attend(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, part: AttentionPart
    ) -> torch.Tensor:
        """[num_rows, len, num_heads, head_size] to the same, over every earlier token and the query's own."""
        return part.compute.attend(query, key_cache, value_cache, part, self.head_size**-0.5)


class _Heads(NamedTuple):
    """What a Mamba layer computes with, in the type of its recurrence but for the convolution's weight."""

    A: torch.Tensor  # [heads]
    D: torch.Tensor  # [heads]
    dt_bias: torch.Tensor  # [heads]
    conv_weight: torch.Tensor  # [channels, kernel], each tap of all channels contiguous


def _heads(
    A_log: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor, conv_weight: torch.Tensor, dtype: torch.dtype
) -> _Heads:
    return _Heads(-torch.exp(A_log.to(dtype)), D.to(dtype), upcast(dt_bias), conv_weight.T.contiguous().T)


class _Tokens(NamedTuple):
    """The tokens of a step's decodes, behind the convolution."""

    rows: Ragged
    conv_out: torch.Tensor  # [D, len, channels], padded; of kernels [num_tokens, channels]
    raw_dt: torch.Tensor  # [num_tokens, heads], as projected …
    dt: torch.Tensor  # … and behind the softplus; kernels do that themselves
    heads: _Heads
    cu_seqlens: torch.Tensor | None = None  # [D + 1], for kernels


class Mamba2Mixer(nn.Module):
    """A Mamba-2 layer: projection, causal convolution, state-space recurrence, gated norm, projection."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        groups: int,
        conv_kernel: int,
        chunk_size: int,
        eps: float,
        conv_bias: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.num_heads, self.head_dim, self.state_size, self.groups = num_heads, head_dim, state_size, groups
        self.kernel, self.chunk_size = conv_kernel, chunk_size
        inner = num_heads * head_dim
        conv_dim = inner + 2 * groups * state_size
        self.splits = (inner, conv_dim, num_heads)
        self.in_proj = Linear(hidden_size, sum(self.splits), bias)
        self.conv_weight = _empty(conv_dim, conv_kernel)
        self.conv_bias = _empty(conv_dim) if conv_bias else None
        self.dt_bias = _empty(num_heads)
        self.A_log = _empty(num_heads)
        self.D = _empty(num_heads)
        self._heads = Derived(_heads)
        self.norm = GatedRMSNorm(inner, groups, eps)
        self.out_proj = Linear(inner, hidden_size, bias)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        metadata: MambaMetadata = context.metadata[self.name]
        cache = context.views[self.name]
        gate, conv_in, raw_dt = self.in_proj(x).split(self.splits, dim=-1)
        if self._launches(context):
            mixed = self._launch(conv_in, raw_dt, context, metadata)
            return self.out_proj(gated_rms_norm(mixed, gate, self.norm.weight, self.groups, self.norm.eps))
        split, tokens = metadata.num_decodes, metadata.num_decode_tokens
        first = 0 if metadata.undo.reads_states else split  # row whose state is read here
        # All rows are read before any is written: a row may write the block that it, or another, starts from.
        windows = metadata.windows(cache[0], self.kernel - 1)
        states = read_states(cache[1], metadata.source_indices[first:])
        raw_dt_wide = upcast(raw_dt)
        # The recurrence runs in the wider type of inputs and states, one type for all of its operands.
        dtype = torch.promote_types(raw_dt_wide.dtype, states.dtype)
        heads = self._heads(self.A_log, self.D, self.dt_bias, self.conv_weight, dtype=dtype)
        windows, states = windows.to(conv_in.dtype), states.to(dtype)
        dt = F.softplus(raw_dt_wide + heads.dt_bias).to(dtype)
        outputs = []
        if (rows := metadata.decode_rows) is not None:
            conv_out, inputs = causal_conv1d(
                rows.padded(conv_in[:tokens]), heads.conv_weight, self.conv_bias, windows[:split]
            )
            decodes = _Tokens(rows, conv_out, raw_dt[:tokens], dt[:tokens], heads)
            memory = context.row_memory.get(self.name)
            y = metadata.undo.advance(self, decodes, states[: split - first], cache[1], memory, metadata)
            self._store_inputs(cache[0], metadata.state_indices[:split, 0], inputs[:, 1:])
            outputs.append(y.flatten(1))
        if metadata.prefill_rows is not None:
            outputs.append(
                self._prefill(
                    conv_in[tokens:], dt[tokens:], windows[split:], states[split - first :], cache, heads, metadata
                )
            )
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.out_proj(self.norm(mixed, gate))

    def fold(self, step: UndoStep, context: ForwardContext) -> None:
        """Write the states that are due in a step that runs no tokens."""
        step.fold(self, context.views[self.name][1], context.row_memory[self.name], self._launches(context))

    def _launches(self, context: ForwardContext) -> bool:
        """Whether kernels are chosen and take the layer's dtypes."""
        if context.kernels != "triton":
            return False
        return {part.dtype for part in context.views[self.name]} <= {*FLOATS, torch.int16}

    def _launch(
        self, conv_in: torch.Tensor, dt: torch.Tensor, context: ForwardContext, metadata: MambaMetadata
    ) -> torch.Tensor:
        """Convolution and recurrence as Triton kernels: [num_tokens, channels] to [num_tokens, inner]."""
        conv_state, ssm_state = context.views[self.name]
        split, tokens = metadata.num_decodes, metadata.num_decode_tokens
        weights = self._heads(self.A_log, self.D, self.dt_bias, self.conv_weight, dtype=torch.float32)
        taps, heads = (weights.conv_weight, self.conv_bias), (self.dt_bias, self.A_log)
        windows, window_rows = metadata.window_indices, metadata.window_rows
        outputs = []
        if (rows := metadata.decode_rows) is not None:
            conv_out = causal_conv1d_update(
                conv_state,
                conv_in[:tokens],
                *taps,
                metadata.cu_seqlens,
                windows[:split],
                window_rows[:split],
                metadata.window_targets,
            )
            decodes = _Tokens(rows, conv_out, dt[:tokens], dt[:tokens], weights, metadata.cu_seqlens)
            memory = context.row_memory.get(self.name)
            outputs.append(metadata.undo.launch(self, decodes, ssm_state, memory, metadata))
        if metadata.prefill_rows is not None:
            spans, initial = metadata.spans, metadata.has_initial_state
            assert spans is not None and initial is not None
            conv_out = causal_conv1d_prefill(
                conv_state, conv_in[tokens:], *taps, spans, windows[split:], window_rows[split:], initial
            )
            x, B, C = self._parts(conv_out, conv_out.dtype)
            sources, states = metadata.source_indices[split:], ssm_state
            if is_split := ssm_state.dtype == torch.int16:
                # The scan knows no planes: it gets the states that it starts from, and room for those it leaves.
                count, blocks = len(sources), spans.span_blocks
                places = torch.arange(1, 1 + count + len(blocks), device=x.device)
                states = torch.empty(1 + len(places), *ssm_state.shape[2:], dtype=torch.float32, device=x.device)
                states[1 : 1 + count] = read_states(ssm_state, sources)
                spans, sources = copy(spans), places[:count]
                spans.span_blocks = places[count:]
            outputs.append(chunk_scan_prefill(states, x, dt[tokens:], *heads, B, C, self.D, spans, sources, initial))
            if is_split:
                write_states(ssm_state, blocks, states[1 + count :])
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return mixed.flatten(1)

    def _parts(self, conv_out: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, B and C of the tokens, in `dtype`."""
        leading, shared = conv_out.shape[:-1], self.groups * self.state_size
        x, B, C = conv_out.to(dtype).split((self.splits[0], shared, shared), dim=-1)
        groups = (*leading, self.groups, self.state_size)
        return x.view(*leading, self.num_heads, self.head_dim), B.view(groups), C.view(groups)

    # What `attention.undo` asks of a layer.

    def scan(self, tokens: _Tokens, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens, heads, head_dim] outputs, and the states [D, len, …] after each token of each row."""
        x, B, C = self._parts(tokens.conv_out, states.dtype)
        heads = tokens.heads
        y, after = selective_state_update(states, x, tokens.rows.padded(tokens.dt), heads.A, B, C, heads.D)
        return tokens.rows.flat(y), after.flatten(0, 1)

    def write_states(self, state: torch.Tensor, blocks: torch.Tensor, states: torch.Tensor) -> None:
        """What padding leaves goes to the null block."""
        copy_blocks(state, blocks, states.to(state.dtype))

    def scan_behind(
        self, tokens: _Tokens, state: torch.Tensor, memory: ReplayRing, step: ReplayStep, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        """Outputs of tokens that see a state and, behind it, the inputs in a ring."""
        x, B, C = self._parts(tokens.rows.flat(tokens.conv_out), tokens.raw_dt.dtype)
        return replay_update_reference(
            state, memory, step, x, tokens.raw_dt, self.dt_bias, self.A_log, B, C, self.D, cu_seqlens
        )

    def write_behind(self, state: torch.Tensor, memory: ReplayRing, step: ReplayStep, launches: bool) -> None:
        """The states that `step` makes due, from the inputs in a ring."""
        (replay_flush if launches else replay_flush_reference)(state, memory, step, self.A_log)

    def launch_scan(
        self, tokens: _Tokens, state: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """`scan` and `write_states` in one kernel."""
        x, dt, dt_bias, A_log, B, C, D, cu_seqlens = self._operands(tokens)
        return selective_state_update_slots(state, x, dt, dt_bias, A_log, B, C, D, cu_seqlens, sources, targets)

    def launch_behind(self, tokens: _Tokens, state: torch.Tensor, memory: ReplayRing, step: ReplayStep) -> torch.Tensor:
        """`scan_behind` in one kernel."""
        x, dt, dt_bias, A_log, B, C, D, cu_seqlens = self._operands(tokens)
        return replay_update(state, memory, step, x, dt, dt_bias, A_log, B, C, D, cu_seqlens)

    def _operands(self, tokens: _Tokens) -> tuple[torch.Tensor, ...]:
        assert tokens.cu_seqlens is not None
        x, B, C = self._parts(tokens.conv_out, tokens.conv_out.dtype)
        return x, tokens.raw_dt, self.dt_bias, self.A_log, B, C, self.D, tokens.cu_seqlens

    def _prefill(
        self,
        conv_in: torch.Tensor,
        dt: torch.Tensor,
        window: torch.Tensor,
        state: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        heads: _Heads,
        metadata: MambaMetadata,
    ) -> torch.Tensor:
        rows, (conv_state, ssm_state) = metadata.prefill_rows, cache
        assert rows is not None
        if metadata.fresh is not None:
            # Filled, not multiplied: a block's previous owner may have left NaN or infinity in it.
            window = window.masked_fill(metadata.fresh[:, None, None], 0)
            state = state.masked_fill(metadata.fresh[:, None, None, None], 0)
        row, offsets, blocks = metadata.prefill_states
        conv_out, inputs = causal_conv1d(rows.padded(conv_in), heads.conv_weight, self.conv_bias, window)
        x, B, C = self._parts(conv_out, state.dtype)
        y, states = chunk_scan(x, rows.padded(dt), heads.A, B, C, heads.D, state, self.chunk_size, row, offsets)
        write_states(ssm_state, blocks, states)
        self._store_inputs(conv_state, blocks, windows_at(inputs, row, offsets, self.kernel - 1))
        return rows.flat(y).flatten(1)

    @staticmethod
    def _store_inputs(conv_state: torch.Tensor, blocks: torch.Tensor, inputs: torch.Tensor) -> None:
        conv_state[:, : inputs.shape[1]].index_copy_(0, blocks, inputs.to(conv_state.dtype))


class SquaredReluMLP(nn.Module):
    """`down(relu(up(x)) ** 2)`."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.down_proj(self.up_proj(x).relu_().square_())
