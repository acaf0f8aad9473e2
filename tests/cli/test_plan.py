"""`hybrid-kv plan`: JSON on stdout, a table for readers, and what it refuses in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_kv
from hybrid_kv.cache.plan import describe
from hybrid_kv.cache.ranks import Ranks
from hybrid_kv.cache.spec import FullAttentionSpec
from hybrid_kv.cli.plan import parse_memory, planned
from hybrid_kv.config import ConfigError, DraftMethod
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models import registry
from hybrid_kv.models.random_checkpoint import write_drafter
from tests.cli.run import printed, refused, run
from tests.model_configs import CONFIGS, NEMOTRON_3_NANO

GUARD_MODEL = Path(hybrid_kv.__path__[0], "check", "guard_model")


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
    assert (plan["model_type"], plan["backend"]) == ("nemotron_h", "FLASH_ATTN")
    assert plan["cached_layers"] == {"mamba2": 23, "attention": 6}
    assert (plan["block_size"], plan["mamba_block_size"], plan["max_model_len"]) == (
        2112,
        131072,
        131072,
    )
    assert plan["num_blocks"] == 40 * 2**30 // (6 * 2112 * 1024)
    assert plan["total_bytes"] == plan["num_blocks"] * 6 * 2112 * 1024
    assert [group["kernel_block_size"] for group in plan["groups"]][-1] == 64
    assert plan["blocks_per_request"] == 4 + 63
    assert sum(len(group["layers"]) for group in plan["groups"]) == 29


def test_flags_of_vllm_reach_the_plan_and_those_of_the_command_go_before_them(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    flags = "--max-model-len 6000 -tp 2 --spec-method dflash --spec-tokens 5 --tool-call-parser x"
    plan = plan_json(capsys, config, "--vllm-flags", flags, "--num-speculative-tokens", "3")
    assert (plan["mamba_cache_mode"], plan["max_model_len"]) == ("align", 6000)
    assert (plan["tensor_parallel_size"], plan["num_speculative_tokens"]) == (2, 3)
    assert plan["notes"][-2:] == [
        "--tool-call-parser is left out: it says nothing about the cache",
        "the layers of the drafter are not in the plan, its drafts are",
    ]


def test_a_match_unit_must_divide_the_blocks(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    flags = config, "--mamba-cache-mode", "align", "--max-model-len", "60"
    notes = plan_json(capsys, *flags)["notes"]
    assert "hits are multiples of 2096 tokens" in notes[-1]
    assert plan_json(capsys, *flags, "--prefix-match-unit", "16")["notes"] == notes[:-1]
    error = refused(capsys, "plan", *flags, "--prefix-match-unit", "100")
    assert "prefix_match_unit=100 does not divide the block sizes [2096]" in error


def test_flags_reach_the_plan(capsys: pytest.CaptureFixture[str], config: str) -> None:
    flags = ["--num-blocks", "500", "--num-speculative-tokens", "3", "--mamba-cache-mode", "all"]
    flags += [
        "--mamba-block-size",
        "1000",
        "--kv-cache-dtype",
        "fp8",
        "--mamba-ssm-cache-dtype",
        "bfloat16",
    ]
    plan = plan_json(
        capsys,
        config,
        *flags,
        "--max-model-len",
        "6000",
        "--max-num-seqs",
        "90",
        "--block-size",
        "32",
    )
    assert plan["mamba_state_bytes"] == 6 * 6144 * 2 + 64 * 64 * 128 * 2
    assert plan["page_size_bytes"] == 4000 * 512
    assert plan["mamba_block_size"] == plan["block_size"] == 4000
    notes = "\n".join(plan["notes"])
    assert "--mamba-block-size 1000 was raised to its multiple 4000" in notes
    assert "--block-size 32 was raised to 4000" in notes
    assert "requests of 6000 tokens fit at once, not 90" in notes


@pytest.mark.parametrize(
    ("flags", "state_bytes"),
    [
        ([], 64 * 64 * 128 * 4),
        (["--mamba-ssm-cache-dtype", "float16"], 64 * 64 * 128 * 2),
        (
            [
                *("--mamba-ssm-cache-dtype", "float16", "--enable-mamba-cache-stochastic-rounding"),
                *("--mamba-cache-philox-rounds", "5"),
            ],
            64 * 64 * 128 * 2,
        ),
        (["--mamba-ssm-cache-dtype", "int8"], 64 * 64 * (128 + 4)),
        (["--mamba-ssm-cache-dtype", "fp8"], 64 * 64 * (128 + 4)),
    ],
)
def test_a_state_of_8_bits_has_a_scale_for_each_row(
    capsys: pytest.CaptureFixture[str], config: str, flags: list[str], state_bytes: int
) -> None:
    """Those of Nemotron-3-Nano are 128 elements long."""
    flags += ["--num-blocks", "500", "--mamba-cache-mode", "align", "--max-model-len", "9000"]
    plan = plan_json(capsys, config, *flags)
    assert plan["mamba_state_bytes"] == 3 * 6144 * 2 + state_bytes
    assert plan["page_size_bytes"] == plan["block_size"] * 1024 >= plan["mamba_state_bytes"]
    assert plan["block_size"] - 16 < plan["mamba_state_bytes"] / 1024


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
    assert (
        "--mamba-cache-mode align caches prefixes too and pads by "
        f"{aligned['mamba_padding_percent']:.0f} %"
    ) in note
    assert "vLLM 0.22 falls back to mode align" in note
    assert not any("pads each" in note for note in aligned["notes"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu-memory", "1MiB"], "the cache has 0 blocks"),
        (["--num-blocks", "2"], "at least 6 blocks"),
        (["--requests", "lognormal:prompt=20/200,output=1/1"], "add --gpu-memory or --num-blocks"),
        (["--num-blocks", "9", "--max-model-len", "0"], "--max-model-len"),
        (
            ["--num-blocks", "9", "--attention-backend", "MAGIC"],
            "attention backend 'MAGIC' is unknown",
        ),
        (
            ["--num-blocks", "500", "--tensor-parallel-size", "3"],
            "can't be divided over --tensor-parallel-size 3",
        ),
        (
            ["--num-blocks", "500", "--requests", "lengths.txt"],
            "neither a .csv or .jsonl file nor lognormal",
        ),
    ],
)
def test_impossible_plans_are_one_line_on_stderr_and_exit_2(
    capsys: pytest.CaptureFixture[str], config: str, flags: list[str], message: str
) -> None:
    assert message in refused(capsys, "plan", config, *flags)


def test_without_a_pool_there_are_sizes_and_no_capacity(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    flags = [config, "--mamba-cache-mode", "align", "--pipeline-parallel-size", "2"]
    plan, full = plan_json(capsys, *flags), plan_json(capsys, *flags, "--num-blocks", "5000")
    unknown = {
        "num_blocks",
        "total_bytes",
        "longest_request",
        "max_concurrency",
        "token_capacity",
        "stages",
    }
    assert {key for key in full if plan[key] != full[key]} == unknown
    assert all(plan[key] is None for key in unknown - {"stages"})
    assert [stage["total_bytes"] for stage in plan["stages"]] == [None, None]
    out = printed(capsys, "plan", *flags)
    assert (
        f"{plan['blocks_per_request']:,} blocks, {plan['bytes_per_request']:,} B" in out
        and "capacity" not in out
    )


def test_a_model_of_the_hub_is_planned_from_its_config_alone(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def download(name: str, filename: str, local_files_only: bool) -> str:
        fetched.append((name, filename))
        if name == "nvidia/gone":
            raise OSError("404: no such repository\nmore")
        return f"{config}/config.json"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    assert plan_json(capsys, "nvidia/nano", "--num-blocks", "500")["model_type"] == "nemotron_h"
    code, out, err = run(capsys, "plan", "nvidia/gone")
    assert (code, out) == (2, "")
    assert (
        err == "error: model nvidia/gone: not a folder, and the hub says: 404: no such repository\n"
    )
    assert fetched == [(name, "config.json") for name in ("nvidia/nano", "nvidia/gone")]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "plan owner/name",
            "model owner/name: not a folder, the hub does not answer within 5 s, and no "
            "earlier download has it; give "
            "a folder, or try again with a network",
        ),
        (
            "accuracy --task gsm8k --limit 2",
            "openai/gsm8k cannot be loaded, the hub does not answer within 5 s; give "
            "--gsm8k-dir, or set "
            "HF_HUB_OFFLINE=1 to use an earlier download",
        ),
    ],
)
def test_without_a_network_the_hub_is_tried_once(tmp_path: Path, words: str, error: str) -> None:
    """By the hub's own client, in a process of its own: it reads its address once."""
    where = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "hybrid_kv.cli", *words.split()]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **where}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {error}\n")


def test_a_file_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refused(capsys, "plan", tmp_path / "missing.json", "--num-blocks", "9")
    assert "does not exist; give a config.json, the folder that holds it, or owner/name" in said


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("512MiB", 2**29),
        ("1.5 kib", 1536),
        ("4096", 4096),
        ("7B", 7),
    ],
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
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    widths = {
        kind: FullAttentionSpec(1, heads, 8, torch.float32)
        for kind, heads in (("two", 2), ("three", 3))
    }
    caches = {kind: {"": lambda config, options, spec=spec: spec} for kind, spec in widths.items()}
    registry.register(registry.Family(lambda config: config.get("order"), caches), "uneven")
    sizes = {"hidden_size": 8, "vocab_size": 9, "dtype": "float32", "max_position_embeddings": 100}
    config = {"model_type": "uneven", "order": ["three", "two", "three"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_json(capsys, str(tmp_path), "--num-blocks", "10")
    (group,) = plan["groups"]
    assert group["page_sizes_bytes"] == [16 * 2 * 4 * 8 * heads for heads in (3, 2, 3)]
    assert plan["total_bytes"] == 10 * 16 * 2 * 4 * 8 * (3 + 2 + 3)
    out = printed(capsys, "plan", str(tmp_path), "--num-blocks", "10")
    assert "2,048 to 3,072 B, each layer its own" in out


def test_ranks_divide_what_one_gpu_keeps(capsys: pytest.CaptureFixture[str], config: str) -> None:
    """The numbers are those of tests/cache/test_ranks.py."""
    ranks = [
        "--tensor-parallel-size",
        "8",
        "--decode-context-parallel-size",
        "4",
        "--pipeline-parallel-size",
        "3",
    ]
    flags = [config, "--gpu-memory", "1GB", "--mamba-cache-mode", "align", *ranks]
    plan = plan_json(capsys, *flags)
    assert [plan[f"{name}_parallel_size"] for name in ("tensor", "pipeline", "decode_context")] == [
        8,
        3,
        4,
    ]
    assert (plan["block_size"], plan["blocks_per_request"]) == (528, 63 + 8)
    assert [stage["block_bytes"] for stage in plan["stages"]] == [
        pages * 270_336 for pages in (2, 3, 2)
    ]
    assert plan["num_blocks"] == 10**9 // (3 * 270_336)
    assert (
        plan["total_bytes"] == plan["stages"][1]["total_bytes"] == plan["num_blocks"] * 3 * 270_336
    )
    assert sorted(name for stage in plan["stages"] for name in stage["layers"]) == sorted(
        name for group in plan["groups"] for name in group["layers"]
    )
    out = printed(capsys, "plan", *flags)
    assert "24: 8 tensor × 3 pipeline, context 4" in out
    assert "528 tokens on each of 4 GPUs" in out
    assert " 1      10                   811,008" in out


@pytest.mark.parametrize("method", [None, "mtp", "dflash"])
def test_layers_and_groups_are_those_of_the_engine(
    tmp_path: Path, method: DraftMethod | None
) -> None:
    write_drafter(tmp_path, GUARD_MODEL)
    llm = LLM(
        GUARD_MODEL,
        device="cpu",
        num_blocks=64,
        max_model_len=512,
        num_speculative_tokens=2,
        speculative_method=method,
        speculative_model=str(tmp_path) if method == "dflash" else None,
    )
    shape, plan = planned(str(GUARD_MODEL), replace(llm.config, platform="cpu"), 512)
    assert describe(plan) == describe(llm.plan)
    heads = {name.split(".")[0] for group in plan.config.groups for name in group.layer_names}
    assert heads == {"layers", *filter(None, [method])}
    assert len(shape.stages(Ranks())[-1]) == len(shape.layers)


def test_a_head_that_is_not_there_is_not_planned(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    flags = ["--speculative-method", "mtp", "--num-speculative-tokens", "3"]
    assert "the file names no draft head" in refused(capsys, "plan", config, *flags)
    Path(config, "config.json").write_text(json.dumps(CONFIGS["ibm-ai-platform/Bamba-9B"]))
    assert "bamba checkpoints have no draft head" in refused(capsys, "plan", config, *flags)


@pytest.mark.parametrize("limit", ["2097", "2098"])
def test_a_block_that_is_longer_than_any_prompt_is_noted(
    capsys: pytest.CaptureFixture[str], config: str, limit: str
) -> None:
    """A prompt leaves room for a token of output, and its last one is computed."""
    flags = [config, "--mamba-cache-mode", "align", "--max-model-len"]
    plan = plan_json(capsys, *flags, limit)
    assert plan["block_size"] == 2096
    notes = [note for note in plan["notes"] if note.startswith("no prompt can hit")]
    assert bool(notes) == (limit == "2097")
    assert all("raise --max-model-len 2097 to at least 2098" in note for note in notes)


def test_requests_at_once_are_also_counted_as_vllm_does(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    """One request of 131,072 tokens has 63 blocks and four states."""
    out = printed(capsys, "plan", config, "--num-blocks", "670")
    assert "9.99 of 67 blocks each (vLLM: 10.00, with the null block)" in out


@pytest.mark.parametrize(("context", "copies"), [("1", 4), ("2", 2), ("4", None)])
def test_copies_of_kv_heads_are_noted(
    capsys: pytest.CaptureFixture[str], config: str, context: str, copies: int | None
) -> None:
    flags = [
        "--num-blocks",
        "5000",
        "--tensor-parallel-size",
        "8",
        "--decode-context-parallel-size",
        context,
    ]
    notes = "\n".join(plan_json(capsys, config, *flags)["notes"])
    if copies is None:
        assert "are kept" not in notes
    else:
        assert f"are kept {copies} times" in notes
        assert "--decode-context-parallel-size 4 divides the tokens instead" in notes


def test_requests_of_given_lengths_are_counted(
    capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path
) -> None:
    """Blocks of 2,096 tokens; five groups, four of them states in mode align.

    3,000 + 1,193 - 1 = 4,192 tokens are 2 blocks of attention, and with two states in each group 10
    at most: 100 usable blocks hold ten such requests. The last chunk holds 2 + 4 * 2; each of 1,192
    decodes 2 + 4, but the one behind 4,192 tokens, which would cross, does not come.
    """
    (tmp_path / "some.csv").write_text("prompt_tokens,output_tokens\n3000,1193\n200000,1\n")
    flags = [
        config,
        "--num-blocks",
        "101",
        "--mamba-cache-mode",
        "align",
        "--requests",
        str(tmp_path / "some.csv"),
    ]
    plan = plan_json(capsys, *flags)
    running = (10 + 1192 * 6) / 1193
    assert plan["requests"] == {
        "num_given": 2,
        "num_refused": 1,
        "num_fit": 10,
        "most_blocks": 10.0,
        "num_fit_running": round(100 / running, 2),
        "running_blocks": round(running, 2),
    }
    assert any(note.startswith("1 of 2 requests are left out") for note in plan["notes"])
    out = printed(capsys, "plan", *flags)
    assert "10 of 10.0 blocks at most, or 16.66 of 6.0 on average" in out
