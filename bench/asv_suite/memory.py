"""Memory, exactly: what a request holds, and what a plan makes of a GPU."""

from __future__ import annotations

from bench import memory
from bench.harness.asv_classes import Counted, Grid

CELLS = memory.cells()


class Held(Counted):
    """Blocks of a request with a prompt of 1,000 tokens in chunks of 256.

    They are counted after the prompt and after 128 decoded tokens.
    """

    grid = Grid.of(CELLS, "held")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def track_most(self, mode: str, K: int) -> float:
        return self.counts["most"].value

    track_most.unit = "blocks"

    def track_prompt(self, mode: str, K: int) -> float:
        return self.counts["prompt"].value

    track_prompt.unit = "blocks"

    def track_mamba(self, mode: str, K: int) -> float:
        return self.counts["mamba"].value

    track_mamba.unit = "blocks"

    def track_attention(self, mode: str, K: int) -> float:
        return self.counts["attention"].value

    track_attention.unit = "blocks"

    def track_published(self, mode: str, K: int) -> float:
        return self.counts["published"].value

    track_published.unit = "blocks"


class Plan(Counted):
    """60 GiB for requests of up to 131,072 tokens, FlashAttention."""

    grid = Grid.of(CELLS, "plan")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def track_bytes_per_request(self, model: str, mode: str, K: int) -> float:
        return self.counts["bytes_per_request"].value

    track_bytes_per_request.unit = "B"

    def track_block_size(self, model: str, mode: str, K: int) -> float:
        return self.counts["block_size"].value

    track_block_size.unit = "tokens"

    def track_page_size_bytes(self, model: str, mode: str, K: int) -> float:
        return self.counts["page_size_bytes"].value

    track_page_size_bytes.unit = "B"

    def track_num_blocks(self, model: str, mode: str, K: int) -> float:
        return self.counts["num_blocks"].value

    track_num_blocks.unit = "blocks"

    def track_token_capacity(self, model: str, mode: str, K: int) -> float:
        return self.counts["token_capacity"].value

    track_token_capacity.unit = "tokens"

    def track_blocks_per_request(self, model: str, mode: str, K: int) -> float:
        return self.counts["blocks_per_request"].value

    track_blocks_per_request.unit = "blocks"
