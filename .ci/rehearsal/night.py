"""A run of nightly-gpu.yml: its jobs, each behind those that it needs, and their steps."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

from rehearsal.expressions import EXPRESSION, Names, condition, evaluate, filled, unknown_names
from rehearsal.github import ACTIONS, ROOT, GitHub, git, guard_rows, write_script

ENTRY = ROOT / ".ci/rehearse"
ASV_ENVIRONMENTS = ROOT / "out/rehearsal-asv"
JOB = {
    "needs",
    "if",
    "runs-on",
    "timeout-minutes",
    "env",
    "outputs",
    "steps",
    "permissions",
    "environment",
}
STEP = {"id", "if", "uses", "with", "run", "env", "timeout-minutes", "continue-on-error"}
# What a step must not get from the make that called this.
OURS = re.compile("GITHUB_|MAKE|MFLAGS|RESULTS$|N$|BASE$|BIN$|PYTHON|TRITON_INTERPRET")
FEW_BYTES = 1000  # of a full disk


class UnknownError(Exception):
    """A part of a workflow that is not played here."""


class Night:
    """A run of the workflow.

    Attributes:
        failed: the steps that failed where they must not, as `job: command`.
    """

    def __init__(self, workflow: Path, folder: Path, fault: str) -> None:
        """Set up a night, of which nothing has run yet.

        Args:
            fault: what goes wrong; see `faults`.

        Raises:
            UnknownError: nothing has run.
        """
        self.github = GitHub(folder)
        self.fault = fault
        self.failed: list[str] = []
        self._jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
        self._needs = Names()
        github = {
            "server_url": "https://example.com",
            "repository": "owner/name",
            "run_id": "1",
            "token": "token",
        }
        self._values: dict[str, Any] = {
            "github": github | {"sha": git("rev-parse", "HEAD")},
            "vars": {"GPU_RUNNER": "", "NIGHTLY_MODELS": "guard_model"},
            "inputs": {"base": "", "models": ""},
            "needs": self._needs,
        }
        for job in self._jobs.values():
            self._check({key: value for key, value in job.items() if key != "steps"}, JOB)
            for step in job["steps"]:
                self._check(step, STEP)

    def _check(self, job_or_step: Mapping[str, Any], keys: set[str]) -> None:
        """Raise `UnknownError` for what is not played here."""
        given = set(job_or_step)
        if "uses" in job_or_step:
            action = job_or_step["uses"].partition("@")[0]
            if action not in ACTIONS:
                raise UnknownError(f"action {action}")
            keys = keys | {f"with {key}" for key in ACTIONS[action]}
            given |= {f"with {key}" for key in job_or_step.get("with", ())}
        if given - keys:
            raise UnknownError(f"key {min(given - keys)!r}")
        text = json.dumps(job_or_step, ensure_ascii=False).replace('\\"', '"')
        for expression in [*EXPRESSION.findall(text), condition(job_or_step)]:
            for name in unknown_names(expression, self._values):
                raise UnknownError(f"expression {name}")

    def prepare(self) -> None:
        """Make GitHub's part, and tools that run this checkout's commands smaller."""
        self.github.prepare(may_write=self.fault != "token")
        for name in re.findall(r"\$\(BIN\)/([\w-]+)", (ROOT / "Makefile").read_text()):
            script = f'#!/bin/sh\nexec "{sys.executable}" "{ENTRY}" --tool {name} "$@"\n'
            write_script(self.github.folder / "bin" / name, script)

    def run(self) -> None:
        """Run all jobs."""
        needed = {}
        for name, job in self._jobs.items():
            needs = job.get("needs", [])
            needed[name] = [needs] if isinstance(needs, str) else needs
        for name in TopologicalSorter(needed).static_order():
            success = all(self._needs[other]["result"] == "success" for other in needed[name])
            self._run_job(name, success)

    def _run_job(self, name: str, success: bool) -> None:
        job, steps, result = self._jobs[name], Names(), "skipped"
        if evaluate(condition(job), self._values, success):
            if name == "push" and self.fault == "force-push":
                self.github.rewrite(
                    {"results/guard.csv": "".join(guard_rows()[:1] + guard_rows()[2:50])}
                )
            workspace = self.github.folder / name
            workspace.mkdir()
            result = "success"
            for number in range(len(job["steps"])):
                if not self._run_step(name, number, steps, result == "success"):
                    result = "failure"
        outputs = filled(job.get("outputs", {}), {**self._values, "steps": steps})
        self._needs[name] = Names(result=result, outputs=Names(outputs))
        print(f"{name}: {result}", flush=True)

    def _run_step(self, job: str, number: int, steps: Names, success: bool) -> bool:
        """Run a step, unless its `if` says no; return whether the job may still succeed."""
        step = self._jobs[job]["steps"][number]
        called = step.get("run") or step["uses"].partition("@")[0]
        output = self.github.folder / "output"
        output.write_text("")
        begin = time.perf_counter()
        outcome = "skipped"
        values = {**self._values, "steps": steps}
        if evaluate(condition(step), values, success):
            if "run" in step:
                env = filled({**self._jobs[job].get("env", {}), **step.get("env", {})}, values)
                env["GITHUB_OUTPUT"] = str(output)
                fine = self._make(f"{job}-{number}", step["run"].split()[1:], env)
            else:
                fine = self.github.act(
                    called, filled(step.get("with", {}), values), self.github.folder / job
                )
            outcome = "success" if fine else "failure"
        if "id" in step:
            lines = output.read_text().splitlines()
            outputs = Names(line.split("=", 1) for line in lines)
            steps[step["id"]] = Names(outcome=outcome, outputs=outputs)
        print(f"  {job:6}{called:39} {outcome:8}{time.perf_counter() - begin:6.1f} s", flush=True)
        has_failed = outcome == "failure" and not step.get("continue-on-error")
        if has_failed:
            self.failed.append(f"{job}: {called}")
        return not has_failed

    def _make(self, name: str, arguments: Sequence[str], given: Mapping[str, str]) -> bool:
        """Call `make` in the job's workspace, with what the workflow sets.

        Return whether it succeeds.
        """
        bin_folder = self.github.folder / "bin"
        workspace = self.github.folder / name.rpartition("-")[0]
        env = {key: value for key, value in os.environ.items() if not OURS.match(key)}
        env |= {
            **given,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "REHEARSED_FAULT": self.fault,
        }
        if "REMOTE" in env:
            env["REMOTE"] = self.github.remote.as_uri()
        limit = resource.RLIM_INFINITY
        if self.fault == "disk" and arguments[0] == "gpu-bench":
            limit = FEW_BYTES
        if arguments[0] == "history":
            keep_asv_environments(workspace)
        done = subprocess.run(
            ["make", "-o", ".venv/.installed", f"BIN={bin_folder}", *arguments],
            cwd=workspace,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit)),
        )
        (self.github.folder / f"{name}.log").write_text(done.stdout)
        if done.returncode and not self.fault:
            print(*done.stdout.splitlines()[-20:], sep="\n")
        return done.returncode == 0


def keep_asv_environments(workspace: Path) -> None:
    """Let asv find the environments of the last rehearsal, whose making takes minutes."""
    place = workspace / ".asv/env"
    if not place.is_symlink():
        ASV_ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(ASV_ENVIRONMENTS)
