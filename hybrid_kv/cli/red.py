"""`hybrid-kv red`: all that is failing, since which commit, or only what is new."""

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
    failures = new_failures(report.failing, known)
    if failures and markdown is not None:
        write_whole(markdown, "\n".join(failing_lines(report, failures)) + "\n")

    def lines() -> None:
        for failing in failures:
            _print(report, failing)
        is_news = bool(failures) and before is not None
        print(counted(failures) + (", and was not before" if is_news else ""))

    show([_document(report, failing) for failing in failures], as_json, out, lines)
    if failures:
        raise typer.Exit(1)


def _print(report: Report, failing: Failing) -> None:
    from hybrid_kv.errors import printable
    from hybrid_kv.measure.dashboard.words import commit_day, title

    def commit(row: Any) -> str:
        return f"{row.commit[:10] or 'no commit'}{' + changes' * row.dirty}, {commit_day(row)}"

    info = report.infos.get(failing.first.commit)
    since = commit(failing.first) + (f", {info.author}" if info else "")
    for line in (
        f"{failing.text}  {title(failing.key)}: {failing.value}",
        f"    since {since}; last passed: {commit(failing.passed) if failing.passed else 'never'}",
    ):
        # Authors and params may hold what a terminal obeys.
        print(printable(line))


def _document(report: Report, failing: Failing) -> dict[str, Any]:
    from hybrid_kv.measure.dashboard.data import SERIES

    def run(row: Any) -> dict[str, Any]:
        info = report.infos.get(row.commit)
        names = ("commit", "dirty", "time_utc", "run_id", "value")
        return {name: getattr(row, name) for name in names} | {
            "author": info.author if info else None
        }

    levels = {"was": failing.step.before, "is": failing.step.after} if failing.step else {}
    return {
        **dict(zip(SERIES, failing.key, strict=True)),
        "word": failing.word,
        "unit": failing.newest.unit,
        "newest": run(failing.newest),
        "since": run(failing.first),
        "last_passed": run(failing.passed) if failing.passed else None,
        **levels,
    }
