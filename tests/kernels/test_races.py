"""The checker of launches finds what a GPU would do in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hybrid_kv.kernels.common.launch import jit
from tests.kernels.interpreter import interpreted

if TYPE_CHECKING:
    import triton.language as tl


def _shift(x, y, n, OFFSET: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(y + i, tl.load(x + i + OFFSET, mask=i < n), mask=i < n)


def _launch(offset: int, width: int, size: int | None) -> None:
    """Shift an array of 9 elements into another of `size`; None: into itself."""
    x = torch.zeros(9)
    y = x if size is None else torch.zeros(size)
    kernel = jit(_shift)
    kernel[3,](x, y, 8, OFFSET=offset, WIDTH=width)


def test_programs_of_their_own_elements_pass() -> None:
    interpreted(_launch, 0, 4, None)
    interpreted(_launch, 1, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            (1, 4, None), "a load of what another program stores", id="a neighbour's element"
        ),
        pytest.param((2, 4, 8), "a load outside of all arguments", id="behind the end"),
        pytest.param((0, 4, 7), "a store outside of all arguments", id="too short"),
    ],
)
def test_a_planted_race_or_address_is_found(
    arguments: tuple[int, int, int | None], said: str
) -> None:
    # Triton wraps what is raised inside a kernel
    with pytest.raises(Exception, match=rf"_shift, line.*{said}"):
        interpreted(_launch, *arguments)


def _overlap(y, WIDTH: tl.constexpr):
    tl.store(y + tl.program_id(0) + tl.arange(0, WIDTH), 1.0)


def _launch_overlap() -> None:
    jit(_overlap)[2,](torch.zeros(8), WIDTH=4)


def test_two_programs_that_store_one_element_are_found() -> None:
    with pytest.raises(AssertionError, match=r"_overlap, lines .*two programs store it"):
        interpreted(_launch_overlap)


def _again(y, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    tl.store(y + i, 1.0)
    tl.store(y + WIDTH + i, tl.load(y + (i + 1) % WIDTH))


def _launch_again() -> None:
    jit(_again)[1,](torch.zeros(8), WIDTH=4)


def test_a_load_of_what_a_thread_beside_has_stored_is_found() -> None:
    with pytest.raises(
        AssertionError, match=r"_again, lines .*a load of what its program has stored"
    ):
        interpreted(_launch_again)


def _make_types() -> None:
    from triton.language import block_type, float32

    assert (block_type(float32, [4, 2]).numel, str(block_type(float32, [4]).shape)) == (8, "['4']")
    for size, error in ((4.0, TypeError), (3, ValueError)):
        with pytest.raises(error, match="Shape element 0"):
            block_type(float32, [size, 2])


def test_a_shape_that_is_none_is_refused_beside_one_that_is_known() -> None:
    interpreted(_make_types)
