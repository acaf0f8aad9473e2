"""Metrics of compiled kernels, and that an injected regression of each kind is caught."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from bench import kernel_blocks
from bench.static import compile, counts, gate
from bench.static.compile import TARGETS, Measurement, measure
from bench.static.gate import judge, read_baseline, result_rows
from bench.static.isa import access_bits, instruction_mix, instructions
from bench.static.record import AotCase
from hybrid_kv import kernels
from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.results import append_rows, provenance
from tests.cli.run import printed, refused

# ---- injected kernels ----


@triton.jit
def _centre(x, y, scale, BLOCK: tl.constexpr, STRIDE: tl.constexpr, WORK: tl.constexpr):
    """Subtract the sum: all values of a program live in registers at once."""
    offsets = tl.arange(0, BLOCK) * STRIDE
    values = tl.load(x + offsets)
    for _ in tl.static_range(WORK):
        values = values * scale + 1.0
    tl.store(y + offsets, values - tl.sum(values, 0))


INJECTED = {
    "more work": {"WORK": 8},
    "a little work": {"WORK": 1},
    "narrow": {"STRIDE": 2},
    "larger block": {"BLOCK": 1 << 13},
    "broken": {"BLOCK": 1000},
}


def _case(shape: str, **changes: int) -> AotCase:
    constexprs = {"BLOCK": 1 << 11, "STRIDE": 1, "WORK": 2} | changes
    return AotCase(
        kernel="injected.centre",
        shape=shape,
        dtype="float32",
        fn=_centre,
        signature={"x": "*fp32", "y": "*fp32", "scale": "fp32"},
        options={"num_warps": constexprs.pop("num_warps", 4), "num_stages": 1},
        constexprs=constexprs,
        bytes_per_program=8 * constexprs["BLOCK"],
        state_access=True,
    )


def aot_cases(lanes: int) -> list[AotCase]:
    spilled = _case("spilled", BLOCK=lanes << 9, num_warps=1)  # 512 values of each lane
    injected = [_case(shape, **changes) for shape, changes in INJECTED.items()]
    return [_case(f"plain, warps of {lanes}"), spilled, *injected]


@pytest.fixture(scope="module")
def injected() -> dict[str, Measurement]:
    """Compiled under TRITON_INTERPRET, which must not reach the workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(compile, "NUM_WORKERS", 1)
        return {one.shape: replace(one, shape="injected") for one in measure([__name__], ["sm_90"])}


@pytest.fixture(scope="module")
def baseline(
    injected: dict[str, Measurement], tmp_path_factory: pytest.TempPathFactory
) -> gate.Baseline:
    file = tmp_path_factory.mktemp("baseline") / "kernels.csv"
    append_rows(file, result_rows(injected["plain, warps of 32"]))
    return read_baseline(file, provenance().triton)


@pytest.mark.parametrize(
    ("shape", "failures", "warnings"),
    [
        ("a little work", [], []),  # less than before
        ("more work", [], ["sass instructions per byte"]),
        (
            "narrow",
            ["accesses state in 32 bit, not 128", "32 bit loads instead of 128", "32 bit stores"],
            [""],
        ),
        ("larger block", ["blocks per SM instead of 16"], []),
        ("spilled", ["spills "], []),
        ("broken", ["does not compile: CompilationError"], []),
    ],
)
def test_a_injected_regression_is_caught(
    injected: dict[str, Measurement],
    baseline: gate.Baseline,
    shape: str,
    failures: list[str],
    warnings: list[str],
) -> None:
    verdict = judge(injected[shape], baseline)
    for found, expected in ((verdict.failures, failures), (verdict.warnings, warnings)):
        assert len(found) == len(expected), found
        assert all(part in text for part, text in zip(expected, found, strict=True)), found
    assert verdict.word == ("FAILED" if failures else "warning" if warnings else "ok")


def test_what_needs_no_baseline_fails_without_one(
    injected: dict[str, Measurement], baseline: gate.Baseline
) -> None:
    """Nor does --update accept it."""
    for shape in ("narrow", "spilled", "broken"):
        assert (
            judge(injected[shape], {}).word
            == judge(injected[shape], baseline, accept=True).word
            == "FAILED"
        )
    for shape in ("larger block", "more work"):
        assert judge(injected[shape], {}).word == "new"
        assert judge(injected[shape], baseline, accept=True).word == "ok"


def test_metrics_of_a_kernel_that_can_be_counted_by_hand(injected: dict[str, Measurement]) -> None:
    metrics = injected["plain, warps of 32"].metrics
    assert metrics is not None
    assert (metrics.load_bits, metrics.store_bits, metrics.spill_bytes) == (128, 128, 0)
    # 2048 floats, 128 threads, 4 floats an access: four loads and stores; a sum over 4 warps: 5 + 2
    # shuffles.
    mix = metrics.mix["ptx"]
    assert (mix["global"], mix["shuffle"], mix["shared"]) == (8, 7, 4)
    assert metrics.shared_bytes == 16
    assert metrics.instructions_per_byte == metrics.instructions * 128 / (8 * 2048)


def test_state_access_that_narrows_on_one_side_only(
    injected: dict[str, Measurement], baseline: gate.Baseline
) -> None:
    plain = injected["plain, warps of 32"]
    assert plain.metrics is not None
    narrower = replace(plain, metrics=replace(plain.metrics, store_bits=64))
    assert judge(narrower, baseline).failures == ["64 bit stores instead of 128"]
    assert judge(replace(narrower, state_access=False), baseline).failures == []


def test_the_newest_baseline_of_this_triton_counts(
    injected: dict[str, Measurement], tmp_path: Path
) -> None:
    plain = injected["plain, warps of 32"]
    assert plain.metrics is not None
    file = tmp_path / "kernels.csv"
    append_rows(file, result_rows(replace(plain, metrics=replace(plain.metrics, blocks_per_sm=20))))
    known = read_baseline(file, provenance().triton)
    assert judge(plain, known).failures == ["16 blocks per SM instead of 20"]
    assert judge(plain, read_baseline(file, "3.5.1")).word == "new"
    append_rows(file, result_rows(plain))
    assert judge(plain, read_baseline(file, provenance().triton)).word == "ok"


def test_counts_of_different_code_are_not_compared(
    baseline: gate.Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without NVIDIA's disassembler PTX is counted."""
    monkeypatch.setattr(compile, "_disassemble", lambda cubin: None)
    case = _case("injected", WORK=8)
    metrics = compile.read_metrics(case, "sm_90", compile.compile_case(case, "sm_90"))
    assert metrics.isa == "ptx" and metrics.mix.keys() == {"ptx"}
    one = Measurement(
        "injected.centre", "injected", "float32", "sm_90", state_access=True, metrics=metrics
    )
    assert judge(one, baseline).word == "ok"


# ---- reading code ----


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
                                                               /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R12.64] ;  /* 0x000000060c048981 */
        /*0020*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
        /*0030*/                   LDGDEPBAR ;
        /*0040*/             @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0060*/                   STL [R1+0x4], R5 ;
        /*0070*/                   STS.64 [R1], R4 ;
        /*0080*/                   FFMA R1, R2, R3, R4 ;
        /*0090*/                   F2FP.BF16.F32.PACK_AB R1, R2, R3 ;
        /*00a0*/                   MUFU.EX2 R1, R2 ;
        /*00b0*/                   SHFL.BFLY PT, R1, R2, 0x1, 0x1f ;
        /*00c0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00d0*/                   EXIT ;
        /*00e0*/                   NOP;
"""
PTX = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0
)
.reqntid 128
{
	.reg .b32 	%r<71>;
$L__func_begin0:
// %bb.0:
	ld.param.b64 	%rd5, [k_param_0];
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	@!%p2 st.global.L1::evict_last.b16 [ %rd3 + 0 ], { %rs15 };
	cp.async.cg.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x10, %r6;
	cp.async.commit_group;
	ld.shared.b32 	%r70, [global_smem];
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        { %r1 }, { %r2 };
	cvt.rn.bf16x2.f32 %r1, %r2, %r3;
	fma.rn.f32 	%r30, %r1, %r2, %r3;
	ex2.approx.f32 	%r31, %r30;
	shfl.sync.bfly.b32 	%r53, %r52, 16, 31, -1;
	bar.sync 	0;
	add.s32 	%r1, %r2, 1;
	@%p3 bra 	$L__BB0_2;
	ret;
}
	.file	1 "k.py"
	.section	.debug_abbrev
	{
.b8 1
	}
"""
AMDGCN = """
k:                                      ; @k
	.cfi_startproc
; %bb.0:
	s_load_dwordx8 s[4:11], s[0:1], 0x8
	s_waitcnt lgkmcnt(0)
	global_load_dwordx2 v[2:5], v[2:3], off
	global_load_ushort v2, v[2:3], off
	global_store_short_d16_hi v[2:3], v4, off
	ds_bpermute_b32 v1, v2, v3
	ds_write_b32 v1, v2
	scratch_store_dword off, v1, s32
	v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0
	v_add_f32_dpp v1, v2, v3 row_shr:1
	v_exp_f32_e32 v1, v2
	v_cvt_f32_i32_e32 v1, v2
	v_fma_f32 v1, v2, v3, v4
	v_add_u32_e32 v1, v2, v3
	s_barrier
	s_nop 0
	s_endpgm
	.section	.rodata,"a",@progbits
	v_not_an_instruction
"""
EACH = dict.fromkeys(
    ("shared", "local", "tensor", "float", "convert", "special", "shuffle", "control"), 1
)
EACH |= {"integer": 2, "barrier": 2}


@pytest.mark.parametrize(
    ("isa", "code", "expected"),
    [
        ("sass", SASS, EACH | {"global": 2}),
        ("ptx", PTX, EACH | {"global": 3, "control": 2, "local": 0}),
        ("amdgcn", AMDGCN, EACH | {"global": 3, "shuffle": 2}),
    ],
)
def test_every_instruction_is_found_and_classed(
    isa: str, code: str, expected: dict[str, int]
) -> None:
    assert instruction_mix(isa, instructions(isa, code)) == {
        name: n for name, n in expected.items() if n
    }


@pytest.mark.parametrize(
    ("isa", "line", "bits"),
    [
        ("ptx", "ld.global.v8.b32 { %r1 }, [ %rd1 + 0 ];", (256, 0)),
        (
            "ptx",
            "ld.global.L1::no_allocate.L2::cache_hint.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ], %rd4;",
            (128, 0),
        ),
        ("ptx", "ld.volatile.global.u8 %rs1, [%rd1];", (8, 0)),
        ("ptx", "@%p4 st.global.v2.b16 [ %rd3 + 0 ], { %rs1, %rs2 };", (0, 32)),
        ("ptx", "cp.async.ca.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x4;", (32, 0)),
        ("ptx", "ld.shared.v4.b32 { %r1 }, [%r2];", (0, 0)),
        ("amdgcn", "global_load_dwordx4 v[2:5], v[2:3], off", (128, 0)),
        ("amdgcn", "global_load_sbyte v2, v[2:3], off", (8, 0)),
        ("amdgcn", "buffer_load_short_d16 v2, v3, s[0:3], 0", (16, 0)),
        ("amdgcn", "buffer_store_dword v2, v3, s[0:3], 0", (0, 32)),
        ("amdgcn", "global_load_lds_dword v[2:3], off", (32, 0)),
        ("amdgcn", "s_load_dwordx4 s[4:7], s[0:1], 0x8", (0, 0)),
    ],
)
def test_access_width(isa: str, line: str, bits: tuple[int, int]) -> None:
    assert access_bits(instructions(isa, f"\t{line}\n")) == bits


@pytest.mark.parametrize(
    ("target", "registers", "shared", "num_warps", "blocks"),
    [
        ("sm_90", 32, 0, 4, 16),
        ("sm_90", 32, 0, 1, 32),  # 64 warps would fit
        ("sm_90", 65, 0, 4, 7),  # 72 are dealt out
        ("sm_90", 255, 0, 8, 1),
        ("sm_90", 32, 100 << 10, 4, 2),
        ("sm_80", 32, 163 << 10, 4, 1),
        ("sm_80", 32, 164 << 10, 4, 0),  # 1 KiB is the system's
        ("sm_100", 32, 227 << 10, 4, 1),
        ("gfx942", 64, 0, 4, 8),
        ("gfx942", 32, 33 << 10, 4, 1),
        ("gfx942", 32, 65 << 10, 4, 0),
    ],
)
def test_blocks_per_sm(
    target: str, registers: int, shared: int, num_warps: int, blocks: int
) -> None:
    assert TARGETS[target].blocks_per_sm(registers, shared, num_warps) == blocks


# ---- the command ----


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting workers takes longer than compiling, which is done once.

    Counts have their own tests.
    """
    once = cache(compile.measure_job)
    monkeypatch.setattr(gate, "measure", lambda *what: (once(*job) for job in compile.jobs(*what)))
    monkeypatch.setattr(counts, "count_all", list)


@pytest.mark.usefixtures("one_process")
def test_block_tables_pass_and_a_step_down_does_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, report = tmp_path / "kernels.csv", tmp_path / "kernels.json"
    only = "kernels", "-k", "block_tables", "--targets", "sm_90,gfx942"
    out = printed(capsys, *only, "--baseline", file, "--update", "--out", report)
    assert "4 compiled with Triton" in out and "0 failed; 4 without a baseline" in out
    document = json.loads(report.read_text())
    assert document["passed"] and len(document["kernels"]) == 4
    assert document["kernels"][0]["measurement"]["metrics"]["mix"].keys() == {"ptx", "sass"}
    lines = file.read_text().splitlines()

    # What did not change is not written again.
    assert "0 failed\n" in printed(capsys, *only, "--baseline", file, "--update")
    assert file.read_text().splitlines() == lines

    key = ("block_tables.update_block_tables", "Nemotron-3-Nano, 256 rows", "int32", "sm_90")
    better = next(
        row
        for row in result_rows(_measurement(key, blocks_per_sm=31))
        if row.metric == "blocks_per_sm"
    )
    append_rows(file, [better])
    out = printed(capsys, *only[:3], "--targets", "sm_90", "--baseline", file, code=1)
    assert (
        "update_block_tables (Nemotron-3-Nano, 256 rows, int32) on sm_90: 12 blocks per "
        "SM instead of 31"
    ) in out
    printed(capsys, *only[:3], "--targets", "sm_90", "--baseline", file, "--update")
    assert read_baseline(file, provenance().triton)[key]["blocks_per_sm"] == 12


def _measurement(key: tuple[str, str, str, str], **changes: int) -> Measurement:
    metrics = compile.Metrics(32, 0, 0, 16, 128, 128, "sass", 100, None, {"sass": {}})
    return Measurement(*key, state_access=False, metrics=replace(metrics, **changes))


@pytest.mark.usefixtures("one_process")
def test_a_failure_is_exit_1_and_never_becomes_the_baseline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compile, "MODULES", [__name__])
    file = tmp_path / "kernels.csv"
    out = printed(capsys, "kernels", "--targets", "gfx942", "--baseline", file, "--update", code=1)
    assert not file.exists()
    assert "injected.centre (narrow, float32) on gfx942: accesses state in 32 bit, not 128" in out
    assert "injected.centre (spilled, float32) on gfx942: spills" in out
    assert "injected.centre (broken, float32) on gfx942: does not compile" in out
    assert "plain, warps of 64" in out and "3 failed" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--targets", "sm_90,sm_70"],
            "unknown target 'sm_70'; use sm_80, sm_90, sm_100, gfx942\n",
        ),
        (["--baseline", "nowhere.csv"], "nowhere.csv does not exist, so nothing would be compared"),
        (
            ["--out", "/dev/null/kernels.json"],
            "/dev/null/kernels.json: /dev/null cannot be written",
        ),
        ([], "triton is not installed; run: pip install 'hybrid_kv[kernels]'"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    if not args:  # nothing is wrong with the command
        monkeypatch.setitem(sys.modules, "triton", None)
    assert refused(capsys, "kernels", *args).startswith(f"error: {message}")


def test_cases_that_would_share_a_baseline_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules[__name__], "aot_cases", lambda _: [_case("plain"), _case("plain")]
    )
    with pytest.raises(ValueError, match="two cases have the same kernel, shape and dtype"):
        compile.cases_of.__wrapped__(__name__, "sm_90")


def die(*job: Any) -> None:
    os._exit(9)


def test_a_compiler_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "NUM_WORKERS", 1)
    monkeypatch.setattr(compile, "measure_job", die)
    with pytest.raises(
        HybridKVError, match=r"a compiler process died at or after injected\.centre for sm_90"
    ):
        list(measure([__name__], ["sm_90"]))


def test_every_program_of_the_package_is_compiled() -> None:
    cases = [case for module in compile.MODULES for case in compile.cases_of(module, "sm_90")]
    files = [*Path(kernels.__path__[0]).rglob("*.py"), Path(kernel_blocks.__file__)]
    sources = "".join(path.read_text() for path in files)
    programs = re.findall(r"^def (\w+)\(\n    \w+: tl\.tensor", sources, re.MULTILINE)
    assert {case.fn.__name__ for case in cases} == set(programs)
