"""A Mamba-2 layer (Dao and Gu, 2024): convolution, state-space recurrence, gated norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec
from hybrid_kv.kernels.gated_norm import gated_rms_norm
from hybrid_kv.kernels.recompute import (
    RecomputeStep,
    recompute_flush,
    recompute_flush_reference,
    recompute_update,
    recompute_update_reference,
)
from hybrid_kv.kernels.ssd import (
    chunk_scan,
    chunk_scan_prefill,
    selective_state_update,
    selective_state_update_slots,
)
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import Derived, ForwardContext, GatedRMSNorm, Linear, empty, upcast
from hybrid_kv.models.mixers.conv import Projected, Tensors, Tokens, rates, sizes_of
from hybrid_kv.models.mixers.launched import LaunchedMixer, ScanRows


def check_time_steps(file: ConfigFile) -> None:
    """Refuse limits of the time step: engines and transformers differ in where they apply them."""
    # JSON's spelling, and transformers' own.
    endless = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    limit = file.get("time_step_limit")
    if limit is not None and limit not in endless:
        raise file.fail(
            f"time_step_limit={limit!r} can't be run, [0.0, Infinity] can; use another checkpoint"
        )


def _heads(
    A_log: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor, dtype: torch.dtype
) -> Tensors:
    return *rates(A_log, D, dtype), upcast(dt_bias)


class Mamba2Mixer(LaunchedMixer):
    """The layer.

    Args:
        spec: of its cache, which has the sizes. Heads of a group share B and C, and are normed
            together.
        bias: of both projections; `out_bias` of the last one, if it differs.
    """

    update = staticmethod(selective_state_update)
    scan = staticmethod(chunk_scan)

    def __init__(
        self,
        name: str,
        hidden_size: int,
        spec: KVCacheSpec,
        chunk_size: int,
        eps: float,
        conv_bias: bool,
        bias: bool,
        out_bias: bool | None = None,
    ) -> None:
        assert isinstance(spec, MambaSpec)
        conv_dim, kernel = sizes_of(spec)
        x, B, _ = spec.inputs
        super().__init__(name, conv_dim, kernel, conv_bias)
        num_heads, self.head_dim = x.shape
        self.groups, self.state_size = B.shape
        self.num_heads = num_heads
        inner = num_heads * self.head_dim
        self.chunk_size = chunk_size
        self.splits = (inner, conv_dim, num_heads)
        self.in_proj = Linear(hidden_size, sum(self.splits), bias)
        self.dt_bias = empty(num_heads)
        self.A_log = empty(num_heads)
        self.D = empty(num_heads)
        self._heads = Derived(_heads)
        self.norm = GatedRMSNorm(inner, self.groups, eps)
        self.out_proj = Linear(inner, hidden_size, bias if out_bias is None else out_bias)

    def project(self, x: torch.Tensor) -> Projected:
        gate, conv_in, raw_dt = self.in_proj(x).split(self.splits, dim=-1)
        return Projected(conv_in, (raw_dt,), (gate,))

    def finish(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        return self.out_proj(self.gated(mixed, rest[0], launches=False))

    def gated(self, mixed: torch.Tensor, gate: torch.Tensor, launches: bool) -> torch.Tensor:
        """Gate and norm after the recurrence: [num_tokens, channels], in the dtype of the gate."""
        if launches:
            return gated_rms_norm(mixed, gate, self.norm.weight, self.norm.groups, self.norm.eps)
        return self.norm(mixed, gate)

    def operands(self, conv_out: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        """Return x, dt after the softplus, A, B, C, D."""
        A, D, dt_bias = self._heads(self.A_log, self.D, self.dt_bias, dtype=dtype)
        x, B, C = self._parts(conv_out, dtype)
        dt = F.softplus(upcast(inputs[0]) + dt_bias).to(dtype)
        return x, dt, A, B, C, D

    def _parts(
        self, conv_out: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x, B and C of the tokens, in `dtype`."""
        leading = conv_out.shape[:-1]
        shared = self.groups * self.state_size
        x, B, C = conv_out.to(dtype).split((self.splits[0], shared, shared), dim=-1)
        groups = (*leading, self.groups, self.state_size)
        return x.view(*leading, self.num_heads, self.head_dim), B.view(groups), C.view(groups)

    # With a history.

    def recompute(
        self, decodes: Tokens, history: RecomputeStep, context: ForwardContext
    ) -> torch.Tensor:
        (state,) = self.parts(context, "state")
        ring = context.row_memory[self.name]
        raw_dt = decodes.inputs[0]
        x, B, C = self._parts(decodes.rows.flat(decodes.conv_out), raw_dt.dtype)
        return recompute_update_reference(
            state,
            ring,
            history,
            x,
            raw_dt,
            self.dt_bias,
            self.A_log,
            B,
            C,
            self.D,
            decodes.rows.starts,
        )

    def flush(self, history: RecomputeStep, context: ForwardContext) -> None:
        (state,) = self.parts(context, "state")
        ring = context.row_memory[self.name]
        (recompute_flush if self.launches(context) else recompute_flush_reference)(
            state, ring, history, self.A_log
        )

    # Triton kernels.

    def launch_decodes(
        self, conv_out: torch.Tensor, inputs: Tensors, context: ForwardContext
    ) -> torch.Tensor:
        metadata = context.metadata[self.name]
        (state,) = self.parts(context, "state")
        x, B, C = self._parts(conv_out, conv_out.dtype)
        operands = x, inputs[0], self.dt_bias, self.A_log, B, C, self.D, metadata.cu_seqlens
        history = metadata.rollback.history
        if history is not None:
            return recompute_update(state, context.row_memory[self.name], history, *operands)
        split = metadata.num_decodes
        return selective_state_update_slots(
            state, *operands, metadata.source_indices[:split], metadata.state_indices[:split]
        )

    def launch_scan(
        self, state: torch.Tensor, conv_out: torch.Tensor, inputs: Tensors, rows: ScanRows
    ) -> torch.Tensor:
        x, B, C = self._parts(conv_out, conv_out.dtype)
        return chunk_scan_prefill(
            state, x, inputs[0], self.dt_bias, self.A_log, B, C, self.D, *rows
        )

    def finish_launched(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        return self.out_proj(self.gated(mixed, rest[0], launches=True))
