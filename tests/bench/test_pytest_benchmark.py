"""The documented commands of pytest-benchmark, run as they stand but for one cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pytest_benchmark_times_a_cell_and_compares(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = [
        "--benchmark-only",
        "--benchmark-json",
        str(file),
        "-p",
        "no:xdist",
        "-k",
        "gated_norm/norm",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "tests/bench/test_cases.py", *options]
    # A worker of xdist says so to its children, too, and pytest-benchmark times nothing there.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (timed,) = json.loads(file.read_text())["benchmarks"]
    assert timed["stats"]["rounds"] == 20 and timed["stats"]["median"] > 0
    compare = [sys.executable, "-m", "pytest_benchmark", "compare", str(file)]
    compared = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert compared.returncode == 0, compared.stderr
    assert "gated_norm/norm" in compared.stdout
