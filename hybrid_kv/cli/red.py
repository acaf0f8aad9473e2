"""`hybrid-kv red`: what is failing, since which commit and author; or only what began to fail with new rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli.options import AsJson, OutFile, show

if TYPE_CHECKING:
    from hybrid_kv.measure.dashboard.failing import Failing
    from hybrid_kv.measure.dashboard.report import Report


def red(
    results: Annotated[
        Path, typer.Option(help="Folder with CSVs or data sets, or a data set.")
    ] = Path("results"),
    before: Annotated[
        Path | None,
        typer.Option(help="Folder with earlier rows: leave out what was failing with them."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Also write what is failing here, as a table for an issue.")
    ] = None,
    as_json: AsJson = False,
    out: OutFile = None,
) -> None:
    """Print what is failing, since which commit, and its author; exit code 1 if anything is."""
    from hybrid_kv.errors import VoidError
    from hybrid_kv.files import check_outputs, write_whole
    from hybrid_kv.measure.dashboard.data import load
    from hybrid_kv.measure.dashboard.failing import counted, new_failures
    from hybrid_kv.measure.dashboard.markdown import failing_lines
    from hybrid_kv.measure.dashboard.report import Report
    from hybrid_kv.measure.results import head

    check_outputs(out, markdown)
    checkout = head()
    known = Report(load(before, checkout), checkout).failing if before is not None else []
    report = Report(load(results, checkout), checkout)
    if report.results.rows.empty:
        raise VoidError(f"nothing was judged, {results} holds no row")
    found = new_failures(report.failing, known)
    if found and markdown is not None:
        write_whole(markdown, "\n".join(failing_lines(report, found)) + "\n")

    def lines() -> None:
        for one in found:
            _print(report, one)
        print(counted(found) + (", and was not before" if found and before is not None else ""))

    show([_document(report, one) for one in found], as_json, out, lines)
    if found:
        raise typer.Exit(1)


def _print(report: Report, one: Failing) -> None:
    from hybrid_kv.errors import printable
    from hybrid_kv.measure.dashboard.words import commit_day, title

    def commit(row: Any) -> str:
        return f"{row.commit[:10] or 'no commit'}{' + changes' * row.dirty}, {commit_day(row)}"

    info = report.infos.get(one.first.commit)
    since = commit(one.first) + (f", {info.author}" if info else "")
    for line in (
        f"{one.text}  {title(one.key)}: {one.value}",
        f"    since {since}; last passed: {commit(one.passed) if one.passed else 'never'}",
    ):
        # Authors and params may hold what a terminal obeys.
        print(printable(line))


def _document(report: Report, one: Failing) -> dict[str, Any]:
    from hybrid_kv.measure.dashboard.data import SERIES

    def run(row: Any) -> dict[str, Any]:
        info = report.infos.get(row.commit)
        names = ("commit", "dirty", "time_utc", "run_id", "value")
        return {name: getattr(row, name) for name in names} | {
            "author": info.author if info else None
        }

    levels = {"was": one.step.before, "is": one.step.after} if one.step else {}
    return {
        **dict(zip(SERIES, one.key, strict=True)),
        "word": one.word,
        "unit": one.newest.unit,
        "newest": run(one.newest),
        "since": run(one.first),
        "last_passed": run(one.passed) if one.passed else None,
        **levels,
    }
