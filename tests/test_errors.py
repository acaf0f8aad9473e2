"""How a command ends, whichever it is: exit code, one line, and streams that cannot be used."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.cli import main
from hybrid_kv.errors import _extra, require, run_command
from tests.cli.run import raising, refused, run


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("guard --quik", ["--quik", "--quick", "; see hybrid-kv guard --help"]),
        ("plan", ["Missing argument 'config'", "; see hybrid-kv plan --help"]),
        ("plan x --platform tpu", ["--platform': 'tpu'", "'cuda', 'xpu', 'cpu'"]),
        ("plan x --block-size big", ["--block-size", "integer", "'big'"]),
        ("plan x y z", ["y z", "; see hybrid-kv plan --help"]),
        ("compare --seed -1", ["--seed", "0", "'-1'"]),
        ("results --last", ["--last", "; see hybrid-kv"]),
        ("accuracy compare one.jsonl", ["'candidate'", "; see hybrid-kv accuracy compare --help"]),
        ("guerd", ["'guerd'", "'guard'", "; see hybrid-kv --help"]),
    ],
)
def test_wrong_usage_is_one_line_on_stderr_and_exit_2(
    capsys: pytest.CaptureFixture[str], line: str, parts: list[str]
) -> None:
    err = refused(capsys, *line.split())
    assert not [part for part in parts if part not in err]


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (2, "")
    assert "guard" in out and "--help" in out


def test_a_bug_is_not_dressed_up_as_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.models.shapes.model_shape", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["plan", "config.json", "--num-blocks", "9"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "some/file"), "some/file: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.ENOSPC, "No space left on device", 7), "No space left on device"),
        (OSError("no device"), "no device"),
        (OSError(), "OSError"),
        (MemoryError(), "out of memory"),
        (KeyboardInterrupt(), "interrupted"),
        (
            ModuleNotFoundError(
                "No module named 'prometheus_client'", name="prometheus_client.core"
            ),
            (
                "prometheus_client.core is not installed; run: pip install "
                "'hybrid_kv[serve]', in a checkout -e '.[serve]'"
            ),
        ),
        (
            ModuleNotFoundError("it went"),
            (
                "a package is not installed: it went; run: pip install 'hybrid_kv[all]', in a "
                "checkout -e '.[all]'"
            ),
        ),
    ],
)
def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    said: str,
) -> None:
    monkeypatch.setattr("hybrid_kv.models.shapes.model_shape", raising(error))
    code = 130 if isinstance(error, KeyboardInterrupt) else 2
    assert run(capsys, "plan", "config.json", "--num-blocks", "9") == (code, "", f"error: {said}\n")


def test_each_module_has_its_extra() -> None:
    """By import names, which are not always those of packages."""
    extras = {
        "torch": "engine",
        "lm_eval": "accuracy",
        "yaml": "accuracy",
        "scipy": "accuracy",
        "ray": "cluster",
    }
    extras |= {
        "prometheus_client": "serve",
        "asv_runner": "bench",
        "cosmic_ray": "dev",
        "json": "all",
    }
    assert {name: _extra(name) for name in extras} == extras


def test_a_missing_package_is_found_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    require("json", "rich")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        require("json", "no_such_package")
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ModuleNotFoundError, match="scipy"):
        require("scipy")


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (["guard", "--quick", "--results", "{folder}"], "lm_eval", "accuracy"),
        (["generate", "x"], "transformers", "models"),
        (["accuracy", "--limit", "1", "--results", "{folder}"], "datasets", "accuracy"),
        (["kernels"], "triton", "kernels"),
        (["compare", "--results", "{folder}"], "scipy", "accuracy"),
    ],
)
def test_every_command_names_the_extra_that_it_lacks_before_it_works(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    package: str,
    extra: str,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    for work in (
        "hybrid_kv.check.guard.run._run",
        "hybrid_kv.measure.dashboard.data.load",
        "hybrid_kv.LLM",
    ):
        monkeypatch.setattr(work, raising(AssertionError("it worked before it looked")))
    arguments = [argument.format(folder=tmp_path / "new") for argument in command]
    said = (
        f"error: {package} is not installed; run: pip install 'hybrid_kv[{extra}]', in "
        f"a checkout -e '.[{extra}]'\n"
    )
    assert run(capsys, *arguments) == (2, "", said)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_sanitizers_report_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hybrid_kv.sanitizer import SanitizerError

    said = "block 3 has two owners\n  step 1: request 0\n  step 2: request 1"
    monkeypatch.setattr(
        "hybrid_kv.models.shapes.model_shape", raising(SanitizerError("owner", said))
    )
    assert run(capsys, "plan", "config.json", "--num-blocks", "9") == (1, "", f"{said}\n")


def test_what_reads_files_alone_needs_no_torch(tmp_path: Path) -> None:
    """The wheel installs neither: see `dependencies` in pyproject.toml."""
    root = Path(__file__).resolve().parents[1]
    commands = [
        "plan --help",
        (
            f"plan {root}/examples/qwen3-next/config.json --dtype float32 --kv-cache-dtype "
            "fp8 --tensor-parallel-size 2"
        ),
        (
            f"plan {root}/examples/nemotron-3-nano/config.json --num-blocks 9000 "
            "--state-scheme recompute"
        ),
        (
            f"predict {root}/examples/nemotron-3-nano/config.json --gpu b200 --state-scheme "
            "recompute --weights 60GB"
        ),
        "families",
        f"results {root}/results/guard.csv",
        f"report --results {tmp_path} --out {tmp_path / 'site'}",
    ]
    for name in ("guard.csv", "accuracy.csv"):
        (tmp_path / name).symlink_to(root / "results" / name)
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'numba', 'transformers', "
        "'tokenizers', 'safetensors'))\n"
    )
    code += (
        "from hybrid_kv.cli import main\nfor command in sys.argv[1:]:\n    try:\n     "
        "   main(command.split())\n"
    )
    code += "    except SystemExit as left:\n        print('code', left.code, command)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, *commands], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    parts = re.split(r"^code 0 (.*)\n", done.stdout, flags=re.MULTILINE)
    assert parts[1::2] == commands and all(parts[:-1:2])


# ---- standard streams ----


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code after `from hybrid_kv.cli import main`, with output that no shell redirects."""
    command = [sys.executable, "-c", f"from hybrid_kv.cli import main\n{code}"]
    options = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        **options,
    }
    return subprocess.run(command, text=True, timeout=60, check=False, **options)


VERSION = "main(['--version'])"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = python(VERSION, stdout=full)
        assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")
        assert python("main(['plan'])", stderr=full).returncode == 2  # no stream is left


def test_closed_streams_are_one_line_and_no_file_takes_their_place(tmp_path: Path) -> None:
    done = python(VERSION, preexec_fn=lambda: os.close(1), stdout=None)
    assert done.returncode == 2
    assert (
        done.stderr == "error: standard output is closed; redirect it to a file or to /dev/null\n"
    )
    assert python(VERSION, preexec_fn=lambda: os.close(2), stderr=None).returncode == 0
    # The descriptor of the first file that is opened would be 2: what a library writes there would
    # be in the file.
    code = (
        "from hybrid_kv.errors import run_command\nrun_command(lambda: "
        "print(open('file', 'w').fileno()))"
    )
    done = python(code, preexec_fn=lambda: os.close(2), stderr=None, cwd=tmp_path)
    assert int(done.stdout) > 2


def test_a_reader_that_left_is_neither_an_error_nor_a_failed_check() -> None:
    read, write = os.pipe()
    os.close(read)
    done = python(VERSION, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (2, "")


def test_a_terminal_that_knows_only_ascii_gets_all_of_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUTF8"}
    code = "from hybrid_kv.errors import run_command\ntry:\n"
    code += "    run_command(lambda: print('2 \\u00d7 \\udcff \\u03bc'))\n"
    code += (
        "except SystemExit as left:\n    assert left.code == 0\nmain(['results', "
        "'--since', '\\u00d7'])"
    )
    done = python(code, env={**environment, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr.count("\n"), done.stdout[:2]) == (2, 1, "2 ")


def test_a_process_that_is_interrupted_with_its_workers_says_one_line(tmp_path: Path) -> None:
    file = tmp_path / "work.py"
    file.write_text(
        "import sys, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "from hybrid_kv.errors import deaf_to_ctrl_c, run_command\n"
        "def work():\n"
        "    with ProcessPoolExecutor(2, mp_context=get_context('spawn')) as pool:\n"
        "        with deaf_to_ctrl_c():\n"
        "            futures = [pool.submit(time.sleep, 1) for _ in range(2)]\n"
        "        print('at work', flush=True)\n"
        "        futures[0].result()\n"
        "if __name__ == '__main__':\n"
        "    run_command(work)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([sys.executable, str(file)], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "at work\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "error: interrupted\n"
    assert process.returncode == 130


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])  # nohup ignores one
def test_a_process_that_is_ended_leaves_no_part_of_a_file(
    tmp_path: Path, name: str, handler: str
) -> None:
    code = f"import os, signal\nsignal.signal(signal.{name}, signal.{handler})\n"
    code += "from hybrid_kv.errors import run_command\nfrom hybrid_kv.files import new_folder\n"
    code += (
        "def work():\n    with new_folder('made'):\n        os.kill(os.getpid(), "
        f"signal.{name})\nrun_command(work)"
    )
    done = python(code, cwd=tmp_path)
    ended = (128 + signal.Signals[name], "error: interrupted\n", [])
    expected = ended if handler == "SIG_DFL" else (0, "", ["made"])
    assert (done.returncode, done.stderr, [one.name for one in tmp_path.iterdir()]) == expected


def test_a_long_value_is_cut_and_nothing_obeys_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    err = refused(capsys, "results", "--since", "\x1b[31m" + "x" * 100_000)
    assert len(err) < 1100 and err.startswith("error: --since \\x1b[31mxxx") and " … " in err
    assert err.endswith("is not a moment; write 2026-11-21 or 2026-11-21T06:00:00Z\n")


def test_a_command_that_exits_by_itself_keeps_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    for given, code, said in (
        (3, 3, ""),
        (None, 0, ""),
        ("no such thing", 2, "error: no such thing\n"),
    ):
        with pytest.raises(SystemExit) as left:
            run_command(raising(SystemExit(given)))
        assert (left.value.code, capsys.readouterr().err) == (code, said)
