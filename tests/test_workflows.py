"""The workflows: what they may do, and that a developer can run what they run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from hybrid_kv.cli import app

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
# Which job has a token that may only read, to ask GitHub a question.
ASKS = {("bench-comment.yml", "allow")}
# They take minutes, or are this suite.
SLOW = {
    "test",
    "guard",
    "guard-quick",
    "kernels",
    "compare",
    "commit-page",
    "history",
    "wheel",
    "report",
    "lint-workflows",
}


def make(*arguments, **environment):
    """`make` with this Python's tools instead of .venv's, and without installing anything."""
    command = ["make", "-o", ".venv/.installed", f"BIN={BIN}", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def targets(job):
    """What `make` is called with in a job's steps."""
    return [step["run"].removeprefix("make ").split() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_runs_once(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert set(workflow["concurrency"]) == {"group", "cancel-in-progress"}
    assert "pull_request_target" not in path.read_text() and "workflow_run" not in path.read_text()


@pytest.mark.parametrize(("file", "name", "job"), JOBS)
def test_a_job_has_a_limit_pinned_actions_and_the_least_rights(file, name, job):
    assert job["timeout-minutes"] <= 300
    writes = {scope for scope, right in job.get("permissions", {}).items() if right == "write"}
    assert writes == WRITES.get((file, name), set())
    for step in job["steps"]:
        if "uses" in step:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize(("file", "name", "job"), JOBS)
def test_every_command_is_a_make_target(file, name, job):
    """And holds no expression: what comes from outside reaches the shell through the environment."""
    for step in job["steps"]:
        if "run" in step:
            assert re.fullmatch(r"make [\w-]+( [A-Z]+=[\w./-]+)*", step["run"])
    for arguments in targets(job):
        done = make("-n", *arguments)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "name", "job"), [case for case in JOBS if case.values[0] in ("ci.yml", "bench-pr.yml")]
)
def test_the_cpu_jobs_run_here(file, name, job, tmp_path):
    if name == "comment":
        pytest.skip("writes to a pull request; see test_a_pull_request_gets_one_comment")
    ran = [arguments for arguments in targets(job) if arguments[0] not in SLOW]
    for arguments in ran:
        done = make(*arguments, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"))
        assert done.returncode == 0, done.stdout + done.stderr
    assert ran or name == "workflows"


def recipe(arguments):
    """What a make target runs when nothing is installed yet, with the text of the scripts that it calls."""
    command = ["make", "-n", "--always-make", *arguments]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return text + "".join((ROOT / name).read_text() for name in re.findall(r"bash (\.ci/[\w-]+)", text))


INSTALLS = re.compile(r"\.ci/install|\bpip\b|\bnpx\b|\buv\b")


def test_installing_is_recognised():
    assert INSTALLS.search(recipe(["merge-results"])) and INSTALLS.search(recipe(["lint-workflows"]))
    assert not INSTALLS.search(recipe(["step-summary"]))


@pytest.mark.parametrize(("file", "name", "job"), JOBS)
def test_what_may_write_installs_nothing(file, name, job):
    """A package runs code where it is installed and wherever Python starts: no token that writes is near it."""
    workflow = yaml.safe_load((ROOT / ".github/workflows" / file).read_text())
    for where in (workflow, job):
        assert "token" not in json.dumps(where.get("env", {})).lower() and "secrets." not in json.dumps(
            where.get("env")
        )
    writes = (file, name) in {*WRITES, *ASKS}
    for step in job["steps"]:
        has_token = re.search(r"github\.token|secrets\.", json.dumps(step.get("env", {})))
        assert writes or not has_token
        if "run" in step and (writes or has_token):
            assert not INSTALLS.search(recipe(step["run"].removeprefix("make ").split()))


def test_two_scripts_write_what_later_steps_read_as_lines():
    """A line break in a value would be a second output: see the tests of both."""
    writers = {path.name for path in SCRIPTS if re.search("GITHUB_(OUTPUT|ENV|PATH|STATE)", path.read_text())}
    assert writers == {"gpu-compare", "may-bench"}
    for path in WORKFLOWS:
        assert "GITHUB_" not in path.read_text()  # a step runs a make target and nothing else


@pytest.mark.parametrize("base", ["abc\nhistory=success", "abc\rx", "abc\x1b[2J"])
@pytest.mark.parametrize("source", ["input", "branch"])
def test_a_line_break_is_no_second_output(tmp_path, base, source):
    variables = {
        **os.environ,
        "RESULTS": "nightly",
        "BASE": base if source == "input" else "",
        "GITHUB_OUTPUT": "output",
    }
    if source == "branch":
        (tmp_path / "baseline").mkdir()
        (tmp_path / "baseline/gpu-passed").write_text(base)
    command = ["bash", ROOT / ".ci/gpu-compare", "false"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "output").exists()


def test_a_line_break_reaches_no_summary(tmp_path):
    summary = tmp_path / "summary.md"
    command = [BIN / "hybrid-kv", "compare", "HEAD\n# alarm", ".", "--markdown", summary]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not summary.exists()


SCRIPTS = [ROOT / "Makefile", *(path for path in sorted((ROOT / ".ci").iterdir()) if path.is_file())]
COMMANDS = {
    (name, option)
    for path in SCRIPTS
    for name, line in re.findall(r"hybrid[-_]kv\"? ([a-z]+)(.*)", path.read_text())
    for option in re.findall(r" (--[\w-]+)", line)
}


@pytest.mark.parametrize(("name", "option"), sorted(COMMANDS))
def test_every_command_has_the_options_that_scripts_give_it(name, option):
    command = typer.main.get_command(app).commands[name]
    command = getattr(command, "default", command)  # `hybrid-kv results` lists
    assert option in {text for parameter in command.params for text in parameter.opts}


def test_ci_runs_what_a_developer_runs():
    assert re.findall(r"^make .*", (ROOT / ".ci/run").read_text(), re.MULTILINE) == ["make test"]


def test_zizmor_finds_nothing():
    zizmor = BIN / "zizmor"
    if not zizmor.exists():
        pytest.skip("zizmor is not installed")
    done = subprocess.run([zizmor, "--offline", "--no-progress", ".github"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_actionlint_finds_nothing():
    if not (actionlint := shutil.which("actionlint")):
        pytest.skip("actionlint is not installed; make lint-workflows fetches it")
    done = subprocess.run([actionlint, *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- the scripts that write ----

GH = r"""#!{python}
import json, os, sys
from pathlib import Path
folder = Path(os.environ["FAKE_GH"])
arguments = sys.argv[1:]
bodies = [a.partition("@")[2] for a in arguments if a.startswith("body=@")]
if "--body-file" in arguments:
    bodies.append(arguments[arguments.index("--body-file") + 1])
with (folder / "calls").open("a") as file:
    file.write(json.dumps([arguments, [Path(body).read_text() for body in bodies]]) + "\n")
if "--jq" in arguments:
    answer = os.environ.get("FAKE_ANSWER", "")
    if answer.startswith("{"):  # by a part of what is asked for
        answer = next(text for part, text in json.loads(answer).items() if f"/{part}" in arguments[1])
    print(answer)
"""


@pytest.fixture
def gh(tmp_path):
    """Runs a script with a `gh` that answers what it is told and writes down how it was called."""
    program = tmp_path / "bin" / "gh"
    program.parent.mkdir()
    program.write_text(GH.replace("{python}", sys.executable))
    program.chmod(0o755)

    def run(*command, answer="", **environment):
        log = tmp_path / "calls"
        log.unlink(missing_ok=True)
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        variables = {**os.environ, "PATH": path, "FAKE_GH": str(tmp_path), "FAKE_ANSWER": answer, **environment}
        subprocess.run(["bash", *command], cwd=ROOT, env=variables, check=True, capture_output=True)
        return [json.loads(line) for line in log.read_text().splitlines()]

    return run


def test_a_pull_request_gets_one_comment(gh, tmp_path):
    (tmp_path / "summary.md").write_text("all is well $(id) `id`\n")
    where = {"REPOSITORY": "owner/name", "PULL_REQUEST": "7"}
    command = [".ci/comment", str(tmp_path / "summary.md")]
    body = "<!-- hybrid-kv -->\nall is well $(id) `id`\n"

    _, (call, bodies) = gh(*command, **where)
    assert "POST" in call and "repos/owner/name/issues/7/comments" in call and bodies == [body]
    _, (call, bodies) = gh(*command, answer="41\n43", **where)
    assert "PATCH" in call and "repos/owner/name/issues/comments/41" in call and bodies == [body]
    _, (call, bodies) = gh(".ci/comment", str(tmp_path / "none.md"), answer="41", RUN_URL="run/1", **where)
    assert "PATCH" in call and bodies == ["<!-- hybrid-kv -->\nThe comparison could not run: run/1\n"]


def test_the_comment_links_the_pages_that_there_are(gh, tmp_path):
    (tmp_path / "summary.md").write_text("all is well\n")
    head, base = "a" * 40, "b" * 40
    site = (tmp_path / "served").as_uri()
    where = {"REPOSITORY": "owner/name", "PULL_REQUEST": "7", "RUN_URL": "run/1", "COMMIT": head, "BASE": base}
    command = [".ci/comment", str(tmp_path / "summary.md")]
    for folder in ("site", "served"):
        (tmp_path / folder / "commits").mkdir(parents=True)
    _, (_, (body,)) = gh(*command, SITE_URL=site, **where)
    assert body == "<!-- hybrid-kv -->\nall is well\n"  # no page, no link
    (tmp_path / "site/commits/aaaaaaaaaaaa.html").touch()
    _, (_, (body,)) = gh(*command, SITE_URL="", **where)
    assert body.endswith("`site/commits/aaaaaaaaaaaa.html` in [this artifact](run/1#artifacts).\n")
    (tmp_path / "served/commits/bbbbbbbbbbbb.html").touch()
    _, (_, (body,)) = gh(*command, SITE_URL=site, **where)
    assert body.endswith(f"[`bbbbbbb`]({site}/commits/bbbbbbbbbbbb.html).\n")


def test_only_who_may_write_has_a_request_measured(gh, tmp_path):
    head, base = "a" * 40, "b" * 40
    answers = {"permission": "write", "pulls": head, "compare": base}
    output = tmp_path / "output"
    where = {"REPOSITORY": "owner/name", "PULL_REQUEST": "7", "ASKED_BY": "somebody", "GITHUB_OUTPUT": str(output)}

    def asked(**changed):
        output.unlink(missing_ok=True)
        calls = gh(".ci/may-bench", answer=json.dumps(answers | changed), **where)
        assert calls[0][0][1] == "repos/owner/name/collaborators/somebody/permission"
        return output.read_text()

    assert asked() == asked(permission="admin") == f"head={head}\nbase={base}\n"
    for changed in ({"permission": "read"}, {"permission": ""}, {"pulls": "main"}, {"compare": f"{base}\nhead=x"}):
        with pytest.raises(subprocess.CalledProcessError):
            asked(**changed)
        assert not output.exists()


def test_bench_runs_foreign_code_without_token_secret_or_cache():
    """What it put into a cache would be the default branch's; no job that may write or builds a release reads one."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/bench-comment.yml").read_text())["jobs"]
    foreign = [name for name, job in jobs.items() if "needs.allow.outputs.head" in json.dumps(job["steps"][0])]
    assert foreign == ["compare"] and "permissions" not in jobs["compare"]
    assert not re.search(r"token|secrets\.|cache", json.dumps(jobs["compare"]))
    assert jobs["compare"]["needs"] == "allow" and "'/bench'" in jobs["allow"]["if"]
    cached = {path.name for path in WORKFLOWS if re.search(r"^ +cache:", path.read_text(), re.MULTILINE)}
    assert cached == {"ci.yml", "bench-pr.yml"}


def test_an_alarm_says_what_to_run(gh):
    outcomes = {"gpu-test": "success", "gpu-guard": "failure", "gpu-bench": "skipped", "gpu-accuracy": "failure"}
    where = {"REPOSITORY": "owner/name", "COMMIT": "abc", "RUN_URL": "run/1"}
    calls = gh(".ci/alarm", OUTCOMES=json.dumps(outcomes), **where)
    created, (body,) = calls[-1]
    assert created[:2] == ["issue", "create"]
    assert "Nightly run failed: gpu-guard, gpu-accuracy" in created
    assert "make gpu-guard\nmake gpu-accuracy\n" in body and "make gpu-test" not in body
    assert "git checkout abc" in body and "run/1" in body and "BASE" not in body

    (commented, bodies), *_ = reversed(gh(".ci/alarm", answer="12", OUTCOMES=json.dumps(outcomes), **where))
    assert commented[:3] == ["issue", "comment", "12"] and bodies == [body]


def test_an_alarm_about_gpu_times_names_the_other_commit_and_the_way_to_accept_them(gh):
    where = {"REPOSITORY": "owner/name", "COMMIT": "abc", "RUN_URL": "run/1"}
    outcomes = {"gpu-test": "success", "gpu-compare": "failure", "base": "def"}
    created, (body,) = gh(".ci/alarm", OUTCOMES=json.dumps(outcomes), BASE="def", **where)[-1]
    assert "Nightly run failed: gpu-compare" in created
    assert "git checkout abc\nmake gpu-compare BASE=def\n```\n" in body and "`base`" in body
    outcomes |= {"gpu-compare": "success", "gpu-guard": "failure"}
    _, (body,) = gh(".ci/alarm", OUTCOMES=json.dumps(outcomes), BASE="def", **where)[-1]
    assert "make gpu-guard\n```\n" in body and "def" not in body and "`base`" not in body


def test_an_alarm_without_a_failed_step_names_the_first_ones(gh):
    where = {"REPOSITORY": "owner/name", "COMMIT": "abc", "RUN_URL": "run/1"}
    _, (body,) = gh(".ci/alarm", OUTCOMES="", **where)[-1]
    assert "make gpu-test\nmake gpu-guard\n" in body
    (created, _) = gh(".ci/alarm", OUTCOMES="", **where)[-1]
    assert "Nightly run failed: a job died" in created


def test_an_alarm_shows_what_became_red(gh, tmp_path):
    where = {"REPOSITORY": "owner/name", "COMMIT": "abc", "RUN_URL": "run/1", "RED": "failure"}
    table = tmp_path / "red.md"
    table.write_text("| red | figure |\n|---|--:|\n| `guard $(id)` | `3` |\n")
    created, (body,) = gh(".ci/alarm", str(table), OUTCOMES='{"gpu-test": "success"}', **where)[-1]
    assert "Nightly run failed: something became red" in created
    assert body.endswith("run/1\n\n" + table.read_text())
    created, (body,) = gh(".ci/alarm", str(table), OUTCOMES='{"gpu-test": "failure"}', **where)[-1]
    assert "Nightly run failed: gpu-test, something became red" in created
    assert table.read_text() in body and body.endswith("make gpu-test\n```\n")
    _, (body,) = gh(".ci/alarm", str(tmp_path / "none"), OUTCOMES="{}", **where)[-1]
    assert "could not be told" in body


def test_rows_are_appended_to_their_branch(tmp_path):
    remote = tmp_path / "remote.git"
    subprocess.run(["git", "init", "-q", "--bare", remote], check=True)
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    (checkout / "results").mkdir()
    header, *rows = (ROOT / "results/accuracy.csv").read_text().splitlines(keepends=True)
    (checkout / "results/accuracy.csv").write_text(header + rows[0])
    (checkout / "nightly").mkdir()

    def night(**files):
        for old in (checkout / "nightly").iterdir():
            old.unlink()
        for name, text in files.items():
            (checkout / f"nightly/{name}.csv").write_text(text)
        return merge() or push()

    def script(*command):
        variables = {**os.environ, "RESULTS": "nightly", "REMOTE": str(remote), "GH_TOKEN": "secret"}
        done = subprocess.run(["bash", *command], cwd=checkout, env=variables, capture_output=True, text=True)
        assert "secret" not in done.stdout + done.stderr
        return done

    def merge():
        """Beside a checkout of the branch, if there is one; None, or how it failed."""
        shutil.rmtree(checkout / "baseline", ignore_errors=True)
        if subprocess.run(["git", "-C", remote, "rev-parse", "-q", "--verify", "results"], capture_output=True).stdout:
            subprocess.run(["git", "clone", "-q", "-b", "results", remote, checkout / "baseline"], check=True)
        done = script(".ci/merge-results", str(BIN / "hybrid-kv"))
        return done if done.returncode else None

    def push():
        return script(".ci/push-results")

    def branch(name):
        command = ["git", "-C", remote, "show", f"results:results/{name}.csv"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert night(accuracy=header + rows[1], gpu=header + rows[2]).returncode == 0
    assert branch("accuracy") == header + rows[0] + rows[1]
    assert branch("gpu") == header + rows[2]
    assert night(accuracy=header + rows[3]).returncode == 0
    assert branch("accuracy") == header + rows[0] + rows[1] + rows[3]
    for again in ({}, {"accuracy": header + rows[3]}, {"accuracy": header + "1,torn"}):
        done = night(**again)
        assert done.returncode == 0 and "no new rows" in done.stdout
    assert night(accuracy=header + "1,broken\n").returncode != 0
    assert branch("accuracy") == header + rows[0] + rows[1] + rows[3]

    # What has been committed to the checkout since, and what asv measured.
    (checkout / "results/accuracy.csv").write_text(header + rows[0] + rows[4])
    (checkout / "nightly/asv/box").mkdir(parents=True)
    (checkout / "nightly/asv/box/abc.json").write_text("{}")
    (checkout / "nightly/gpu-passed").write_text("abc\n")
    for old in (checkout / "nightly").glob("*.csv"):
        old.unlink()
    assert (merge() or push()).returncode == 0
    assert branch("accuracy") == header + rows[0] + rows[1] + rows[3] + rows[4]
    shown = ["git", "-C", remote, "show", "results:asv/box/abc.json"]
    assert subprocess.run(shown, check=True, capture_output=True, text=True).stdout == "{}"
    shown[-1] = "results:gpu-passed"
    assert subprocess.run(shown, check=True, capture_output=True, text=True).stdout == "abc\n"

    # Nothing is taken away, and nothing comes that is no result.
    (checkout / "out/branch/results/accuracy.csv").write_text(header + rows[5])
    done = push()
    assert (
        done.returncode == 1 and "results/accuracy.csv on the branch is not the beginning of the new one" in done.stderr
    )
    assert merge() is None
    (checkout / "out/branch/.github").mkdir()
    (checkout / "out/branch/.github/workflow.yml").touch()
    (checkout / "out/branch/gpu-passed").write_text("def\n")
    assert push().returncode == 0
    files = subprocess.run(
        ["git", "-C", remote, "ls-tree", "-r", "--name-only", "results"], capture_output=True, text=True
    )
    assert files.stdout.split() == ["asv/box/abc.json", "gpu-passed", "results/accuracy.csv", "results/gpu.csv"]


def test_a_night_is_compared_with_the_last_that_passed(tmp_path):
    """The first with none; one that fails does not become the one to beat, and a commit that is given comes first."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    name = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    program = tmp_path / "hybrid-kv"
    program.write_text('#!/bin/sh\necho "$@" >>calls\ncase "$*" in *slow*) exit 1;; esac\n')
    program.chmod(0o755)
    passed = tmp_path / "nightly/gpu-passed"

    def head():
        command = ["git", "-C", tmp_path, "rev-parse", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def night(base="", results="nightly"):
        """Exit code, what was compared, the step's output, and the next night's baseline, after a commit."""
        command = ["git", *name, "-C", tmp_path, "commit", "-q", "--allow-empty", "-m", "x"]
        subprocess.run(command, check=True)
        for file in ("calls", "output"):
            (tmp_path / file).unlink(missing_ok=True)
        passed.unlink(missing_ok=True)
        variables = {**os.environ, "RESULTS": results, "BASE": base, "GITHUB_OUTPUT": "output"}
        command = ["bash", ROOT / ".ci/gpu-compare", program]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else done.stdout
        if passed.exists():
            (tmp_path / "baseline").mkdir(exist_ok=True)
            shutil.copy(passed, tmp_path / "baseline")
        return done.returncode, calls, (tmp_path / "output").read_text()

    def compared(base, results="nightly"):
        return f"compare --tier gpu --results {results} -- {base} .\n"

    code, said, output = night()
    assert (code, output) == (0, "base=\n") and "nothing to compare with" in said
    first = head()
    assert night() == (0, compared(first), f"base={first}\n")
    second = head()
    assert night("slow") == (1, compared("slow"), "base=slow\n") and not passed.exists()
    assert night() == (0, compared(second), f"base={second}\n")
    assert passed.read_text() == head() + "\n"
    assert night("--output=x")[1] == compared("--output=x")  # a revision, whatever it looks like
    assert night("def", results="results") == (0, compared("def", "results"), "base=def\n")
    assert not list((tmp_path / "results").iterdir())  # at home only rows are kept


def test_every_step_of_a_night_that_can_fail_reaches_the_alarm():
    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly-gpu.yml").read_text())["jobs"]
    ran = {step["id"]: step for step in jobs["gpu"]["steps"] if "run" in step}
    outputs = jobs["gpu"]["outputs"]
    assert {name: f"${{{{ steps.{name}.outcome }}}}" for name in ran} == {n: o for n, o in outputs.items() if n in ran}
    assert all(step["run"].split()[:2] == ["make", name] for name, step in ran.items())
    assert set(outputs) - set(ran) == {"base"}
    assert sum(step["timeout-minutes"] for step in ran.values()) < jobs["gpu"]["timeout-minutes"]
    assert jobs["alarm"]["steps"][-1]["env"]["OUTCOMES"] == "${{ toJSON(needs.gpu.outputs) }}"


def test_what_became_red_stops_no_rows_and_reaches_the_alarm():
    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly-gpu.yml").read_text())["jobs"]
    (step,) = [step for step in jobs["rows"]["steps"] if step.get("id") == "red"]
    assert step["continue-on-error"] is True
    assert jobs["rows"]["outputs"] == {"red": "${{ steps.red.outcome }}"}
    assert "needs.rows.outputs.red == 'failure'" in jobs["alarm"]["if"]
    assert jobs["alarm"]["steps"][-1]["env"]["RED"] == "${{ needs.rows.outputs.red }}"


def asv_results(commits):
    """What `asv run` leaves: one benchmark, measured on each of the commits."""
    benchmark = {"name": "suite.time_it", "code": "", "type": "time", "unit": "seconds", "params": [], "version": "1"}
    files = {"benchmarks.json": {"suite.time_it": {**benchmark, "param_names": []}, "version": 2}}
    machine = {"machine": "box", "arch": "x", "cpu": "x", "num_cpu": "2", "os": "x", "ram": "1"}
    files["box/machine.json"] = {**machine, "version": 1}
    columns = ["result", "params", "version", "started_at", "duration"]
    for date, commit in enumerate(commits):
        files[f"box/{commit[:8]}-env.json"] = {
            "commit_hash": commit,
            "env_name": "env",
            "date": 1767225600000 + 86400000 * date,
            "params": {**machine, "python": "3.11"},
            "python": "3.11",
            "requirements": {},
            "env_vars": {},
            "result_columns": columns,
            "results": {"suite.time_it": [[0.5 + date], [], "1", 1767225600000, 1.0]},
            "durations": {},
            "version": 2,
        }
    return files


def test_asvs_pages_are_those_of_the_branch(tmp_path):
    """By asv itself, on a detached head; a commit that is gone costs its own point alone."""
    asv = BIN / "asv"
    if not asv.exists():
        pytest.skip("asv is not installed")
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copy(ROOT / "asv.conf.json", tmp_path)

    def git(*arguments):
        name = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
        done = subprocess.run(("git", *name, *arguments), cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def pages(results):
        command = ["bash", ".ci/asv-page", str(asv)]
        variables = {**os.environ, "RESULTS": results, "REPOSITORY_URL": "https://example.com/o/r"}
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    git("init", "-q", "-b", "another")
    commits = []
    for text in "ab":
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "-q", "-m", text)
        commits.append(git("rev-parse", "HEAD"))
    git("checkout", "-q", "--detach")
    for results in ("results", "out/branch"):
        done = pages(results)
        assert done.returncode == 0 and "make history" in done.stdout and not (tmp_path / "site").exists()

    for name, document in asv_results([*commits, "f" * 40]).items():
        file = tmp_path / "out/branch/asv" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document))
    done = pages("out/branch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site/asv/index.html").exists()
    shown = json.loads((tmp_path / "site/asv/index.json").read_text())
    assert (shown["project_url"], shown["show_commit_url"]) == (
        "https://example.com/o/r",
        "https://example.com/o/r/commit/",
    )
    assert not (tmp_path / "asv.pages.json").exists()
    (graph,) = (tmp_path / "site/asv/graphs/summary").glob("*.json")
    assert [value for _, value in json.loads(graph.read_text())] == [0.5, 1.5]


def test_the_night_publishes_asvs_pages():
    """From the whole history, behind the merge that makes the branch, before the report that links them."""
    steps = yaml.safe_load((ROOT / ".github/workflows/nightly-gpu.yml").read_text())["jobs"]["rows"]["steps"]
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


def test_a_change_of_what_makes_a_comparison_is_compared():
    workflow = yaml.safe_load((ROOT / ".github/workflows/bench-pr.yml").read_text())
    paths = {path.removesuffix("/**") for path in workflow[True]["pull_request"]["paths"]}
    assert {"hybrid_kv", "bench", "Makefile", ".ci", "pyproject.toml", "constraints.txt"} < paths
    assert all((ROOT / path).exists() for path in paths)


def test_a_night_is_paired_with_the_first_one(tmp_path):
    """Every model is asked, one that fails included, and its name never reaches the shell as a pattern or a path."""
    program = tmp_path / "hybrid-kv"
    program.write_text('#!/bin/sh\necho "$@" >>calls\ncase "$*" in *lost*) exit 1;; esac\n')
    program.chmod(0o755)
    (tmp_path / "baseline/samples").mkdir(parents=True)
    (tmp_path / "baseline/samples/org_lost.jsonl.gz").touch()

    def night(models):
        (tmp_path / "calls").unlink(missing_ok=True)
        variables = {**os.environ, "RESULTS": "nightly", "MODELS": models}
        done = subprocess.run(["bash", ROOT / ".ci/accuracy", program], cwd=tmp_path, env=variables)
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    code, calls = night("org/lost org/*")
    assert code == 1
    assert calls == [
        "accuracy --model=org/lost --against=baseline/samples/org_lost.jsonl.gz --results nightly",
        "accuracy --model=org/* --task=gsm8k --limit=1319 --samples=nightly/samples/org__.jsonl.gz --results nightly",
    ]
    assert night("org/new")[0] == 0


@pytest.mark.parametrize(
    ("engine", "model", "served", "how"),
    [
        ("vllm", "lfm2", "vllm image serve /model --enable-prefix-caching", "checkpoint lfm2"),
        ("sglang", "org/name", "python3 image -m sglang.launch_server --model-path /model", "download org/name"),
    ],
)
def test_an_engine_is_served_from_its_image_and_asked_there(tmp_path, engine, model, served, how):
    for name in ("docker", "curl", "hf", "hybrid-kv"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $@" >>"$CALLS"\n')
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    given = {"PATH": path, "CALLS": str(calls), "RESULTS": str(tmp_path / "out"), "MODEL": model, "ENGINE": engine}
    command = ["bash", ROOT / ".ci/guard-engine", tmp_path / "hybrid-kv"]
    subprocess.run(command, env={**os.environ, **given, "IMAGE": "image"}, check=True)
    made, ran, asked, guarded, removed = calls.read_text().splitlines()
    assert how in made and served in ran and (" --dtype float32 " in ran) is (model == "lfm2")
    assert asked.endswith("http://127.0.0.1:8000/v1/models")
    assert guarded.startswith("hybrid-kv guard --target http://127.0.0.1:8000 --model /")
    assert removed.startswith(f"docker rm --force hybrid-kv-{engine}-")


def test_an_engine_without_an_image_is_left_out_and_an_unknown_one_refused(tmp_path):
    given = {**os.environ, "RESULTS": str(tmp_path), "MODEL": "lfm2", "IMAGE": ""}
    command = ["bash", ROOT / ".ci/guard-engine", "hybrid-kv"]
    for engine, code, text in (
        ("vllm", 0, "no image of vllm is named"),
        ("tgi", 2, "error: ENGINE=tgi: use vllm or sglang"),
    ):
        done = subprocess.run(command, env={**given, "ENGINE": engine}, capture_output=True, text=True)
        assert done.returncode == code and text in done.stdout + done.stderr
