"""The workflows: what they may do, and that a developer can run what they run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_kv import LLM
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.measure.results import read_rows
from tests.bench.harness.toy import git
from tests.check.serve.conftest import OPTIONS, served
from tests.support.options import check_options

Script = Callable[..., str]

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
BIN = Path(sys.executable).parent
JOBS = [
    pytest.param(path.name, name, job, id=f"{path.stem}-{name}")
    for path in WORKFLOWS
    for name, job in yaml.safe_load(path.read_text())["jobs"].items()
]
# Which job may write, and what.
WRITES = {
    ("bench-comment.yml", "comment"): {"pull-requests"},
    ("bench-pr.yml", "comment"): {"pull-requests"},
    ("nightly-gpu.yml", "push"): {"contents"},
    ("nightly-gpu.yml", "pages"): {"pages", "id-token"},
    ("nightly-gpu.yml", "alarm"): {"issues"},
    ("release.yml", "publish"): {"id-token"},
    ("release.yml", "announce"): {"contents"},
}
# Which job has a token that may only read, to query GitHub.
READS = {("bench-comment.yml", "allow")}
# They take minutes, or are this suite.


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_runs_once(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert set(workflow["concurrency"]) == {"group", "cancel-in-progress"}
    assert "pull_request_target" not in path.read_text() and "workflow_run" not in path.read_text()


@pytest.mark.parametrize(("file", "name", "job"), JOBS)
def test_a_job_has_a_limit_pinned_actions_and_the_least_rights(
    file: str, name: str, job: dict[str, Any]
) -> None:
    assert job["timeout-minutes"] <= 300
    writes = {scope for scope, right in job.get("permissions", {}).items() if right == "write"}
    assert writes == WRITES.get((file, name), set())
    for step in job["steps"]:
        if "uses" in step:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize(("file", "name", "job"), JOBS)
def test_every_command_is_a_make_target(file: str, name: str, job: dict[str, Any]) -> None:
    """No command has an expression: outside values reach the shell through the environment."""
    for step in job["steps"]:
        if "run" in step:
            assert re.fullmatch(r"make [\w-]+( [A-Z]+=[\w./-]+)*", step["run"])
            command = [
                "make",
                "-n",
                "-o",
                ".venv/.installed",
                f"BIN={BIN}",
                *step["run"].split()[1:],
            ]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def recipe(arguments: Sequence[str]) -> str:
    """Return what a make target runs when nothing is installed yet, its scripts included."""
    command = ["make", "-n", "--always-make", *arguments]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return text + "".join(
        (ROOT / name).read_text() for name in re.findall(r"bash (\.ci/[\w-]+)", text)
    )


INSTALLS = re.compile(r"\.ci/install|\bpip\b|\bnpx\b|\buv\b")


@pytest.mark.parametrize(("file", "name", "job"), JOBS)
def test_what_may_write_installs_nothing(file: str, name: str, job: dict[str, Any]) -> None:
    """A package runs code when it is installed or Python starts: no writing token is near it."""
    workflow = yaml.safe_load((ROOT / ".github/workflows" / file).read_text())
    for where in (workflow, job):
        assert "token" not in json.dumps(where.get("env", {})).lower()
        assert "secrets." not in json.dumps(where.get("env"))
    writes = (file, name) in {*WRITES, *READS}
    for step in job["steps"]:
        has_token = re.search(r"github\.token|secrets\.", json.dumps(step.get("env", {})))
        assert writes or not has_token
        if "run" in step and (writes or has_token):
            assert not INSTALLS.search(recipe(step["run"].removeprefix("make ").split()))


def test_two_scripts_write_what_later_steps_read_as_lines() -> None:
    """A line break in a value would be a second output: see the tests of both."""
    writers = {
        path.name
        for path in SCRIPTS
        if re.search("GITHUB_(OUTPUT|ENV|PATH|STATE)", path.read_text())
    }
    # it plays GitHub's part and reads them
    assert writers - {"rehearse"} == {"gpu-compare", "may-bench"}
    for path in WORKFLOWS:
        assert "GITHUB_" not in path.read_text()  # a step runs a make target and nothing else


@pytest.mark.parametrize("base", ["abc\nhistory=success", "abc\rx", "abc\x1b[2J"])
@pytest.mark.parametrize("source", ["input", "branch"])
def test_a_line_break_is_no_second_output(tmp_path: Path, base: str, source: str) -> None:
    variables = {
        "RESULTS": "nightly",
        "BASE": base if source == "input" else "",
        "GITHUB_OUTPUT": "output",
    }
    if source == "branch":
        (tmp_path / "baseline").mkdir()
        (tmp_path / "baseline/gpu-passed").write_text(base)
    command = ["bash", ROOT / ".ci/gpu-compare", "false"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
    )
    assert (
        done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "output").exists()
    )


SCRIPTS = [
    ROOT / "Makefile",
    *(path for path in sorted((ROOT / ".ci").iterdir()) if path.is_file()),
]
COMMANDS = {
    (name, option)
    for path in SCRIPTS
    if path.suffix != ".yaml"  # tests/test_smoke.py
    for name, line in re.findall(r"hybrid[-_]kv\"? ([a-z]+)(.*)", path.read_text())
    for option in re.findall(r" (--[\w-]+)", line)
}


@pytest.mark.parametrize(("name", "option"), sorted(COMMANDS))
def test_every_command_has_the_options_that_scripts_give_it(name: str, option: str) -> None:
    check_options([name, option], f"{name} {option}")


def test_ci_runs_what_a_developer_runs() -> None:
    assert re.findall(r"^make .*", (ROOT / ".ci/run").read_text(), re.MULTILINE) == ["make test"]


# ---- the scripts ----

# In place of gh and hybrid-kv: notes its arguments, and the text of a file among them, and prints
# what it is given.
FAKE = """#!/bin/sh
echo "$@" >>"$CALLS"
body='s/.*body\\(=@\\|-file \\)\\([^ ]*\\).*/\\2/'
case "$*" in *body*) cat "$(echo "$*" | sed "$body")" >>"$CALLS";; esac
case "$*" in *slow*) exit 1;; *collaborators*) echo "$PERMISSION";; *pulls*) echo "$HEAD";;
*compare*) echo "$BASE";; *--jq*) echo "$OPEN";; esac
"""


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run a .ci/ script in an empty folder; return its programs' arguments, or its failure."""
    for name in ("gh", "hybrid-kv"):
        (tmp_path / name).write_text(FAKE)
        (tmp_path / name).chmod(0o755)

    def run(name: str, *arguments: str, **environment: str) -> str:
        (tmp_path / "calls").unlink(missing_ok=True)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        where = {
            "REPOSITORY": "owner/name",
            "RUN_URL": "run/1",
            "RESULTS": "nightly",
            "GITHUB_OUTPUT": "output",
        }
        variables = {
            **os.environ,
            "PATH": path,
            "CALLS": str(tmp_path / "calls"),
            **where,
            **environment,
        }
        command = ["bash", ROOT / ".ci" / name, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        return (tmp_path / "calls").read_text() if done.returncode == 0 else done.stderr

    return run


def test_a_pull_request_gets_one_comment(script: Script, tmp_path: Path) -> None:
    (tmp_path / "summary.md").write_text("all is well $(id) `id`\n")
    body = "<!-- hybrid-kv -->\nall is well $(id) `id`\n"
    first = script("comment", "summary.md", PULL_REQUEST="7")
    assert "POST repos/owner/name/issues/7/comments" in first and first.endswith(body)
    later = script("comment", "summary.md", PULL_REQUEST="7", OPEN="41\n43")
    assert "PATCH repos/owner/name/issues/comments/41" in later and later.endswith(body)
    assert script("comment", "none.md", PULL_REQUEST="7").endswith(
        "The comparison could not run: run/1\n"
    )


def test_only_who_may_write_has_a_request_measured(script: Script, tmp_path: Path) -> None:
    commits = {"HEAD": "a" * 40, "BASE": "b" * 40}
    right = {"PULL_REQUEST": "7", "ASKED_BY": "one", "PERMISSION": "write", **commits}
    assert "collaborators/one/permission" in script("may-bench", **right)
    assert (tmp_path / "output").read_text() == f"head={commits['HEAD']}\nbase={commits['BASE']}\n"
    for changed in (
        {"PERMISSION": "read"},
        {"PERMISSION": ""},
        {"HEAD": "main"},
        {"BASE": f"{'b' * 40}\nhead=x"},
    ):
        assert script("may-bench", **{**right, **changed}).startswith("error: ")


def test_an_alarm_says_what_to_run(script: Script, tmp_path: Path) -> None:
    (tmp_path / "red.md").write_text("| red |\n")
    outcomes = json.dumps({"gpu-test": "success", "gpu-guard": "failure", "gpu-compare": "failure"})
    made = script("alarm", "red.md", OUTCOMES=outcomes, COMMIT="abc", BASE="def", RED="failure")
    assert (
        "issue create" in made
        and "Nightly run failed: gpu-guard, gpu-compare, something became red" in made
    )
    assert (
        "git checkout abc\nmake gpu-guard\nmake gpu-compare BASE=def\n" in made
        and "| red |\n" in made
    )
    made = script("alarm", "red.md", OUTCOMES="", COMMIT="abc", OPEN="12")
    assert (
        "issue comment 12" in made
        and "make gpu-test\nmake gpu-guard\n" in made
        and "| red |" not in made
    )


def test_a_night_is_compared_with_the_last_that_passed(script: Script, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    (tmp_path / "baseline").mkdir()
    (tmp_path / "baseline/gpu-passed").write_text("def\n")
    assert (
        script("gpu-compare", "hybrid-kv", BASE="slow") == ""
        and not (tmp_path / "nightly/gpu-passed").exists()
    )
    assert script("gpu-compare", "hybrid-kv") == "compare --tier gpu --results nightly -- def .\n"
    assert len((tmp_path / "nightly/gpu-passed").read_text()) == 41


def test_a_first_night_has_compared_nothing_and_is_what_the_next_is_compared_with(
    script: Script, tmp_path: Path
) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    assert script("gpu-compare", "hybrid-kv").startswith("void: no commit has passed yet")
    assert len((tmp_path / "nightly/gpu-passed").read_text()) == 41


# In place of hybrid-kv: no line has changed.
VOID = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in *changed-since*) exit 3;; esac
"""


def test_a_day_without_a_changed_line_takes_a_sample_or_is_void(
    script: Script, tmp_path: Path
) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    (tmp_path / "hybrid-kv").write_text(VOID)
    first, second = script("mutants", "hybrid-kv", N="100", SAMPLE="20").splitlines()
    assert "--generated 100 --changed-since" in first and "--generated 20 --seed" in second
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/titles", "HEAD"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 3 and done.stdout.startswith("void: ")
    assert script("mutants", "hybrid-kv", N="100") == ""


def test_rows_are_appended_to_their_branch(script: Script, tmp_path: Path) -> None:
    header, *rows = (ROOT / "results/accuracy.csv").read_text().splitlines(keepends=True)
    for folder, text in (
        ("results", header + rows[0]),
        ("nightly", header + rows[1] + "1,torn"),
        ("baseline/results", header + rows[2]),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "accuracy.csv").write_text(text)
    assert script("merge-results", "hybrid-kv") == "results --check out/branch/results\n"
    merged = tmp_path / "out/branch/results/accuracy.csv"
    assert merged.read_text() == header + rows[2] + rows[0] + rows[1]


def test_bench_runs_foreign_code_without_token_secret_or_cache() -> None:
    """Foreign code's cache would be the default branch's: no job that writes reads one."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/bench-comment.yml").read_text())["jobs"]
    foreign = [
        name
        for name, job in jobs.items()
        if "needs.allow.outputs.head" in json.dumps(job["steps"][0])
    ]
    assert foreign == ["compare"] and "permissions" not in jobs["compare"]
    assert not re.search(r"token|secrets\.|cache", json.dumps(jobs["compare"]))
    assert jobs["compare"]["needs"] == "allow" and "'/bench'" in jobs["allow"]["if"]
    cached = {
        path.name for path in WORKFLOWS if re.search(r"^ +cache:", path.read_text(), re.MULTILINE)
    }
    assert cached == {"ci.yml", "bench-pr.yml", "rehearsal.yml"}


def test_every_step_of_a_night_that_can_fail_reaches_the_alarm() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly-gpu.yml").read_text())["jobs"]
    ran = {step["id"]: step for step in jobs["gpu"]["steps"] if "run" in step}
    outputs = jobs["gpu"]["outputs"]
    assert {name: f"${{{{ steps.{name}.outcome }}}}" for name in ran} == {
        n: o for n, o in outputs.items() if n in ran
    }
    assert all(step["run"].split()[:2] == ["make", name] for name, step in ran.items())
    assert set(outputs) - set(ran) == {"base"}
    assert sum(step["timeout-minutes"] for step in ran.values()) < jobs["gpu"]["timeout-minutes"]
    assert jobs["alarm"]["steps"][-1]["env"]["OUTCOMES"] == "${{ toJSON(needs.gpu.outputs) }}"
    # What became red stops no rows.
    (step,) = [step for step in jobs["rows"]["steps"] if step.get("id") == "red"]
    assert step["continue-on-error"] is True
    assert jobs["rows"]["outputs"] == {"red": "${{ steps.red.outcome }}"}
    assert "needs.rows.outputs.red == 'failure'" in jobs["alarm"]["if"]
    assert jobs["alarm"]["steps"][-1]["env"]["RED"] == "${{ needs.rows.outputs.red }}"


def test_the_night_publishes_asvs_pages() -> None:
    """From the whole history, after the merge into the branch, before the report links them."""
    steps = yaml.safe_load((ROOT / ".github/workflows/nightly-gpu.yml").read_text())["jobs"][
        "rows"
    ]["steps"]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    (checkout,) = [step for step in checkouts if "ref" not in step["with"]]
    assert checkout["with"]["fetch-depth"] == 0
    ran = [step["run"] for step in steps if "run" in step]
    made = [
        "make merge-results",
        "make red RESULTS=out/branch/results",
        "make asv-page RESULTS=out/branch",
        "make report RESULTS=out/branch/results",
    ]
    assert ran == [*made, "make docs"]


def test_a_change_of_what_makes_a_comparison_is_compared() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/bench-pr.yml").read_text())
    paths = {path.removesuffix("/**") for path in workflow[True]["pull_request"]["paths"]}
    assert {"hybrid_kv", "bench", "Makefile", ".ci", "pyproject.toml", "constraints.txt"} < paths
    assert all((ROOT / path).exists() for path in paths)


ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def test_the_action_has_no_expression_in_its_commands_and_its_token_in_one_step() -> None:
    steps = ACTION["runs"]["steps"]
    assert all(
        re.fullmatch(r'bash "\$GITHUB_ACTION_PATH/\.ci/[\w-]+"( [\w./]+)?', step["run"])
        for step in steps
    )
    assert [step["if"] for step in steps if "token" in json.dumps(step)] == [
        "inputs.run == 'comment'"
    ]
    given = re.findall(r"inputs\.([\w-]+)", json.dumps(steps))
    assert set(given) == set(ACTION["inputs"])


@pytest.mark.parametrize(
    ("job", "runs"), [("guard", ["guard", "accuracy"]), ("comment", ["comment"])]
)
def test_the_job_for_another_repository_gives_the_action_what_it_takes(
    job: str, runs: list[str]
) -> None:
    steps = yaml.safe_load((ROOT / "examples/ci/cache.yml").read_text())["jobs"][job]["steps"]
    given = [step["with"] for step in steps if step.get("uses", "").startswith("OWNER/hybrid-kv@")]
    assert [inputs.get("run", ACTION["inputs"]["run"]["default"]) for inputs in given] == runs
    assert all(inputs.keys() <= ACTION["inputs"].keys() for inputs in given)


def test_the_action_guards_and_keeps_its_verdict(script: Script, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    where = {"HYBRID_KV": "hybrid-kv", "GITHUB_STEP_SUMMARY": str(page)}
    ran = script("action", RUN="guard", TARGET="vllm", MODEL="a b", AGAINST="old/python", **where)
    assert ran.startswith("check vllm --model=a b --against=old/python --junit-xml out/guard.xml ")
    assert (
        script("action", RUN="compare", BASE="main", **where).endswith(" -- main .\n")
        and not page.exists()
    )
    (tmp_path / "out/summary.md").write_text("### 1 of 2\n")
    assert (
        script("action", RUN="guard", TARGET="slow", MODEL="m", **where) == ""
        and page.read_text() == "### 1 of 2\n"
    )
    assert (
        script("action", RUN="all", **where)
        == "error: run=all: use guard, accuracy, compare or comment\n"
    )


def test_the_action_runs_all_gates_of_accuracy(script: Script, tmp_path: Path) -> None:
    given = {
        "HYBRID_KV": "hybrid-kv",
        "RUN": "accuracy",
        "TARGET": "http://x",
        "MODEL": "m",
        "TASK": "gsm8k",
    }
    first, second = script(
        "action", **given, MIN_ACCEPTANCE_LENGTH="2.6", MAX_KL="0.0025"
    ).splitlines()
    assert first.startswith(
        "accuracy --target=http://x --model=m --results out --task=gsm8k "
        "--min-acceptance-length=2.6 "
    )
    assert second.startswith(
        "accuracy divergence --target=http://x --model=m --results out --max-kl=0.0025 "
    )
    first, _ = script("action", **given, BASELINE="a b.jsonl").splitlines()
    assert "--against=a b.jsonl " in first and "--task" not in first


@pytest.mark.parametrize(
    ("codes", "expected"),
    [("00", 0), ("10", 1), ("01", 1), ("21", 1), ("12", 1), ("30", 3), ("03", 3), ("20", 2)],
)
def test_the_action_ends_with_the_worst_of_the_gates(
    codes: str, expected: int, tmp_path: Path
) -> None:
    command = tmp_path / "hybrid-kv"
    command.write_text(
        f'#!/bin/sh\nif [ "$2" = divergence ]; then exit {codes[1]}; fi\nexit {codes[0]}\n'
    )
    command.chmod(0o755)
    given = {
        **os.environ,
        "HYBRID_KV": str(command),
        "RUN": "accuracy",
        "TARGET": "t",
        "MODEL": "m",
        "TASK": "gsm8k",
    }
    done = subprocess.run(["bash", ROOT / ".ci/action"], cwd=tmp_path, env=given, check=False)
    assert done.returncode == expected


def test_the_action_runs_all_gates_for_real(tmp_path: Path) -> None:
    """Against a server, with the command that is installed."""
    options = {**OPTIONS, "max_model_len": 1024, "mamba_cache_mode": "align"}
    options |= {"speculative_method": "mtp", "num_speculative_tokens": 3}
    with served(LLM(str(FOLDER), **options)) as server:
        given = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HYBRID_KV": str(Path(sys.executable).with_name("hybrid-kv")),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "page.md"),
            **{
                "RUN": "accuracy",
                "TARGET": server.url,
                "MODEL": "guard_model",
                "TASK": "gsm8k_synth",
            },
            **{"QUESTIONS": "8", "MIN_ACCEPTANCE_LENGTH": "2"},
        }
        done = subprocess.run(
            ["bash", ROOT / ".ci/action"], cwd=tmp_path, env=given, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "out/accuracy.csv").set_index("metric")["verdict"]
    assert {name: rows[name] for name in ("acceptance_length", "cached_kl", "unlikely_tokens")} == {
        "acceptance_length": "pass",
        "cached_kl": "pass",
        "unlikely_tokens": "pass",
    }
    assert "exact_match_strict" in rows
    kept = {
        "accuracy.xml",
        "accuracy.json",
        "divergence.xml",
        "divergence.json",
        "samples.jsonl.gz",
        "summary.md",
    }
    assert kept <= {file.name for file in (tmp_path / "out").iterdir()}


def test_an_engine_without_an_image_and_an_unknown_one_are_refused(tmp_path: Path) -> None:
    given = {**os.environ, "RESULTS": str(tmp_path), "MODEL": "lfm2", "IMAGE": ""}
    command = ["bash", ROOT / ".ci/guard-engine", "hybrid-kv"]
    for engine, code, text in (
        ("vllm", 2, "error: no image of vllm is named; IMAGE=NAME names one"),
        ("tgi", 2, "error: ENGINE=tgi: use vllm or sglang"),
    ):
        done = subprocess.run(
            command, env={**given, "ENGINE": engine}, capture_output=True, text=True
        )
        assert done.returncode == code and text in done.stdout + done.stderr
