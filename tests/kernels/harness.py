"""What the tests of all kernels share.

A test module states an *operation*: a class whose instances are the arguments of one call, made
from a `Shape`, and what `tests.kernels.definitions` says of them. From it come the tests that
kernel and reference give the expected values and write nothing else (`equality`), that wrong
arguments are rejected (`rejections`), that offsets may pass 2^31 (`check_far`) and that nothing
spills (`compiled`). Kernels run in Triton's interpreter, in another process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.static import compile
from bench.static.record import AotCase
from tests.kernels.interpreter import (
    Counts,
    count_bytes,
    interpreted,
    share_memory_with_the_interpreter,
)

# Of storing: a unit in the last place (half of one on a GPU; the interpreter truncates), relative
# and absolute.
ROUNDING = {
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (2.0**-7, 0.0),
    torch.float16: (2.0**-10, 2.0**-24),
    torch.float64: (0.0, 0.0),
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
# Signalling NaN: a program that computes with it and stores the result leaves another NaN.
POISON = {
    torch.float64: 0x7FF0 << 48 | 1,
    torch.float32: 0x7F810001,
    torch.bfloat16: 0x7F81,
    torch.float16: 0x7C01,
}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
GAPS = [0, 5, 16]  # elements between pages, and between tokens, that are not the layer's


class Shape(SimpleNamespace):
    """The sizes of one call; it pickles, so that it reaches the process that interprets."""

    def but(self, **changes: Any) -> Shape:
        return Shape(**{**vars(self), **changes})


def shapes(
    base: Shape, **options: st.SearchStrategy[Any] | Sequence[Any]
) -> st.SearchStrategy[Shape]:
    """`base` with other values: of each name a strategy, or a list to choose from."""
    drawn = {
        name: option if isinstance(option, st.SearchStrategy) else st.sampled_from(option)
        for name, option in options.items()
    }
    return st.builds(base.but, seed=st.integers(0, 2**31), **drawn)


def poisoned(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count,), POISON[dtype], dtype=BITS[dtype.itemsize]).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, which are equal for NaN that are equal."""
    return tensor.cpu().view(BITS[tensor.itemsize])


class Pool:
    """Blocks with gaps between them, every element NaN until something is put there."""

    def __init__(
        self,
        num_blocks: int,
        shape: tuple[int, ...],
        gap: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        size = math.prod(shape)
        self.storage = poisoned(2 + num_blocks * (size + gap), dtype).to(device)
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        self.blocks = self.storage.as_strided((num_blocks, *shape), (size + gap, *strides), 2)


def flat_tokens(
    count: int,
    shapes_: Sequence[tuple[int, ...]],
    gap: int,
    dtype: torch.dtype,
    g: torch.Generator,
    scale: float = 1.0,
    offset: int = 0,
) -> list[torch.Tensor]:
    """Return slices of a wide projection, [count, *shape]; two trailing tokens are NaN."""
    sizes = [math.prod(shape) for shape in shapes_]
    wide = (torch.randn(count, offset + sum(sizes) + gap, generator=g) * scale).to(dtype)
    wide[count - 2 :] = torch.nan
    parts = wide[:, offset : offset + sum(sizes)].split(sizes, dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes_, strict=True)]


def update_rows(shape: Shape, g: torch.Generator) -> dict[str, torch.Tensor]:
    """Return rows of a verify step: their starts, the blocks they read, the blocks they write.

    A shape's `rows` are tokens, whether it is padding, and the token whose block is also the
    source, or -1.
    """
    ids = (1 + torch.randperm(len(shape.rows) * (1 + shape.columns), generator=g)).view(
        len(shape.rows), -1
    )
    sources, targets = ids[:, 0].clone(), ids.clone()[:, 1:]  # rows at a stride of their own
    for row, (length, padding, alias) in enumerate(shape.rows):
        if padding:
            sources[row], targets[row] = 0, 0
        elif 0 <= alias < length:
            sources[row] = targets[row, alias]
        # Behind the row's length stays a block that must not be written, not the null block.
    starts = torch.tensor([0, *(length for length, _, _ in shape.rows)]).cumsum(0)
    return {"cu_seqlens": starts, "source_indices": sources, "state_indices": targets}


def spread_time_steps(
    count: int, heads: int, dtype: torch.dtype, g: torch.Generator
) -> torch.Tensor:
    """Return time steps [count, heads], around every bend of softplus and across 20.

    The bends: where 1 + e is 1, where it is not exact, near 0. A strong decay often stands
    before a weak one; the last two tokens are no row's.
    """
    bends = torch.tensor([-24.0, -16.7, -7.0, -7.0, -3.0, -3.0, 0.0, 2.0, 19.0, 21.0])
    chosen = bends[torch.randint(len(bends), (count, heads + 1), generator=g)]
    dt = (chosen + torch.rand(count, heads + 1, generator=g)).to(dtype)
    dt[count - 2 :] = torch.nan
    return dt[:, :heads]


class Expected(NamedTuple):
    """One part of a result, in float64.

    Attributes:
        where: "y", or the argument that is written.
        index: of the part in there.
        share: of `scale` by which arithmetic may err; 0: the value is copied.
        dtype: that it is rounded to.
    """

    where: str
    index: object
    value: torch.Tensor
    share: float
    scale: object
    dtype: torch.dtype


class Operation:
    """One call: `arguments` by name, `pools` by the arguments that are views of them.

    Attributes:
        kernel, reference: what is called.
        like: the argument whose shape and type the result has.
        patches: module and attributes of it for a shape, where the kernel is interpreted.
    """

    pools: dict = {}  # noqa: RUF012
    like = "x"

    def expected(self) -> Iterable[Expected]:
        """The parts of the result, made before the call."""
        return []

    @classmethod
    def patches(cls, shape: Shape) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def run(self, implementation: Callable[..., Any]) -> Any:
        return implementation(**self.arguments)


def near(
    what: str,
    got: torch.Tensor,
    expected: torch.Tensor,
    share: float,
    scale: float | torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Within the arithmetic's share of `scale`, and the rounding of `dtype`."""
    relative, absolute = ROUNDING[dtype] if share else (0.0, 0.0)
    allowed = share * scale + relative * expected.abs() + absolute
    excess = (got.cpu().double() - expected).abs() / (allowed + 1e-300)
    assert bool((excess <= 1).all()), f"{what}: {float(excess.max())} times what is allowed"


def check(operation: Operation, implementation: Callable[..., Any]) -> Any:
    """The result is as expected, and nothing else has been written."""
    expected = list(operation.expected())
    before = {
        name: argument.clone()
        for name, argument in operation.arguments.items()
        if isinstance(argument, torch.Tensor) and name not in operation.pools
    }
    storages = {id(pool): (pool, pool.storage.clone()) for pool in operation.pools.values()}
    y = operation.run(implementation)
    if (like := operation.arguments.get(operation.like)) is not None:
        assert (y.dtype, y.shape) == (like.dtype, like.shape) and y.is_contiguous()
    may_change = {
        key: torch.zeros(len(pool.storage), dtype=torch.bool) for key, (pool, _) in storages.items()
    }
    for what, index, value, share, scale, dtype in expected:
        if what == "y":
            near(f"y {index}", y[index], value, share, scale, dtype)
            continue
        view, pool = operation.arguments[what], operation.pools[what]
        near(f"{what} {index}", view[index], value, share, scale, dtype)
        own = may_change[id(pool)].as_strided(view.shape, view.stride(), view.storage_offset())
        own[tuple(part.cpu() if isinstance(part, torch.Tensor) else part for part in index)] = True
    for key, (pool, old) in storages.items():
        changed = bits(pool.storage) != bits(old)
        assert not bool((changed & ~may_change[key]).any()), "something else was written"
    for name, old in before.items():
        assert torch.equal(bits(operation.arguments[name]), bits(old)), f"{name} was written"
    return y


def check_kernel(kind: type[Operation], shape: Shape) -> None:
    with kind.patches(shape):
        check(kind(shape), kind.kernel)


def equality(
    kind: type[Operation], cases: st.SearchStrategy[Shape], *examples: Shape
) -> list[Callable[[], None]]:
    """Return tests of a kernel (a quarter of the examples, as it is slow) and its reference."""

    def kernel(shape: Shape) -> None:
        interpreted(check_kernel, kind, shape)

    def reference(shape: Shape) -> None:
        check(kind(shape), kind.reference)

    found = []
    for test, share in ((kernel, 4), (reference, 1)):
        for shape in examples:
            test = example(shape)(test)
        found.append(settings(max_examples=settings().max_examples // share)(given(cases)(test)))
    return found


CHANGES = {
    "flat": lambda t: t[0],
    "deep": lambda t: t[None],
    "short": lambda t: t[:-1],
    "elsewhere": lambda t: t.to("meta"),
    "another type": lambda t: (
        t.double() if t.is_floating_point() else t.long() if t.dtype == torch.bool else t.float()
    ),
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0],
    "apart": lambda t: torch.stack([t, t], min(t.dim(), 2)).select(min(t.dim(), 2), 0),
}


def rejections(
    make: Callable[[], dict[str, Any]],
    call: Callable[..., object],
    special: Sequence[tuple[str, Callable[[Any], object], str]] = (),
    allowed: Collection[str] = (),
) -> Callable[..., None]:
    """Return a test that an argument of another shape, type, device or with gaps is refused.

    Args:
        make: gives the arguments by name.
        special: argument, change, message.
        allowed: "argument, change" that are not wrong.
    """
    cases = [
        pytest.param(name, change, "", id=f"{name}, {kind}")
        for name, argument in make().items()
        if isinstance(argument, torch.Tensor)
        for kind, change in CHANGES.items()
        if f"{name}, {kind}" not in allowed
    ]
    cases += [
        pytest.param(name, change, message, id=f"{name}: {message}")
        for name, change, message in special
    ]

    @pytest.mark.parametrize(("name", "change", "message"), cases)
    def test(name: str, change: Callable[[Any], object], message: str) -> None:
        arguments = make()
        arguments[name] = change(arguments[name])
        with pytest.raises(ValueError, match=message or None):
            call(**arguments)

    return test


def rejected_operations(
    kind: type[Operation],
    shape: Shape,
    special: Sequence[tuple[str, Callable[[Any], object], str]] = (),
    allowed: Collection[str] = (),
) -> Callable[..., None]:
    """`rejections` of an operation; its pools may have fewer blocks."""
    fewer = {f"{name}, short" for name in kind(shape).pools}
    return rejections(lambda: kind(shape).arguments, kind.kernel, special, fewer | {*allowed})


def check_far(kind: type[Operation], shape: Shape, seeds: int = 3) -> None:
    """Check blocks 2^31 elements and more into a pool that is never committed as a whole."""
    share_memory_with_the_interpreter()
    for seed in range(seeds):
        here, there = (kind(shape.but(seed=seed)) for _ in range(2))
        for name in there.pools:
            view = there.arguments[name]
            count, stride = len(view), 2**31 // (len(view) - 1) + 8
            memory = torch.empty(count * stride, dtype=view.dtype)
            there.arguments[name] = memory.as_strided(
                view.shape, (stride, *view.stride()[1:])
            ).copy_(view)
        outputs = [operation.run(kind.kernel) for operation in (here, there)]
        if outputs[0] is not None:
            assert torch.equal(*(bits(y[: here.num_tokens]) for y in outputs))
        for name in there.pools:
            assert torch.equal(bits(here.arguments[name]), bits(there.arguments[name])), name


def check_far_tokens(
    kind: type[Operation], shape: Shape, names: Sequence[str], stride: int
) -> None:
    """Tokens 2^31 elements and more behind the first, in each of the arguments named."""
    share_memory_with_the_interpreter()
    here, there = kind(shape), kind(shape)
    for name in names:
        view = there.arguments[name]
        memory = torch.empty(len(view) * stride, dtype=view.dtype)
        far = memory.as_strided(view.shape, (stride, *view.stride()[1:]))
        there.arguments[name] = far.copy_(view)
    outputs = [operation.run(kind.kernel)[: here.num_tokens] for operation in (here, there)]
    assert torch.equal(*map(bits, outputs))
    for name, pool in here.pools.items():
        assert torch.equal(bits(pool.storage), bits(there.pools[name].storage)), name


def measure(
    kind: type[Operation], shape: Shape, *names: str
) -> tuple[dict[str, Counts], Counts, int]:
    """What a launch loads and stores of the arguments named: see `count_bytes`."""
    operation = kind(shape)
    with kind.patches(shape):
        return count_bytes(
            {name: operation.arguments[name] for name in names}, operation.run, kind.kernel
        )


def compiled(
    kernel: str,
    wanted: Callable[[AotCase], bool] = lambda case: True,
    load: int = 128,
    store: int = 128,
    least: Callable[[AotCase, str], float] = lambda case, target: 0,
) -> Callable[..., None]:
    """Return a test that cases compile without spills and to wide accesses.

    `hybrid-kv kernels` compiles all cases for all targets.

    Args:
        kernel: as the names of its cases begin.
        least: blocks that an SM must hold.
    """

    @pytest.mark.parametrize("target", ["sm_90", "gfx942"])
    def test(target: str) -> None:
        (module,) = compile.MODULES
        found = [
            case
            for case in compile.cases_of(module, target)
            if case.kernel.startswith(kernel) and wanted(case)
        ]
        assert found
        for case in found:
            # which takes as long as all else
            with patch.object(compile, "_disassemble", lambda _: None):
                metrics = compile.read_metrics(case, target, compile.compile_case(case, target))
            assert metrics.spill_bytes == 0, (case, metrics)
            assert metrics.load_bits >= load and metrics.store_bits >= store, (case, metrics)
            assert metrics.blocks_per_sm >= least(case, target), (case, metrics)

    return test


def multiply_bfloat16() -> AbstractContextManager[object]:
    """Multiply bfloat16 by value: the interpreter takes their bits as integers (triton#4972)."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    dot = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object
    ) -> TensorHandle:
        return dot(self, widened(a), widened(b), *rest)

    return patch.object(InterpreterBuilder, "create_dot", create_dot)


def defined(
    recurrence: Callable[..., tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]],
    *operands: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a row's outputs and the state after each token, by a definition in float64."""
    outputs, states = recurrence(*(part.cpu().double().numpy() for part in operands))
    return torch.from_numpy(outputs), [*torch.from_numpy(states)]


def assert_close(
    got: torch.Tensor, expected: torch.Tensor, share: float, terms: float = 1e-3
) -> None:
    """By a share of the largest value: elements err relatively without bound where terms cancel."""
    assert float((got.double() - expected.double()).abs().max()) <= share * max(
        float(expected.abs().max()), terms
    )


def strided_states(values: torch.Tensor) -> torch.Tensor:
    """A copy as `cache.layout` hands it out: with gaps between the pages, which hold NaN."""
    size = math.prod(values.shape[1:])
    pages = torch.full((2 + len(values) * (size + 5),), torch.nan, dtype=values.dtype)
    strides = (size + 5, *torch.empty(values.shape[1:]).stride())
    return pages.as_strided(values.shape, strides, 2).copy_(values)


def wanted_states(
    draw: Callable[[st.SearchStrategy[Any]], Any], lengths: Sequence[int], most: int | None = None
) -> tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]:
    """Rows and offsets of states that are wanted, in any order: a list and two tensors."""
    places = st.sampled_from(
        [(row, n + 1) for row, length in enumerate(lengths) for n in range(length)]
    )
    wanted = draw(st.lists(places, max_size=most))
    rows, offsets = torch.tensor(wanted, dtype=torch.int64).view(-1, 2).unbind(1)
    return wanted, rows, offsets
