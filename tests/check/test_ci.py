"""What machines read: the three forms of the same verdicts, and where they go."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from hybrid_kv.check.ci import (
    MAX_LETTERS,
    Verdict,
    junit_xml,
    markdown,
    plain,
    published,
    workflow_commands,
)
from tests.measure.dashboard.hostile import PAYLOADS

VERDICTS = [
    Verdict("layout, views", "ok", "", 1.5),
    Verdict("layout, <pages>", "failed", "page 1: 3%, not 4\nmore \x1b[2J of it\ud800", 0.25),
    Verdict("cost | hits", "void", "nothing\rhappened"),
    Verdict("seeds", "skipped", "the target offers no seed"),
]


def test_junit_has_a_case_for_each_verdict() -> None:
    (suite,) = ElementTree.fromstring(junit_xml("hybrid-kv guard", VERDICTS))
    assert " ".join(suite.attrib.values()) == "hybrid-kv guard 4 1 1 1 1.750"
    assert [case.get("name") for case in suite] == [one.name for one in VERDICTS]
    assert [[element.tag for element in case] for case in suite] == [
        [],
        ["failure"],
        ["error"],
        ["skipped"],
    ]
    assert suite[1][0].get("message") == "page 1: 3%, not 4" and suite[1][0].text.endswith(
        "more \ufffd[2J of it\ufffd"
    )


def test_a_value_of_a_workflow_command_ends_no_command() -> None:
    assert workflow_commands("guard", VERDICTS) == [
        (
            "::error title=guard%3A layout%2C <pages> failed::page 1: 3%25, not 4%0Amore "
            "\ufffd[2J of it\ufffd"
        ),
        "::error title=guard%3A cost | hits void::nothing%0Dhappened",
    ]


def test_the_summary_has_what_did_not_pass() -> None:
    first, _, *table = markdown("guard", VERDICTS).splitlines()
    assert (
        first == "### guard: 1 of 3 passed"
        and len(table) == 4
        and all(line.count("|") == 4 for line in table)
    )
    assert markdown("guard", VERDICTS[:1]) == "### guard: 1 of 1 passed\n\n"


def test_a_run_that_ends_early_has_failed_and_github_is_shown_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, junit = tmp_path / "summary.md", tmp_path / "tests.xml"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    with pytest.raises(OSError, match="disk"), published("guard", junit) as keep:
        keep(VERDICTS[:1])
        assert 'tests="1" failures="0"' in junit.read_text()
        raise OSError("disk")
    assert 'tests="2" failures="1"' in junit.read_text()
    assert capsys.readouterr() == (
        "",
        "::error title=guard%3A the run itself failed::ended early: disk\n",
    )
    assert summary.read_text().startswith("### guard: 1 of 2 passed\n")


@pytest.mark.parametrize("text", PAYLOADS)
def test_a_text_is_one_code_span_in_a_cell(text: str) -> None:
    tokens = (
        MarkdownIt("commonmark")
        .enable("table")
        .parse(f"| a | b |\n|---|---|\n| {plain(text)} | end |\n")
    )
    cells = [token.children for token in tokens if token.type == "inline"][2:]
    assert [[child.type for child in cell] for cell in cells] == [["code_inline"], ["text"]]
    assert cells[1][0].content == "end"


def test_a_text_is_short_and_never_empty() -> None:
    assert plain("x" * 1000) == f"`{'x' * (MAX_LETTERS - 1)}…`"
    assert plain(" \n ") == "–"
