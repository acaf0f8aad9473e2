"""Ctrl-C is one line, and nothing that was started goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from bench.harness import history
from tests.bench.harness.toy import TORCH, write_toy

HOLD = """
import os

def hold():
    # The test learns the process, which then waits for an end that does not come.
    pipe = os.open(os.environ["FIFO"], os.O_WRONLY)
    os.write(pipe, f"{os.getpid()}\\n".encode())
    os.read(os.pipe()[0], 1)
"""
STUCK = f"""{HOLD}
from bench.harness.cells import Case, Cell

def cells():
    return [Cell("stuck", "forever", {{}}, "cpu", lambda: Case(hold, lambda: 0.0), True)]
"""


def interrupted(command: Sequence[str], fifo: Path, **variables: str) -> tuple[int, str, int]:
    """Press Ctrl-C while a case runs; return exit code, stderr and the case's process."""
    os.mkfifo(fifo)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, **variables, "FIFO": str(fifo)}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        with open(fifo) as pipe:
            at_work = int(pipe.readline())
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    return process.returncode, err, at_work


def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(HOLD + "hold()\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2])])
    command = [sys.executable, "-m", "bench", "--quick"]
    assert interrupted(command, tmp_path / "fifo", PYTHONPATH=path)[:2] == (
        130,
        "error: interrupted\n",
    )


def is_over(process: int) -> bool:
    """It ended, though its parent may not have read its exit code."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_comparison_that_is_interrupted_says_one_line_and_ends_its_workers(
    tmp_path: Path,
) -> None:
    toy = tmp_path / "toy"
    write_toy(toy)
    (toy / "bench" / "stuck.py").write_text(STUCK)
    (tmp_path / "torch.py").write_text(TORCH)  # of the workers
    code = (
        "import os; from pathlib import Path; from bench.harness import compare; from "
        "hybrid_kv.cli import main\n"
        f"compare.ROOT = Path({str(toy)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
        "main(['compare', 'HEAD', 'HEAD', '-k', 'stuck', '--results', "
        f"{str(tmp_path / 'results')!r}])"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code, err, worker = interrupted(
        [sys.executable, "-c", code], tmp_path / "fifo", TMPDIR=str(temporary)
    )
    assert (code, err) == (130, "error: interrupted\n")
    assert is_over(worker)
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "results" / "compare.csv").exists()


def test_a_history_that_is_interrupted_ends_asv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "asv.py").write_text(
        f"import os\nos.environ['FIFO'] = {str(fifo)!r}\n{STUCK}\nhold()\n"
    )
    monkeypatch.setattr(history, "ROOT", tmp_path)
    seen = []

    class Interrupted(subprocess.Popen):
        def communicate(self, given: str) -> NoReturn:
            with open(fifo) as pipe:
                seen.append(int(pipe.readline()))
            raise KeyboardInterrupt

    monkeypatch.setattr(history.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        history.run_asv("run")
    assert is_over(seen[0])
