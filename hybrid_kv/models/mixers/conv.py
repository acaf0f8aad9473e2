"""What the mixers with a state share: a causal convolution over a window that is carried from step to step.

`ConvMixer` keeps the window alone. `RecurrentMixer` adds a recurrent state; a new recurrence is a subclass that says
what its operands are and how a few tokens (`step`) and a whole row (`chunk`) move the state. Neither knows the cache
mode, the undo scheme or where a state lies: `MambaMetadata` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from hybrid_kv.attention.mamba import MambaMetadata
from hybrid_kv.attention.undo import UndoStep
from hybrid_kv.kernels.causal_conv1d import causal_conv1d, windows_at
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.strided import copy_blocks
from hybrid_kv.kernels.replay import read_states, write_states
from hybrid_kv.models.layers import Derived, ForwardContext, empty, upcast

Tensors = tuple[torch.Tensor, ...]


class Projected(NamedTuple):
    """What a mixer makes of its input, [num_tokens, …] each."""

    conv_in: torch.Tensor  # [num_tokens, channels], what the convolution reads
    inputs: Tensors  # what else the recurrence reads
    rest: Tensors = ()  # what only `finish` reads


class Tokens(NamedTuple):
    """The tokens of a step's decodes, behind the convolution."""

    rows: Ragged
    conv_out: torch.Tensor  # [D, len, channels], padded; of kernels [num_tokens, channels]
    inputs: Tensors  # [num_tokens, …]
    dtype: torch.dtype  # of the recurrence
    cu_seqlens: torch.Tensor | None = None  # [D + 1], for kernels


def _taps(weight: torch.Tensor) -> torch.Tensor:
    return weight.T.contiguous().T  # each tap of all channels contiguous


class ConvMixer(nn.Module):
    """Projection, causal convolution, projection.

    Args:
        name: of the layer's cache.
        channels, kernel: of the convolution.
        silu: behind the convolution.
    """

    def __init__(self, name: str, channels: int, kernel: int, conv_bias: bool, silu: bool = True) -> None:
        super().__init__()
        self.name, self.kernel, self.silu = name, kernel, silu
        self.conv_weight = empty(channels, kernel)
        self.conv_bias = empty(channels) if conv_bias else None
        self._taps = Derived(_taps)

    def project(self, x: torch.Tensor) -> Projected:
        """[num_tokens, hidden_size]."""
        raise NotImplementedError

    def finish(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        """[num_tokens, …] behind convolution and recurrence to [num_tokens, hidden_size]."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        metadata: MambaMetadata = context.metadata[self.name]
        cache = context.views[self.name]
        conv_in, inputs, rest = self.project(x)
        split, tokens = metadata.num_decodes, metadata.num_decode_tokens
        # All rows are read before any is written: a row may write the block that it, or another, starts from.
        windows = metadata.windows(cache[0], self.kernel - 1).to(conv_in.dtype)
        states = self._read(cache, metadata)
        outputs = []
        if (rows := metadata.decode_rows) is not None:
            conv_out, seen = self._convolve(rows.padded(conv_in[:tokens]), windows[:split])
            decodes = Tokens(rows, conv_out, tuple(part[:tokens] for part in inputs), self._dtype(conv_in, states))
            outputs.append(self._decode(decodes, states, context, metadata))
            self._store_inputs(cache[0], metadata.state_indices[:split, 0], seen[:, 1:])
        if (rows := metadata.prefill_rows) is not None:
            window = windows[split:]
            if metadata.fresh is not None:
                # Filled, not multiplied: a block's previous owner may have left NaN or infinity in it.
                window = window.masked_fill(metadata.fresh[:, None, None], 0)
            conv_out, seen = self._convolve(rows.padded(conv_in[tokens:]), window)
            own = tuple(rows.padded(part[tokens:]) for part in inputs)
            outputs.append(rows.flat(self._prefill(conv_out, own, states, cache, metadata)))
            row, offsets, blocks = metadata.prefill_states
            self._store_inputs(cache[0], blocks, windows_at(seen, row, offsets, self.kernel - 1))
        return self.finish(outputs[0] if len(outputs) == 1 else torch.cat(outputs), rest)

    def _convolve(self, x: torch.Tensor, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return causal_conv1d(x, self._taps(self.conv_weight), self.conv_bias, windows, self.silu)

    @staticmethod
    def _store_inputs(conv_state: torch.Tensor, blocks: torch.Tensor, inputs: torch.Tensor) -> None:
        conv_state[:, : inputs.shape[1]].index_copy_(0, blocks, inputs.to(conv_state.dtype))

    # What a recurrence replaces.

    def _read(self, cache: Tensors, metadata: MambaMetadata) -> torch.Tensor | None:
        return None

    def _dtype(self, conv_in: torch.Tensor, states: torch.Tensor | None) -> torch.dtype:
        return conv_in.dtype

    def _decode(
        self, tokens: Tokens, states: torch.Tensor | None, context: ForwardContext, metadata: MambaMetadata
    ) -> torch.Tensor:
        return tokens.rows.flat(tokens.conv_out)

    def _prefill(
        self,
        conv_out: torch.Tensor,
        inputs: Tensors,
        states: torch.Tensor | None,
        cache: Tensors,
        metadata: MambaMetadata,
    ) -> torch.Tensor:
        return conv_out


class RecurrentMixer(ConvMixer):
    """A convolution and behind it a recurrence, in the wider dtype of inputs and states."""

    def operands(self, conv_out: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        """What `step` and `chunk` read, [num_rows, len, …] or of no token, in `dtype`.

        Args:
            conv_out: [num_rows, len, channels]; `inputs`: `Projected.inputs`, [num_rows, len, …].
        """
        raise NotImplementedError

    def step(self, states: torch.Tensor, operands: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """From the states [num_rows, …]: outputs [num_rows, len, …] and the states [num_rows, len, …] behind all."""
        raise NotImplementedError

    def chunk(
        self, states: torch.Tensor, operands: Tensors, rows: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the states [num_rows, …]: outputs, and the states [M, …] after `offsets[m]` tokens of row `rows[m]`."""
        raise NotImplementedError

    def fold(self, step: UndoStep, context: ForwardContext) -> None:
        """Write the states that are due in a step that runs no tokens."""
        step.fold(self, context.views[self.name][1], context.row_memory.get(self.name), self.launches(context))

    def launches(self, context: ForwardContext) -> bool:
        """Whether Triton kernels run this layer in this step; without any it runs in torch."""
        return False

    def _read(self, cache: Tensors, metadata: MambaMetadata) -> torch.Tensor:
        first = 0 if metadata.undo.reads_states else metadata.num_decodes  # row whose state is read here
        return read_states(cache[1], metadata.source_indices[first:])

    def _dtype(self, conv_in: torch.Tensor, states: torch.Tensor | None) -> torch.dtype:
        assert states is not None
        return torch.promote_types(upcast(conv_in[:0]).dtype, states.dtype)

    def _decode(
        self, tokens: Tokens, states: torch.Tensor | None, context: ForwardContext, metadata: MambaMetadata
    ) -> torch.Tensor:
        assert states is not None
        before = states[: metadata.num_decodes if metadata.undo.reads_states else 0].to(tokens.dtype)
        memory = context.row_memory.get(self.name)
        y: torch.Tensor = metadata.undo.advance(self, tokens, before, context.views[self.name][1], memory, metadata)
        return y.flatten(1)

    def _prefill(
        self,
        conv_out: torch.Tensor,
        inputs: Tensors,
        states: torch.Tensor | None,
        cache: Tensors,
        metadata: MambaMetadata,
    ) -> torch.Tensor:
        assert states is not None and metadata.prefill_rows is not None
        dtype = self._dtype(conv_out, states)
        before = states[len(states) - metadata.prefill_rows.num_rows :].to(dtype)
        if metadata.fresh is not None:
            before = before.masked_fill(metadata.fresh.view(-1, *[1] * (before.dim() - 1)), 0)
        row, offsets, blocks = metadata.prefill_states
        y, wanted = self.chunk(before, self.operands(conv_out, inputs, dtype), row, offsets)
        write_states(cache[1], blocks, wanted)
        return y.flatten(2)

    # What `attention.undo` asks of a layer beside the launches, which are a subclass's.

    def scan(self, tokens: Tokens, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens, …] outputs, and the states [D * len, …] after each token of each row."""
        inputs = tuple(map(tokens.rows.padded, tokens.inputs))
        y, after = self.step(states, self.operands(tokens.conv_out, inputs, tokens.dtype))
        return tokens.rows.flat(y), after.flatten(0, 1)

    def write_states(self, state: torch.Tensor, blocks: torch.Tensor, states: torch.Tensor) -> None:
        """What padding leaves goes to the null block."""
        copy_blocks(state, blocks, states.to(state.dtype))

    def scan_behind(self, tokens: Any, state: Any, memory: Any, step: Any, cu_seqlens: Any) -> torch.Tensor:
        """Of a layer whose spec has `inputs`."""
        raise NotImplementedError

    def write_behind(self, state: Any, memory: Any, step: Any, launches: bool) -> None:
        """Of a layer whose spec has `inputs`."""
        raise NotImplementedError

    def launch_scan(self, tokens: Any, state: Any, sources: Any, targets: Any) -> torch.Tensor:
        """Of a layer that `launches`."""
        raise NotImplementedError

    def launch_behind(self, tokens: Any, state: Any, memory: Any, step: Any) -> torch.Tensor:
        """Of a layer that `launches`."""
        raise NotImplementedError
