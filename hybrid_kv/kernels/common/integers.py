"""Integers of sizes and grids."""


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()
