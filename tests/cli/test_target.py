"""`hybrid-kv check` and its older spelling: what it prints, writes and rejects.

Probes are tested in tests/check.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hybrid_kv.check.probes import guarded
from hybrid_kv.check.probes.guarded import Guarded
from hybrid_kv.check.probes.session import Outcome, Session
from hybrid_kv.check.targets.target import Inside, Known
from hybrid_kv.cli import target
from hybrid_kv.cli.publish import EngineRun, publish
from hybrid_kv.measure.results import read_rows
from tests.check.probes.toy import ToyKind, ToyOracle
from tests.cli.run import raising, refused, run


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ToyKind:
    """The toy engine; one of its builds is old."""
    kinds = {"toy": ToyKind(), "broken": ToyKind(bug="hit")}
    builds = {"old/broken": kinds["broken"], "old/sound": kinds["toy"]}
    known = target.kind_of
    monkeypatch.setattr(
        target,
        "kind_of",
        lambda name, python=None: builds.get(python) or kinds.get(name) or known(name, python),
    )
    monkeypatch.setattr(target, "model_folder", lambda model: nullcontext(str(tmp_path)))
    monkeypatch.setattr(target, "num_workers", lambda jobs: 1)  # another process knows no toy
    monkeypatch.setattr(guarded, "Oracle", lambda folder, dtype: ToyOracle())
    (tmp_path / "config.json").write_text('{"model_type": "toy", "vocab_size": 50}')
    monkeypatch.chdir(tmp_path)
    return kinds["toy"]


QUICK = ("guard", "--quick", "--matrix", "prefix=on", "-k", "repeat")


def test_a_sound_engine_ends_with_0_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, *QUICK, "--target", "toy")
    first, *_, last = out.splitlines()
    assert (code, first) == (0, "plain: 2 right")
    assert last == (
        "toy 1.0, qwen3_5_text: 64 answers, 1,958 tokens with their prompts; 64 judged "
        "right or wrong"
    )
    assert not (tmp_path / "repro").exists()


@pytest.mark.parametrize(("engine", "code"), [("toy", 0), ("broken", 1)])
def test_check_is_guard_with_a_target(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str, code: int
) -> None:
    """Both end, print and keep the same, but for the title of the verdicts, and seconds."""
    options = ("--quick", "--matrix", "prefix=on", "-k", "repeat", "--seed", "3")
    seen = []
    for number, words in enumerate((("check", engine), ("guard", "--target", engine))):
        places = {
            "--repro": f"{number}/repro",
            "--junit-xml": f"{number}/tests.xml",
            "--publish": f"{number}/pages",
        }
        found, out, err = run(
            capsys, *words, *options, *(word for pair in places.items() for word in pair)
        )
        rows = (
            read_rows(tmp_path / f"{number}/pages/rows.csv")
            .drop(columns=["run_id", "time_utc"])
            .fillna("")
        )
        suite = ElementTree.parse(tmp_path / places["--junit-xml"]).find("testsuite")
        cases = [case.get("name") for case in suite.iter("testcase")]
        files = sorted(file.name for file in (tmp_path / str(number)).rglob("*.*"))
        assert found == code and suite.get("name") == f"hybrid-kv {' '.join(words)}"
        seen.append((out, re.sub(r" in \d+ s: .*", "", err), rows.to_dict("records"), cases, files))
    assert seen[0] == seen[1] and seen[0][2]


def test_a_family_is_made_in_the_size_that_the_engine_takes(
    toy: ToyKind, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.size = "small"
    models = []
    monkeypatch.setattr(
        target, "model_folder", lambda model: models.append(model) or nullcontext(".")
    )
    for model in ("lfm2", "lfm2:tiny", "some/hub-id"):
        assert run(capsys, *QUICK, "--target", "toy", "--model", model)[0] == 0
    assert models == ["lfm2:small", "lfm2:tiny", "some/hub-id"]


def test_the_document_says_what_backs_each_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *QUICK, "--target", "broken", "--json")
    found = json.loads(out)
    plain, _, _, wrong = found["outcomes"]
    assert (plain["verdict"], plain["num_answers"], plain["num_judged"]) == ("right", 8, 8)
    assert (
        wrong["verdict"] == "wrong"
        and "the oracle has" in wrong["detail"]
        and wrong["moved"]["hits"] > 0
    )
    assert found["num_tokens"] == sum(one["num_tokens"] for one in found["outcomes"]) > 0
    assert found["seconds"] >= 0 and found["seed"] == 0


def test_what_was_found_is_kept_if_making_it_small_is_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(target, "shrink", raising(KeyboardInterrupt()))
    code, _, err = run(capsys, *QUICK, "--target", "broken", "--out", "found.json")
    assert code != 0 and "interrupted" in err
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["probe"] for one in found["outcomes"] if one["verdict"] == "wrong"] == ["repeat"]


def test_what_has_an_answer_is_kept_if_the_next_probe_is_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = [Session.run] * 2

    def interrupted(*arguments: Any) -> Outcome:
        if not left:
            raise KeyboardInterrupt
        return left.pop()(*arguments)

    monkeypatch.setattr(Session, "run", interrupted)
    assert run(capsys, *QUICK, "--target", "toy", "--out", "found.json")[0] != 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["probe"] for one in found["outcomes"]] == ["alone", "repeat"]


def test_a_wrong_answer_ends_with_1_and_can_be_played_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, *QUICK, "--target", "broken", "--json", "--out", "found.json")
    found = json.loads(out)
    assert code == 1 and found == json.loads((tmp_path / "found.json").read_text())
    wrong = [one for one in found["outcomes"] if one["verdict"] == "wrong"]
    assert [(one["probe"], one["settings"]) for one in wrong] == [("repeat", {"prefix": "on"})]
    assert "shrunk to 2 requests" in err
    (played,) = (tmp_path / "repro").glob("*.json")
    for words in (("replay",), ("guard", "--replay")):
        code, out, _ = run(capsys, *words, str(played))
        assert code == 1 and "still wrong" in out
    played.write_text(played.read_text().replace('"broken"', '"toy"'))
    for words in (("replay",), ("guard", "--replay")):
        code, out, _ = run(capsys, *words, str(played))
        assert code == 0 and ": right" in out


@pytest.mark.parametrize(
    ("old", "code", "word"), [("old/sound", 1, "wrong"), ("old/broken", 0, "as before")]
)
def test_what_an_old_build_has_too_is_no_news(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, code: int, word: str
) -> None:
    found, out, _ = run(
        capsys, *QUICK, "--target", "broken", "--against", old, "--junit-xml", "deep/tests.xml"
    )
    assert found == code and word in out and (tmp_path / "repro").exists() == bool(code)
    suite = ElementTree.parse(tmp_path / "deep/tests.xml").find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == (
        "4",
        str(code),
        str(1 - code),
    )


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [(["right", "void"], 3), (["void", "wrong"], 1), (["inconclusive"], 1), (["not supported"], 0)],
)
def test_void_alone_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verdicts: list[str],
    code: int,
) -> None:
    monkeypatch.setattr(target, "guard", lambda *_: None)
    monkeypatch.setattr(
        target.ProbeRun, "found", lambda _: [Outcome("repeat", {}, one) for one in verdicts]
    )
    assert run(capsys, *QUICK, "--target", "toy")[0] == code


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "none"], "none: there is no such engine; use one of ours"),
        (["--target", "toy", "--matrix", "prefix=1"], "prefix=1: use one of off, on"),
        (["--target", "toy", "--against", "none"], "there is no such engine"),
        (["--target", "toy", "-k", "nothing"], "no probe has this in its name"),
        (["--target", "toy", "--record"], "--target does not go with --record"),
        (
            ["--target", "toy", "--exact", "--weights", "random"],
            "--weights and --exact exclude each other",
        ),
        (["--against", "toy"], "hybrid-kv check ENGINE"),
        (["--replay", "config.json", "--target", "toy"], "--replay does not go with --target"),
        (
            ["--target", "ours", "--python", "x"],
            "--python x: ours runs in this Python; leave it out",
        ),
        (
            ["--target", "vllm", "--python", "no/python"],
            "no/python: No such file or directory; give the Python of",
        ),
        (
            ["--target", "vllm", "--against", sys.executable],
            f"{sys.executable} has no vllm; give the Python of",
        ),
        (["--replay", "config.json"], "config.json is no scenario"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert said in refused(capsys, "guard", *options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check"], "Missing argument 'engine'"),
        (["check", "none"], "there is no such engine; use one of ours"),
        (["check", "toy", "--record"], "No such option: --record"),
        (
            ["check", "toy", "--exact", "--weights", "random"],
            "--weights and --exact exclude each other",
        ),
        (["check", "toy", "--quick", "--long"], "--quick and --long exclude each other"),
        (["check", "toy", "--publish", "/dev/null/x"], "/dev/null/x/rows.csv: Not a directory"),
        (["replay"], "Missing argument 'file'"),
        (["replay", "config.json"], "config.json is no scenario"),
    ],
)
def test_what_the_newer_spellings_cannot_run_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(capsys, *words)


def test_an_exact_model_runs_before_the_other_one_where_the_engine_can(
    toy: ToyKind, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.inside = Inside({}, (), {"kda": ()})
    models = []
    monkeypatch.setattr(
        target, "model_folder", lambda model: models.append(model) or nullcontext(".")
    )
    monkeypatch.setattr(target, "is_exact", lambda folder: True)  # no folder is written here
    for options in (
        (),
        ("--exact",),
        ("--weights", "random"),
        ("--matrix", "prefix=on"),
        ("--model", "exact:gdn"),
    ):
        assert run(capsys, "guard", "--quick", "-k", "repeat", "--target", "toy", *options)[0] == 0
    family = "qwen3_5_text"
    both = ["exact", "exact:kda"]
    assert models == [*both, family, *both, family, family, "exact:gdn"]


@pytest.mark.parametrize("is_central", [True, False])
def test_beside_an_exact_model_random_weights_have_all_settings_where_models_handle_caches(
    toy: ToyKind,
    is_central: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy.inside = Inside({}, (), is_central=is_central)
    sizes = []

    class Recorded(target.ProbeRun):
        def __init__(
            self,
            guarded: Guarded,
            cells: Sequence[Mapping[str, str]] | None,
            select: Sequence[str],
            report: Callable[[Outcome], None],
            size: str,
        ) -> None:
            sizes.append((size, guarded.thorough))
            super().__init__(guarded, [{}], select, report, size)

    monkeypatch.setattr(target, "ProbeRun", Recorded)
    run(capsys, "guard", "--target", "toy")
    assert sizes == [("full", False), ("quick", False) if is_central else ("full", True)]


def test_a_folder_of_pages_has_the_newest_verdict_of_each_release(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("broken", "toy"):
        run(capsys, *QUICK, "--target", name, "--publish", "pages")
        page = (tmp_path / "pages/toy.md").read_text()
        assert "| setting | 1.0 |" in page and "| `plain` | right |" in page
        assert f"| `prefix=on` | {'found' if name == 'broken' else 'right'} |" in page
        assert ("- 1.0, prefix=on: `repeat: " in page) == (name == "broken")
    rows = read_rows(tmp_path / "pages/rows.csv")
    assert [*rows["verdict"]] == ["pass", "pass", "fail", "fail", "pass", "pass", "pass", "pass"]
    assert f"{rows['n'][::2].sum()} answers" in page
    assert (
        f"| tokens | {int(rows['value'][rows['metric'] == 'tokens'].sum()):,} |\n\nSeeds 0." in page
    )


def test_a_page_has_a_column_for_each_runner_of_a_release(tmp_path: Path) -> None:
    settings = (
        {},
        {"runner": "v1"},
        {"runner": "cpu", "prefix": "on"},
        {"runner": "v2", "prefix": "on"},
    )
    publish(
        tmp_path,
        EngineRun("toy", "1.0", "exact", 0, "v2"),
        [Outcome("alone", one) for one in settings],
    )
    # rows without a runner
    publish(tmp_path, EngineRun("toy", "1.0", "exact", 0), [Outcome("alone", {}, "void")])
    page = (tmp_path / "toy.md").read_text()
    assert "| setting | 1.0 v2 | 1.0 v1 | 1.0 |" in page and "its runner for CPUs" in page
    assert (
        "| `plain` | right | right | void |" in page
        and "| `prefix=on` | right | – | right |" in page
    )


def test_what_is_known_is_counted_and_named(
    toy: ToyKind, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.known = (Known("1.0", "toy_script", probe="repeat", setting="prefix=on"),)
    toy.how = {"bug": "hit"}
    code, out, _ = run(capsys, *QUICK, "--target", "toy")
    assert code == 0 and "prefix=on: 1 right, 1 known" in out
    assert out.splitlines()[-1] == "1 known: toy_script (docs/found.md)"


def test_rows_of_another_schema_are_refused_before_any_probe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n")
    assert "rows.csv" in refused(capsys, *QUICK, "--target", "toy", "--publish", ".")
