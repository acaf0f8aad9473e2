"""The page: one `index.html` with its data, its script and plotly inside; it opens from a disk or an archive."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.dashboard import sections
from hybrid_kv.dashboard.data import (
    Results,
    Series,
    each,
    histories,
    newest_series,
    points_per_series,
    thin,
)
from hybrid_kv.dashboard.draw import MARKS, Missing, Section, code, in_script, paragraph, table
from hybrid_kv.dashboard.gpu import gpu_section
from hybrid_kv.dashboard.steps import ALPHA, MIN_CHANGE, MIN_SEGMENT, MIN_SPREADS, Step

_FOLDER = Path(__file__).parent
MAX_STEPS_LISTED = 20
ASV_PAGES = "asv/index.html"  # beside the page


def build_page(results: Results, repository: str = "", machine: str = "", asv: bool = False) -> str:
    """The whole page as HTML.

    Args:
        repository: URL of a repository whose commits are at `URL/commit/SHA`; without one they are no links.
        machine: that the filter starts with; empty: all.
        asv: asv's own pages are in the folder `asv` beside it, to be linked.

    Raises:
        ConfigError: `repository` is no http(s) URL, or no row is from `machine`.
        HybridKVError: plotly is not installed.
    """
    if repository and not re.fullmatch(r"https?://[^\s\"'<>]+", repository):
        raise ConfigError(f"{repository!r} is no URL of a repository; write https://HOST/OWNER/NAME")
    repository = repository.rstrip("/")
    if machine and machine not in results.machines:
        raise ConfigError(f"no row is from machine {machine!r}; there are {', '.join(results.machines) or 'none'}")
    plotly = _plotly()

    def link(commit: str) -> str:
        short = escape(commit[:7]) or "no commit"
        return f'<a href="{escape(repository)}/commit/{escape(commit)}">{short}</a>' if repository and commit else short

    series = histories(results.rows)
    missing = Missing()
    shown = [
        sections.verdict_section(results, link, missing),
        _history_section(series, link, missing),
        sections.compare_section(results, link, missing),
        sections.expansion_section(results, missing),
        sections.scheme_section(results, missing),
        gpu_section(results),
        sections.accuracy_section(results, missing),
        sections.answers_section(results, missing),
        sections.static_section(results, missing),
        sections.curve_section(results, missing),
    ]
    found = [section for section in shown if section is not None]
    if missing.notes:
        rows = [[escape(what), code(command)] for what, command in missing.notes]
        found.append(Section("Missing", "What has not been measured yet", table(["what", "makes its rows"], rows)))
    return _html(results, found, _history_json(series, repository), machine, plotly, asv)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise HybridKVError("the report is drawn by plotly, which is not installed; run: pip install plotly") from None
    return str(get_plotlyjs())


def write_page(html: str, folder: Path) -> Path:
    """`index.html` in a folder, whole or not at all.

    Raises:
        HybridKVError: it cannot be written.
    """
    target = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as file:
            file.write(html)
        os.chmod(file.name, 0o644)
        os.replace(file.name, target)
    except OSError as error:
        raise HybridKVError(f"{target} cannot be written: {error.strerror}; choose another --out") from None
    return target


# ---- history ----


def _history_section(series: list[Series], link: sections.Link, missing: Missing) -> Section:
    if not series:
        missing.note("any history", "hybrid-kv guard")
        return Section("History", "There is no row yet", "")
    stepped = [(s, step) for s in series for step in s.steps]
    stepped.sort(key=lambda pair: pair[0].step_row(pair[1]).time, reverse=True)
    worse = sum(s.judge(step) == "worse" for s, step in stepped)
    runs = max(len(s.rows) for s in series)
    finding = f"No level changed in {len(series):,} series of at most {runs:,} {'run' if runs == 1 else 'runs'}"
    if stepped:
        changed = len({s.key for s, _ in stepped})
        times = "once" if worse == 1 else f"{worse:,} times"
        finding = f"{changed:,} of {len(series):,} series changed their level, {times} for the worse"
    shown = newest_series(series)
    index = {s.key: i for i, s in enumerate(shown)}
    listed = [(s, step) for s, step in stepped if s.key in index][:MAX_STEPS_LISTED]
    rows = [
        [
            f'<button type="button" data-series="{index[s.key]}">{escape(title(s))}</button>',
            change_text(step),
            f'<b class="{s.judge(step)}">{s.judge(step)}</b>',
            f"{sections.with_unit(_at(s, step.before))} → {sections.with_unit(_at(s, step.after))}",
            sections.day(s.step_row(step)),
            f"{link(s.row_before(step).commit)} … {link(s.step_row(step).commit)}",
        ]
        for s, step in listed
    ]
    attributes = [f'data-machine="{escape(s.key[4])}"' for s, _ in listed]
    steps = table(["steps", "change", "", "median", "since", "between"], rows, attributes) if rows else ""
    if len(stepped) > len(listed):
        steps += paragraph(f"and {len(stepped) - len(listed):,} older ones")
    body = f"""{steps}
<div class="pick"><label>benchmark <select id="benchmark"></select></label>
<label>case <select id="case"></select></label></div>
<figure><div class="canvas" id="history-chart" role="img" aria-label="figure of each run over time"></div></figure>
{table(["newest runs, UTC", "commit", "figure", "95 % interval", "n", "machine"], [], body_id="history-runs")}
{paragraph(f"{STEP_RULE} {_kept(series, shown)}")}"""
    return Section("History", finding, body)


STEP_RULE = (
    "A step is a change of level on one machine. Counts, bytes and static kernel metrics are exact: each change is a "
    f"step. Other figures are cut where the rank sum of one side is least likely, if {MIN_SEGMENT} runs lie on either "
    f"side, its p-value times the places tried is below {ALPHA:g}, and the medians differ by {100 * MIN_CHANGE:g} % "
    f"and by {MIN_SPREADS:g} robust standard deviations. Runs of a changed tree (hollow) and void ones are left out."
)


def _kept(series: list[Series], shown: list[Series]) -> str:
    limit = points_per_series(shown)
    text = ""
    if max(len(s.rows) for s in shown) > limit:
        text = (
            f"A series with more than {limit} runs keeps the first, the last, the lowest and highest of equal spans. "
        )
    if len(shown) < len(series):
        text += f"Of {len(series):,} series the {len(shown):,} with steps or most runs are here."
    return text


def title(series: Series) -> str:
    """A series in words."""
    suite, benchmark, metric, case, _ = series.key
    return f"{suite}: {benchmark}, {metric}" + (f" ({case})" if case else "")


def _at(series: Series, value: float) -> Any:
    return next(each(series.rows.tail(1)))._replace(value=value)


def change_text(step: Step) -> str:
    """+12 %, or the difference where there was nothing before."""
    return f"{100 * step.change:+.3g} %" if step.before else f"{step.after - step.before:+.3g}"


def _history_json(series: list[Series], repository: str) -> str:
    shown = newest_series(series)
    limit = points_per_series(shown)
    commits: dict[str, int] = {}
    documents = [_series_document(s, limit, commits) for s in shown]
    longest = max(range(len(shown)), key=lambda i: (len(shown[i].steps), len(shown[i].rows)), default=0)
    document = {
        "series": documents,
        "start": longest,
        "commits": list(commits),
        "machines": list(dict.fromkeys(s.key[4] for s in shown)),
        "marks": [asdict(mark) for mark in MARKS],
        "repository": repository,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _series_document(series: Series, limit: int, commits: dict[str, int]) -> dict[str, Any]:
    rows = series.rows.iloc[thin(series.rows["value"].to_numpy(), limit)]
    seconds = _seconds(series.rows["time"])
    clean = seconds[series.clean]
    edges = [0, *(step.index for step in series.steps), len(clean)]
    values = series.rows["value"].to_numpy()[series.clean]
    levels = [
        {"from": int(clean[a]), "to": int(clean[b - 1]), "value": _short(float(np.median(values[a:b])))}
        for a, b in pairwise(edges)
        if series.steps
    ]
    suite, benchmark, metric, case, machine = series.key
    return {
        "suite": suite,
        "benchmark": benchmark,
        "metric": metric,
        "case": case,
        "machine": machine,
        "unit": series.unit,
        "time": _seconds(rows["time"]).tolist(),
        "value": [_short(v) for v in rows["value"]],
        "low": [_short(v) for v in rows["ci_low"].astype(float)],
        "high": [_short(v) for v in rows["ci_high"].astype(float)],
        "n": rows["n"].tolist(),
        "commit": [commits.setdefault(c, len(commits)) for c in rows["commit"]],
        "dirty": rows["dirty"].astype(int).tolist(),
        "levels": levels,
        "steps": [
            {"time": int(clean[step.index]), "text": change_text(step), "word": series.judge(step)}
            for step in series.steps
        ],
    }


def _seconds(times: pd.Series[Any]) -> npt.NDArray[np.int64]:
    epoch = pd.Timestamp(0, tz="UTC")
    return np.asarray((times - epoch) // pd.Timedelta(seconds=1), dtype=np.int64)


def _short(value: float) -> float | None:
    """Six digits: more than any interval here deserves. None: missing."""
    return None if np.isnan(value) else float(f"{value:.6g}")


# ---- the page ----


def _html(results: Results, found: list[Section], history: str, machine: str, plotly: str, asv: bool) -> str:
    newest = f"rows up to {results.rows['time'].iloc[-1]:%Y-%m-%d %H:%M} UTC" if len(results.rows) else "no rows yet"
    files = ", ".join(results.files) or "no file"
    foreign = f" Of another kind, not read: {', '.join(results.foreign)}." if results.foreign else ""
    options = "".join(
        f"<option{' selected' if name == machine else ''}>{escape(name)}</option>" for name in results.machines
    )
    nav = "".join(f'<a href="#{s.anchor}">{escape(s.name)}</a>' for s in found)
    body = "".join(
        f'<section id="{s.anchor}"><p class="kind">{escape(s.name)}</p><h2>{escape(s.finding)}</h2>{s.body}</section>'
        for s in found
    )
    pages = f' By commit: <a href="{ASV_PAGES}">pages of asv</a>, which need the network.' if asv else ""
    # Nothing may be fetched: the page is whole, and stays so.
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>hybrid-kv report</title>
<style>{_text("page.css")}</style>
</head>
<body>
<header><h1>hybrid-kv</h1>
<p>Is the cache still right, and still fast? {len(results.rows):,} measurements, {newest}.</p></header>
<div class="bar"><div><nav aria-label="sections">{nav}</nav>
<label>machine <select id="machine"><option value="">all</option>{options}</select></label></div></div>
<main>{body}</main>
<footer><p>Drawn from {escape(files)}.{escape(foreign)}{pages}</p></footer>
<script type="application/json" id="history-data">{in_script(history)}</script>
<script>{plotly}</script>
<script>{_text("page.js")}</script>
</body>
</html>
"""


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
