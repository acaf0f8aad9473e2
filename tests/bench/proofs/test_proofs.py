"""Proofs of kernels: what is right is proven, and each planted mistake has a witness."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.proofs.kernels import Case, Kernel, block_tables, conv_update, delta_update, state_update
from bench.proofs.prove import PROPERTIES, prove
from bench.proofs.symbolic import planted
from hybrid_kv.kernels.block_tables.launch import _block_tables
from hybrid_kv.kernels.causal_conv1d.update import _conv_update
from hybrid_kv.kernels.gated_delta.slots import _delta_update
from hybrid_kv.kernels.ssd.slots import _state_update


@pytest.mark.parametrize(
    ("make", "bits"), [(conv_update, 32), (state_update, 64), (delta_update, 32)]
)
def test_all_properties_of_a_kernel_are_proven(make: Callable[..., Case], bits: int) -> None:
    found = [*prove(make(columns=1 if make is conv_update else 2, bits=bits))]
    assert [one.property for one in found] == [*PROPERTIES]
    assert {one.word for one in found} == {"proven"} and min(
        one.num_queries for one in found
    ) > 1, found


NARROW = ("source_indices + row).to(tl.int64)", "source_indices + row)")
PLANTED = [
    pytest.param(state_update, _state_update, *NARROW, "32 bits", id="a narrow source"),
    pytest.param(
        state_update, _state_update, "j).to(tl.int64)", "j)", "32 bits", id="a narrow target"
    ),
    pytest.param(
        state_update,
        _state_update,
        "if target != 0:",
        "if length > 0:",
        "own slot",
        id="padding is written",
    ),
    pytest.param(
        state_update,
        _state_update,
        "if target != 0:",
        "if length > 0:",
        "apart",
        id="padding is shared",
    ),
    pytest.param(
        state_update,
        _state_update,
        "range(length)",
        "range(length + 1)",
        "inside",
        id="a token too many",
    ),
    pytest.param(
        delta_update, _delta_update, *NARROW, "32 bits", id="a narrow source of a delta rule"
    ),
    pytest.param(
        delta_update,
        _delta_update,
        "if target != 0:",
        "if length > 0:",
        "own slot",
        id="its padding",
    ),
    pytest.param(
        delta_update,
        _delta_update,
        "// KEY_HEADS)",
        "// HEADS)",
        "inside",
        id="a key head too many",
    ),
    pytest.param(
        conv_update,
        _conv_update,
        "(target != 0) &",
        "(length > 0) &",
        "own slot",
        id="a window of padding",
    ),
    pytest.param(
        conv_update,
        _conv_update,
        "+ row * indices",
        "+ row // 2 * indices",
        "own slot",
        id="another's row",
    ),
    pytest.param(
        conv_update,
        _conv_update,
        "+ row * indices",
        "+ row // 2 * indices",
        "apart",
        id="rows share a block",
    ),
    pytest.param(
        block_tables,
        _block_tables,
        "index.to(tl.int64) *",
        "index *",
        "32 bits",
        id="a narrow table",
    ),
    pytest.param(
        block_tables,
        _block_tables,
        "row * width",
        "row * width + 1",
        "inside",
        id="a column too far",
    ),
]


@pytest.mark.parametrize(("make", "kernel", "old", "new", "name"), PLANTED)
def test_a_planted_mistake_has_a_witness(
    make: Callable[..., Case], kernel: Kernel, old: str, new: str, name: str
) -> None:
    sizes = {} if make is block_tables else {"columns": 1}
    (found,) = prove(make(planted(kernel, old, new), **sizes), [name])
    assert found.word == "witness" and found.said.startswith("line "), found


def test_a_text_that_a_kernel_lacks_is_not_planted() -> None:
    with pytest.raises(ValueError, match="0 times"):
        planted(_conv_update, "no such text", "")
