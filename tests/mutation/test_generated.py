"""What operators make of the code, and which of it is hunted."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_kv.config import ConfigError
from hybrid_kv.guard.patterns import REQUIRED
from hybrid_kv.guard.play import Differences
from hybrid_kv.mutation import catch, equivalent, generated, hunt, sample
from hybrid_kv.mutation.generated import GUARD, TRITON, Generated, Source
from hybrid_kv.mutation.hunt import Forks, Hunt, Row
from hybrid_kv.results import append_rows
from tests.cli.run import run

TEXT = '''"""A text of 1 line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    X = 1


@wraps(2)
def f(x: List[3] = 4) -> Dict[5]:
    """Not 6."""
    y: Tuple[7] = ("ü", 8) if x else None
    assert y == 17
    _log.warning("%d", 9)
    os.kill(y, 19)
    for one in zip(x, y, strict=True):
        if not one:
            raise ValueError(f"{x + 10}" + str(11))
    return -12 + 0 * x


class C:
    def __repr__(self):
        return str(13)

    def check_integrity(self):
        return 18

    def g(self):
        return [
            14,
            self.f(15)
        ]
'''


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A package of two files, and the source of the larger one."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/f.py").write_text(TEXT, encoding="utf-8")
    (tmp_path / "cache/g.py").write_text("def g(x):\n    return x + 1\n")
    for module in (generated, sample):
        monkeypatch.setattr(module, "PACKAGE", tmp_path)
    equivalent._source.cache_clear()
    return Source("cache/f.py")


def all_of(source: Source) -> list[Generated]:
    return [made[0] for place in source.places() if (made := source.mutant(place))]


def test_neither_text_nor_types_nor_errors_nor_logs_nor_checks_are_changed(source: Source) -> None:
    changes = [mutant.change.split(" => ") for mutant in all_of(source) if "NumberReplacer" in mutant.id]
    numbers = [[re.findall(r"\b\d+", lines) for lines in change] for change in changes]
    touched = {int(a) for old, new in numbers for a, b in zip(old, new, strict=True) if a != b}
    assert {4, 8, 12, 14, 15} <= touched
    assert not touched & {2, 3, 6, 7, 9, 10, 11, 13, 17, 18, 19}
    assert not [mutant for mutant in all_of(source) if "strict=False" in mutant.text or "X = 2" in mutant.text]


def test_each_kind_of_operator_finds_its_place_and_says_what_it_changes(source: Source) -> None:
    changes = {mutant.id.split(":")[2]: mutant.change for mutant in all_of(source)}
    assert changes["AddNot"].startswith("f: if not one: => if not not one:")
    assert changes["ZeroIterationForLoop"] == "f: for one in zip(x, y, strict=True): => for one in []:"
    assert changes["ReplaceUnaryOperator_Delete_USub"] == "f: return -12 + 0 * x => return 12 + 0 * x"
    assert changes["ReplaceBinaryOperator_Add_Sub"] == "f: return -12 + 0 * x => return -12 - 0 * x"
    assert changes["NumberReplacer"] == "C.g: self.f(15) => self.f( 14)"


def test_code_that_compiles_to_the_same_is_no_mutant(source: Source) -> None:
    (Path(generated.PACKAGE) / "cache/g.py").write_text("def g(x):\n    if not x:\n        return 2 + 2\n")
    small = Source("cache/g.py")
    operators = Counter(place.operator for place in small.places())
    made = [mutant.id.split(":")[2] for mutant in all_of(small)]
    assert "ReplaceBinaryOperator_Add_Mul" in operators and "ReplaceBinaryOperator_Add_Mul" not in made
    ids = [mutant.id.split(":")[2] for mutant in sample.draw(GUARD, 50, 0) if mutant.file == "cache/g.py"]
    assert ("AddNot" in ids) != ("ReplaceUnaryOperator_Delete_Not" in ids), "both leave the not out"


def test_the_lines_of_a_mutant_are_those_of_its_statement(source: Source) -> None:
    lines = {mutant.change: list(mutant.lines) for mutant in all_of(source)}
    number = TEXT.splitlines().index("        return [") + 1
    assert lines["C.g: self.f(15) => self.f( 14)"] == list(range(number, number + 4))
    (loop,) = [own for change, own in lines.items() if "for one in []" in change]
    assert loop == [TEXT.splitlines().index("    for one in zip(x, y, strict=True):") + 1]


def test_a_digest_outlives_changes_of_other_functions(source: Source) -> None:
    before = {mutant.change: mutant.digest for mutant in all_of(source)}
    (Path(generated.PACKAGE) / "cache/f.py").write_text(TEXT.replace("14,", "16,").replace("X = 1", "X = 1\n"))
    after = {mutant.change: mutant.digest for mutant in all_of(Source("cache/f.py"))}
    same = {change for change in before if before[change] == after.get(change)}
    assert same == {change for change in before if change.startswith("f: ")} and len(same) < len(before)


def test_a_sample_has_each_file_and_a_larger_one_begins_with_it(source: Source) -> None:
    drawn = sample.draw(GUARD, 6, 7)
    assert {mutant.file for mutant in drawn[:2]} == {"cache/f.py", "cache/g.py"}
    assert sample.draw(GUARD, 4, 7) == drawn[:4]
    assert sample.draw(GUARD, 6, 8) != drawn
    assert len({mutant.digest for mutant in sample.draw(GUARD, 999, 7)}) == len(sample.draw(GUARD, 999, 7)) > 20
    assert Counter(mutant.file for mutant in sample.draw(GUARD, 12, 7))["cache/g.py"] in (2, 3)


def test_of_changed_lines_there_is_one_mutant_each(source: Source) -> None:
    numbers = {TEXT.splitlines().index(line) + 1 for line in ("    return -12 + 0 * x", "            14,")}
    drawn = sample.draw(GUARD, 999, 7, {"cache/f.py": numbers | {1, 2}, "cli/h.py": {1}})
    assert sorted(mutant.id.split(":")[1] for mutant in drawn) == sorted(map(str, numbers))


def test_the_changed_lines_are_those_of_git(source: Source) -> None:
    folder = Path(generated.PACKAGE)

    def git(*words: str) -> None:
        name = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "t")
    (folder / "cache/f.py").write_text(
        TEXT.replace("0 * x", "1 * x").replace("            14,\n", "            14,\n" * 3)
    )
    number = TEXT.splitlines().index("            14,") + 1
    assert sample.changed_lines("HEAD") == {
        "cache/f.py": {TEXT.splitlines().index("    return -12 + 0 * x") + 1, number, number + 1}
    }
    for name in ("nothing", "--output=x"):
        with pytest.raises(ConfigError, match=f"--changed-since {name}: git knows no such revision"):
            sample.changed_lines(name)


def test_an_id_names_one_mutant_again(source: Source) -> None:
    for mutant in all_of(source)[::7]:
        assert sample.by_id(GUARD, mutant.id) == mutant
    for name in ("cache/f.py:1:AddNot:1", "cache/h.py:1:AddNot:1", "F16"):
        with pytest.raises(ConfigError, match=f"--id {name}: "):
            sample.by_id(GUARD, name)


def test_each_kernel_of_triton_is_changed() -> None:
    for path in generated.PACKAGE.glob("kernels/*/*.py"):
        text, file = path.read_text(encoding="utf-8"), path.relative_to(generated.PACKAGE).as_posix()
        if "import triton.language" in text or "import AotCase" in text:
            assert file in generated.files(TRITON), file


def test_how_wide_a_launch_is_and_what_is_only_compiled_are_not_changed(source: Source) -> None:
    text = "def aot_cases():\n    return 1\n\n\ndef launch(f, x):\n    f(x + 2, num_warps=4, num_stages=1, BLOCK=8)\n"
    text += "    return {'num_warps': 4, 'x': 20}\n"
    (Path(generated.PACKAGE) / "cache/g.py").write_text(text)
    changed = "".join(mutant.change.split(" => ")[1] for mutant in all_of(Source("cache/g.py")))
    assert "x + 3" in changed and "BLOCK= 9" in changed and changed.count("num_warps=4, num_stages=1") > 2
    assert "'x': 21" in changed.replace("  ", " ") and changed.count("'num_warps': 4") > 1
    assert "aot_cases" not in {mutant.change.split(":")[0] for mutant in all_of(Source("cache/g.py"))}


def entry(change: str, file: str = "cache/f.py", proof: str = "It is so.") -> str:
    return f"- file: {file}\n  change: '{change}'\n  proof: {proof}\n"


def test_an_equivalent_mutant_is_known_by_its_text_wherever_it_moved(source: Source, tmp_path: Path) -> None:
    file = tmp_path / "equivalent.yaml"
    file.write_text(entry("f: return -12 + 0 * x => return -12 - 0 * x") + entry("C.g: self.f(15) => self.f( 14)"))
    (tmp_path / "cache/f.py").write_text("\n\n" + TEXT)
    assert len(equivalent.read_equivalent(file)) == 2


@pytest.mark.parametrize(
    "text, problem",
    [
        (entry("f: return 0 * x => return 1 * x"), "has no more"),
        (entry("C.g: return -12 + 0 * x => return 12"), "has no more"),
        (entry("f: return -12 + 0 * x"), "has no more"),
        (entry("f: return -12 + 0 * x => return 0", file="cache/gone.py"), "has no more"),
        (entry("f: return -12 + 0 * x => return 0", proof="''"), "or it has no proof"),
        ("- file: cache/f.py", "is no list of equivalent mutants: KeyError"),
        ("[", "is no list of equivalent mutants: ParserError"),
    ],
)
def test_an_entry_that_matches_nothing_is_refused(text: str, problem: str, source: Source, tmp_path: Path) -> None:
    file = tmp_path / "equivalent.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        equivalent.read_equivalent(file)


def test_what_is_proven_equivalent_matches_the_code() -> None:
    equivalent.read_equivalent()


def row(mutant: Generated, section: str = "") -> Row:
    return Row(mutant.id, True, section, "tokens" if section else "", "", 7, 1.0, **mutant.told())


def test_a_sample_goes_on_where_it_was_left(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "read_equivalent", lambda: {(first.file, first.change)})
    first, second, third, *_ = drawn = sample.draw(GUARD, 6, 7)
    csv = tmp_path / "mutants.csv"
    append_rows(csv, [*row(second, "exact model").records("quick+sanitizer"), *row(third).records("quick")])
    left, known = sample.choose(GUARD, 6, 7, None, (), csv)
    assert left == drawn[2:]
    assert known == [replace(row(second, "exact model"), seconds=0.0)]
    append_rows(csv, row(third).records("quick+sanitizer"))
    assert sample.choose(GUARD, 6, 7, None, (), csv)[0] == drawn[3:]
    assert sample.choose(GUARD, 6, 7, None, (), csv, again=True)[0] == drawn[2:]
    assert sample.choose(GUARD, None, 0, None, [second.id], csv) == ([second], [])


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--changed-since", "HEAD"], "give --generated too"),
        (["--generated", "3", "--id", "F16"], "leave out --id and --folder"),
        (["--generated", "3", "--by", "full"], "leave it out"),
        (["--again"], "give --generated too"),
        (["--by", "triton"], "give --generated too"),
        (["--by", "triton", "--id", "F16"], "give --generated too"),
        (["--by", "triton", "--id", "cache/manager.py:1:AddNot:1"], "give --by quick"),
        (["--id", "kernels/ssd/slots.py:1:AddNot:1"], "give --by triton"),
        (["--id", "cache/f.py:1:AddNot:1", "--by", "http"], "leave it out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = run(capsys, "mutants", *arguments, "--results", str(tmp_path))
    assert code == 2 and problem in said


def test_survivors_are_listed_by_their_lines(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = sample.draw(GUARD, 2, 7)
    monkeypatch.setattr(hunt, "hunt_all", lambda *_, **__: iter([row(one, "run"), row(other)]))
    monkeypatch.setattr(sample, "read_equivalent", set)
    code, out, _ = run(capsys, "mutants", "--generated", "2", "--seed", "7", "--results", str(tmp_path))
    assert code == 1
    assert out == f"{other.id} (not caught)\n    {other.change}\n1 of 2 caught: run 1\n"


# ---- the hunt ----


def mutant(text: str, file: str = "config.py") -> Generated:
    path = hunt.PACKAGE / file
    return Generated("Z01", file, path.read_text(encoding="utf-8") + text, range(1, 2), "module: a => b", "0")


def test_a_generated_mutant_that_loops_or_dies_was_caught(forked: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = Hunt(("quick",), 300).ask(mutant("\nimport os\n\nos._exit(3)\n"), forked)
    assert (dies.section, dies.rule, dies.caught) == ("run", "death", True)
    monkeypatch.setattr(catch, "LOOPS", 0.01)
    with pytest.raises(catch.LoopError, match="still at it"), catch._no_loop(catch.LOOPS):
        while True:
            pass


def test_what_no_step_reaches_is_not_hunted() -> None:
    found = Hunt(("quick", "sanitizer"), 300, reached={"config.py": {2: ["plan"]}}).ask(mutant(""), None)  # type: ignore[arg-type]
    assert (found.executed, found.caught, found.problem) == (False, False, "not reached")


def test_what_an_import_reaches_is_hunted_by_all() -> None:
    reached = {"config.py": {1: ["plan", "scenario 11"], 2: ["scenario 2"], 3: [catch.IMPORT, "plan"]}}
    of_lines = Hunt(("quick",), 300, reached=reached)
    for lines, expected in (
        (range(1, 3), ["scenario 2", "scenario 11", "plan"]),
        (range(1, 4), None),
        (range(9, 10), []),
    ):
        assert of_lines._steps(replace(mutant(""), lines=lines)) == expected
    assert Hunt(("quick",), 300)._steps(mutant("")) is None


def test_a_hunt_is_by_the_steps_that_reach_the_mutant(tmp_path: Path) -> None:
    def names(ways: tuple[str, ...], reached: list[str] | None) -> list[str]:
        return [*catch._steps(ways, 9, tmp_path, reached)]

    every = names(("quick",), None)
    assert every[0] == "first" and every[-1] == catch.EXACT and {"plan", "kernels routers", "costs"} < {*every}
    assert names(("quick", "sanitizer"), None) == [*every[:-1], catch.SANITIZER]
    assert names(("quick",), ["costs", "kernels routers"]) == ["kernels routers", "costs"]
    assert names(("quick",), ["scenario 3", "plan"]) == ["first", "plan", catch.EXACT]
    assert names(("quick", "sanitizer"), ["scenario 3"]) == ["first", catch.SANITIZER]


def test_scenarios_that_are_left_out_count_for_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []
    patterns = [*REQUIRED]

    def play(number: int, sanitize: bool) -> Differences:
        played.append(number)
        return Differences(seen=Counter({patterns[number]: 1}), num_requests=1)

    monkeypatch.setattr(catch, "_play", play)
    rest = {*patterns} - {patterns[2], patterns[5]}
    assert not catch.Scenarios(False, tmp_path, [2, 5], [*rest]).end(9).section
    assert played == [2, 5]
    found = catch.Scenarios(False, tmp_path, [2], [*rest]).end(9)
    assert (found.rule, found.detail) == ("void", patterns[5])


def test_lines_know_the_steps_that_reached_them() -> None:
    reach, before = catch.Reach([__file__]), sys.gettrace()
    sys.settrace(reach)
    try:
        for step, x in (("a", False), ("b", False), ("c", True)):
            reach.begin(step)
            _branch(x)
    finally:
        sys.settrace(before)
    first = _branch.__code__.co_firstlineno
    assert [reach.steps[__file__].get(first + i) for i in (1, 2, 3, 4)] == [["a", "b", "c"], ["c"], ["a", "b"], None]


def test_what_an_import_reaches_is_no_step_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first scenario would be the only one to hunt a constant."""
    (tmp_path / "late_constant.py").write_text("X = 1\n\n\ndef f():\n    return X\n")
    monkeypatch.syspath_prepend(tmp_path)

    def play(number: int, sanitize: bool) -> Differences:
        __import__("late_constant").f()
        return Differences(num_requests=1)

    monkeypatch.setattr(catch, "_play", play)
    monkeypatch.setattr(catch, "_sections", lambda *_: {})
    file = str(tmp_path / "late_constant.py")
    before = sys.gettrace()
    found = catch.reach({"files": [file], "modules": ["late_constant"], "amount": 2}, tmp_path)
    sys.settrace(before)
    assert found["steps"][file][1] == [catch.IMPORT] and found["steps"][file][5] == ["scenario 0", "scenario 1"]


def _branch(x: bool) -> int:
    if x:
        return 1
    return 2
