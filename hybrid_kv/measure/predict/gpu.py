"""The time of a kernel on a GPU, from the bytes that it moves: a floor, an L2 tier, one bandwidth.

    time = launches * floor + serial * (tokens - 1)
         + bytes * (hits / L2 rate + (1 - hits) / bandwidth)

`hits` is the share of bytes that the L2 cache still holds: all where less than `fits` of it was
touched since, none beyond `spills`, a straight line between.

Sources. `GPUS`: NVIDIA's data sheets. `CHIPS`: fitted by `python -m bench.predict --fit` to the
decode and verify rows of one GPU each, `FITTED_ON`, in aiconfigurator-core 0.12.0 (Apache-2.0).
Other GPUs take the constants of the chip that is closest in architecture, with their own bandwidth
and cache; docs/predict.md has their errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Families of kernels. A convolution's window is kept channel last, as here, or width last, as in
# vLLM's GDN layers.
UPDATE = "update"
CONVOLUTION = "convolution"
WIDTH_LAST = "width last"
BOUNDS = ("floor", "L2", "memory")


@dataclass(frozen=True)
class Chip:
    """Constants of an architecture.

    Attributes:
        reached: of a data sheet's bandwidth.
        fits, spills: of the L2 cache.
        serial: µs for each further token of a request in a state update.
        matmul: of a data sheet's flops, by bfloat16 products of 1,024 tokens and more.
        kernels: by family, the floor of a launch in µs and the L2 rate in TB/s.
    """

    reached: float
    fits: float
    spills: float
    serial: float
    matmul: float
    kernels: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class GPU:
    """A data sheet.

    Attributes:
        bandwidth: TB/s.
        l2: MB.
        tflops: of bfloat16 matrix products, dense.
    """

    bandwidth: float
    l2: float
    tflops: float
    chip: str


CHIPS = {
    "hopper": Chip(
        0.866,
        0.497,
        1.12,
        0.805,
        0.797,
        {CONVOLUTION: (3.58, 3.56), UPDATE: (4.12, 5.7), WIDTH_LAST: (1.73, 3.27)},
    ),
    "blackwell": Chip(
        0.727,
        0.0674,
        1.16,
        1.64,
        0.681,
        {CONVOLUTION: (3.94, 3.35), UPDATE: (4.12, 8.21), WIDTH_LAST: (1.96, 3.49)},
    ),
    "ada": Chip(
        0.76,
        0.771,
        1.28,
        1.27,
        0.628,
        {CONVOLUTION: (3.95, 4.69), UPDATE: (3.39, 4.63), WIDTH_LAST: (1.58, 3.12)},
    ),
}
FITTED_ON = {"hopper": "h100", "blackwell": "b200", "ada": "l40s"}
GPUS = {
    "a100": GPU(2.039, 40, 312, "hopper"),
    "h100": GPU(3.35, 50, 989, "hopper"),
    "h200": GPU(4.8, 50, 989, "hopper"),
    "b200": GPU(8.0, 126, 2250, "blackwell"),
    "b300": GPU(8.0, 126, 2250, "blackwell"),
    "gb200": GPU(8.0, 126, 2500, "blackwell"),
    "gb300": GPU(8.0, 126, 2500, "blackwell"),
    "l40s": GPU(0.864, 96, 362, "ada"),
    "rtx_pro_6000": GPU(1.597, 128, 468, "ada"),
}
# Measured over predicted, 5th and 95th percentile, by what bounds a kernel: rows of each fitted GPU
# with the constants of the other two chips.
INTERVALS = {"floor": (0.776, 1.27), "L2": (0.418, 1.22), "memory": (0.805, 1.33)}
# µs of the host: a launch by Python (vllm!34838, GB200), one from a CUDA graph, and a wait
# (NVIDIA's "Getting Started with CUDA Graphs", V100: 3.4 less 2.9 µs, 9.6 less 3.8 µs). No table
# here checks them.
LAUNCH = 8.68
GRAPH_NODE = 0.5
WAIT = 5.8


def microseconds(
    gpu: GPU,
    chip: Chip,
    family: str,
    launches: Any,
    num_bytes: Any,
    footprint: Any,
    tokens: Any = 1,
) -> tuple[Any, Any, Any]:
    """Return the parts of a kernel's time in the order of `BOUNDS`, numbers or arrays.

    Args:
        footprint: bytes that were touched since the kernel's own were: its own in a loop over one
            kernel, those of the whole step in an engine.
        tokens: of a request, that one launch computes one after the other.
    """
    floor, rate = chip.kernels[family]
    filled = footprint / (gpu.l2 * 1e6)
    hits = np.clip((chip.spills - filled) / (chip.spills - chip.fits), 0, 1)
    serial = chip.serial * (tokens - 1) if family == UPDATE else 0 * tokens
    moved = num_bytes / 1e6  # µs at 1 TB/s
    return (
        launches * (floor + serial),
        moved * hits / rate,
        moved * (1 - hits) / (chip.reached * gpu.bandwidth),
    )


def bound_of(floor: float, cached: float, memory: float) -> str:
    """Return the bound of a kernel whose time has these parts.

    One that finds any of its bytes in the cache is bound by L2.
    """
    if floor >= cached + memory:
        return "floor"
    return "L2" if cached else "memory"
