"""Integers of sizes, grids and rings."""

WINDOW = 32  # tokens of history that a ring holds besides the step's; one tile of the kernel


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()


def shortest_ring_len(max_query_len: int) -> int:
    """Return how many tokens a ring must hold at least, see `kernels.recompute`.

    Those that a flush up to a boundary leaves, those of a step, and those of the step after it.
    """
    return 3 * max_query_len - 1


def default_ring_len(max_query_len: int) -> int:
    """Return the tokens of a ring.

    A longer one flushes less often, but every step reads the history.
    """
    return max(WINDOW, 2 * max_query_len - 1) + max_query_len
