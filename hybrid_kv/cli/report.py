"""`hybrid-kv report`: all results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_kv.cli.options import AsJson, show


def report(
    results: Annotated[Path, typer.Option(help="Folder with CSVs or data sets.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder that gets index.html and rows.parquet.")] = Path("site"),
    machine: Annotated[str, typer.Option(help="Start with this machine's rows; default: all.")] = "",
    markdown: Annotated[Path | None, typer.Option(help="Also write a short summary for a pull request here.")] = None,
    repository: Annotated[
        str, typer.Option(help="URL to which commits are linked, such as https://HOST/OWNER/NAME.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Draw all results as one page that opens offline, with all rows beside it."""
    from hybrid_kv.dashboard.data import find_files, load
    from hybrid_kv.dashboard.markdown import summary
    from hybrid_kv.dashboard.page import ALL_ROWS, ASV_PAGES, build_page, write_page
    from hybrid_kv.dashboard.verdicts import headline, verdicts
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs, write_whole
    from hybrid_kv.results import head
    from hybrid_kv.results.dataset import export_file

    require("plotly")
    check_outputs(out / "index.html", out / ALL_ROWS, markdown)
    rows, checked_out = load(results), head()
    html = build_page(rows, repository, machine, (out / ASV_PAGES).exists(), checked_out, download=True)
    export_file(find_files(results).read, out / ALL_ROWS)
    page = write_page(html, out)
    if markdown is not None:
        write_whole(markdown, summary(rows, machine, checked_out))
    said = headline(verdicts(rows.of_machine(machine)), checked_out)

    def lines() -> None:
        typer.secho(said.finding, fg={"fail": "red", "void": "yellow", "stale": "yellow"}.get(said.word))
        print(*filter(None, [said.age, page]), sep="\n")

    show({"verdict": said.word, "finding": said.finding, "age": said.age, "page": str(page)}, as_json, None, lines)
