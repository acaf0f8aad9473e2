"""Operations of Triton's interpreter on drawn operands: Triton's own way, then the short one.

It is run by itself, since both change Triton's language for the whole process. It prints how many
operations were compared, and how many of them went to numpy at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from hybrid_kv.check.targets.workers.vllm_gpu import shortcuts

SHAPES: list[tuple[int, ...]] = [(), (4,), (8,), (2, 4)]
TYPES = [tl.int1, tl.int8, tl.int32, tl.int64, tl.uint32, tl.uint64, tl.float16, tl.float32]
OPERATORS = [
    *shortcuts.ARITHMETIC,
    *shortcuts.DIVISIONS,
    *shortcuts.LOGIC,
    *shortcuts.COMPARISONS,
    "__rsub__",
]
NUMBERS = [0, 3, -5, 2**31 - 1, -(2**31), 2**31, 2**40, 2.5, True]
MEMORY = np.arange(64, dtype=np.int64)


@triton.jit
def kernel() -> None:
    """Let Triton see that its language is used here."""
    tl.program_id(0)


def tensor(rng: random.Random, scalar: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor of drawn numbers."""
    dtype = interpreter._get_np_dtype(scalar)
    drawn = [rng.randrange(-9, 9) for _ in range(int(np.prod(shape or (1,))))]
    data = np.array(drawn).astype(dtype).reshape(shape or (1,))
    return made(data, scalar, shape)


def pointers(rng: random.Random, element: Any, shape: tuple[int, ...]) -> Any:
    """Return pointers into MEMORY."""
    size = max(1, element.primitive_bitwidth // 8)
    places = [rng.randrange(0, 16) * size for _ in range(int(np.prod(shape or (1,))))]
    data = np.array(places, np.uint64).reshape(shape or (1,)) + np.uint64(MEMORY.ctypes.data)
    return made(data, tl.pointer_type(element), shape)


def made(data: Any, scalar: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor of a type."""
    type = tl.block_type(scalar, list(shape)) if shape else scalar
    return tl.tensor(interpreter.TensorHandle(data, scalar), type)


def result_of(operation: Callable[[], Any]) -> Any:
    """Return all that there is to say of a result, or the kind of the error."""
    MEMORY[:] = np.arange(64)
    try:
        result = operation()
    except Exception as error:
        return type(error).__name__
    if result is None or result.handle is None:  # a store
        return MEMORY.tolist()
    data = result.handle.data
    return (
        (str(result.type), str(result.dtype), str(result.handle.dtype)),
        ([int(size) for size in result.shape], int(result.numel)),
        (data.dtype.name, data.shape, str(data.tolist())),  # NaN is not equal to itself
    )


def operations(rng: random.Random) -> list[Callable[[], Any]]:
    """Return all operators on all pairs of operands, and loads and stores."""
    kinds = list(itertools.product(TYPES, SHAPES))
    drawn = [tensor(rng, *kind) for kind in kinds]
    places = [pointers(rng, *kind) for kind in kinds]
    every: list[Callable[[], Any]] = []
    for name in OPERATORS:
        for one in drawn:
            every += [lambda a=one, b=two, n=name: getattr(a, n)(b) for two in (*drawn, *NUMBERS)]
    conditions = [one for one in drawn if one.dtype is tl.int1]
    for one in conditions:
        for x in (*drawn, 5):
            every += [lambda c=one, a=x, b=two: tl.where(c, a, b) for two in (*drawn, *NUMBERS)]
    for seed, one in itertools.product((tensor(rng, tl.int64, ()), 7), drawn):
        every += [lambda s=seed, b=one, n=num_rounds: tl.rand(s, b, n) for num_rounds in (1, 10)]
    for place in places:
        every += [lambda a=place, b=offset: a + b for offset in (*drawn, *places, *NUMBERS[:3])]
        for mask in (None, *conditions):
            every += [
                lambda p=place, m=mask, o=other: tl.load(p, m, o) for other in (None, 0, -1, 2.5)
            ]
            every += [lambda p=place, m=mask, v=value: tl.store(p, v, m) for value in (*drawn, 7)]
    return every


def main() -> None:
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    interpreter._patch_lang(kernel.fn)
    every = operations(random.Random(0))
    slow = [result_of(operation) for operation in every]
    shortcuts.install_types()
    shortcuts.install_operators()
    shortcuts.install_memory(tl)
    num_short = 0
    make = shortcuts.made

    def counted(*of: Any) -> Any:
        nonlocal num_short
        num_short += 1
        return make(*of)

    shortcuts.made = counted
    for expected, operation in zip(slow, operations(random.Random(0)), strict=True):
        got = result_of(operation)
        assert got == expected, (expected, got, operation.__defaults__)
    print(len(every), num_short)


if __name__ == "__main__":
    main()
