"""Attention over kernel blocks, and the writing of K and V before it."""

from __future__ import annotations

from bench import paged_attention
from bench.harness.asv_classes import Grid, Timed, TimedOnDevice

CELLS = paged_attention.cells()


class Decode(Timed):
    """`length` queries of each request over `context` tokens, their own included.

    The pages lie all over the cache.
    """

    grid = Grid.of(CELLS, "decode")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_decode(self, model: str, num_reqs: int, length: int, context: int) -> None:
        self.run()


class Chunk(Timed):
    """`length` queries of each request over `context` tokens, their own included.

    The pages lie all over the cache.
    """

    grid = Grid.of(CELLS, "chunk")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_chunk(self, model: str, num_reqs: int, length: int, context: int) -> None:
        self.run()


class WriteKv(Timed):
    """K and V of a step's tokens into the slots of their blocks; two tokens are padding."""

    grid = Grid.of(CELLS, "write_kv")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_write_kv(self, model: str, num_tokens: int) -> None:
        self.run()


class DecodeKernel(TimedOnDevice):
    """`length` queries of each request over `context` tokens, their own included.

    The pages lie all over the cache.
    """

    grid = Grid.of(CELLS, "decode_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_decode_kernel(
        self, model: str, num_reqs: int, length: int, context: int
    ) -> None:
        self.run()

    def time_decode_kernel_sync(self, model: str, num_reqs: int, length: int, context: int) -> None:
        self.run_sync()


class ChunkKernel(TimedOnDevice):
    """`length` queries of each request over `context` tokens, their own included.

    The pages lie all over the cache.
    """

    grid = Grid.of(CELLS, "chunk_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_chunk_kernel(
        self, model: str, num_reqs: int, length: int, context: int
    ) -> None:
        self.run()

    def time_chunk_kernel_sync(self, model: str, num_reqs: int, length: int, context: int) -> None:
        self.run_sync()
