"""What passed and what did not, in the newest run of each suite on each machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from hybrid_kv.dashboard.data import column
from hybrid_kv.dashboard.draw import in_script
from hybrid_kv.dashboard.report import Report, Section
from hybrid_kv.dashboard.verdicts import SuiteVerdict, age_of, distance_text, headline, verdicts
from hybrid_kv.dashboard.words import WORDS, day, suite_name

PLACE = 10


def section(report: Report) -> Section:
    found = verdicts(report.results.rows)
    whole = headline(found, report.head)
    if not found:
        return Section("Verdict", whole.finding, report.missing.note("a verdict", "hybrid-kv guard --record"))
    tiles = "".join(_tile(report, v) for v in found)
    body = f"""<p class="age {whole.word}">{escape(whole.age)}</p>
<script type="application/json" id="headlines">{in_script(json.dumps(_headlines(report, found)))}</script>
<ul class="tiles">{tiles}</ul>"""
    return Section("Verdict", whole.finding, body, whole.word)


def _headlines(report: Report, found: Sequence[SuiteVerdict]) -> dict[str, dict[str, str]]:
    """What the title says when only one machine is shown; by machine, "" for all of them."""
    own = {machine: [v for v in found if v.machine in (machine, "")] for machine in report.results.machines}
    return {machine: asdict(headline(some, report.head)) for machine, some in {"": found, **own}.items()}


def _tile(report: Report, v: SuiteVerdict) -> str:
    age, word = age_of([v], report.head), headline([v], report.head).word
    commit = report.link(v.newest.commit) + (" + changes" if v.newest.dirty else "")
    far = f"<span class=where>{distance_text(age.nearest, age.farthest)} from HEAD</span>" if age.farthest else ""
    mark = next((text for text in column(v.rows, "unfit", str) if text), None)
    unfit = f"<span class=where>not fit for times: {escape(mark)}</span>" if mark else ""
    return (
        f'<li class="tile" data-machine="{escape(v.machine)}"><b class="{word}">{WORDS[word]}</b>'
        f'<span class="name">{escape(suite_name(v.suite))}</span>'
        f"<span>{v.count('pass'):,} of {len(v.rows):,} checks</span>"
        f"<span class=where>{commit}, <time>{day(v.newest)}</time></span>{far}"
        f"<span class=where>{escape(v.machine) or 'any machine'}</span>{unfit}</li>"
    )
