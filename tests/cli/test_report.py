"""`hybrid-kv report`: what it writes, and what it refuses in one line."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hybrid_kv.measure.results import read_rows
from hybrid_kv.measure.results.dataset import export_rows
from tests.cli import run as cli
from tests.cli.run import raising
from tests.measure.dashboard.kinds import everything
from tests.measure.dashboard.rows import row, write


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return cli.run(capsys, "report", *arguments)


def test_it_writes_the_page_and_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, site, text = (
        write(tmp_path / "rows", everything()),
        tmp_path / "site",
        tmp_path / "summary.md",
    )
    options = ("--repository", "https://example.org/a/b", "--site", "https://a.example.org/b/")
    options += ("--machine", "rack, H200")
    code, out, err = run(capsys, "--results", rows, "--out", site, "--markdown", text, *options)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "✕ HEAD is wrong",
        "right? ✕ no: 1 check failed",
        "slower? ✕ yes: state_update slots +19.8 % worse",
        "stale: guard by a commit that this checkout lacks: hybrid-kv guard --record",
        "stale: kernels by a commit that this checkout lacks: hybrid-kv kernels --update",
        'next: hybrid-kv guard -k "layout"',
        str(site / "index.html"),
    ]
    html = (site / "index.html").read_text()
    assert "https://example.org/a/b/commit/" in html
    assert "<option selected>rack, H200</option>" in html
    assert "| ✕ fail | 0 of 1 |" in text.read_text()
    assert "[`0004100`](https://a.example.org/b/commits/000410004100.html)" in text.read_text()
    assert sorted(file.name for file in site.iterdir()) == ["commits", "index.html", "rows.parquet"]
    assert len(list((site / "commits").iterdir())) == 44
    assert "https://example.org/a/b/commit/" in (site / "commits" / "000410004100.html").read_text()
    assert (
        '<a href="rows.parquet" download>' in html
        and "https://example.org/a/b/blob/HEAD/docs/results.md" in html
    )
    assert len(read_rows(site / "rows.parquet")) == len(everything())
    assert "asv/index.html" not in html


def test_it_links_asvs_pages_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, site = write(tmp_path / "rows", everything()), tmp_path / "site"
    (site / "asv").mkdir(parents=True)
    (site / "asv" / "index.html").touch()
    assert run(capsys, "--results", rows, "--out", site)[0] == 0
    assert 'href="asv/index.html"' in (site / "index.html").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--results", "nowhere"), "nowhere is no folder with results"),
        (("--machine", "mars"), "no row is from machine 'mars'"),
        (("--repository", "example.org"), "'example.org' is not the URL of a repository"),
        (("--site", "https://x/)["), "'https://x/)[' is not the URL of a site"),
        (("--markdown", "/dev/null/summary.md"), "/dev/null cannot be written"),
        (("--markdown", "."), ". is a folder"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_nothing_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "results", everything())
    assert said in cli.refused(capsys, "report", *options)
    assert not (tmp_path / "site").exists()


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that `report` says of `rows` in a folder; nothing is written."""
    places = ["--results", folder / "rows", "--out", folder / "site", "--markdown", folder / "s.md"]
    err = cli.refused(capsys, "report", *places)
    assert len(err) < 600
    assert not [
        path
        for path in folder.rglob("*")
        if "site" in path.parts or path.suffix in (".md", ".part")
    ]
    return err


def test_a_folder_without_results_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    assert "rows has no CSV of results; `hybrid-kv guard --results" in refused(tmp_path, capsys)
    (tmp_path / "rows" / "other.csv").write_text("a,b\n1,2\n")
    assert "has no CSV of results" in refused(tmp_path, capsys)


def test_a_data_set_is_results_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_rows([write(tmp_path / "rows", everything()) / "made.csv"], tmp_path / "all.parquet")
    assert run(capsys, "--results", tmp_path / "all.parquet", "--out", tmp_path / "site")[0] == 0
    assert len(read_rows(tmp_path / "site" / "rows.parquet")) == len(everything())


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_report_that_cannot_be_finished_leaves_no_part(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
) -> None:
    write(tmp_path / "rows", [row(0, verdict="pass")])
    monkeypatch.setattr("hybrid_kv.files.os.replace", raising(failure))
    code, _, err = run(capsys, "--results", tmp_path / "rows", "--out", tmp_path / "site")
    assert (code, err.count("\n")) == (130 if isinstance(failure, KeyboardInterrupt) else 2, 1)
    assert not list((tmp_path / "site").iterdir())
