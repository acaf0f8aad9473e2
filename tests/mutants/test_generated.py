"""What operators make of the code, and which of it is run."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_kv.check.guard.patterns import REQUIRED
from hybrid_kv.check.guard.play import Differences
from hybrid_kv.config import ConfigError
from hybrid_kv.measure.results import append_rows
from mutants.runner import equivalent, generated, guard, sample
from mutants.runner import run as runs
from mutants.runner.generated import Generated, Source
from mutants.runner.mutant import PACKAGE
from mutants.runner.run import Forks, MutationRun, Row
from tests.bench.bisect.toy import commit, git
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
    equivalent.cached_source.cache_clear()
    return Source("cache/f.py")


def all_of(source: Source) -> list[Generated]:
    return [made[0] for place in source.places() if (made := source.mutant(place))]


def test_neither_text_nor_types_nor_errors_nor_logs_nor_checks_are_changed(source: Source) -> None:
    changes = [
        mutant.change.split(" => ") for mutant in all_of(source) if "NumberReplacer" in mutant.id
    ]
    numbers = [[re.findall(r"\b\d+", lines) for lines in change] for change in changes]
    touched = {int(a) for old, new in numbers for a, b in zip(old, new, strict=True) if a != b}
    assert {4, 8, 12, 14, 15} <= touched
    assert not touched & {2, 3, 6, 7, 9, 10, 11, 13, 17, 18, 19}
    assert not [
        mutant
        for mutant in all_of(source)
        if "strict=False" in mutant.text or "X = 2" in mutant.text
    ]


def test_each_kind_of_operator_finds_its_place_and_says_what_it_changes(source: Source) -> None:
    changes = {mutant.id.split(":")[2]: mutant.change for mutant in all_of(source)}
    assert changes["AddNot"].startswith("f: if not one: => if not not one:")
    assert (
        changes["ZeroIterationForLoop"] == "f: for one in zip(x, y, strict=True): => for one in []:"
    )
    assert (
        changes["ReplaceUnaryOperator_Delete_USub"] == "f: return -12 + 0 * x => return 12 + 0 * x"
    )
    assert changes["ReplaceBinaryOperator_Add_Sub"] == "f: return -12 + 0 * x => return -12 - 0 * x"
    assert changes["NumberReplacer"] == "C.g: self.f(15) => self.f( 14)"


def test_code_that_compiles_to_the_same_is_no_mutant(source: Source) -> None:
    (Path(generated.PACKAGE) / "cache/g.py").write_text(
        "def g(x):\n    if not x:\n        return 2 + 2\n"
    )
    small = Source("cache/g.py")
    operators = Counter(place.operator for place in small.places())
    made = [mutant.id.split(":")[2] for mutant in all_of(small)]
    assert (
        "ReplaceBinaryOperator_Add_Mul" in operators and "ReplaceBinaryOperator_Add_Mul" not in made
    )
    ids = [
        mutant.id.split(":")[2]
        for mutant in sample.draw(None, 50, 0)
        if mutant.file == "cache/g.py"
    ]
    assert ("AddNot" in ids) != ("ReplaceUnaryOperator_Delete_Not" in ids), "both leave the not out"


def test_a_digest_outlives_changes_of_other_functions(source: Source) -> None:
    before = {mutant.change: mutant.digest for mutant in all_of(source)}
    (Path(generated.PACKAGE) / "cache/f.py").write_text(
        TEXT.replace("14,", "16,").replace("X = 1", "X = 1\n")
    )
    after = {mutant.change: mutant.digest for mutant in all_of(Source("cache/f.py"))}
    same = {change for change in before if before[change] == after.get(change)}
    assert same == {change for change in before if change.startswith("f: ")} and len(same) < len(
        before
    )


def test_a_sample_has_each_file_and_a_larger_one_begins_with_it(source: Source) -> None:
    drawn = sample.draw(None, 6, 7)
    assert {mutant.file for mutant in drawn[:2]} == {"cache/f.py", "cache/g.py"}
    assert sample.draw(None, 4, 7) == drawn[:4]
    assert sample.draw(None, 6, 8) != drawn
    assert (
        len({mutant.digest for mutant in sample.draw(None, 999, 7)})
        == len(sample.draw(None, 999, 7))
        > 20
    )
    assert Counter(mutant.file for mutant in sample.draw(None, 12, 7))["cache/g.py"] in (2, 3)


def test_of_changed_lines_there_is_one_mutant_each(source: Source) -> None:
    numbers = {
        TEXT.splitlines().index(line) + 1 for line in ("    return -12 + 0 * x", "            14,")
    }
    drawn = sample.draw(None, 999, 7, {"cache/f.py": numbers | {1, 2}, "cli/h.py": {1}})
    assert sorted(mutant.id.split(":")[1] for mutant in drawn) == sorted(map(str, numbers))


def test_the_changed_lines_are_those_of_git(source: Source) -> None:
    folder = Path(generated.PACKAGE)
    git(folder, "init", "-q")
    commit(folder, {})
    text = TEXT.replace("0 * x", "1 * x").replace("            14,\n", "            14,\n" * 3)
    (folder / "cache/f.py").write_text(text)
    edited, number = (
        TEXT.splitlines().index(line) + 1 for line in ("    return -12 + 0 * x", "            14,")
    )
    assert sample.changed_lines("HEAD") == {"cache/f.py": {edited, number, number + 1}}
    for name in ("nothing", "--output=x"):
        with pytest.raises(
            ConfigError, match=f"--changed-since {name}: git knows no such revision"
        ):
            sample.changed_lines(name)


def test_an_id_names_one_mutant_again(source: Source) -> None:
    for mutant in all_of(source)[::7]:
        assert sample.by_id(mutant.id) == mutant
    for name in ("cache/f.py:1:AddNot:1", "cache/h.py:1:AddNot:1", "F16"):
        with pytest.raises(ConfigError, match=f"--id {name}: "):
            sample.by_id(name)


def test_how_wide_a_launch_is_is_not_changed(source: Source) -> None:
    text = "def launch(f, x):\n    f(x + 2, num_warps=4, num_stages=1, BLOCK=8)\n"
    text += "    return {'num_warps': 4, 'x': 20}\n"
    (Path(generated.PACKAGE) / "cache/g.py").write_text(text)
    changed = "".join(mutant.change.split(" => ")[1] for mutant in all_of(Source("cache/g.py")))
    assert (
        "x + 3" in changed
        and "BLOCK= 9" in changed
        and changed.count("num_warps=4, num_stages=1") > 2
    )
    assert "'x': 21" in changed.replace("  ", " ") and changed.count("'num_warps': 4") > 1


def entry(change: str, file: str = "cache/f.py", proof: str = "It is so.") -> str:
    return f"- file: {file}\n  change: '{change}'\n  proof: {proof}\n"


def test_the_equivalent_mutants_are_of_code_that_is_there() -> None:
    assert equivalent.read_equivalent()


def test_an_equivalent_mutant_is_known_by_its_text_wherever_it_moved(
    source: Source, tmp_path: Path
) -> None:
    file = tmp_path / "equivalent.yaml"
    file.write_text(
        entry("f: return -12 + 0 * x => return -12 - 0 * x")
        + entry("C.g: self.f(15) => self.f( 14)")
    )
    (tmp_path / "cache/f.py").write_text("\n\n" + TEXT)
    assert len(equivalent.read_equivalent(file)) == 2


def test_proofs_of_code_that_has_gone_are_dropped(source: Source, tmp_path: Path) -> None:
    file, kept = tmp_path / "equivalent.yaml", entry("f: return -12 + 0 * x => return -12 - 0 * x")
    file.write_text("# Proofs.\n" + entry("f: gone => here") + kept + entry("C.g: gone => here"))
    assert equivalent.prune(file) == [
        "cache/f.py: f: gone => here",
        "cache/f.py: C.g: gone => here",
    ]
    assert file.read_text() == "# Proofs.\n" + kept


@pytest.mark.parametrize(
    "text, problem",
    [
        (entry("f: return 0 * x => return 1 * x"), "has no more"),
        (entry("C.g: return -12 + 0 * x => return 12"), "has no more"),
        (entry("f: return -12 + 0 * x"), "has no more"),
        (entry("f: return -12 + 0 * x => return 0", file="cache/gone.py"), "has no more"),
        (entry("f: return -12 + 0 * x => return 0", proof="''"), "or the entry has no proof"),
        ("- file: cache/f.py", "is not a list of equivalent mutants: KeyError"),
        ("[", "is not a list of equivalent mutants: ParserError"),
    ],
)
def test_an_entry_that_matches_nothing_is_refused(
    text: str, problem: str, source: Source, tmp_path: Path
) -> None:
    file = tmp_path / "equivalent.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        equivalent.read_equivalent(file)


def row(mutant: Generated, section: str = "") -> Row:
    return Row(mutant.id, section, "tokens" if section else "", "", 7, 1.0, **mutant.labels())


def test_a_sample_goes_on_where_it_was_left(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "read_equivalent", lambda: {(first.file, first.change)})
    first, second, third, *_ = drawn = sample.draw(None, 6, 7)
    by = "+".join(second.ways("quick"))
    csv = tmp_path / "mutants.csv"
    append_rows(csv, [*row(second, "exact model").records(by), *row(third).records("full")])
    left, known = sample.choose(None, 6, 7, None, (), csv)
    assert left == drawn[2:]
    assert known == [replace(row(second, "exact model"), seconds=0.0)]
    append_rows(csv, row(third).records(by))
    assert sample.choose(None, 6, 7, None, (), csv)[0] == drawn[3:]
    assert sample.choose(None, 6, 7, None, (), csv, again=True)[0] == drawn[2:]
    assert sample.choose(None, None, 0, None, [second.id], csv) == ([second], [])


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--changed-since", "HEAD"], "give --generated too"),
        (["--generated", "3", "--id", "F16"], "leave out --id and --folder"),
        (["--generated", "3", "--by", "full"], "generated mutants are killed by quick or tests"),
        (["--again"], "give --generated too"),
        (["--by", "tests", "--id", "F16"], "known bugs by all but tests"),
        (["--id", "cli/plan.py:1:AddNot:1"], "use one that a row has"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = run(capsys, "mutants", *arguments, "--results", str(tmp_path))
    assert code == 2 and problem in said


def test_survivors_are_listed_by_their_lines(
    source: Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = sample.draw(None, 2, 7)
    monkeypatch.setattr(runs, "run_all", lambda *_, **__: iter([row(one, "run"), row(other)]))
    monkeypatch.setattr(sample, "read_equivalent", set)
    code, out, _ = run(
        capsys, "mutants", "--generated", "2", "--seed", "7", "--results", str(tmp_path)
    )
    assert code == 1
    assert out == f"{other.id} (not caught)\n    {other.change}\n1 of 2 caught: run 1\n"


# ---- the run ----


def test_a_generated_mutant_that_dies_was_caught_and_a_loop_ends(forked: Forks) -> None:
    text = (PACKAGE / "config.py").read_text(encoding="utf-8") + "\nimport os\n\nos._exit(3)\n"
    dies = MutationRun(300).judge(
        Generated("Z01", "config.py", text, "module: a => b", "0"), ("quick",), forked
    )
    assert (dies.section, dies.rule, dies.caught) == ("run", "death", True)
    with pytest.raises(guard.LoopError, match="not done after"), guard.time_limit(0.01):
        while True:
            pass


def test_the_exact_model_begins_and_ends_a_run(tmp_path: Path) -> None:
    every = [*guard.steps_of(("quick",), tmp_path)]
    assert every[0] == "first" and every[-1] == guard.EXACT and {"costs", "eviction"} < {*every}
    assert "block ids" not in every
    assert [*guard.steps_of(("quick", "sanitizer"), tmp_path)] == [*every[:-1], guard.SANITIZER]


def test_what_never_happens_is_found_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hybrid_kv.check.guard.play.run_scenario", lambda _: Differences(num_requests=2)
    )
    scenarios = guard.Scenarios(tmp_path, sanitize=False)
    assert scenarios.play(3) == guard.Catch(requests=4)
    found = scenarios.end(5)
    assert (found.section, found.rule, found.requests) == (guard.EXACT, "void", 6)
    assert next(iter(REQUIRED)) in found.detail
