"""`hybrid-kv report`: all results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_kv.cli.options import AsJson, show


def report(
    results: Annotated[Path, typer.Option(help="Folder with CSVs or data sets, or a data set.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder that gets index.html, commits and rows.parquet.")] = Path("site"),
    machine: Annotated[str, typer.Option(help="Start with this machine's rows; default: all.")] = "",
    markdown: Annotated[Path | None, typer.Option(help="Also write a short summary for a pull request here.")] = None,
    repository: Annotated[
        str, typer.Option(help="URL to which commits are linked, such as https://HOST/OWNER/NAME.")
    ] = "",
    site: Annotated[str, typer.Option(help="URL that OUT is served from, to which the summary links commits.")] = "",
    as_json: AsJson = False,
) -> None:
    """Draw all results as one page that opens offline, with all rows and a page for each commit beside it."""
    from hybrid_kv.dashboard.commit import write_commits
    from hybrid_kv.dashboard.data import find_files, load
    from hybrid_kv.dashboard.markdown import summary
    from hybrid_kv.dashboard.page import ALL_ROWS, ASV_PAGES, build_page
    from hybrid_kv.dashboard.report import COMMITS, Report
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs, write_whole
    from hybrid_kv.results import head
    from hybrid_kv.results.dataset import export_file

    require("plotly")
    page = out / "index.html"
    check_outputs(page, out / ALL_ROWS, out / COMMITS / "any", markdown)
    drawn = Report(load(results), head(), repository, site)
    html = build_page(drawn, machine, (out / ASV_PAGES).exists())
    export_file(find_files(results).read, out / ALL_ROWS)
    write_commits(drawn, out / COMMITS)
    write_whole(page, html)
    if markdown is not None:
        write_whole(markdown, summary(drawn, machine))
    whole = drawn.headline(machine)

    def lines() -> None:
        typer.secho(
            whole.finding, fg={"fail": "red", "void": "yellow", "worse": "red", "stale": "yellow"}.get(whole.word)
        )
        print(*filter(None, [whole.age, page]), sep="\n")

    show({"verdict": whole.word, "finding": whole.finding, "age": whole.age, "page": str(page)}, as_json, None, lines)
