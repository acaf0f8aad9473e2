"""Odd input for every command, and what must hold for each; `make fuzz` draws 3,000 new cases.

Exit code 0 to 3; with 2 one line on standard error that begins with `error:`, otherwise at most one
line, besides progress: a bar, or the line about a checkpoint that is loaded; no traceback, no hang,
nothing half-written.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from hybrid_kv.check.targets.dialects import MOST_BYTES
from hybrid_kv.cli import main
from hybrid_kv.kernels.block_tables import HostTables, TableLayout
from tests.check.targets import hostile
from tests.fuzz import cases

LIMIT_SECONDS = 60
LIMIT_BYTES = 12 * 2**30  # of address space; torch's libraries alone take several
PROGRESS = re.compile(
    r"^.{0,40}:\s+\d+%\||^\s*$|^.{0,40}: \d+it \[|^loading \w+ in \w+: [\d,]+ B of weights on disk;"
    r"|^plain: [a-z ]+ (right|wrong|inconclusive|void|not supported) |^[a-z ]+: shrunk to \d"
)
LEFT_OVER = re.compile(r"\.part$|^\.hybrid-kv\.|^tmp")
WRITTEN = ("new.json", "er.json", "é.json", "a b.json")  # names of JSON files among the places
STDIN = (b"", b"Question: 1 + 1?\n", b"\xff\n", None)


class Hang(BaseException):
    """A case that took too long; no command catches it."""


@given(
    make=st.sampled_from([make for make, weight in cases.KINDS.items() for _ in range(weight)]),
    rng=st.randoms(use_true_random=False),
    stdin=st.sampled_from(STDIN),
    passes=st.booleans(),
)
@settings(suppress_health_check=list(HealthCheck))
def test_odd_input_ends_in_one_line(
    make: cases.Make,
    rng: random.Random,
    stdin: bytes | None,
    passes: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with case_folder() as folder:
        (folder / "taken.txt").write_text("taken")
        arguments = [text.replace("\0", "") for text in make(rng, folder)]
        note(f"hybrid-kv {' '.join(map(ascii, arguments))}")
        code, err = run(folder, arguments, stdin, passes, capfd)
        other = {
            b
            for a, b in pairwise(arguments)
            if a in ("--markdown", "--samples", "--file", "--junit-xml")
        }
        assert [*judge(code, err), *left_over(folder, other)] == [], err


SENDS = {"stream": "cut off", "preempt": "preempted"}  # the probe that is served from there


@pytest.mark.parametrize(
    ("place", "broken"), [pytest.param(*one, id=name) for name, *one in hostile.every()]
)
def test_a_hostile_server_gets_a_verdict_or_one_line(
    place: str, broken: hostile.Break, capfd: pytest.CaptureFixture[str]
) -> None:
    case = hostile.Case({place: broken})
    with case_folder() as folder:
        code, err = run(
            folder,
            cases.against(case, folder, SENDS.get(place, "alone")),
            b"",
            passes=True,
            capfd=capfd,
        )
        assert [*judge(code, err), *left_over(folder, set())] == [], err
    assert case.most_bytes < 8 * MOST_BYTES


@pytest.mark.parametrize("owner", hostile.OWNERS)
def test_a_server_with_nothing_broken_is_right(
    owner: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with case_folder() as folder:
        code, err = run(
            folder,
            cases.against(hostile.Case({}, owner), folder, "cut off"),
            b"",
            passes=True,
            capfd=capfd,
        )
    assert (code, len(err.splitlines())) == (0, 1), err


def run(
    folder: Path,
    arguments: list[str],
    stdin: bytes | None,
    passes: bool,
    capfd: pytest.CaptureFixture[str],
) -> tuple[object, str]:
    """Exit code and standard error of a command."""
    capfd.readouterr()
    with cases.stubs(folder, passes), limits(stdin), pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code, capfd.readouterr().err


@contextmanager
def case_folder() -> Iterator[Path]:
    """The current folder, a new one."""
    before = Path.cwd()
    with TemporaryDirectory() as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


@contextmanager
def limits(stdin: bytes | None) -> Iterator[None]:
    """Standard input, a limit of memory and time, and warnings on standard error."""

    def hang(*_: object) -> None:
        raise Hang

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
        patch.setenv("HF_HUB_OFFLINE", "1")
        for category in (UserWarning, RuntimeWarning):
            warnings.filterwarnings("always", category=category)
        patch.setattr(warnings, "showwarning", lambda message, *_: print(message, file=sys.stderr))
        before, (soft, hard) = (
            signal.signal(signal.SIGALRM, hang),
            resource.getrlimit(resource.RLIMIT_AS),
        )
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, hard))
        signal.alarm(LIMIT_SECONDS)
        try:
            yield
        finally:
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            signal.signal(signal.SIGALRM, before)


def judge(code: object, err: str) -> list[str]:
    """Violations in the exit code and on standard error."""
    lines = [line for line in re.split(r"[\r\n]", err) if not PROGRESS.match(line)]
    found = [] if code in range(4) else [f"exit code {code}"]
    if len(lines) > 1:
        found.append(f"{len(lines)} lines on standard error")
    if code == 2 and not (lines and lines[-1].startswith("error: ")) and err:
        found.append("exit code 2 without an error")
    return found


def left_over(folder: Path, no_json: set[str]) -> list[str]:
    """Violations in the files; `no_json` are names of files of another kind."""
    found = []
    for file in folder.rglob("*"):
        if LEFT_OVER.search(file.name):
            found.append(f"{file.name} was left behind")
        elif (
            file.is_file() and file.name in WRITTEN and str(file.relative_to(folder)) not in no_json
        ):
            try:
                json.loads(file.read_text())
            except ValueError:
                found.append(f"{file.name} is half-written")
        elif file.name == "index.html" and not file.read_text().rstrip().endswith("</html>"):
            found.append(f"{file.name} is half-written")
    if (folder / "taken.txt").is_file() and not (folder / "taken.txt").read_bytes():
        found.append("taken.txt was emptied")
    return found


@pytest.fixture(autouse=True, scope="module")
def _slow_start() -> None:
    """Imports and compilation, which a slow disk would make look like a hang."""
    for late in (
        "transformers.models.auto.tokenization_auto",
        "hybrid_kv.measure.accuracy.run",
        "duckdb",
    ):
        pytest.importorskip(late)
    HostTables([TableLayout(1, 1, 1, 1)], 1, 1)


def test_every_option_of_every_command_is_tried() -> None:
    rng = random.Random(0)
    for words, every in cases.commands().items():
        drawn = {
            text for _ in range(400) for text in cases.options(rng, *words) if text.startswith("-")
        }
        assert [name for name, (spellings, _) in every.items() if not drawn & {*spellings}] == [], (
            words
        )


@pytest.mark.parametrize(
    ("code", "err", "found"),
    [
        (0, "plan:  40%|####      | 2/5\rplan: 100%|#####| 5/5\na warning\n", []),
        (
            2,
            "loading bamba in float32: 455,120 B of weights on disk; a request of ...\nerror: no\n",
            [],
        ),
        (2, "", []),  # a reader that left, or help
        (4, "", ["exit code 4"]),
        (2, "a\nerror: b\n", ["2 lines on standard error"]),
        (2, "no such thing\n", ["exit code 2 without an error"]),
    ],
)
def test_a_violation_on_standard_error_is_seen(code: int, err: str, found: list[str]) -> None:
    assert judge(code, err) == found


def test_violations_in_files_are_seen(tmp_path: Path) -> None:
    files = {"new.json": ('{"half', "is half-written"), "index.html": ("<html>", "is half-written")}
    files |= {"x.part": ("", "was left behind"), "taken.txt": ("", "was emptied")}
    for name, (text, _) in files.items():
        (tmp_path / name).write_text(text)
    assert {*left_over(tmp_path, set())} == {f"{name} {said}" for name, (_, said) in files.items()}
