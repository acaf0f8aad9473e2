"""Mixers that have Triton kernels: the launches of a layer, where an engine runs on them.

The convolution of all decodes is one launch and that of all prefills another; a subclass adds its
recurrence. What launches are handed are slices and indices that the step's metadata already holds.
"""

from __future__ import annotations

from copy import copy

import torch

from hybrid_kv.attention.mamba import MambaMetadata
from hybrid_kv.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update
from hybrid_kv.kernels.common.launch import FLOATS
from hybrid_kv.kernels.common.spans import Spans
from hybrid_kv.kernels.recompute import read_states, write_states
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.models.mixers.conv import RecurrentMixer, Tensors

# Of the prefills, the blocks they start from, and which have one.
ScanRows = tuple[Spans, torch.Tensor, torch.Tensor]


class LaunchedMixer(RecurrentMixer):
    """A recurrent layer that plain torch or Triton kernels run."""

    def launches(self, context: ForwardContext) -> bool:
        """Return whether Triton kernels run this layer: they are chosen, and take its dtypes."""
        metadata = context.metadata.get(self.name)  # a flush has none
        if context.kernels != "triton" or getattr(metadata, "rounding", None) is not None:
            return False
        return {view.dtype for view in context.views[self.name]} <= {*FLOATS, torch.int16}

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if not self.launches(context):
            return super().forward(x, context)
        metadata: MambaMetadata = context.metadata[self.name]
        conv_in, inputs, rest = self.project(x)
        (conv_state,) = self.parts(context, "window")
        split = metadata.num_decodes
        tokens = metadata.num_decode_tokens
        taps = self._taps(self.conv_weight), self.conv_bias
        windows = metadata.window_indices
        window_rows = metadata.window_rows
        outputs = []
        if metadata.decode_rows is not None:
            conv_out = causal_conv1d_update(
                conv_state,
                conv_in[:tokens],
                *taps,
                metadata.cu_seqlens,
                windows[:split],
                window_rows[:split],
                metadata.window_targets,
            )
            outputs.append(
                self.launch_decodes(conv_out, tuple(values[:tokens] for values in inputs), context)
            )
        if metadata.prefill_rows is not None:
            spans = metadata.spans
            initial = metadata.has_initial_state
            assert spans is not None and initial is not None
            conv_out = causal_conv1d_prefill(
                conv_state,
                conv_in[tokens:],
                *taps,
                spans,
                windows[split:],
                window_rows[split:],
                initial,
            )
            outputs.append(
                self.launch_prefills(conv_out, tuple(values[tokens:] for values in inputs), context)
            )
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.finish_launched(mixed.flatten(1), rest)

    def launch_decodes(
        self, conv_out: torch.Tensor, inputs: Tensors, context: ForwardContext
    ) -> torch.Tensor:
        """Run the recurrence of the decodes, and store states in their blocks.

        Operands and outputs are [num_tokens, …] each.
        """
        raise NotImplementedError

    def launch_prefills(
        self, conv_out: torch.Tensor, inputs: Tensors, context: ForwardContext
    ) -> torch.Tensor:
        """Run the recurrence of the prefills, and store states in their blocks.

        Operands and outputs are [num_tokens, …] each.
        """
        metadata = context.metadata[self.name]
        (state,) = self.parts(context, "state")
        spans = metadata.spans
        sources = metadata.source_indices
        initial = metadata.has_initial_state
        assert spans is not None and initial is not None
        sources = sources[metadata.num_decodes :]
        if state.dtype != torch.int16:
            return self.launch_scan(state, conv_out, inputs, (spans, sources, initial))
        # The scan knows no planes: it gets the states that it starts from, and room for those it
        # leaves.
        count = len(sources)
        blocks = spans.span_blocks
        places = torch.arange(1, 1 + count + len(blocks), device=state.device)
        states = torch.empty(
            1 + len(places), *state.shape[2:], dtype=torch.float32, device=state.device
        )
        states[1 : 1 + count] = read_states(state, sources)
        spans = copy(spans)
        spans.span_blocks = places[count:]
        y = self.launch_scan(states, conv_out, inputs, (spans, places[:count], initial))
        write_states(state, blocks, states[1 + count :])
        return y

    def launch_scan(
        self, state: torch.Tensor, conv_out: torch.Tensor, inputs: Tensors, rows: ScanRows
    ) -> torch.Tensor:
        """Scan the prefills over `state`, which is not in planes."""
        raise NotImplementedError

    def finish_launched(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        """Do `finish` after launches."""
        return self.finish(mixed, rest)
