"""The causal convolution of the mixers with a state, over a window that steps hand on.

`ConvMixer` keeps the window alone. `RecurrentMixer` adds a recurrent state; a new recurrence is a
subclass that says what its operands are and how a few tokens (`step`) and a whole row (`chunk`)
move the state. Neither knows the cache mode, the rollback scheme or where a state lies:
`MambaMetadata` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from itertools import compress
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from hybrid_kv.attention.mamba import MambaMetadata
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.kernels.causal_conv1d import causal_conv1d, windows_at
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.strided import copy_blocks
from hybrid_kv.kernels.recompute import RecomputeStep, read_states, write_states
from hybrid_kv.kernels.state_codec import state_codec
from hybrid_kv.models.layers import Derived, ForwardContext, empty
from hybrid_kv.models.mixers.rounded import RoundedStates, WantedBlocks

Tensors = tuple[torch.Tensor, ...]


class Projected(NamedTuple):
    """The projections of a mixer's input, [num_tokens, …] each."""

    conv_in: torch.Tensor  # [num_tokens, channels], what the convolution reads
    inputs: Tensors  # what else the recurrence reads
    rest: Tensors = ()  # what only `finish` reads


class Tokens(NamedTuple):
    """The tokens of a step's decodes or prefills, after the convolution."""

    rows: Ragged
    conv_out: torch.Tensor  # [num_rows, len, channels], padded
    inputs: Tensors  # [num_tokens, …]


def _joined(parts: Sequence[torch.Tensor], dim: int = -1) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _store_inputs(windows: Tensors, blocks: torch.Tensor, inputs: torch.Tensor) -> None:
    """Store inputs in the windows, each of which takes its share of the channels."""
    owned = (
        [inputs]
        if len(windows) == 1
        else inputs.split([window.shape[2] for window in windows], dim=2)
    )
    for window, values in zip(windows, owned, strict=True):
        window[:, : values.shape[1]].index_copy_(0, blocks, values.to(window.dtype))


@cache
def _wide(*dtypes: torch.dtype) -> torch.dtype:
    return reduce(torch.promote_types, dtypes, torch.float32)


def contiguous_taps(weight: torch.Tensor) -> torch.Tensor:
    return weight.T.contiguous().T  # each tap of all channels contiguous


def rates(
    A_log: torch.Tensor, other: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decay rates of states, and another weight of the recurrence in its dtype."""
    return -A_log.to(dtype).exp(), other.to(dtype)


def sizes_of(spec: MambaSpec) -> tuple[int, int]:
    """Return channels and kernel of the convolution of a layer with one window.

    The window has K rows more than the kernel needs.
    """
    rows, channels = spec.parts[0].shape
    return channels, rows + 1 - spec.num_speculative_tokens


class ConvMixer(nn.Module):
    """Projection, causal convolution, projection.

    Args:
        name: of the layer's cache.
        channels, kernel: of the convolution.
        silu: after the convolution.

    Attributes:
        roles: of the parts of its state, as its spec lists them; windows share the channels in this
            order.
    """

    roles: tuple[str, ...] = ("window",)

    def __init__(
        self, name: str, channels: int, kernel: int, conv_bias: bool, silu: bool = True
    ) -> None:
        super().__init__()
        self.name = name
        self.kernel = kernel
        self.silu = silu
        self.conv_weight = empty(channels, kernel)
        self.conv_bias = empty(channels) if conv_bias else None
        self._taps = Derived(contiguous_taps)
        self._has_role = {
            role: [named == role for named in self.roles] for role in ("window", "state")
        }

    def project(self, x: torch.Tensor) -> Projected:
        """Project the input [num_tokens, hidden_size]."""
        raise NotImplementedError

    def finish(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        """Project [num_tokens, …] after convolution and recurrence to [num_tokens, hidden_size]."""
        raise NotImplementedError

    def parts(self, context: ForwardContext, role: str) -> Tensors:
        """Return the layer's memory of one role, [num_blocks, …] each."""
        return tuple(compress(context.views[self.name], self._has_role[role]))

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        metadata: MambaMetadata = context.metadata[self.name]
        kept = self.parts(context, "window")
        conv_in, inputs, rest = self.project(x)
        split = metadata.num_decodes
        tokens = metadata.num_decode_tokens
        # All rows are read before any is written: a row may write the block that it, or another,
        # starts from.
        windows = _joined([metadata.windows(view, self.kernel - 1) for view in kept]).to(
            conv_in.dtype
        )
        states = self.read_states(context, metadata)
        outputs = []
        rows = metadata.decode_rows
        if rows is not None:
            conv_out, seen = self._convolve(rows.padded(conv_in[:tokens]), windows[:split])
            decodes = Tokens(rows, conv_out, tuple(values[:tokens] for values in inputs))
            outputs.append(self._decode(decodes, states, context))
            _store_inputs(kept, metadata.state_indices[:split, 0], seen[:, 1:])
        rows = metadata.prefill_rows
        if rows is not None:
            window = windows[split:]
            if metadata.fresh is not None:
                # Filled, not multiplied: a block's previous owner may have left NaN or infinity in
                # it.
                window = window.masked_fill(metadata.fresh[:, None, None], 0)
            conv_out, seen = self._convolve(rows.padded(conv_in[tokens:]), window)
            prefills = Tokens(rows, conv_out, tuple(values[tokens:] for values in inputs))
            outputs.append(rows.flat(self._prefill(prefills, states, context)))
            row, offsets, blocks = metadata.prefill_states
            _store_inputs(kept, blocks, windows_at(seen, row, offsets, self.kernel - 1))
        return self.finish(_joined(outputs, dim=0), rest)

    def _convolve(
        self, x: torch.Tensor, windows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return causal_conv1d(x, self._taps(self.conv_weight), self.conv_bias, windows, self.silu)

    # What a recurrence replaces.

    def read_states(self, context: ForwardContext, metadata: MambaMetadata) -> Tensors:
        return ()

    def _decode(self, decodes: Tokens, states: Tensors, context: ForwardContext) -> torch.Tensor:
        return decodes.rows.flat(decodes.conv_out)

    def _prefill(self, prefills: Tokens, states: Tensors, context: ForwardContext) -> torch.Tensor:
        return prefills.conv_out


class RecurrentMixer(ConvMixer):
    """A convolution and after it a recurrence, in the wider dtype of inputs and states.

    Attributes:
        chunk_size: tokens that `scan` takes together.
        update: of the states [num_rows, …] and the `operands`: outputs [num_rows, len, …] and the
            states [num_rows, len, …] after all tokens.
        scan: of the `operands`, the states, `chunk_size`, rows and offsets: outputs, and the states
            [M, …] after `offsets[m]` tokens of row `rows[m]`.
    """

    roles: tuple[str, ...] = ("window", "state")
    chunk_size: int
    update: ClassVar[Callable[..., Tensors]]
    scan: ClassVar[Callable[..., Tensors]]

    def operands(self, conv_out: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        """Return the operands of `update` and `scan` in `dtype`, [num_rows, len, …] or of no token.

        Args:
            conv_out: [num_rows, len, channels]; `inputs`: `Projected.inputs`, [num_rows, len, …].
        """
        raise NotImplementedError

    def recompute(
        self, decodes: Tokens, history: RecomputeStep, context: ForwardContext
    ) -> torch.Tensor:
        """Return the outputs of tokens after a history; flush what is due; append their inputs."""
        raise NotImplementedError

    def flush(self, history: RecomputeStep, context: ForwardContext) -> None:
        """Write the states that are due of requests that run no tokens.

        It is called for a layer whose spec has `inputs`.
        """
        raise NotImplementedError

    def rounded(self, context: ForwardContext) -> RoundedStates | None:
        """Return the states where a step goes on from their stored form; None where it does not."""
        state, *_ = self.parts(context, "state")
        codec = state_codec(state.dtype, context.metadata[self.name].rounding)
        if codec is None:
            return None
        views = context.views[self.name]
        return RoundedStates(codec, views[self.roles.index("state") :], self.name)

    def read_states(self, context: ForwardContext, metadata: MambaMetadata) -> Tensors:
        rounded = self.rounded(context)
        if rounded is not None:
            return (rounded.read(metadata.source_indices),)
        # Row whose state is read here.
        first = 0 if metadata.rollback.history is None else metadata.num_decodes
        return tuple(
            read_states(view, metadata.source_indices[first:])
            for view in self.parts(context, "state")
        )

    def _dtype(self, conv_in: torch.Tensor, states: Tensors) -> torch.dtype:
        return _wide(conv_in.dtype, *[state.dtype for state in states])

    def _decode(self, decodes: Tokens, states: Tensors, context: ForwardContext) -> torch.Tensor:
        metadata: MambaMetadata = context.metadata[self.name]
        rows, conv_out, _ = decodes
        history = metadata.rollback.history
        if history is not None:
            return self.recompute(decodes, history, context).flatten(1)
        dtype = self._dtype(conv_out, states)
        before = [state[: metadata.num_decodes].to(dtype) for state in states]
        inputs = tuple(map(rows.padded, decodes.inputs))
        operands = self.operands(conv_out, inputs, dtype)
        rounded = self.rounded(context)
        if rounded is not None:
            positions = rows.padded(metadata.positions[: metadata.num_decode_tokens])
            targets = metadata.decode_targets.view(positions.shape)
            wanted = WantedBlocks.of_every_token(targets)
            (state,) = before
            y = rounded.run(self.update, state, operands, positions, wanted)
            return rows.flat(y).flatten(1)
        y, *after = self.update(*before, *operands)
        for view, values in zip(self.parts(context, "state"), after, strict=True):
            # What padding leaves goes to the null block.
            copy_blocks(view, metadata.decode_targets, values.flatten(0, 1).to(view.dtype))
        return rows.flat(y).flatten(1)

    def _prefill(self, prefills: Tokens, states: Tensors, context: ForwardContext) -> torch.Tensor:
        metadata: MambaMetadata = context.metadata[self.name]
        rows, conv_out, _ = prefills
        dtype = self._dtype(conv_out, states)
        num_rows = rows.num_rows
        before = [state[len(state) - num_rows :].to(dtype) for state in states]
        if metadata.fresh is not None:
            before = [
                state.masked_fill(metadata.fresh.view(-1, *[1] * (state.dim() - 1)), 0)
                for state in before
            ]
        row, offsets, blocks = metadata.prefill_states
        operands = self.operands(conv_out, tuple(map(rows.padded, prefills.inputs)), dtype)
        rounded = self.rounded(context)
        if rounded is not None:
            positions = rows.padded(metadata.positions[metadata.num_decode_tokens :])
            wanted = WantedBlocks(row, offsets, blocks)
            (state,) = before
            return rounded.run(self.update, state, operands, positions, wanted).flatten(2)
        y, *kept = self.scan(*operands, *before, self.chunk_size, row, offsets)
        for view, values in zip(self.parts(context, "state"), kept, strict=True):
            write_states(view, blocks, values)
        return y.flatten(2)
