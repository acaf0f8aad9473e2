"""`hybrid-kv report`: what it writes, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_kv.cli import main
from tests.dashboard.kinds import everything
from tests.dashboard.rows import write

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["report", *map(str, arguments)])
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err  # type: ignore[return-value]


def test_it_writes_the_page_and_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, site, text = write(tmp_path / "rows", everything()), tmp_path / "site", tmp_path / "summary.md"
    options = ("--repository", "https://example.org/a/b", "--machine", "rack, H200")
    code, out, err = run(capsys, "--results", rows, "--out", site, "--markdown", text, *options)
    assert (code, err) == (0, "")
    said, age, page = out.splitlines()
    assert said == "✕ fail: 28 of 29 checks of the newest runs" and page == str(site / "index.html")
    assert age.endswith("2026-02-07. 29 rows are of a commit that this checkout does not have.")
    html = (site / "index.html").read_text()
    assert "https://example.org/a/b/commit/" in html
    assert "<option selected>rack, H200</option>" in html
    assert "28 of 29 checks" in text.read_text()
    assert [file.name for file in site.iterdir()] == ["index.html"]
    assert "asv/index.html" not in html


def test_it_links_asvs_pages_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        (("--repository", "example.org"), "'example.org' is no URL"),
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
    code, out, err = run(capsys, *options)
    assert (code, out) == (2, "")
    assert said in err and err.count("\n") == 1
    assert not (tmp_path / "site").exists()


def test_a_damaged_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "rows", everything())
    with (rows / "made.csv").open("a") as file:
        file.write("1,2,3\n")
    code, _, err = run(capsys, "--results", rows, "--out", tmp_path / "site")
    assert code == 2 and "made.csv" in err and err.count("\n") == 1
