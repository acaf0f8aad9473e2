"""The test that SGLang's repository can hold."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.check.exports import sglang as sglang_export
from hybrid_kv.check.exports.traffic import PACKAGE
from hybrid_kv.check.probes.known import known_of
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.targets import sglang
from hybrid_kv.check.targets.exact import ExactAnswers, name_of
from hybrid_kv.check.targets.kinds import for_model, model_folder
from tests.check.targets.models import installed
from tests.cli.run import printed, refused

PROVIDED = {"numpy", "sglang", "torch", "transformers", "triton"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    sglang_export.write_test(folder)
    return folder


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Any]:
    return json.loads((folder / PACKAGE / "cases.json").read_text())


def test_it_needs_nothing_that_sglang_does_not_have(folder: Path) -> None:
    needed = set()
    for file in (folder / "test_exact_hybrid_cache.py", *(folder / PACKAGE).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                needed |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                needed.add(str(node.module).partition(".")[0])
    assert needed - {*sys.stdlib_module_names} <= PROVIDED | {"torchvision"}


def test_its_tokens_are_those_of_the_exact_model(cases: dict[str, Any]) -> None:
    assert len(cases["settings"]) == sum(map(len, sglang_export.CELLS.values()))
    for name, model in cases["models"].items():
        with model_folder(f"exact:{name}") as checkpoint:
            answers = ExactAnswers(checkpoint)
            sent = model["traffic"]["alone"][0]
            (request,), (tokens,) = sent["requests"], sent["expected"]
            assert tokens == answers.tokens(request["prompt"], request["max_tokens"])
            assert model["config"]["exact"]["name"] == name_of(checkpoint) == name
    for setting in cases["settings"].values():
        assert {*setting["probes"]} <= {*cases["models"][setting["model"]]["traffic"]}


def test_no_setting_is_one_that_a_release_gets_wrong() -> None:
    for name, texts in sglang_export.CELLS.items():
        with model_folder(f"exact:{name}") as checkpoint:
            kind = for_model(sglang.KIND, checkpoint)
            for text in texts:
                cell = dict(word.split("=") for word in text.split())
                wrong = Outcome("alone", cell, "wrong", "token 0 is 1, not 2")
                assert known_of(kind, sglang.RELEASE, wrong) is None


def test_a_failure_of_one_model_is_not_known_of_others() -> None:
    cell = {"prefix": "on", "spec": "ngram4"}
    names = []
    for name in ("gdn", "short_conv"):
        with model_folder(f"exact:{name}") as checkpoint:
            wrong = Outcome("alone", cell, "wrong", "token 0 is 1, not 2")
            known = known_of(for_model(sglang.KIND, checkpoint), sglang.RELEASE, wrong)
            names.append(known and known.name)
    assert names == [None, "sglang_short_conv_tree"]


def test_a_setting_passes_and_a_wrong_token_fails(folder: Path, cases: dict[str, Any]) -> None:
    python = installed("sglang", "sglang")
    name = "short_conv: prefix=on graph=on"
    cases["settings"][name]["probes"] = ["alone"]
    traffic = cases["models"]["short_conv"]["traffic"]
    run = folder / PACKAGE / "run.py"

    def code() -> int:
        (folder / PACKAGE / "cases.json").write_text(json.dumps(cases))
        environment = {**os.environ, "PYTHONPATH": ""}
        command = [python, str(run), name]
        return subprocess.run(command, env=environment, capture_output=True).returncode

    assert code() == 0
    traffic["alone"][-1]["expected"][0][-1] += 1
    assert code() == 1


def test_the_command_writes_an_empty_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "test_exact_hybrid_cache.py" in printed(capsys, "export", "sglang", tmp_path / "new")
    assert "not an empty folder" in refused(capsys, "export", "sglang", tmp_path / "new")
    assert "mlx: there is no test to export" in refused(capsys, "export", "mlx", tmp_path / "x")
    assert not (tmp_path / "x").exists()
