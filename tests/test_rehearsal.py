"""The rehearsal of the nightly workflow: a fault ends as promised; unknown ones are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
NIGHTLY = (ROOT / ".github/workflows/nightly-gpu.yml").read_text()
pytestmark = [
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a git checkout"),
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="the pretend device needs a build for the CPU"
    ),
]


def rehearse(out: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / ".ci/rehearse", "--out", out, *arguments]
    return subprocess.run(
        command, cwd=out.parent, env={**os.environ, "N": "7"}, capture_output=True, text=True
    )


def test_a_promise_that_is_not_kept_is_named(tmp_path: Path) -> None:
    """An alarm ignores the job with the GPU; `make rehearse` has each fault end as promised."""
    workflow = tmp_path / "night.yml"
    workflow.write_text(NIGHTLY.replace("needs.gpu.result != 'success' || ", ""))
    done = rehearse(tmp_path / "out", "--fault", "step", "--workflow", workflow)
    assert done.returncode == 1 and "the alarm lacks 'failed: gpu-guard --'" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("actions/deploy-pages@", "actions/cache@", "action actions/cache"),
        ("github.run_id", "github.run_number", "expression github.run_number"),
        ("!cancelled() && needs.rows", "failure() && needs.rows", "expression failure"),
        ("merge-multiple: true", "github-token: x", "key 'with github-token'"),
        ("timeout-minutes: 45", "shell: sh", "key 'shell'"),
    ],
)
def test_what_is_unknown_is_refused_before_anything_runs(
    old: str, new: str, name: str, tmp_path: Path
) -> None:
    workflow = tmp_path / "night.yml"
    workflow.write_text(re.sub(re.escape(old), new, NIGHTLY, count=1))
    done = rehearse(tmp_path / "out", "--workflow", workflow)
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "out").exists()
    assert done.stderr == f"error: night.yml has an unknown {name}\n"


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of .ci/rehearse can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("inputs.base || vars.MODELS", "a b"),
        ("steps.gpu-test.outcome", "failure"),
        ("steps.gpu-test.outputs.base", ""),
        ("toJSON(needs.gpu.outputs)", '{"gpu-test": "failure"}'),
        ("!cancelled() && needs.gpu.result == 'success'", "False"),
        (
            "!cancelled() && (needs.gpu.result != 'success' || needs.rows.result == 'failure')",
            "True",
        ),
    ],
)
@pytest.mark.usefixtures("rehearsal")
def test_an_expression_has_githubs_value(expression: str, value: str) -> None:
    from rehearsal.expressions import Names, filled

    known = {
        "inputs": {"base": ""},
        "vars": {"MODELS": "a b"},
        "steps": Names({"gpu-test": Names(outcome="failure")}),
        "needs": Names(gpu=Names(result="failure", outputs=Names({"gpu-test": "failure"}))),
    }
    assert filled({"x": f"${{{{ {expression} }}}}"}, known) == {"x": value}


@pytest.mark.usefixtures("rehearsal")
def test_what_is_cut_is_named_and_is_in_the_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    from rehearsal.tools import SMALLER, UNREHEARSED

    assert {smaller.unrehearsed for smaller in SMALLER} <= set(UNREHEARSED)
    scripts = [ROOT / "Makefile", *(path for path in (ROOT / ".ci").iterdir() if path.is_file())]
    text = "".join(path.read_text() for path in scripts)
    for smaller in SMALLER:
        last = smaller.command.split()[-1]
        assert last in text and all(word.rpartition("=")[2] in text for word in smaller.swap)
