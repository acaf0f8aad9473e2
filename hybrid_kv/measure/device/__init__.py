"""A GPU that is not there: the engine runs on it, and launches, waits and copies are counted.

    with pretend_gpu() as gpu:
        llm = LLM(folder, device="cuda:0", attention_backend="TORCH")
        llm.generate(prompts)
    gpu.counts()  # launches, waits, uploads, bytes, allocations
    [(event.where, event.operation) for event in gpu.events if event.kind == "wait"]

It computes on the CPU, so tokens must be the CPU's. It refuses what a GPU refuses: tensors of both
devices in one operation. It notes a *wait* where the host would wait for the device: a copy that
blocks or is not of pinned memory, a value or a size that the host reads, an index that is on the
CPU or a mask. A copy that does not wait is late: its target holds NaN until the host waits, and its
source must not change until then.

What it does not see: C++ behind no operation of torch (FlashAttention, FlashInfer), the order of
kernels on several streams, how long anything takes. One operation counts as one launch; a sort or a
masked index is several on a GPU.

Nothing of the engine imports this package; it is for tests and counts.
"""

from hybrid_kv.measure.device.machine import pretend_gpu
from hybrid_kv.measure.device.pretend import (
    DeviceError,
    DeviceEvent,
    PretendGPU,
    PretendTensor,
    why_not_replayed,
)

__all__ = [
    "DeviceError",
    "DeviceEvent",
    "PretendGPU",
    "PretendTensor",
    "pretend_gpu",
    "why_not_replayed",
]
