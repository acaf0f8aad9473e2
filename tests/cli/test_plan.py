"""`hybrid-kv plan`: JSON on stdout, a table for readers, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.cache.spec import FullAttentionSpec
from hybrid_kv.cli.plan import parse_memory
from hybrid_kv.config import ConfigError
from hybrid_kv.models import registry
from tests.cli.run import run
from tests.model_configs import CONFIGS, NEMOTRON_3_NANO


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[NEMOTRON_3_NANO]))
    return str(tmp_path)


def plan_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = run(capsys, "plan", *args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)  # type: ignore[no-any-return]


def test_json_holds_the_whole_plan(capsys: pytest.CaptureFixture[str], config: str) -> None:
    plan = plan_json(capsys, config, "--gpu-memory", "40GiB", "--platform", "xpu")
    assert (plan["model_type"], plan["backend"], plan["cached_layers"]) == (
        "nemotron_h",
        "FLASH_ATTN",
        {"mamba2": 23, "attention": 6},
    )
    assert (plan["block_size"], plan["mamba_block_size"], plan["max_model_len"]) == (2112, 131072, 131072)
    assert plan["num_blocks"] == 40 * 2**30 // (6 * 2112 * 1024)
    assert plan["total_bytes"] == plan["num_blocks"] * 6 * 2112 * 1024
    assert [group["kernel_block_size"] for group in plan["groups"]][-1] == 64
    assert plan["blocks_per_request"] == 4 + 63
    assert sum(len(group["layers"]) for group in plan["groups"]) == 29


def test_flags_reach_the_plan(capsys: pytest.CaptureFixture[str], config: str) -> None:
    flags = ["--num-blocks", "500", "--num-speculative-tokens", "3", "--mamba-cache-mode", "all"]
    flags += ["--mamba-block-size", "1000", "--cache-dtype", "fp8", "--mamba-ssm-cache-dtype", "bfloat16"]
    plan = plan_json(capsys, config, *flags, "--max-model-len", "6000", "--max-num-seqs", "90", "--block-size", "32")
    assert plan["mamba_state_bytes"] == 6 * 6144 * 2 + 64 * 64 * 128 * 2
    assert plan["page_size_bytes"] == 4000 * 512
    assert plan["mamba_block_size"] == plan["block_size"] == 4000
    notes = "\n".join(plan["notes"])
    assert "--mamba-block-size 1000 was raised to its multiple 4000" in notes
    assert "--block-size 32 was raised to 4000" in notes
    assert "requests of 6000 tokens fit at once, not 90" in notes


def test_text_shows_sizes_groups_and_notes(capsys: pytest.CaptureFixture[str], config: str) -> None:
    code, out, err = run(capsys, "plan", config, "--gpu-memory", "40GiB")
    assert (code, err) == (0, "")
    for part in ("2,096 tokens", "padded by 0.58 %", "3,335", "40.00 GiB", "note: 1 of 30 layer slots"):
        assert part in out


def test_a_mode_that_vllm_lacks_for_gated_delta_nets_is_noted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "qwen.json"
    path.write_text(json.dumps(CONFIGS["Qwen/Qwen3-Next-80B-A3B"]))
    plan = plan_json(capsys, str(path), "--num-blocks", "500", "--mamba-cache-mode", "all")
    (note,) = (note for note in plan["notes"] if "pads each Mamba state" in note)
    assert f"by {plan['mamba_padding_percent']:.0f} %" in note
    assert plan["mamba_padding_percent"] > 280
    aligned = plan_json(capsys, str(path), "--num-blocks", "500", "--mamba-cache-mode", "align")
    assert f"--mamba-cache-mode align caches prefixes too and pads by {aligned['mamba_padding_percent']:.0f} %" in note
    assert "vLLM 0.22 falls back to mode align" in note
    assert not any("pads each" in note for note in aligned["notes"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu-memory", "1MiB"], "the cache has 0 blocks"),
        (["--num-blocks", "2"], "at least 6 blocks"),
        ([], "--num-blocks or --gpu-memory"),
        (["--gpu-memory", "lots"], "'lots' is not a memory size; write 80GiB"),
        (["--num-blocks", "9", "--block-size", "24"], "block size 24 does not fit FLASH_ATTN"),
        (["--num-blocks", "9", "--block-size", "0"], "block_size=0 must be an integer >= 1"),
        (["--num-blocks", "9", "--max-model-len", "0"], "max_model_len=0"),
        (["--num-blocks", "9", "--backend", "MAGIC"], "attention backend 'MAGIC' is unknown"),
        (["--num-blocks", "9", "--cache-dtype", "int3"], "cache_dtype='int3' is not a dtype"),
        (["--num-blocks", "9", "--num-speculative-tokens", "-1"], "num_speculative_tokens=-1"),
        (["--num-blocks", "9", "--mamba-cache-mode", "align", "--mamba-block-size", "5"], "cannot be kept"),
    ],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_impossible_plans_are_one_line_on_stderr_and_exit_2(
    capsys: pytest.CaptureFixture[str], config: str, flags: list[str], message: str, as_json: list[str]
) -> None:
    code, out, err = run(capsys, "plan", config, *flags, *as_json)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.json", None, "does not exist"),
        ("broken.json", "{", "is not JSON"),
        ("other.json", '{"model_type": "rwkv"}', "supported are bamba, "),
    ],
)
def test_unusable_files_are_one_line_on_stderr_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    code, out, err = run(capsys, "plan", str(tmp_path / name), "--num-blocks", "9")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("512MiB", 2**29), ("1.5 kib", 1536), ("4096", 4096), ("7B", 7)],
)
def test_memory_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 gigs", "1e9", "80GiB80"])
def test_memory_sizes_that_mean_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a memory size"):
        parse_memory(text)


def test_layers_with_pages_of_their_own_are_listed_one_by_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    widths = {kind: FullAttentionSpec(1, heads, 8, torch.float32) for kind, heads in (("two", 2), ("three", 3))}
    caches = {kind: {"": lambda config, options, spec=spec: spec} for kind, spec in widths.items()}
    registry.register(registry.Family(lambda config: config.get("order"), caches), "uneven")
    sizes = {"hidden_size": 8, "vocab_size": 9, "dtype": "float32", "max_position_embeddings": 100}
    config = {"model_type": "uneven", "order": ["three", "two", "three"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_json(capsys, str(tmp_path), "--num-blocks", "10")
    (group,) = plan["groups"]
    assert group["page_sizes_bytes"] == [16 * 2 * 4 * 8 * heads for heads in (3, 2, 3)]
    assert plan["total_bytes"] == 10 * 16 * 2 * 4 * 8 * (3 + 2 + 3)
    code, out, err = run(capsys, "plan", str(tmp_path), "--num-blocks", "10")
    assert (code, err) == (0, "")
    assert "2,048 to 3,072 B, each layer its own" in out
