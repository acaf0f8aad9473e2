"""The operands of a verify step and a prefill, for any recurrent layer (a second base class)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.kernels.harness import Operation, Shape, shapes, update_rows
from tests.support.spans import Cut


class Recurrent(Operation):
    def put(self, block: int, scale: float, g: torch.Generator) -> None:
        """An initial state into a block; with scale 0 the first token's own contribution shows."""
        state = self.arguments["state"]
        state[block] = (torch.randn(state.shape[1:], generator=g) * scale).to(
            state.device, state.dtype
        )


class VerifyStep(Recurrent):
    """Rows of a shape, see `update_rows`."""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape, g = shape, torch.Generator().manual_seed(shape.seed)
        self.num_tokens = sum(length for length, _, _ in shape.rows)
        super().__init__(
            shape, self.num_tokens, 1 + len(shape.rows) * (1 + shape.columns), g, device
        )
        indices = update_rows(shape, g)
        sources = indices["source_indices"]
        for source in sources[sources > 0].tolist():
            self.put(source, shape.initial, g)
        self.arguments |= {
            name: part.to(device, shape.index_dtype) for name, part in indices.items()
        }


@st.composite
def verify_steps(draw: DrawFn, base: Shape, **options: Any) -> Shape:
    """Shapes with rows of up to six tokens; see `harness.shapes`."""
    columns = draw(st.integers(1, 6))
    row = st.tuples(st.integers(0, columns), st.booleans(), st.integers(-1, columns - 1))
    rows = draw(st.lists(row, min_size=1, max_size=2))
    return draw(shapes(base.but(rows=tuple(rows), columns=columns), **options))


class Prefill(Recurrent):
    """Rows of a shape, see `test_spans.Row`."""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape, g = shape, torch.Generator().manual_seed(shape.seed)
        self.cut = Cut(shape.rows, shape.chunk_size, g, device, shape.index_dtype)
        self.num_tokens = self.cut.spans.num_tokens
        super().__init__(shape, self.num_tokens, self.cut.num_blocks, g, device)
        for row, source in zip(shape.rows, self.cut.sources, strict=True):
            if row.initial and source > 0:
                self.put(source, shape.initial, g)
        self.arguments |= self.cut.arguments("source_indices")
