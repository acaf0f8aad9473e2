"""Compiling ahead of time: a case for a target, and all cases in worker processes.

Shapes considered. (a) Metrics through a driver (`CompiledKernel.n_regs`): needs the GPU. (b)
`cuobjdump -res-usage`: knows the stack, not the spills. (c) A second `ptxas -v` on the PTX, 20 ms,
the tool that Triton itself needs; for AMD the comments of the assembly. This is (c); SASS comes
through `cuobjdump` where Triton brings it.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Any

from bench.static.isa import access_bits, instruction_mix, instructions
from bench.static.record import AotCase
from hybrid_kv.config import HybridKVError
from hybrid_kv.errors import deaf_to_ctrl_c
from hybrid_kv.kernels.common.integers import cdiv

MODULES = ["bench.static.launches"]  # with `aot_cases`, of our own kernels
NUM_WORKERS = 2
MAX_BLOCKS = 32  # per SM or CU, on all targets


@dataclass(frozen=True)
class Target:
    """A GPU architecture.

    Registers are 512 per lane and quarter of an SM (CU), dealt out by eight, on all of them.
    """

    backend: str
    arch: int | str
    warp_size: int
    max_warps: int
    shared_bytes: int
    reserved_bytes: int  # of shared memory, per block

    def blocks_per_sm(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """Return how many thread blocks (workgroups) one SM (CU) holds at once; 0: not even one."""
        per_quarter = min(self.max_warps // 4, 512 // (cdiv(max(registers, 1), 8) * 8))
        blocks = min(MAX_BLOCKS, 4 * per_quarter // num_warps)
        per_block = 128 * cdiv(shared_bytes + self.reserved_bytes, 128)
        return min(blocks, self.shared_bytes // per_block) if per_block else blocks


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 64, 164 << 10, 1 << 10),
    "sm_90": Target("cuda", 90, 32, 64, 228 << 10, 1 << 10),
    "sm_100": Target("cuda", 100, 32, 64, 228 << 10, 1 << 10),
    "gfx942": Target("hip", "gfx942", 64, 32, 64 << 10, 0),
}


def parse_targets(text: str) -> list[str]:
    """Return the names in a comma-separated list, once each.

    Raises:
        HybridKVError: one of them is unknown.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in TARGETS]:
        raise HybridKVError(f"unknown target {unknown[0]!r}; use {', '.join(TARGETS)}")
    return names


@dataclass(frozen=True)
class Metrics:
    """The metrics of one compilation.

    Attributes:
        registers: 32-bit, per thread (AMD: VGPRs, accumulators included).
        spill_bytes: per thread, stores and loads (AMD: VGPRs and SGPRs, four bytes each).
        shared_bytes: per block.
        blocks_per_sm: how many fit at once.
        load_bits, store_bits: the widest access to global memory; 0 without one.
        isa: what `instructions` counts: "sass", "ptx" where no disassembler is, or "amdgcn".
        instructions: of the kernel, each once, however often it runs.
        instructions_per_byte: thread-instructions per byte that a program must move, None if that
            is unknown.
        mix: instructions by class, per level of code.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    load_bits: int
    store_bits: int
    isa: str
    instructions: int
    instructions_per_byte: float | None
    mix: dict[str, dict[str, int]]


UNITS = {
    "registers": ("", "lower"),
    "spill_bytes": ("B", "lower"),
    "shared_bytes": ("B", "lower"),
    "blocks_per_sm": ("", "higher"),
    "load_bits": ("bit", "higher"),
    "store_bits": ("bit", "higher"),
    "instructions": ("", "lower"),
    "instructions_per_byte": ("1/B", "lower"),
}


def compile_case(case: AotCase, target_name: str) -> Any:
    """Return Triton's `CompiledKernel` of a case.

    This process must not have imported Triton under TRITON_INTERPRET.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    target = TARGETS[target_name]
    arguments: list[str] = case.fn.arg_names
    types = {
        name: "constexpr" if name in case.constexprs else case.signature[name] for name in arguments
    }
    aligned = [n for n, kind in types.items() if kind.startswith("*") or n in case.divisible]
    source = ASTSource(
        case.fn,
        types,
        dict(case.constexprs),
        {(arguments.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton_compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options=dict(case.options),
    )


def read_metrics(case: AotCase, target_name: str, compiled: Any) -> Metrics:
    """Return the metrics of what `compile_case` returned."""
    target = TARGETS[target_name]
    shared = compiled.metadata.shared
    levels: dict[str, list[str]] = {}
    if target.backend == "cuda":
        registers, spills = _ptxas_usage(compiled.asm["ptx"], int(target.arch))
        levels["ptx"] = instructions("ptx", compiled.asm["ptx"])
        if (sass := _disassemble(compiled.asm["cubin"])) is not None:
            levels["sass"] = instructions("sass", sass)
    else:
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        spills = 4 * (
            _number(r"\.vgpr_spill_count:\s+(\d+)", text)
            + _number(r"\.sgpr_spill_count:\s+(\d+)", text)
        )
        levels["amdgcn"] = instructions("amdgcn", text)
    isa, lines = list(levels.items())[-1]
    load_bits, store_bits = access_bits(next(iter(levels.values())))
    threads = case.options["num_warps"] * target.warp_size
    return Metrics(
        registers=registers,
        spill_bytes=spills,
        shared_bytes=shared,
        blocks_per_sm=target.blocks_per_sm(registers, shared, case.options["num_warps"]),
        load_bits=load_bits,
        store_bits=store_bits,
        isa=isa,
        instructions=len(lines),
        instructions_per_byte=len(lines) * threads / case.bytes_per_program
        if case.bytes_per_program
        else None,
        mix={level: instruction_mix(level, lines) for level, lines in levels.items()},
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise HybridKVError(f"no {pattern!r} in the compiler's output; this reads Triton 3.7's")
    return int(found[1])


def _ptxas_usage(ptx: str, arch: int) -> tuple[int, int]:
    """Return registers per thread and bytes of spill stores and loads.

    They are as Triton's own call of ptxas would report them.
    """
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            get_ptxas(arch).path,
            "-lineinfo",
            "-v",
            f"--gpu-name={sm_arch_from_capability(arch)}",
        ]
        log = subprocess.run(
            [*command, file.name, "-o", os.devnull], capture_output=True, text=True, check=True
        ).stderr
    spills = _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log)
    return _number(r"Used (\d+) registers", log), spills


def _disassemble(cubin: bytes) -> str | None:
    """Return SASS, or None where Triton came without NVIDIA's disassembler."""
    from triton import knobs

    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout


@dataclass(frozen=True)
class Measured:
    """A measurement that a baseline is held against, on one target."""

    kernel: str
    shape: str
    dtype: str
    target: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.kernel, self.shape, self.dtype, self.target

    def values(self) -> dict[str, float]:
        """Return what a baseline holds, by the name of its metric."""
        raise NotImplementedError


@dataclass(frozen=True)
class Measurement(Measured):
    """One case on one target. `metrics` is None if it does not compile; `error` then says why."""

    state_access: bool
    metrics: Metrics | None
    error: str = ""

    def values(self) -> dict[str, float]:
        """Return the values; counts of different levels of code are not comparable."""
        if self.metrics is None:
            return {}
        found = {name: getattr(self.metrics, name) for name in UNITS}
        return {
            f"{self.metrics.isa}_{name}" if name.startswith("instructions") else name: float(value)
            for name, value in found.items()
            if value is not None
        }


@cache
def cases_of(module: str, target: str) -> list[AotCase]:
    """Return the cases of a module for a target."""
    cases: list[AotCase] = importlib.import_module(module).aot_cases(TARGETS[target].warp_size)
    if len({(case.kernel, case.shape, case.dtype) for case in cases}) < len(cases):
        raise ValueError(
            f"{module}: two cases have the same kernel, shape and dtype, and would share a baseline"
        )
    return cases


def measure(
    modules: Sequence[str], targets: Sequence[str], select: Sequence[str] | None = None
) -> Iterator[Measurement]:
    """Compile every case of the modules on every target, in worker processes.

    Yield them in order, as they are ready.

    Raises:
        HybridKVError: a compiler process died.
    """
    todo = jobs(modules, targets, select)
    # Spawned, not forked: a worker must import Triton itself, outside the interpreter that a test
    # may have chosen.
    with ProcessPoolExecutor(NUM_WORKERS, get_context("spawn"), _leave_interpreter) as pool:
        with deaf_to_ctrl_c():  # A submit may start a worker.
            futures = [pool.submit(measure_job, *job) for job in todo]
        try:
            for (module, index, target), future in zip(todo, futures, strict=True):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    kernel = cases_of(module, target)[index].kernel
                    raise HybridKVError(
                        f"a compiler process died at or after {kernel} for {target}"
                    ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def jobs(
    modules: Sequence[str], targets: Sequence[str], select: Sequence[str] | None = None
) -> list[tuple[str, int, str]]:
    """Return module, index of the case and target of what `measure` compiles.

    A case's targets stand together.
    """
    found = [
        (module, index, target)
        for module in modules
        for target in targets
        for index, case in enumerate(cases_of(module, target))
        if not select or any(part.lower() in case.kernel.lower() for part in select)
    ]
    return sorted(found, key=lambda job: (modules.index(job[0]), job[1]))


def _leave_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def measure_job(module: str, index: int, target: str) -> Measurement:
    case = cases_of(module, target)[index]
    measurement = Measurement(case.kernel, case.shape, case.dtype, target, case.state_access, None)
    try:
        compiled = compile_case(case, target)
    except (
        Exception
    ) as error:  # Whatever a compiler throws at a kernel is what was to be found out.
        reason = " ".join(str(error).split())[-300:]
        return replace(measurement, error=f"does not compile: {type(error).__name__}: {reason}")
    return replace(measurement, metrics=read_metrics(case, target, compiled))
