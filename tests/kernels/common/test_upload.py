"""Arrays of any dtype and shape come to the device by one copy that the host does not wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_kv.kernels.common.upload import (
    StepUpload,
    download,
    fill,
    move,
    now,
    stage_fields,
    together,
    upload,
)
from hybrid_kv.measure.device import DeviceError, pretend_gpu

ARRAYS = (
    np.arange(6).reshape(2, 3)[:, ::2],
    np.array([], dtype=np.int64),
    np.array([True, False, True]),
    np.linspace(0, 1, 5),
    np.arange(3, dtype=np.int32),
)


@dataclass(frozen=True)
class Named:
    first: Any
    second: Any


def test_one_copy_brings_them_all() -> None:
    with pretend_gpu() as gpu:
        moved = upload(torch.device("cuda:0"), *ARRAYS)
        found = [tensor.cpu().numpy() for tensor in moved]
        (copy,) = (event for event in gpu.events if event.kind == "upload")
    assert copy.is_pinned and not any(
        tensor.storage_offset() * tensor.itemsize % 16 for tensor in moved
    )
    for got, wanted in zip(found, ARRAYS, strict=True):
        assert got.dtype == wanted.dtype and np.array_equal(got, wanted)


def test_a_device_of_another_kind_gets_them_too() -> None:
    moved = upload(torch.device("meta"), *ARRAYS)
    assert [(tensor.device.type, tensor.shape) for tensor in moved] == [
        ("meta", array.shape) for array in ARRAYS
    ]


def test_the_host_may_change_them_at_once() -> None:
    with pretend_gpu() as gpu:
        array = np.arange(3)
        (moved,) = upload(torch.device("cuda:0"), array)
        assert gpu.counts()["wait"] == 0
        array += 1
        torch.cuda.synchronize()
        assert moved.tolist() == [0, 1, 2]


def test_memory_that_is_not_its_own_would_be_noticed() -> None:
    with pretend_gpu():
        source = torch.arange(3).pin_memory()
        source.to("cuda:0", non_blocking=True)
        source.numpy()[0] = 7
        with pytest.raises(DeviceError, match="changed before its copy was done"):
            torch.cuda.synchronize()


def test_what_is_staged_together_is_made_in_its_order_of_one_upload() -> None:
    with pretend_gpu() as gpu:
        pair, made, (last,) = now(
            torch.device("cuda:0"), together(move(*ARRAYS[:2]), ((), lambda: 7), move(ARRAYS[4]))
        )
        assert [part.tolist() for part in (*pair, last)] == [
            [[0, 2], [3, 5]],
            [],
            [0, 1, 2],
        ] and made == 7
        assert now(torch.device("cuda:0"), ((), lambda: 7)) == 7 and gpu.counts()["upload"] == 1
        since, _ = len(gpu.events), now(torch.device("cuda:0"), fill((pair[0], ARRAYS[0] + 1)))
        assert download(pair[0], None, pair[0][1]) == [[[1, 3], [4, 6]], None, [4, 6]]
        assert gpu.counts(since)["download"] == 1 and download(None) == [None]


def test_each_of_a_step_gets_its_result_of_one_upload() -> None:
    with pretend_gpu() as gpu:
        upload = StepUpload()
        pair, seven = upload.add(move(*ARRAYS[:2])), upload.add(((), lambda: 7))
        named = upload.add(stage_fields(Named(ARRAYS[4], ARRAYS[0])))
        assert not hasattr(pair, "result")
        upload.send(torch.device("cuda:0"))
        assert [values.tolist() for values in pair.result] == [
            [[0, 2], [3, 5]],
            [],
        ] and seven.result == 7
        assert isinstance(named.result, Named) and named.result.first.device.type == "cuda"
        assert (named.result.first.tolist(), named.result.second.tolist()) == (
            [0, 1, 2],
            [[0, 2], [3, 5]],
        )
        assert gpu.counts()["upload"] == 1


def test_a_step_without_arrays_uploads_nothing() -> None:
    with pretend_gpu() as gpu:
        upload = StepUpload()
        seven = upload.add(((), lambda: 7))
        upload.send(torch.device("cuda:0"))
        assert seven.result == 7 and not gpu.counts()["upload"]


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(3)
    upload(torch.device("cpu"), array)[0][0] = 7
    assert array[0] == 7
