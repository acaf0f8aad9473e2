"""The test that an engine's repository can hold, in the engine with each patch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from hybrid_kv.check.exports.traffic import PACKAGE
from mutants.runner.patched import Found, PatchedEngine, head, package_of

EXPORTED = "exported"  # a variant


class ExportedSearch:
    """The settings of the exported test that look for each patch of an engine.

    Args:
        folder: that holds the test.
        default: a level of the cells that do not name one of its factor, as the test writes it.
    """

    def __init__(self, engine: PatchedEngine, python: str, folder: Path, default: str) -> None:
        self._engine = engine
        self._python = python
        self._default = default
        self._folder = folder
        cases = json.loads((folder / PACKAGE / "cases.json").read_text())
        self._settings = [*cases["settings"]]

    def run(self, name: str) -> Found:
        """Run the settings with a patch of the release as it is, the likeliest first.

        It ends with the first problem.
        """
        patches = self._engine.patches_of(name, is_healed=False)
        found = Found(name, EXPORTED)
        with tempfile.TemporaryDirectory() as folder:
            self._engine.overlay(package_of(self._engine, self._python), patches, Path(folder))
            began = time.perf_counter()
            command = [self._python, str(self._folder / PACKAGE / "run.py")]
            with subprocess.Popen(
                [*command, *self._by_likeness(head(patches[-1])[2])],
                env=os.environ | {"PYTHONPATH": folder},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ) as process:
                assert process.stdout is not None
                lines = map(json.loads, process.stdout)
                first = next((line for line in lines if line["problem"]), None)
                os.killpg(process.pid, signal.SIGKILL)
            found.seconds = round(time.perf_counter() - began, 1)
        if first is not None:
            found.setting = first["setting"]
            found.probe, _, found.detail = first["problem"].splitlines()[-1].partition(": ")
        return found

    def _by_likeness(self, cells: list[str]) -> list[str]:
        """Return the test's settings, those first that share most levels with a cell."""
        factor = self._default.partition("=")[0]
        levels = [
            {*cell.split()} | ({self._default} if factor not in cell else set()) for cell in cells
        ]

        def unlikeness(setting: str) -> int:
            own = {*setting.split()}
            return min(len(own ^ of) for of in levels)

        return sorted(self._settings, key=unlikeness)
