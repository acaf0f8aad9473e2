"""The test that vLLM's repository can hold."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_kv.check.exports import vllm as vllm_export
from hybrid_kv.check.exports.traffic import PACKAGE, TEST
from hybrid_kv.check.targets.exact import ExactAnswers
from hybrid_kv.check.targets.kinds import model_folder
from hybrid_kv.check.targets.vllm import KIND
from tests.check.targets.models import installed
from tests.cli.run import printed

PROVIDED = {"numpy", "pytest", "torch", "torchvision", "triton", "vllm"}
COLUMNS = 88


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    vllm_export.write_test(folder)
    return folder


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Any]:
    return json.loads((folder / PACKAGE / "cases.json").read_text())


def test_it_needs_nothing_that_vllm_does_not_have(folder: Path) -> None:
    needed, own = set(), {file.stem for file in (folder / PACKAGE).iterdir()}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                needed |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                needed.add(str(node.module).partition(".")[0])
    assert needed - {*sys.stdlib_module_names} <= PROVIDED | own


def test_what_is_written_for_vllm_has_its_header_and_its_columns(folder: Path) -> None:
    for file in (folder / TEST, folder / PACKAGE / "run.py"):
        lines = file.read_text().splitlines()
        assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
        assert max(map(len, lines)) <= COLUMNS
    (step,) = yaml.safe_load((folder / PACKAGE / "step.yaml").read_text())
    assert "vllm/v1/worker/" in step["source_file_dependencies"]
    assert "cpu_test" in (folder / TEST).read_text() and "cpu_test" in step["commands"][0]


def test_its_tokens_are_those_of_the_exact_model(cases: dict[str, Any]) -> None:
    assert len(cases["settings"]) == sum(map(len, vllm_export.CELLS.values()))
    for model in vllm_export.CELLS:
        with model_folder(f"exact:{model}") as checkpoint:
            answers = ExactAnswers(checkpoint)
        settings = [setting for setting in cases["settings"].values() if setting["model"] == model]
        for name in {name for setting in settings for name in setting["probes"].values()}:
            last = cases["traffic"][name][-1]
            request, tokens = last["requests"][0], last["expected"][0]
            assert tokens == answers.tokens(request["prompt"], request["max_tokens"])


def test_prompts_with_drafts_have_more_than_one_token(cases: dict[str, Any]) -> None:
    for setting_name, setting in cases["settings"].items():
        rounds = [sent for name in setting["probes"].values() for sent in cases["traffic"][name]]
        shortest = min(len(request["prompt"]) for sent in rounds for request in sent["requests"])
        assert shortest == (2 if "spec=" in setting_name else 1)


def test_equal_seeds_give_equal_files(folder: Path, tmp_path: Path) -> None:
    vllm_export.write_test(tmp_path)
    written = f"{PACKAGE}/cases.json"
    assert (tmp_path / written).read_bytes() == (folder / written).read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    vllm_export.write_test(other, seed=1)
    assert (other / written).read_bytes() != (folder / written).read_bytes()


def test_a_setting_passes_and_a_wrong_token_fails(folder: Path, cases: dict[str, Any]) -> None:
    python = installed("vllm", "vllm")
    name = "runner=v1 prefix=on"
    title, traffic = next(iter(cases["settings"][name]["probes"].items()))
    cases["settings"][name]["probes"] = {title: traffic}

    def problem() -> str:
        (folder / PACKAGE / "cases.json").write_text(json.dumps(cases))
        ran = subprocess.run(
            [python, str(folder / PACKAGE / "run.py"), name],
            env={**os.environ, "PYTHONPATH": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        (line,) = map(json.loads, ran.stdout.splitlines())
        assert line["setting"] == name
        return line["problem"]

    assert problem() == ""
    cases["traffic"][traffic][-1]["expected"][0][-1] += 1
    assert problem().startswith(f"{title}: request 0 got ")


def test_the_command_says_how_to_run_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"pytest {TEST}" in printed(capsys, "export", "vllm", tmp_path / "new")
    assert (tmp_path / "new" / TEST).is_file()


def test_each_setting_is_one_of_the_exact_model() -> None:
    inside = KIND.inside
    assert inside is not None
    for text in (text for cells in vllm_export.CELLS.values() for text in cells):
        for factor, level in (word.split("=") for word in text.split()):
            assert level in inside.factors[factor]
