"""`hybrid-kv families` and `hybrid-kv checkpoint`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.run import printed, run


def test_a_checkpoint_is_written_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "made"
    code, out, err = run(capsys, "checkpoint", "nemotron_h", str(folder), "--seed", "4")
    assert (
        (code, err) == (0, "")
        and out.startswith(f"{folder}: nemotron_h, tiny, ")
        and out.endswith("seed 4\n")
    )
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    code, out, err = run(capsys, "checkpoint", "nemotron_h", str(folder))
    assert (code, out, err) == (
        2,
        "",
        f"error: {folder} is there and not an empty folder; give another one\n",
    )


def test_families_that_run_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    families = json.loads(printed(capsys, "families", "--json"))
    runs = [family["runs"] for family in families]
    assert runs == sorted(runs, reverse=True) and {*runs} == {True, False}
    _, _, *lines = printed(capsys, "families").splitlines()
    rows = [line.split() for line in lines if line.strip() and "\u2500" not in line]
    assert [(row[0], row[1:3] == ["planned", "only"]) for row in rows] == [
        (family["model_type"], not family["runs"]) for family in families
    ]


def test_a_seed_of_more_than_64_bits_is_rejected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(capsys, "checkpoint", "bamba", str(tmp_path / "new"), "--seed", str(2**64))
    assert (
        code == 2
        and "less than or equal to 9223372036854775807" in err
        and not (tmp_path / "new").exists()
    )


def test_an_exact_checkpoint_is_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "exact"
    code, out, err = run(capsys, "checkpoint", "lfm2", str(folder), "--exact")
    tensors = load_file(folder / "model.safetensors").values()
    num_weights = sum(tensor.numel() for tensor in tensors)
    assert code == 0 and f"lfm2, exact, {num_weights:,} weights in float32" in out, err
    code, out, err = run(capsys, "checkpoint", "lfm2", "--verify", str(folder))
    assert code == 2 and "writes no checkpoint; leave lfm2 out" in err
    code, out, err = run(capsys, "checkpoint", "lfm2")
    assert code == 2 and "name a family and a folder" in err


def test_a_checkpoint_of_random_weights_is_not_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "checkpoint", "lfm2", str(tmp_path / "random"))
    code, out, _ = run(capsys, "checkpoint", "--verify", str(tmp_path / "random"))
    assert (
        code == 1
        and "float32, whole: 218 tokens not exact: model.layers.0.operator_norm, after" in out
    )
