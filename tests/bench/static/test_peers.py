"""A peer's launches are recorded and compiled; a made-up peer shows how."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton")

from bench.peers import _Finder
from bench.peers import kernels as peers
from bench.static import compile, counts, gate
from bench.static.compile import compile_case, read_metrics
from tests.cli.run import printed, refused

OPS = "vllm/model_executor/layers/mamba/ops"
NORM = """
import torch
import vllm.envs as envs
from vllm import _custom_ops
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.kv_cache_interface import KVQuantMode
from .helpers import twice

logger = init_logger(__name__)
assert HAS_TRITON
# A kernel for CPUs would replace the one for GPUs.
assert not current_platform.is_cpu() and not current_platform.is_xpu()
assert not current_platform.is_rocm()
MODES = (KVQuantMode.NONE, KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.INT4_PER_TOKEN_HEAD)
assert len(set(MODES)) == 3
SIZES = [triton.Config({"BLOCK_N": size}, num_warps=size // 128) for size in (256, 512)]


@triton.autotune(SIZES, key=[])
@triton.heuristics({"HAS_BIAS": lambda args: args["B"] is not None})
@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    X, Y, B, rows, stride: tl.int64, odd, one, eps, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr
):
    columns = tl.arange(0, BLOCK_N)
    x = tl.load(X + tl.program_id(0) * stride + columns).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(B + columns)
    tl.store(Y + tl.program_id(0) * stride + columns, twice(x) * eps)


def _layer_norm_fwd(x, weight, bias, eps, z, group_size, norm_before_gate, is_rms_norm):
    with torch.cuda.device(x.device.index):
        _norm_kernel[(len(x),)](x, torch.empty_like(x), bias, 32, x.stride(0), 7, x.stride(1), eps)
"""
HELPERS = """
from vllm.triton_utils import tl, triton


@triton.jit
def twice(x):
    return 2 * x
"""
BROKEN = """
from vllm.triton_utils import tl, triton


@triton.jit
def _selective_scan_update_kernel(state, BLOCK_SIZE_M: tl.constexpr):
    tl.store(state + tl.arange(0, BLOCK_SIZE_M), 0.0)


def selective_state_update(state, *args, **kwargs):
    _selective_scan_update_kernel[(1,)](state, 1000)
"""


def forget() -> None:
    peers.find.cache_clear()
    compile.cases_of.cache_clear()


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return a made-up vLLM: a norm, an update that fails to compile, a broken package."""
    folder = tmp_path / "peer" / OPS
    folder.mkdir(parents=True)
    (tmp_path / "peer" / "vllm" / "__init__.py").write_text("raise ImportError('no extensions')\n")
    files = {"layernorm_gated": NORM, "helpers": HELPERS, "mamba_ssm": BROKEN}
    for name, text in {**files, "ssd_combined": "import made_up_package\n"}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "peer")
    root = peers.root_of
    monkeypatch.setattr(
        peers, "root_of", lambda package: root(package) if package == "vllm" else None
    )
    forget()
    yield
    forget()


@pytest.mark.usefixtures("made_up")
def test_a_launch_is_recorded_as_triton_would_compile_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"
    }
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = next(case for case in peers.aot_cases(32) if "norm" in case.kernel)
    assert (case.kernel, case.shape, case.dtype) == (
        "vllm.norm_kernel",
        "Nemotron-3-Nano, config 1/2",
        "bfloat16",
    )
    assert case.constexprs == {"B": None, "one": 1, "BLOCK_N": 256, "HAS_BIAS": False}
    constants = dict.fromkeys(case.constexprs, "constexpr")
    kinds = {
        "X": "*bf16",
        "Y": "*bf16",
        "rows": "i32",
        "stride": "i64",
        "odd": "i32",
        "eps": "fp32",
    }
    assert case.signature == kinds | constants
    # Triton may not look at `rows`, and 7 is odd.
    assert {"stride"} == set(case.divisible) - {"X", "Y"}
    assert (
        case.options == {"num_warps": 2, "num_stages": 3} and case.bytes_per_program == 3 * 256 * 2
    )
    metrics = read_metrics(case, "sm_90", compile_case(case, "sm_90"))
    # 4 of 256 numbers a thread
    assert (metrics.load_bits, metrics.store_bits, metrics.spill_bytes) == (64, 64, 0)
    # The package is as before: only the tests know of it.
    assert {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"
    } == before
    assert not any(isinstance(finder, _Finder) for finder in sys.meta_path)


@pytest.mark.usefixtures("made_up")
def test_the_command_shows_them_apart_and_gates_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        gate, "measure", lambda *what: (compile.measure_job(*job) for job in compile.jobs(*what))
    )
    monkeypatch.setattr(counts, "count_all", list)
    file, report = tmp_path / "kernels.csv", tmp_path / "kernels.json"
    options = "-k", "block_tables", "--update", "--baseline", file, "--out", report
    out = printed(capsys, "kernels", "--peers", "--targets", "sm_90", *options)
    ours, theirs = out.split("kernels of other packages, not gated:")
    assert "block_tables.update_block_tables" in ours and "vllm." not in ours
    assert (
        "vllm.norm_kernel" in theirs
        and "block_tables." not in theirs
        and "without a baseline" not in theirs
    )
    assert (
        "vllm.selective_scan_update_kernel (Nemotron-3-Nano, K=0, float32) on sm_90: "
        "warning: does not"
    ) in theirs
    assert "FAILED" not in out and "ok\n" not in theirs
    assert "\nmamba_ssm is not installed\n" in theirs
    chunks = (
        "\nvllm.model_executor.layers.mamba.ops.ssd_combined (Nemotron-3-Nano, chunks of 128): "
    )
    assert f"{chunks}skipped, it needs the package made_up_package\n" in theirs
    assert (
        "\nvllm.model_executor.layers.mamba.ops.causal_conv1d (Nemotron-3-Nano, K=0): Module"
        in theirs
    )
    assert file.exists() and "vllm" not in file.read_text()
    document = json.loads(report.read_text())
    assert document["passed"]
    assert not any(one["measurement"]["kernel"].startswith("vllm.") for one in document["kernels"])
    assert "vllm.norm_kernel" in [one["kernel"] for one in document["peers"]]


def test_without_any_it_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "root_of", lambda package: None)
    forget()
    err = refused(capsys, "kernels", "--peers", "--targets", "sm_90")
    assert (
        "neither vllm nor mamba_ssm can be imported; run: pip install --no-deps vllm "
        "mamba-ssm einops"
    ) in err


@pytest.mark.parametrize("package", peers.PACKAGES)
def test_every_kernel_of_an_installed_peer_is_recorded(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    forget()
    cases, absent = peers.find()
    reasons = [line for line in absent if line.startswith(f"{package}.")]
    assert not [
        line for line in reasons if not line.endswith("skipped, it needs the package einops")
    ]
    assert {case.shape.split(",")[0] for case in cases if case.kernel.startswith(package)} == {
        "Nemotron-3-Nano"
    }
    assert not any(case.kernel.startswith("hybrid_kv") for case in cases)
