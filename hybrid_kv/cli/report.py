"""`hybrid-kv report`: all results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_kv.cli.options import AsJson, show


def report(
    results: Annotated[
        Path, typer.Option(help="Folder with CSVs or data sets, or a data set.")
    ] = Path("results"),
    out: Annotated[
        Path, typer.Option(help="Folder that gets index.html, commits and rows.parquet.")
    ] = Path("site"),
    machine: Annotated[
        str, typer.Option(help="Start with this machine's rows; default: all.")
    ] = "",
    markdown: Annotated[
        Path | None, typer.Option(help="Also write a short summary for a pull request here.")
    ] = None,
    repository: Annotated[
        str, typer.Option(help="URL to which commits are linked, such as https://HOST/OWNER/NAME.")
    ] = "",
    site: Annotated[
        str, typer.Option(help="URL that OUT is served from, to which the summary links commits.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Draw all results as one page that opens offline.

    All rows and a page for each commit lie next to it.
    """
    from hybrid_kv.files import check_outputs, write_whole
    from hybrid_kv.measure.dashboard.commit import write_commits
    from hybrid_kv.measure.dashboard.data import find_files, load
    from hybrid_kv.measure.dashboard.markdown import summary
    from hybrid_kv.measure.dashboard.page import ALL_ROWS, ASV_PAGES, build_page
    from hybrid_kv.measure.dashboard.report import COMMITS, Report
    from hybrid_kv.measure.dashboard.verdicts import command_of
    from hybrid_kv.measure.results import head
    from hybrid_kv.measure.results.dataset import export_file

    page = out / "index.html"
    check_outputs(page, out / ALL_ROWS, out / COMMITS / "any", markdown)
    checkout = head()
    drawn = Report(load(results, checkout), checkout, repository, site)
    html = build_page(drawn, machine, (out / ASV_PAGES).exists())
    export_file(find_files(results).read, out / ALL_ROWS)
    write_commits(drawn, out / COMMITS)
    write_whole(page, html)
    if markdown is not None:
        write_whole(markdown, summary(drawn, machine))
    answers = drawn.answers(machine)
    verdict = answers.verdict
    stale = [
        f"{suite.suite} by {suite.fresh.distance}: {command_of(suite.suite)}"
        for suite in answers.stale
        if suite.fresh
    ]

    def lines() -> None:
        colours = {"fail": "red", "void": "yellow", "worse": "red", "stale": "yellow"}
        typer.secho(verdict.text, fg=colours.get(verdict.word))
        print(f"right? {answers.right.text}\nslower? {answers.slower.text}")
        for line in stale:
            print(f"stale: {line}")
        print(f"next: {answers.command or 'nothing'}", page, sep="\n")

    document: dict[str, object] = {
        "verdict": verdict.word,
        "finding": verdict.text,
        "right": answers.right.text,
    }
    document |= {
        "slower": answers.slower.text,
        "next": answers.command,
        "stale": stale,
        "page": str(page),
    }
    show(document, as_json, None, lines)
