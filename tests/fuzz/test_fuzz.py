"""Odd input for every command: 200 cases here, 2,000 a night (`make fuzz`)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.cli import app
from tests.fuzz import __main__ as fuzz
from tests.fuzz import cases, values

ROOT = Path(__file__).resolve().parents[2]


def test_no_odd_input_gets_past_one_line() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_and_every_option_is_tried() -> None:
    commands = {words[0] for words in cases.commands()}
    known = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    assert commands == known | {group.name for group in app.registered_groups}
    rng = random.Random(0)
    for words, every in cases.commands().items():
        drawn = {text for _ in range(400) for text in cases.options(rng, words) if text.startswith("-")}
        missing = [option.name for option in every if not drawn & set(option.opts)]
        assert not missing, (words, missing)


def test_a_case_depends_on_its_number_alone(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        arguments = [
            str(cases.KINDS[kind][1](random.Random(f"7/{kind}"), folder)) for kind in ("plan_config", "results")
        ]
        made.append((arguments, {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("code", "err", "raised", "found"),
    [
        (0, "", "", []),
        (0, "plan:  40%|####      | 2/5\rplan: 100%|#####| 5/5\na warning\n", "", []),
        (2, "error: no\n", "", []),
        (2, "loading bamba in float32: 455,120 B of weights on disk; a request of ...\nerror: no\n", "", []),
        (2, "", "", []),  # a reader that left, or help
        (3, "", "", ["exit code 3"]),
        (None, "", "Traceback", ["a traceback"]),
        (None, "", "took more than 20 s", ["it hung"]),
        (2, "a\nerror: b\n", "", ["2 lines on standard error"]),
        (2, "no such thing\n", "", ["exit code 2 without an error"]),
    ],
)
def test_what_a_command_may_not_do_is_seen(code: Any, err: str, raised: str, found: list[str]) -> None:
    assert fuzz.judge(code, err, raised) == found


def test_what_a_command_may_not_leave_is_seen(tmp_path: Path) -> None:
    (tmp_path / "taken.txt").write_text("taken")
    (tmp_path / "new.json").write_text("{}")
    assert fuzz.left_over(tmp_path, set()) == []
    (tmp_path / "new.json").write_text('{"half')
    (tmp_path / "x.part").touch()
    (tmp_path / "taken.txt").write_text("")
    (tmp_path / "index.html").write_text("<html>")
    assert set(fuzz.left_over(tmp_path, set())) == {
        "new.json is half-written",
        "x.part was left behind",
        "taken.txt was emptied",
        "index.html is half-written",
    }


def test_a_command_that_breaks_is_seen_with_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: list[str]) -> None:
        print("half a line", file=sys.stderr)
        raise ZeroDivisionError

    monkeypatch.setattr("hybrid_kv.cli.main", broken)
    monkeypatch.chdir(tmp_path)
    told = fuzz.one_case(0, 3, tmp_path)
    assert told["violations"] == ["a traceback"] and "ZeroDivisionError" in told["said"]
    assert not list(tmp_path.iterdir())


def test_odd_values_are_never_shared() -> None:
    """A list that one case puts into a document must not grow with the next."""
    before = repr(values.ODD)
    for number in range(300):
        values.odd_json(random.Random(number), {"a": [1, {"b": None}], "c": "x"})
    assert repr(values.ODD) == before
