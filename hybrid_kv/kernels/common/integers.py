"""Integers of sizes, grids and rings."""

WINDOW = 32  # tokens of history that a ring holds besides the step's; one tile of the kernel


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()


def shortest_ring_len(max_query_len: int) -> int:
    """Tokens that a ring must hold: what a boundary leaves, a step, and the one behind it; see `kernels.recompute`."""
    return 3 * max_query_len - 1


def default_ring_len(max_query_len: int) -> int:
    """Tokens of a ring: longer ones flush less often, but every step reads the history."""
    return max(WINDOW, 2 * max_query_len - 1) + max_query_len
