"""Each known bug is one change of the code as it is; a few of them are caught end to end."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from hybrid_kv.check.guard.registry import CHECKS
from hybrid_kv.check.guard_model import FOLDERS
from hybrid_kv.check.targets.ours import LEVELS
from hybrid_kv.config import ConfigError
from hybrid_kv.measure.results import read_rows
from hybrid_kv.models.registry import sized
from mutants.runner import served
from mutants.runner.guard import steps_of
from mutants.runner.mutant import FOLDER, PACKAGE, UNCHANGED, Change, KnownBug, inject, read_mutants
from mutants.runner.run import Forks, MutationRun, Reduced, Row, run_all
from tests.cli.run import run

TEXT = "def f(x):\n    if x:\n        return 1\n    return 2\n"
WHOLE = """
references: [vllm!1]
mechanism: Something is off by one.
settings: prefix=align
changes:
  - file: cache/manager.py
    old: a
    new: b
"""


def mutant(*changes: Change) -> KnownBug:
    return KnownBug("Z01", ("vllm!1",), "Something is off by one.", {}, changes)


@pytest.mark.parametrize("known", read_mutants(), ids=lambda known: known.id)
def test_each_mutant_changes_the_code_as_it_is_under_settings_of_our_target(
    known: KnownBug,
) -> None:
    for text in known.changed().values():
        ast.parse(text)
    assert known.references and known.mechanism.endswith(".")
    for factor, level in known.settings.items():
        assert factor == "model" or level in LEVELS[factor]


def test_no_mutant_uses_a_name_that_is_gone(tmp_path: Path) -> None:
    """It would be caught at once, and whatever it stands for would not be tried."""
    for known in read_mutants():
        for file, text in known.changed().items():
            (tmp_path / f"{known.id}_{file.replace('/', '_')}").write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "F821",
        tmp_path,
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_a_bug_is_injected_or_has_a_reason_why_not() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\b[A-L]\d\d\b", page.split("## Not injected")[1])
    injected = {known.id for known in read_mutants()}
    assert len(set(named)) == len(named)
    assert not injected & set(named)
    catalog = FOLDER.parent.parent / "shared/bug_catalog.md"
    if not catalog.exists():
        pytest.skip("the list of reported bugs is not beside this checkout")
    listed = re.findall(
        r"^(?:\*\*|\| )([A-L]\d\d)\b", catalog.read_text(encoding="utf-8"), re.MULTILINE
    )
    # more are injected: bugs of a kind that no reported one has
    assert injected | set(named) >= set(listed)


def test_text_that_has_moved_or_occurs_twice_is_refused() -> None:
    for old, count in (("return 3", 0), ("return", 2)):
        with pytest.raises(
            ConfigError, match=f"Z01: '{old}' occurs {count} times in f.py, not once"
        ):
            Change("f.py", old, "pass").apply(TEXT, "Z01")


def test_further_lines_are_indented_as_the_first_one() -> None:
    changed = Change("f.py", "if x:\n    return 1", "if not x:\n    return 1\nx = 0").apply(
        TEXT, "Z01"
    )
    assert changed == "def f(x):\n    if not x:\n        return 1\n    x = 0\n    return 2\n"


def test_a_known_bug_is_in_the_copy_alone(tmp_path: Path) -> None:
    before = (PACKAGE / "cache/manager.py").read_text()
    change = Change("cache/manager.py", "class KVCacheManager:", "class KVCacheManager:  # here")
    inject(tmp_path, mutant(change).changed())
    file = tmp_path / "hybrid_kv/cache/manager.py"
    assert (PACKAGE / "cache/manager.py").read_text() == before
    assert (tmp_path / "hybrid_kv/engine/runner.py").samefile(PACKAGE / "engine/runner.py")
    assert "class KVCacheManager:  # here" in file.read_text()
    assert not list(file.parent.glob("__pycache__/manager.*")), (
        "Python would run what it compiled before"
    )


SPELLED = [
    f"{way}cache/manager.py" for way in ("./", "/", "../hybrid_kv/", "cache/../", f"{PACKAGE}/")
]
SPELLED += ["cache//manager.py", "../mutants/runner/run.py", "cache"]


@pytest.mark.parametrize("file", ["check/guard/observer.py", "cache/nothing.py", *SPELLED])
def test_a_bug_is_injected_in_the_engine_alone(file: str) -> None:
    with pytest.raises(ConfigError, match=f"Z01: {file} is not a file of the engine"):
        mutant(Change(file, "a", "b")).changed()


@pytest.mark.parametrize(
    "name, text, problem",
    [
        ("F99", WHOLE.replace("mechanism", "reason"), "KeyError: 'mechanism'"),
        ("F99", WHOLE.replace("prefix=align", "align"), "ValueError"),
        (
            "F99",
            WHOLE + "more: 1\n",
            "its id is invalid, it changes nothing, or \\['more'\\] is unknown",
        ),
        (
            "F99",
            WHOLE.replace("old: a", "old: {a: b}"),
            r"TypeError: old of a change is {'a': 'b'}, not a text",
        ),
        ("nine", WHOLE, "its id is invalid"),
        ("F99", "[", "ParserError"),
        ("F99", "", "TypeError|AttributeError"),
    ],
)
def test_a_file_that_is_no_mutant_is_refused(
    name: str, text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"is not a mutant: .*{problem}".replace(".*its", "its")):
        read_mutants(tmp_path)


def test_an_id_that_no_mutant_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--id F98: there is no such mutant"):
        read_mutants(FOLDER, ["F98"])
    with pytest.raises(ConfigError, match="there are no mutants; run this in a checkout"):
        read_mutants(tmp_path / "nothing")


@pytest.mark.parametrize(
    "id, section, rule", [("B07", "exact model", "step-tokens"), ("L09", "exact model", "")]
)
def test_the_quick_guard_catches_a_known_bug_and_reduces_its_case(
    id: str, section: str, rule: str, tmp_path: Path, forked: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mutants.runner.run.RUNS", 2)
    (known,) = read_mutants(ids=[id])
    row = MutationRun(300, tmp_path).judge(known, ("quick",), forked)
    assert (row.caught, row.section) == (True, section)
    assert rule in row.rule and 0 < row.requests < 1000
    assert row.reduced is not None and row.reduced.is_right and row.reduced.fails == 1
    assert row.reduced.requests <= 3 and row.reduced.tokens <= 64
    assert Path(row.reduced.file).parent == tmp_path / id and Path(row.reduced.file).exists()


def test_a_run_that_fails_ends_and_those_behind_it_do_not_wait_for_its_process() -> None:
    gone = mutant(Change("cache/plan.py", "no such text", ""))
    with pytest.raises(ConfigError, match="occurs 0 times"):
        list(run_all([gone, gone, gone], "quick", MutationRun(300), 1))


def test_code_that_has_moved_is_reported_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "F99.yaml").write_text(WHOLE)
    monkeypatch.setattr(
        "mutants.runner.run.run_all", lambda *_, **__: pytest.fail("a run has begun")
    )
    found, _, said = run(
        capsys, "mutants", "--folder", str(tmp_path), "--results", str(tmp_path / "out")
    )
    assert found == 2 and "F99: 'a' occurs" in said and "the code has moved" in said


def test_every_setting_that_is_probed_is_one_of_our_server() -> None:
    for model, settings in served.CELLS:
        assert model in FOLDERS or model in sized()
        for factor, level in settings.items():
            assert level in LEVELS[factor]


def test_a_copy_without_a_bug_is_one_only_if_it_is_named() -> None:
    (known,) = read_mutants(ids=[UNCHANGED])
    assert known.changed() == {}
    assert UNCHANGED not in {one.id for one in read_mutants()}


@pytest.mark.parametrize(
    "rows, code, said",
    [
        ([("A01", "probes"), (UNCHANGED, "")], 0, "1 of 1 caught"),
        ([("A01", "probes"), (UNCHANGED, "probes")], 1, "false alarm"),
        ([("A01", "probes"), ("A04", "")], 1, "1 of 2 caught"),
        ([("A01", "run")], 1, "A01: run batch, not caught after 1.2 s"),
        ([("A01", "a case that fails 19 of 20 times")], 1, "the reduced case is wrong"),
    ],
)
def test_every_bug_must_be_caught_and_nothing_where_there_is_none(
    rows: list[tuple[str, str]],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = Reduced("case.json", "batch", 2, 40, 8.04, fails=0.95, passes=True)
    made = [
        Row(
            id,
            section,
            "batch",
            "",
            7,
            1.23,
            "somewhere",
            case if section.startswith("a case") else None,
        )
        for id, section in rows
    ]
    monkeypatch.setattr("mutants.runner.run.run_all", lambda *_, **__: iter(made))
    ids = [word for id, _ in rows for word in ("--id", id)]
    found, out, err = run(capsys, "mutants", "--by", "http", *ids, "--results", str(tmp_path))
    assert found == code and said in out + err
    recorded = read_rows(tmp_path / "mutants.csv")
    caught, seconds = (recorded[recorded["metric"] == metric] for metric in ("caught", "seconds"))
    assert list(caught["benchmark"]) == list(seconds["benchmark"]) == [id for id, _ in rows]
    assert list(caught["value"]) == [made_row.caught for made_row in made] and set(
        seconds["value"]
    ) == {1.2}
    assert set(caught["params"]) == set(seconds["params"])
    sizes = dict(
        recorded[recorded["metric"].str.startswith("reduced_")][["metric", "value"]].itertuples(
            index=False
        )
    )
    expected = {
        "requests": 2.0,
        "tokens": 40.0,
        "seconds": 8.0,
        "fails": 0.95,
        "passes_unchanged": 1.0,
    }
    assert sizes == (
        {f"reduced_{name}": value for name, value in expected.items()} if "reduced" in said else {}
    )
    assert '"cell":"somewhere"' in recorded["params"][0]


def test_accuracy_alone_is_as_many_questions_as_a_full_guard_has(tmp_path: Path) -> None:
    (step,) = steps_of(("accuracy",), tmp_path).values()
    assert isinstance(step, partial) and step.args[:2] == (
        "accuracy",
        CHECKS["accuracy"].amounts["full"],
    )


def test_what_takes_too_long_or_dies_is_no_catch(forked: Forks) -> None:
    begin = "from __future__ import annotations"
    row = MutationRun(0.01).judge(mutant(Change("config.py", begin, begin)), ("quick",), forked)
    assert (row.section, row.rule, row.caught) == ("run", "time limit", False)
    dies = mutant(Change("config.py", begin, f"{begin}\n\nimport os\n\nos._exit(3)"))
    row = MutationRun(300).judge(dies, ("sanitizer",), forked)
    assert (row.section, row.rule, row.caught) == (
        "run",
        "death",
        False,
    ) and "exit code 3" in row.detail


def test_a_server_that_does_not_start_or_that_dies_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hybrid_kv.check.targets.target import TargetError

    def refuse(*_: object, root: Path) -> None:
        assert root == tmp_path
        raise TargetError("hybrid-kv serve does not start; it said: injected")

    monkeypatch.setattr(served, "_sound", lambda model, levels: (None, 64))
    monkeypatch.setattr(served.serve, "Served", refuse)
    found, _ = served.probe(tmp_path)
    assert (found.section, found.rule) == ("probes", "start") and "injected" in found.detail
    assert found.cell.startswith("guard_model")

    class Dying:
        target = type("Target", (), {"close": lambda self: None})()

        def run(self, *_: object) -> None:
            raise TargetError("died")

    monkeypatch.setattr(served, "Session", lambda *_: Dying())
    found, _ = served.probe(tmp_path)
    assert (found.section, found.rule, found.detail) == ("probes", "death", "died")
