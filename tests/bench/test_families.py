"""The engine next to vLLM (a stub) and transformers: the worker's protocol, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from bench import families
from bench.harness.cells import WrongResultError
from bench.peers import vllm_process
from bench.peers.vllm_process import VLLMProcess
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.errors import VoidError
from hybrid_kv.measure.results import read_rows
from hybrid_kv.measure.timing.case import ENGINE
from hybrid_kv.models.random_checkpoint import write_checkpoint

# Its tokens are 1, 2, 3 …, each second token of a call costs a second.
STUB = """
import json, sys
print('{"version": "9.9"}', flush=True)
for line in sys.stdin:
    task = json.loads(line)
    tokens = [list(range(1, task["max_tokens"] + 1)) for _ in task["prompts"]]
    print(json.dumps({"tokens": tokens, "seconds": task["max_tokens"] - 0.5}), flush=True)
"""
VLLM = """
import importlib.util
import json
import sys
assert importlib.util.find_spec("kernels") is None
__version__ = "9.9"
class LLM:
    def __init__(self, folder, **options):
        cached = options["enable_prefix_caching"]
        print("chatter", options["dtype"], options["enforce_eager"], cached)
        if "broken" in folder:
            raise ValueError("first\\n\\n  second\\nthird")
    def generate(self, prompts, params, use_tqdm):
        tokens = [prompt["prompt_token_ids"][-1:] * params["max_tokens"] for prompt in prompts]
        return [type("", (), {"outputs": [type("", (), {"token_ids": row})]}) for row in tokens]
class ModelRegistry:
    models = {}
SamplingParams = dict
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker that speaks the protocol, run by this Python."""
    worker = tmp_path / "stub.py"
    worker.write_text(STUB)
    monkeypatch.setattr(vllm_process, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(vllm_process, "WORKER", worker)
    return worker


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["Stub"]}')
    return tmp_path


def test_a_worker_that_ends_says_its_last_line(stub: Path) -> None:
    stub.write_text("import sys\nsys.exit('no memory\\n')")
    with pytest.raises(HybridKVError, match="its process ended with code 1: no memory"):
        VLLMProcess("folder", 8, 512)
    stub.write_text('print(\'{"version": "9.9"}\', flush=True)\ninput()\nraise SystemExit("gone")')
    with (
        VLLMProcess("folder", 8, 512) as process,
        pytest.raises(HybridKVError, match="code 1: gone"),
    ):
        process.generate([[5]], 1)


def test_the_real_worker_keeps_chatter_from_its_answers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(checkpoint))
    monkeypatch.setattr(vllm_process, "PYTHON", Path(sys.executable))
    with VLLMProcess(checkpoint, 8, 512, "bfloat16") as process:
        tokens, seconds = process.generate([[5, 6], [7]], 3)
        assert tokens == [[6, 6, 6], [7, 7, 7]] and seconds >= 0
        process.output.seek(0)
        assert "chatter bfloat16 True False" in process.output.read()
    broken = checkpoint / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["Stub"]}')
    with pytest.raises(HybridKVError, match=r"^ValueError: first second$"):
        VLLMProcess(broken, 8, 512)


def test_without_the_environment_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "PYTHON", tmp_path / ".venv-vllm" / "bin" / "python")
    with pytest.raises(ConfigError, match="run `make peers`"):
        VLLMProcess("folder", 8, 512)
    with pytest.raises(
        ConfigError, match=r"^no \.venv-vllm: run `make peers`, or .* --rival transformers alone$"
    ):
        families.main([])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "PROMPT", 20)
    monkeypatch.setattr(families, "NEW_TOKENS", 4)
    monkeypatch.setattr(families, "BATCHES", (1, 2))


@pytest.mark.usefixtures("short", "stub")
def test_a_rival_with_other_tokens_has_no_time_and_its_difference_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.csv"
    assert families.main(["--family", "guard", "--rounds", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "guard, 1, vllm 9.9: 1 differ, token 0 is 1, transformers has" in printed
    assert printed.count(": more than rounding") == 2
    assert "guard            vllm 9.9            0/1 0/2\n" in printed
    rows = read_rows(out)
    timed = rows[rows["metric"] == "ratio_to_engine"]
    assert len(timed) == 4 and timed["params"].str.contains("transformers").all()
    equal = rows[rows["metric"] == "equal_requests"]
    assert sorted(equal["value"]) == [0, 0, 1, 1, 1, 1]
    assert [*rows[rows["metric"] == "rounded_of_unequal"]["value"]] == [0, 0]


@pytest.mark.usefixtures("short")
def test_a_checkpoint_that_vllm_refuses_has_its_reason(
    stub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.write_text('print(\'{"error": "ValueError: no head of 16"}\', flush=True)')
    out = tmp_path / "rows.csv"
    with pytest.raises(VoidError, match=r"^a rival did not run where it should: guard$"):
        families.main(["--family", "guard", "--rival", "vllm", "--rounds", "1", "--out", str(out)])
    assert (
        "guard            vllm                ValueError: no head of 16\n"
        in capsys.readouterr().out
    )
    (reason,) = read_rows(out).query("metric == 'runs'")["params"]
    assert "no head of 16" in reason


@pytest.mark.parametrize(("family", "chosen"), [("qwen3_next", True), ("lfm2", False)])
def test_every_token_can_be_sent_to_all_experts(tmp_path: Path, family: str, chosen: bool) -> None:
    write_checkpoint(family, tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    families.send_to_all_experts(tmp_path)
    after = json.loads((tmp_path / "config.json").read_text())
    assert (after != before) is chosen
    assert after.get("num_experts_per_tok") == after.get("num_experts")


def fixed(tokens: list[list[int]], prefill: float, each: float) -> families.Side:
    return lambda prompts, n: ([row[:n] for row in tokens], prefill + each * (n - 1))


def test_decode_is_all_less_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "NEW_TOKENS", 3)
    tokens = [[1, 2, 3]]
    sides = {ENGINE: fixed(tokens, 1.0, 2.0), "slow": fixed(tokens, 4.0, 3.0)}
    found = families.measure("guard", sides, [[9]], tokens, 3)
    times = {(one.cell.benchmark, one.cell.params["subject"]): one for one in found}
    assert times["decode", ENGINE].time.value == 4.0
    ratios = [times[phase, "slow"].ratio for phase in ("prefill", "decode")]
    assert [one.value for one in ratios if one] == [4.0, 1.5]


@pytest.mark.parametrize("wrong", [[[7, 2]], [[1, 7]]])
def test_a_token_that_changes_while_it_is_timed_is_no_time(
    monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setattr(families, "NEW_TOKENS", 2)
    with pytest.raises(WrongResultError, match="tokens of engine"):
        families.measure("guard", {ENGINE: fixed(wrong, 1.0, 1.0)}, [[9]], [[1, 2]], 1)


@pytest.mark.parametrize(("margin", "is_rounding"), [(0.019, True), (-0.019, True), (0.021, False)])
def test_a_difference_is_rounding_up_to_twice_what_the_dtype_costs(
    margin: float, is_rounding: bool
) -> None:
    one = families.Difference(0, 1, 2, margin, 0.01)
    assert one.is_rounding is is_rounding and str(one).endswith(": rounding") is is_rounding


@pytest.mark.parametrize(("equal", "rounded", "code"), [(8, 0, 0), (7, 0, 1), (6, 2, 0), (6, 1, 1)])
def test_other_tokens_of_the_engine_are_a_failure_unless_they_are_rounding(
    equal: int,
    rounded: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = families.Family(
        "guard", equal={(1, ENGINE): 1, (8, ENGINE): equal}, rounded={(8, ENGINE): rounded}
    )
    monkeypatch.setattr(families, "compare", lambda *_: found)
    assert families.main(["--family", "guard", "--rival", "transformers"]) == code
    assert f"1/1 {equal}/8" in capsys.readouterr().out
