"""Metrics of a few compiled Triton kernels: exact for one Triton version.

`hybrid-kv kernels` has all, and gates them.
"""

from __future__ import annotations

from importlib.util import find_spec

from bench.harness.cells import Cell, Count, Counts, grid
from bench.static.compile import MODULES, cases_of, compile_case, read_metrics

KERNELS = {
    "state_update.selective_state_update_slots": "Nemotron-3-Nano, K=3",
    "conv_update.causal_conv1d_update": "Nemotron-3-Nano, K=3",
    "block_tables.update_block_tables": "Nemotron-3-Nano, 256 rows",
    "gated_norm.gated_rms_norm": "Nemotron-3-Nano",
}
UNITS = {
    "registers": "registers",
    "spill_bytes": "B",
    "shared_bytes": "B",
    "blocks_per_sm": "blocks",
    "instructions": "instructions",
}


def compiled(seed: int, kernel: str, target: str) -> Counts:
    """Return registers, spills, shared memory and instructions at the shape of one model."""
    cases = (case for module in MODULES for case in cases_of(module, target))
    case = next(case for case in cases if (case.kernel, case.shape) == (kernel, KERNELS[kernel]))
    metrics = read_metrics(case, target, compile_case(case, target))
    # Without a disassembler the count would be that of PTX, another level of code.
    names = [name for name in UNITS if name != "instructions" or metrics.isa != "ptx"]
    better = {"blocks_per_sm": "higher"}
    return {
        name: Count(getattr(metrics, name), UNITS[name], better.get(name, "lower"))
        for name in names
    }


def cells() -> list[Cell]:
    """Return each kernel for one GPU of each maker; none without Triton."""
    if find_spec("triton") is None:
        raise ImportError("Triton is not installed")
    values = {"kernel": tuple(KERNELS), "target": ("sm_90", "gfx942")}
    quick = [
        ("conv_update.causal_conv1d_update", "sm_90"),
        ("state_update.selective_state_update_slots", "sm_90"),
    ]
    return [*grid("kernel_metrics", "compiled", "count", compiled, values, quick, units=UNITS)]
