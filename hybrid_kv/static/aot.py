"""What a kernel costs, known without a GPU: compile it ahead of time and read what came out.

Contract. A kernel file with a Triton kernel has `aot_cases() -> list[AotCase]`, the configurations that it ships, at
the shapes of real models; where they depend on the size of a warp it takes that as `lanes`. `measure` compiles every
case for every target and returns registers, spills, shared memory, thread blocks per SM, the widest global load and
store, and the instructions by class. All of it is deterministic for one Triton version, so a machine without a GPU
holds it exactly against the rows of an earlier commit (`judge`).

Hard gates: a spill, a kernel that no longer compiles or fits an SM, state accessed in less than 128 bit, fewer blocks
per SM than the baseline, narrower state access than the baseline. Soft gate: 5 % more instructions per byte. The
figures see no trip counts, no latency inside a block, no cache hits and no launches: equal figures do not mean equal
speed, worse ones nearly always mean slower.

Shapes considered. (a) Metrics through a driver (`CompiledKernel.n_regs`): needs the GPU. (b) `cuobjdump -res-usage`:
knows the stack, not the spills. (c) A second `ptxas -v` on the PTX, 20 ms, the tool that Triton itself needs; for AMD
the comments of the assembly. This is (c); SASS comes through `cuobjdump` where Triton brings it.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from inspect import signature
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hybrid_kv import kernels
from hybrid_kv.config import HybridKVError
from hybrid_kv.errors import deaf_to_ctrl_c
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.launch import AotCase
from hybrid_kv.results import Row, provenance, read_rows

NUM_WORKERS = 2
STATE_BITS = 128
MAX_BLOCKS = 32  # per SM or CU, on all targets
SOFT_LIMIT = 1.05


@dataclass(frozen=True)
class Target:
    """A GPU architecture. Registers are 512 per lane and quarter of an SM (CU), dealt out by eight, on all of them."""

    backend: str
    arch: int | str
    warp_size: int
    max_warps: int
    shared_bytes: int
    reserved_bytes: int  # of shared memory, per block

    def blocks_per_sm(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """Thread blocks (workgroups) that one SM (CU) holds at once; 0: not even one."""
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
    """Names in a comma-separated list, once each.

    Raises:
        HybridKVError: one of them is unknown.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in TARGETS]:
        raise HybridKVError(f"unknown target {unknown[0]!r}; use {', '.join(TARGETS)}")
    return names


@dataclass(frozen=True)
class Metrics:
    """What one compilation gave.

    Attributes:
        registers: 32-bit, per thread (AMD: VGPRs, accumulators included).
        spill_bytes: per thread, stores and loads (AMD: VGPRs and SGPRs, four bytes each).
        shared_bytes: per block.
        blocks_per_sm: how many fit at once.
        load_bits, store_bits: the widest access to global memory; 0 without one.
        isa: what `instructions` counts: "sass", "ptx" where no disassembler is, or "amdgcn".
        instructions: of the kernel, each once, however often it runs.
        instructions_per_byte: thread-instructions per byte that a program must move, None if that is unknown.
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


# ---- reading code ----

# Per level of code, classes by opcode, the first match wins; what matches none is integer, address or move.
_CLASSES = {
    "sass": {
        "tensor": r"\w*MMA",
        "global": r"LDG(STS)?\b|STG|LD\b|ST\b|ATOMG?\b|REDG?\b|UBLKCP|UTMA",
        "shared": r"LDS|STS|ATOMS|LDTM|STTM",
        "local": r"LDL|STL",
        "barrier": r"BAR|(LDG)?DEPBAR|MEMBAR|WARPSYNC|SYNCS|FENCE",
        "shuffle": r"SHFL|REDUX|VOTE|MATCH",
        "special": r"MUFU",
        "convert": r"F2|I2F|FRND",
        "float": r"F(ADD|MUL|FMA|SET|SEL|MNMX|CHK)|H(ADD|MUL|FMA|SET|MNMX)2|D(ADD|MUL|FMA|SET)",
        "control": r"BRA|BRX|JMP|EXIT|RET|CALL|BSSY|BSYNC|BREAK|YIELD",
    },
    "ptx": {
        "tensor": r"mma|wgmma|tcgen05",
        "global": r"(ld|st|atom|red)\S*\.global|cp\.async\S*\.global",
        "shared": r"(ld|st|atom|red)\S*\.shared|ldmatrix|stmatrix",
        "local": r"(ld|st)\S*\.local",
        "barrier": r"bar|mbarrier|membar|fence|cp\.async",
        "shuffle": r"shfl|redux|vote|match",
        "special": r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\S*\.b?f\d",
        "convert": r"cvt",
        "float": r"\S*\.b?f\d\d",
        "control": r"bra|ret|exit|call",
    },
    "amdgcn": {
        "tensor": r"v_s?mfma",
        "global": r"global_|flat_|buffer_(load|store|atomic)",
        "shuffle": r"ds_b?permute|ds_swizzle|\w+_dpp|v_(read|write)(first)?lane|v_permlane",
        "shared": r"ds_",
        "local": r"scratch_",
        "barrier": r"s_barrier|s_waitcnt|buffer_",
        "special": r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_",
        "convert": r"v_cvt",
        "float": r"v_\w+_b?f\d\d|v_div_",
        "control": r"s_c?branch|s_endpgm|s_setpc|s_swappc",
    },
}
_INSTRUCTION = {
    "sass": re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;\n]*)", re.MULTILINE),
    "ptx": re.compile(r"^\s+(?:@!?%p\d+\s+)?([a-z][^;\n]*)", re.MULTILINE),
    "amdgcn": re.compile(r"^\t([a-z][^;\n]*)", re.MULTILINE),
}
_PTX_ACCESS = re.compile(r"(ld|st)\.(?=\S*\bglobal\b)(?:\S*\.v(\d))?\S*\.[bsuf](\d+)\s")
_PTX_COPY = re.compile(r"cp\.async\.c[ag]\S*\.global\S* [^,]*,[^,]*, *(\w+)")
_AMD_ACCESS = re.compile(r"(?:global|flat|buffer)_(load|store)_(?:lds_)?[us]?(byte|short|dword)(?:x(\d))?")
_AMD_BITS = {"byte": 8, "short": 16, "dword": 32}


def instructions(isa: str, code: str) -> list[str]:
    """The instructions of a kernel in order, without predicates; padding is left out."""
    if isa == "amdgcn":
        code = code.split("\t.section", 1)[0]  # What follows describes the kernel.
    return [line for line in _INSTRUCTION[isa].findall(code) if not line.startswith(("NOP", "s_nop"))]


def instruction_mix(isa: str, lines: Sequence[str]) -> dict[str, int]:
    """How many instructions there are of each class that occurs."""
    patterns = {name: re.compile(pattern) for name, pattern in _CLASSES[isa].items()}
    return dict(Counter(next((n for n, p in patterns.items() if p.match(line)), "integer") for line in lines))


def access_bits(lines: Sequence[str]) -> tuple[int, int]:
    """The widest load from and the widest store to global memory of one thread, in PTX or amdgcn, in bits."""
    bits = {"ld": [0], "st": [0]}
    for line in lines:
        if ptx := _PTX_ACCESS.match(line):
            bits[ptx[1]].append(int(ptx[2] or 1) * int(ptx[3]))
        elif copy := _PTX_COPY.match(line):
            bits["ld"].append(8 * int(copy[1], 0))
        elif amd := _AMD_ACCESS.match(line):
            bits["ld" if amd[1] == "load" else "st"].append(_AMD_BITS[amd[2]] * int(amd[3] or 1))
    return max(bits["ld"]), max(bits["st"])


# ---- compiling ----


def compile_case(case: AotCase, target_name: str) -> Any:
    """Triton's `CompiledKernel` of a case. This process must not have imported Triton under TRITON_INTERPRET."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    target = TARGETS[target_name]
    arguments: list[str] = case.fn.arg_names
    types = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in arguments}
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
        options={"num_warps": case.num_warps, "num_stages": case.num_stages}
        | ({} if case.maxnreg is None else {"maxnreg": case.maxnreg}),
    )


def read_metrics(case: AotCase, target_name: str, compiled: Any) -> Metrics:
    """The metrics of what `compile_case` returned."""
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
        spills = 4 * (_number(r"\.vgpr_spill_count:\s+(\d+)", text) + _number(r"\.sgpr_spill_count:\s+(\d+)", text))
        levels["amdgcn"] = instructions("amdgcn", text)
    isa, lines = list(levels.items())[-1]
    load_bits, store_bits = access_bits(next(iter(levels.values())))
    threads = case.num_warps * target.warp_size
    return Metrics(
        registers=registers,
        spill_bytes=spills,
        shared_bytes=shared,
        blocks_per_sm=target.blocks_per_sm(registers, shared, case.num_warps),
        load_bits=load_bits,
        store_bits=store_bits,
        isa=isa,
        instructions=len(lines),
        instructions_per_byte=len(lines) * threads / case.bytes_per_program if case.bytes_per_program else None,
        mix={level: instruction_mix(level, lines) for level, lines in levels.items()},
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise HybridKVError(f"no {pattern!r} in the compiler's output; this reads Triton 3.6's")
    return int(found[1])


def _ptxas_usage(ptx: str, arch: int) -> tuple[int, int]:
    """Registers per thread and bytes of spill stores and loads, as Triton's own call of ptxas would report them."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-lineinfo", "-v", f"--gpu-name={sm_arch_from_capability(arch)}"]
        log = subprocess.run([*command, file.name, "-o", os.devnull], capture_output=True, text=True, check=True).stderr
    spills = _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log)
    return _number(r"Used (\d+) registers", log), spills


def _disassemble(cubin: bytes) -> str | None:
    """SASS, or None where Triton came without NVIDIA's disassembler."""
    from triton import knobs

    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


# ---- all cases ----


@dataclass(frozen=True)
class Measurement:
    """One case on one target. `metrics` is None if it does not compile; `error` then says why."""

    kernel: str
    shape: str
    dtype: str
    target: str
    state_access: bool
    metrics: Metrics | None
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.kernel, self.shape, self.dtype, self.target

    def values(self) -> dict[str, float]:
        """What a baseline holds, by the name of its metric. Counts of different levels of code are not comparable."""
        if self.metrics is None:
            return {}
        found = {name: getattr(self.metrics, name) for name in UNITS}
        return {
            f"{self.metrics.isa}_{name}" if name.startswith("instructions") else name: float(value)
            for name, value in found.items()
            if value is not None
        }


def kernel_modules() -> list[str]:
    """The modules of `hybrid_kv.kernels` that have cases.

    Raises:
        HybridKVError: Triton is missing.
    """
    try:
        importlib.import_module("triton")
    except ImportError:
        raise HybridKVError(
            "kernels are compiled with Triton, which is not installed; run: pip install -c constraints.txt triton"
        ) from None
    names = [info.name for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    return [name for name in names if hasattr(importlib.import_module(name), "aot_cases")]


@cache
def cases_of(module: str, target: str) -> list[AotCase]:
    """The cases of one of `kernel_modules` for a target."""
    function = importlib.import_module(module).aot_cases
    lanes = {"lanes": TARGETS[target].warp_size} if "lanes" in signature(function).parameters else {}
    cases: list[AotCase] = function(**lanes)
    if len({(case.kernel, case.shape, case.dtype) for case in cases}) < len(cases):
        raise ValueError(f"{module}: two cases have the same kernel, shape and dtype, and would share a baseline")
    return cases


def measure(
    modules: Sequence[str], targets: Sequence[str], select: Sequence[str] | None = None
) -> Iterator[Measurement]:
    """Every case of the modules on every target, compiled in worker processes; in order, as they are ready.

    Raises:
        HybridKVError: a compiler process died.
    """
    jobs = _jobs(modules, targets, select)
    # Spawned, not forked: a worker must import Triton itself, outside the interpreter that a test may have asked for.
    with ProcessPoolExecutor(NUM_WORKERS, get_context("spawn"), _leave_interpreter) as pool:
        with deaf_to_ctrl_c():  # A submit may start a worker.
            futures = [pool.submit(_measure, *job) for job in jobs]
        try:
            for (module, index, target), future in zip(jobs, futures, strict=True):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    kernel = cases_of(module, target)[index].kernel
                    raise HybridKVError(f"a compiler process died at or after {kernel} for {target}") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _jobs(
    modules: Sequence[str], targets: Sequence[str], select: Sequence[str] | None = None
) -> list[tuple[str, int, str]]:
    found = [
        (module, index, target)
        for module in modules
        for target in targets
        for index, case in enumerate(cases_of(module, target))
        if not select or any(part.lower() in case.kernel.lower() for part in select)
    ]
    return sorted(found, key=lambda job: (modules.index(job[0]), job[1]))  # A case's targets stand together.


def _leave_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _measure(module: str, index: int, target: str) -> Measurement:
    case = cases_of(module, target)[index]
    measurement = Measurement(case.kernel, case.shape, case.dtype, target, case.state_access, None)
    try:
        compiled = compile_case(case, target)
    except Exception as error:  # Whatever a compiler throws at a kernel is what was to be found out.
        reason = " ".join(str(error).split())[-300:]
        return replace(measurement, error=f"does not compile: {type(error).__name__}: {reason}")
    return replace(measurement, metrics=read_metrics(case, target, compiled))


# ---- comparing ----

Baseline = Mapping[tuple[str, str, str, str], Mapping[str, float]]


def read_baseline(path: Path, triton: str) -> Baseline:
    """The newest values of each (kernel, shape, dtype, target) under this version of Triton; empty without a file."""
    found: dict[tuple[str, str, str, str], dict[str, float]] = {}
    if path.exists():
        frame = read_rows(path)
        frame = frame[(frame["suite"] == "kernels") & (frame["triton"] == triton)]
        for row in frame[["benchmark", "params", "metric", "value"]].to_dict("records"):
            params = json.loads(row["params"])
            key = row["benchmark"], params["shape"], params["dtype"], params["target"]
            found.setdefault(key, {})[row["metric"]] = float(row["value"])
    return found


@dataclass
class Verdict:
    """A measurement with what is wrong with it: `failures` are hard, `warnings` soft; others' kernels are not gated."""

    measurement: Measurement
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_new: bool = False
    is_gated: bool = True

    @property
    def word(self) -> str:
        if self.failures:
            return "FAILED"
        if not self.is_gated:
            return ""
        return "warning" if self.warnings else ("new" if self.is_new else "ok")


def judge(measurement: Measurement, baseline: Baseline, accept: bool = False) -> Verdict:
    """Apply the gates; with `accept` only those that need no baseline."""
    verdict = Verdict(measurement)
    metrics, then = measurement.metrics, baseline.get(measurement.key)
    if metrics is None:
        verdict.failures.append(measurement.error)
        return verdict
    if metrics.spill_bytes:
        verdict.failures.append(f"spills {metrics.spill_bytes} bytes per thread; fewer rows per program, or more warps")
    if not metrics.blocks_per_sm:
        verdict.failures.append(f"no block fits: {metrics.registers} registers, {metrics.shared_bytes} bytes shared")
    width = max(metrics.load_bits, metrics.store_bits)
    if measurement.state_access and width < STATE_BITS:
        verdict.failures.append(f"accesses state in {width} bit, not {STATE_BITS}")
    verdict.is_new = then is None
    if then is None or accept:
        return verdict
    now = measurement.values()
    for name, what in (("blocks_per_sm", "blocks per SM"), ("load_bits", "bit loads"), ("store_bits", "bit stores")):
        relevant = name == "blocks_per_sm" or measurement.state_access
        if relevant and now[name] < then.get(name, 0):
            verdict.failures.append(f"{now[name]:.0f} {what} instead of {then[name]:.0f}")
    count = f"{metrics.isa}_instructions"
    name = f"{count}_per_byte" if f"{count}_per_byte" in now else count
    if now[name] > SOFT_LIMIT * then.get(name, float("inf")):
        verdict.warnings.append(f"{name.replace('_', ' ')} {now[name]:.4g} instead of {then[name]:.4g}")
    return verdict


def result_rows(measurement: Measurement) -> list[Row]:
    """One row per metric; that of the instruction count carries the mix."""
    metrics = measurement.metrics
    rows = []
    for name, value in measurement.values().items():
        unit, better = UNITS[name.split("_", 1)[1] if "instructions" in name else name]
        params: dict[str, Any] = {name: getattr(measurement, name) for name in ("shape", "dtype", "target")}
        if metrics is not None and name == f"{metrics.isa}_instructions":
            params["mix"] = metrics.mix[metrics.isa]
        rows.append(Row("kernels", measurement.kernel, name, value, unit, params, better=better, verdict="pass"))
    return rows


# ---- the command ----


def run(
    modules: Sequence[str], targets: Sequence[str], baseline: Path, accept: bool, select: Sequence[str] | None = None
) -> list[Verdict]:
    """Measure and judge every case whose kernel has one of `select` in its name, with a progress bar.

    Raises:
        HybridKVError: there is none.
    """
    from tqdm.auto import tqdm

    known = read_baseline(baseline, provenance().triton)
    total = len(_jobs(modules, targets, select))
    if not total:
        raise HybridKVError(f"no kernel has {' or '.join(select or ())!r} in its name")
    seconds = 0.1 if sys.stderr.isatty() else 10.0  # A log keeps every line that a terminal overwrites.
    bar = tqdm(measure(modules, targets, select), "kernels", total, mininterval=seconds)
    return [judge(one, known, accept) for one in bar]


def run_peers(targets: Sequence[str]) -> list[Verdict]:
    """Measure the kernels of other packages: one that does not compile has a warning, and nothing else is judged."""
    found = measure([f"{__name__.rpartition('.')[0]}.peers"], targets)
    return [Verdict(one, warnings=[one.error] if one.error else [], is_gated=False) for one in found]


def changed_rows(verdicts: Sequence[Verdict], baseline: Path) -> list[Row]:
    """The rows of those measurements that the baseline does not hold already."""
    known = read_baseline(baseline, provenance().triton)
    changed = [v.measurement for v in verdicts if v.measurement.values() != known.get(v.measurement.key)]
    return [row for one in changed for row in result_rows(one)]


_MIX = ("global", "shared", "tensor", "float", "integer")


def print_table(verdicts: Sequence[Verdict]) -> None:
    """One line per case and target, and below what is wrong."""
    from rich.console import Console
    from rich.table import Table

    # A terminal may wrap a line; rich would cut the figures off.
    console = Console(highlight=False, markup=False, soft_wrap=True, width=240)
    table = Table(box=None, pad_edge=False)
    headers = ("target", "regs", "spill", "shared", "blocks", "load", "store", "code", "instr.", "/byte")
    for name in ("kernel", "shape", "dtype", *headers, " ".join(_MIX), ""):
        left = name in ("kernel", "shape", "dtype", "target", "code", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    before: tuple[str, ...] = ()
    for verdict in verdicts:
        one = verdict.measurement
        case, metrics = one.key[:3], one.metrics
        cells = [""] * len(headers[1:]) + [""]
        if metrics is not None:
            cells = [f"{metrics.registers}", f"{metrics.spill_bytes}", f"{metrics.shared_bytes}"]
            cells += [f"{metrics.blocks_per_sm}", f"{metrics.load_bits}", f"{metrics.store_bits}"]
            per_byte = metrics.instructions_per_byte
            cells += [metrics.isa, f"{metrics.instructions}", "" if per_byte is None else f"{per_byte:.2f}"]
            mix = metrics.mix[metrics.isa]
            cells += [" ".join(f"{mix.get(name, 0):{len(name)}}" for name in _MIX)]
        table.add_row(*(("", "", "") if case == before else case), one.target, *cells, verdict.word)
        before = case
    console.print(table)
    for verdict in verdicts:
        kernel, shape, dtype, target = verdict.measurement.key
        for line in verdict.failures + [f"warning: {text}" for text in verdict.warnings]:
            console.print(f"{kernel} ({shape}, {dtype}) on {target}: {line}")
    failed = sum(bool(verdict.failures) for verdict in verdicts)
    new = sum(verdict.is_new for verdict in verdicts)
    notes = [f"{len(verdicts)} compiled with Triton {provenance().triton}, {failed} failed"]
    notes += [f"{new} without a baseline: --update records them"] if new else []
    console.print("\n" + "; ".join(notes))


def document(verdicts: Sequence[Verdict], peers: Sequence[Verdict] = ()) -> dict[str, Any]:
    """For JSON: every measurement with its metrics and verdict, those of other packages apart, and their origin."""
    found: dict[str, Any] = {
        "passed": not any(verdict.failures for verdict in verdicts),
        "provenance": asdict(provenance()),
        "kernels": [asdict(verdict) for verdict in verdicts],
    }
    if peers:
        found["peers"] = [asdict(verdict.measurement) for verdict in peers]
    return found
