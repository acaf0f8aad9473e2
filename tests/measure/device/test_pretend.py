"""The pretend device computes as a CPU, refuses as a GPU, and names lines where a host waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from hybrid_kv.measure.device import DeviceError, PretendTensor, pretend_gpu, why_not_replayed
from hybrid_kv.measure.device.pretend import PretendGPU
from tests.kernels.interpreter import interpreted

HERE = "/".join(Path(__file__).parts[-2:])
DEVICE = "cuda:0"


@pytest.fixture(params=["inference", "plain"])
def gpu(request: pytest.FixtureRequest) -> Iterator[PretendGPU]:
    with (
        pretend_gpu() as found,
        torch.inference_mode() if request.param == "inference" else nullcontext(),
    ):
        yield found


def events(gpu: PretendGPU, run: FunctionType, kind: str = "wait") -> tuple[list[str], Any]:
    """Return kind and line of each event of `run`, from its definition on; and its result."""
    since = len(gpu.events)
    out = run()
    first = run.__code__.co_firstlineno
    found = [event for event in gpu.events[since:] if event.kind == kind]
    for event in found:
        file, line = event.where.split(" < ")[0].rsplit(":", 1)
        assert file == HERE and 0 <= int(line) - first < 9, event
    return [event.operation for event in found], out


# ---- values ----


@pytest.mark.parametrize("named", [DEVICE, "cuda"])
def test_operations_are_those_of_a_cpu(gpu: PretendGPU, named: str) -> None:
    def run(device: str) -> list[torch.Tensor]:
        x = torch.arange(24, dtype=torch.float32, device=device).view(4, 6)
        x[1:3, 2] = 7
        x[x > 20] = 0
        y = torch.nn.functional.linear(x.softmax(-1), x[:2]) + torch.tensor(
            [1.0, 2.0], device=device
        )
        z = torch.cat([y, y.cumsum(0)]).index_select(0, torch.tensor([3, 0], device=device))
        q = x.view(1, 2, 2, 6)
        return [
            z,
            x.T[1:],
            x.argmax(-1),
            torch.nn.functional.scaled_dot_product_attention(q, q, q),
            x.sum().view(1),
        ]

    for found, wanted in zip(run(named), run("cpu"), strict=True):
        assert (
            isinstance(found, PretendTensor)
            and found.device == torch.device(DEVICE)
            and found.is_cuda
        )
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        assert torch.equal(found.cpu(), wanted)


def test_what_was_made_outside_of_it_can_be_moved_and_set(gpu: PretendGPU) -> None:
    weight = torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
    weight.data = weight.data.to(DEVICE)
    assert isinstance(weight, PretendTensor) and isinstance(weight, torch.nn.Parameter)
    assert (2 * weight).tolist() == [0, 2, 4]


def test_the_machine_is_as_before_behind_it() -> None:
    with pretend_gpu():
        assert torch.cuda.is_available()
        tensor = torch.zeros(3, device=DEVICE)
    assert not torch.cuda.is_available()
    with pytest.raises(DeviceError, match="the pretend device is gone"):
        tensor + 1
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.data = torch.ones(1)
    assert weight.item() == 1


# ---- what is refused ----


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: torch.ones(3)[x.long()],
        lambda x: x.numpy(),
    ],
)
def test_tensors_of_both_devices_are_refused(gpu: PretendGPU, mixed: FunctionType) -> None:
    with pytest.raises(DeviceError, match=f"^{HERE}:{mixed.__code__.co_firstlineno} "):
        mixed(torch.zeros(3, device=DEVICE))


def test_a_tensor_may_be_made_like_one_of_the_other_device(gpu: PretendGPU) -> None:
    assert torch.ones(3).new_zeros(2, device=DEVICE).tolist() == [0, 0]
    assert torch.zeros_like(torch.ones(2), device=DEVICE).tolist() == [0, 0]


def test_a_number_of_the_cpu_is_free(gpu: PretendGPU) -> None:
    x = torch.ones(3, device=DEVICE)
    since = len(gpu.events)
    assert (x * torch.tensor(2.0)).shape == (3,)
    assert gpu.counts(since) == {**dict.fromkeys(gpu.counts(), 0), "launch": 1, "allocation": 1}


# ---- waits ----


def test_what_the_host_reads_is_a_wait(gpu: PretendGPU) -> None:
    x = torch.arange(4, device=DEVICE)
    assert events(gpu, lambda: x.tolist()) == (["copy"], [0, 1, 2, 3])
    assert events(gpu, lambda: int(x[2])) == (["_local_scalar_dense"], 2)
    assert events(gpu, lambda: bool((x < 9).all())) == (["_local_scalar_dense"], True)
    assert events(gpu, lambda: x[x > 1].tolist()) == (["index by a mask", "copy"], [2, 3])
    assert events(gpu, lambda: x.nonzero().shape) == (["nonzero"], (3, 1))
    assert events(gpu, lambda: (x + x).sum(0))[0] == []


def test_a_mask_that_is_filled_with_one_number_is_no_wait(gpu: PretendGPU) -> None:
    x = torch.arange(4, device=DEVICE)

    def fill() -> None:
        x[x > 1] = 0

    assert events(gpu, fill)[0] == [] and x.tolist() == [0, 1, 0, 0]


def test_an_index_left_on_the_cpu_is_an_upload_and_a_wait(gpu: PretendGPU) -> None:
    x, index = torch.arange(4, device=DEVICE), torch.tensor([3, 1])
    waits, found = events(gpu, lambda: x[index])
    assert waits == ["index on the CPU"] and found.tolist() == [3, 1]
    assert events(gpu, lambda: x[index], "upload")[0] == ["index on the CPU"]


def test_only_copies_of_pinned_memory_do_not_wait_and_only_if_they_need_not(
    gpu: PretendGPU,
) -> None:
    pageable, pinned = torch.arange(3), torch.arange(3).pin_memory()
    assert (
        pinned.is_pinned()
        and not pageable.is_pinned()
        and torch.zeros(2, pin_memory=True).is_pinned()
    )
    assert events(gpu, lambda: pageable.to(DEVICE))[0] == ["copy"]
    assert events(gpu, lambda: pinned.to(DEVICE))[0] == ["copy"]
    assert events(gpu, lambda: pageable.to(DEVICE, non_blocking=True))[0] == [
        "copy of memory that is not pinned"
    ]
    assert events(gpu, lambda: pinned.to(DEVICE, torch.int32, non_blocking=True))[0] != []
    waits, found = events(gpu, lambda: pinned.to(DEVICE, non_blocking=True))
    assert waits == [] and found.tolist() == [0, 1, 2]
    counts = gpu.counts()
    assert (counts["upload"], counts["upload_bytes"]) == (5, 4 * 24 + 12)


# ---- copies in flight ----


def test_a_target_holds_nothing_of_use_until_the_host_waits(gpu: PretendGPU) -> None:
    target = torch.zeros(2).pin_memory()
    target.copy_(torch.ones(2, device=DEVICE), non_blocking=True)
    assert target.isnan().all()
    again = target.to(DEVICE, non_blocking=True)  # behind the copy
    torch.cuda.synchronize()
    assert target.tolist() == again.tolist() == [1, 1]


def test_a_pinned_source_must_not_change_before_the_host_waits(gpu: PretendGPU) -> None:
    source = torch.zeros(2).pin_memory()
    source.to(DEVICE, non_blocking=True)
    torch.cuda.synchronize()
    source += 1
    source.to(DEVICE, non_blocking=True)
    source += 1
    with pytest.raises(DeviceError, match=r"a pinned source \(2,\) changed"):
        torch.cuda.synchronize()


# ---- launches of two steps ----


def test_equal_steps_can_be_replayed_and_the_first_other_argument_is_named(gpu: PretendGPU) -> None:
    kept = torch.zeros(3, device=DEVICE)

    def step(add: torch.Tensor, number: int) -> list[tuple[Any, ...]]:
        with gpu.captured() as launches:
            kept.add_((kept * 2 + add) * number)
        return launches

    once = torch.ones(3, device=DEVICE)
    assert why_not_replayed(step(kept, 1), step(kept, 1)) == ""
    line = step.__code__.co_firstlineno + 2
    assert why_not_replayed(step(kept, 1), step(once, 1)).startswith(f"{HERE}:{line} ")
    assert why_not_replayed(step(kept, 1), step(kept, 2)).endswith("launch 2, mul: 1, then 2")


def test_a_wait_or_an_upload_cannot_be_captured(gpu: PretendGPU) -> None:
    kept = torch.zeros(3, device=DEVICE)
    for run, what in (
        (lambda: kept.tolist(), "download"),
        (lambda: torch.ones(3).to(DEVICE), "upload"),
    ):
        with gpu.captured() as launches:
            run()
        assert f": {what} (" in why_not_replayed(launches, launches)


# ---- Triton ----


def norm_twice() -> tuple[bool, list[tuple[str, str]]]:
    """Run a kernel on the CPU and the device; return whether results agree, and the events."""
    from hybrid_kv.kernels.gated_norm import gated_rms_norm

    tensors = torch.randn(3, 32), torch.randn(3, 32), torch.randn(32)
    wanted = gated_rms_norm(*tensors, 2, 1e-5)
    with pretend_gpu() as gpu:
        tensors = [tensor.to(DEVICE) for tensor in tensors]
        since = len(gpu.events)
        found = gated_rms_norm(*tensors, 2, 1e-5)
        noted = [(event.kind, event.operation) for event in gpu.events[since:]]
        return torch.equal(found.cpu(), wanted), noted


def test_a_kernel_of_triton_is_one_launch_and_computes_the_same() -> None:
    pytest.importorskip("triton")
    same, noted = interpreted(norm_twice)
    assert same and noted == [("allocation", "(3, 32)"), ("launch", "_gated_norm")]


def test_a_kernel_of_triton_gets_no_tensor_of_the_cpu(gpu: PretendGPU) -> None:
    def launch(x: torch.Tensor) -> None:
        gpu.launch("kernel", pytest.fail, (torch.zeros(2, device=DEVICE), x, 3), {})

    with pytest.raises(
        DeviceError,
        match=rf"^{HERE}:{launch.__code__.co_firstlineno + 1} .*: argument 1 \(4,\) is on",
    ):
        launch(torch.zeros(4))
