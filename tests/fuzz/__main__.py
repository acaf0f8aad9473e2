"""`python -m tests.fuzz --cases N [--seed S]`: odd input for every command, and what must hold whatever it is.

Exit code 0, 1 or 2; with 2 one line on standard error that begins with `error:`, else at most one line, both beside
progress: a bar, or the line that says what is loaded and what it takes;
no traceback, no hang, nothing half-written. A case depends on the seed and its number alone: `--only N` repeats it.

The cases run in a process of their own, whose memory is limited: one that dies is a violation, and the next begins with
the case behind it.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 20
LIMIT_BYTES = 12 * 2**30  # of address space; torch's libraries alone take several
_PROGRESS = re.compile(r"^.{0,40}:\s+\d+%\||^\s*$|^.{0,40}: \d+it \[|^loading \w+ in \w+: [\d,]+ B of weights on disk;")
_LEFT_OVER = re.compile(r"\.part$|^\.hybrid-kv\.|^tmp")


class Hang(BaseException):
    """A case that took too long; no command catches it."""


def main() -> int:
    """Run the cases and print what did not hold. Returns 0, or 1 if anything did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, with what it printed")
    parser.add_argument("--from", type=int, dest="first", help=argparse.SUPPRESS)  # of the process inside
    parser.add_argument("--log", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first is not None:
        work(options.seed, range(options.first, options.cases), Path(options.log))
        return 0
    if options.only is not None:
        command = ["--from", str(options.only), "--cases", str(options.only + 1)]
    else:
        command = ["--from", "0", "--cases", str(options.cases)]
    start = time.monotonic()
    told = run_all(command, options.seed)
    for one in told:
        if one["violations"] or options.only is not None:
            print(f"case {one['number']} ({one['kind']}): {'; '.join(one['violations'])}\n  {one['said']}")
            print(f"  again: python -m tests.fuzz --seed {options.seed} --only {one['number']}\n")
    wrong = sum(bool(one["violations"]) for one in told)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(one["kind"] for one in told).items()))
    codes = ", ".join(f"{n} with {code}" for code, n in sorted(Counter(str(one.get("code")) for one in told).items()))
    print(f"{len(told)} cases of seed {options.seed}: {wrong} violations in {time.monotonic() - start:.0f} s")
    print(f"{kinds}; exit codes: {codes}")
    return 1 if wrong else 0


def run_all(command: list[str], seed: int) -> list[dict[str, Any]]:
    """What the processes wrote down, one after the other where one died."""
    first, end = int(command[1]), int(command[3])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        while first < end:
            inside = [sys.executable, "-m", "tests.fuzz", "--from", str(first), "--cases", str(end)]
            inside += ["--seed", str(seed), "--log", str(log)]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
            done = subprocess.run(inside, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            told = [json.loads(line) for line in log.read_text().splitlines()]
            first = first + 1 if not told else told[-1]["number"] + 1
            if first < end:
                kind = "killed" if done.returncode < 0 else "died"
                dead = {"number": first, "kind": kind, "violations": [f"the process ended with {done.returncode}"]}
                with log.open("a") as file:
                    file.write(json.dumps({**dead, "said": done.stderr[-2000:]}) + "\n")
                first += 1
        return [json.loads(line) for line in log.read_text().splitlines()]


def work(seed: int, numbers: range, log: Path) -> None:
    """Run cases, one line of the log for each."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    warnings.filterwarnings("always", category=UserWarning)
    warnings.filterwarnings("always", category=RuntimeWarning)
    signal.signal(signal.SIGALRM, _hang)
    for late in (
        "transformers.models.auto.tokenization_auto",
        "hybrid_kv.accuracy.run",
        "pandas",
        "duckdb",
        "plotly",
        "scipy.stats",
    ):
        importlib.import_module(late)  # A slow disk is no hang.
    from hybrid_kv.kernels.block_tables import HostTables, TableLayout

    HostTables([TableLayout(1, 1, 1, 1)], 1, 1)  # Nor is a compiler.
    root = Path(tempfile.mkdtemp())
    try:
        for number in numbers:
            told = one_case(seed, number, root)
            with log.open("a") as file:
                file.write(json.dumps({"number": number, **told}) + "\n")
    finally:
        os.chdir("/")
        shutil.rmtree(root)


def _hang(*_: object) -> None:
    raise Hang


def one_case(seed: int, number: int, root: Path) -> dict[str, Any]:
    """Make a case, run it, look at what it left."""
    from tests.fuzz import cases

    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(list(cases.KINDS), [weight for weight, _ in cases.KINDS.values()])[0]
    folder = root / "case"
    folder.mkdir()
    os.chdir(folder)
    (folder / "taken.txt").write_text("taken")
    stdin = rng.choice((b"", b"Question: 1 + 1?\n", b"\xff\n", None))
    try:
        arguments = [text.replace("\0", "") for text in cases.KINDS[kind][1](rng, folder)]
        with cases.stubs(folder, rng):
            code, out, err, raised = run(arguments, stdin)
        other = {b for a, b in pairwise(arguments) if a in ("--markdown", "--samples", "--file")}
        violations = [*judge(code, err, raised), *left_over(folder, other)]
    finally:
        os.chdir(root)
        shutil.rmtree(folder)
    said = f"{' '.join(map(ascii, arguments))[:600]}\n  -> {code}: {err[-600:]!a} {raised}"
    return {"kind": kind, "code": code, "violations": violations, "said": said, "out": out[-300:]}


def run(arguments: list[str], stdin: bytes | None) -> tuple[Any, str, str, str]:
    """Exit code, both streams as the system saw them, and the traceback of what came out."""
    from hybrid_kv.cli import main as command

    kept = [os.dup(1), os.dup(2)]
    streams = [tempfile.TemporaryFile() for _ in kept]  # noqa: SIM115  (closed below)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    before = sys.stdin
    sys.stdin = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))  # type: ignore[assignment]
    code: Any = None
    raised = ""
    signal.alarm(LIMIT_SECONDS)
    try:
        command(arguments)
    except SystemExit as left:
        code = left.code
    except Hang:
        raised = f"took more than {LIMIT_SECONDS} s: {traceback.format_exc()[-900:]}"
    except BaseException:
        raised = traceback.format_exc()[-1500:]
    finally:
        signal.alarm(0)
        sys.stdin = before
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
    texts = []
    for stream in streams:
        stream.seek(0)
        texts.append(stream.read().decode(errors="replace"))
        stream.close()
    return code, *texts, raised


def judge(code: Any, err: str, raised: str) -> list[str]:
    """What a command may not do."""
    found = []
    if raised:
        return ["it hung" if raised.startswith("took") else "a traceback"]
    if code not in (0, 1, 2):
        found.append(f"exit code {code}")
    lines = [line for line in re.split(r"[\r\n]", err) if not _PROGRESS.match(line)]
    if len(lines) > 1:
        found.append(f"{len(lines)} lines on standard error")
    if code == 2 and not (lines and lines[-1].startswith("error: ")) and err:
        found.append("exit code 2 without an error")
    return found


def left_over(folder: Path, no_json: set[str]) -> list[str]:
    """What a command may not leave; `no_json` are names of files that are of another kind."""
    found = []
    for file in folder.rglob("*"):
        if _LEFT_OVER.search(file.name):
            found.append(f"{file.name} was left behind")
        elif str(file.relative_to(folder)) in no_json:
            continue
        elif file.is_file() and file.name in ("new.json", "er.json", "é.json", "a b.json"):
            try:
                json.loads(file.read_text())
            except ValueError:
                found.append(f"{file.name} is half-written")
        elif file.name == "index.html" and not file.read_text().rstrip().endswith("</html>"):
            found.append(f"{file.name} is half-written")
    if (folder / "taken.txt").is_file() and not (folder / "taken.txt").read_bytes():
        found.append("taken.txt was emptied")
    return found


if __name__ == "__main__":
    sys.exit(main())
