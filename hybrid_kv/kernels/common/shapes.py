"""What the layers of real models compute with: for what is compiled ahead of time, and for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LayerShape:
    """A Mamba-2 layer and an attention layer of one model, from its config.json.

    Attributes:
        heads, head_dim, state_size, groups: of the Mamba-2 layer.
        query_heads, kv_heads: of the attention layer.
        chunk_size: tokens of the model's own chunks.
        kernel: taps of the convolution.
        head_size: of the attention layer.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    query_heads: int
    kv_heads: int
    chunk_size: int
    kernel: int = 4
    head_size: int = 128

    @property
    def inner(self) -> int:
        """Channels of the gate and of what leaves the recurrence."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def state(self) -> tuple[int, int, int, int]:
        """heads, head_dim, state_size, groups: what the size of a recurrent state follows from."""
        return self.heads, self.head_dim, self.state_size, self.groups

    def of_rank(self, num_ranks: int) -> LayerShape:
        """What one of `num_ranks` tensor-parallel ranks computes with: at least one group and one K/V head."""
        return replace(
            self,
            heads=self.heads // num_ranks,
            groups=max(1, self.groups // num_ranks),
            query_heads=self.query_heads // num_ranks,
            kv_heads=max(1, self.kv_heads // num_ranks),
        )


NANO = "Nemotron-3-Nano"
SHAPES = {
    NANO: LayerShape(64, 64, 128, 8, 32, 2, 128),
    "Nemotron-H-8B": LayerShape(128, 64, 128, 8, 32, 8, 128),
    "Granite-4-H-small": LayerShape(128, 64, 128, 1, 32, 8, 256),
}
