"""What each section of the page says about rows that are known."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hybrid_kv.measure.dashboard.data import SWARM
from hybrid_kv.measure.dashboard.series import histories
from tests.measure.dashboard.html import Checkout, cells, page_of, section, titles
from tests.measure.dashboard.kinds import everything, swarm, swarms
from tests.measure.dashboard.rows import results, row


def test_each_section_says_what_it_found(full: str) -> None:
    assert titles(full) == {
        "failing-now": "6 checks failed, 1 level is worse",
        "suites": "53 of 59 checks of the newest runs passed",
        "history": "1 of 139 series changed their level, 1 of 1 steps for the worse",
        "commits": "0 of the 46 newest commits changed a metric",
        "swarms": "Swarms ran 95,400 exact requests; the newest violated 2 rules",
        "comparison": "1 of 5 benchmarks is slower than fffffff",
        "other-engines": "The engine is faster in 9 of 9 cells",
        "kernel-blocks": "numpy is faster than a list from 6 ids on; on a GPU nothing is measured",
        "gpu": "Kernels move their bytes at 10 to 75 % of the bandwidth of a copy",
        "accuracy": (
            "Right answers: 98.0 % of 250 questions of gsm8k_synth; acceptance "
            "length 3.78; cached KL 0"
        ),
        "hits-and-drafts": "Caching costs no accepted draft: hits and drafts by cache mode",
        "kernels": "None of 4 compiled cases spills registers",
        "operating-curve": "1 of 50 comparisons of equal code raised an alarm; an "
        "injected slowdown of 5 % is found in "
        "95 % of the trials; 1 quarantined",
    }


def test_failing_checks_and_levels_are_listed_with_both_commits(full: str) -> None:
    failed = {name: line for name, *line in cells(section(full, "failing-now"))}
    layout = failed["guard: layout, views"]
    assert (
        layout[0] == '<b class="fail">✕ fail</b>'
        and layout[2:4] == ["never", "3 requests"]
        and layout[5] == "100"
    )
    word, since, passed, value, *_ = failed[
        "state_update: slots, CPU time<br><small>K=3, model=nano</small>"
    ]
    assert (word, value) == ('<b class="worse">+19.8 % worse</b>', "101 ns → 121 ns")
    assert ">0002000</a>, <time>2026-01-21</time>" in since and ">0001900</a>" in passed


def test_the_author_of_the_first_failing_commit_is_named(tmp_path: Path) -> None:
    rows = [row(run, verdict="pass" if run < 3 else "fail", unit="B") for run in range(6)]
    page = page_of(results(tmp_path, *rows), head=Checkout("a" * 40))
    ((_, _, since, passed, *_),) = cells(section(page, "failing-now"))
    assert ">0000300</a>" in since and since.endswith("<br><small>A &lt;b&gt;\x1b[31m U</small>")
    assert ">0000200</a>" in passed
    fine = titles(page_of(results(tmp_path / "a", row(0, verdict="pass"))))
    assert fine["failing-now"] == "Nothing is failing"
    assert "failing-now" not in titles(page_of(results(tmp_path / "b", row(0))))


def test_the_history_lists_all_series_those_with_steps_first(full: str) -> None:
    lines = cells(section(full, "history"))
    assert len(lines) == 139
    name, runs, newest, change, line, commits, machine = lines[0]
    assert name == "state_update: slots, CPU time<br><small>K=3, model=nano</small>"
    assert (runs, newest, change) == ("40", "120 ns", '<b class="worse">+19.8 %</b>')
    assert commits.index("0001900") < commits.index("0002000") and "rack, H200" in machine
    corners = re.search(r'<polyline class="trace" points="(.*?)"', line)
    assert corners and len(corners[1].split()) == 39  # the run of a changed tree is left out
    assert line.count('class="tick"') == 1
    assert not any(re.match(r"(compare|operating_curve|swarm):", name) for name, *_ in lines)


def test_a_comparison_lists_times_and_counts_that_changed(tmp_path: Path) -> None:
    rows = [one for one in everything() if one["suite"] == "compare"]
    old = [
        one | {"run_id": "old", "time_utc": "2025-01-01T00:00:00Z", "value": 3.0} for one in rows
    ]
    unfit = [
        one | {"params": json.dumps({**json.loads(one["params"]), "unfit": "<b> 33%"})}
        for one in rows
    ]
    own = section(page_of(results(tmp_path, *old, *unfit)), "comparison")
    found = cells(own)
    assert [(line[1], line[2]) for line in found[:3]] == [
        ('<b class="void">inconclusive</b>', "+50 % (+49 to +51)"),
        ('<b class="better">faster</b>', "-10 % (-11 to -9)"),
        ('<b class="worse">slower</b>', "+8 % (+7 to +9)"),
    ]
    assert found[3][1:] == ['<b class="fail">changed</b>', "12", "14 blocks"] and len(found) == 4
    assert "Measured on a machine that was not fit for times: &lt;b&gt; 33%." in own


def test_tables_of_times_have_the_newest_of_each_cell(full: str) -> None:
    others = cells(section(full, "other-engines"))
    (ratio,) = [line[1] for line in others if "num_blocks=16, subject=list" in line[0]]
    assert ratio == "4× <small>(3.9× to 4.1×)</small>"
    gpu = cells(section(full, "gpu"))
    case = "<br><small>K=1, model=nano, num_reqs=16</small>"
    assert gpu[0] == [
        f"slots{case}",
        "20 µs <small>(18 µs to 22 µs)</small>",
        "1,500 GB/s",
        "45 %",
        "",
    ]
    assert gpu[3][0] == f"torch (eager){case}" and gpu[3][-1] == "4.5×" and len(gpu) == 2 * 4 + 2
    kernels = cells(section(full, "kernels"))
    assert kernels[0][1:] == ["64", "0", "32", "16", "128", "64", "525", "–"]
    curve = {tuple(line[:2]): line[2:] for line in cells(section(full, "operating-curve"))}
    assert curve["wild/step[K=3]", "equal code"] == ["3 of 50", "0.0 to 16.0 %", "quarantined"]
    assert curve["calm/step[K=3]", "5 % slower"][0] == "19 of 20"


def test_a_spill_is_reported(tmp_path: Path) -> None:
    rows = [one | {"value": 8} if one["metric"] == "spill_bytes" else one for one in everything()]
    assert (
        titles(page_of(results(tmp_path, *rows)))["kernels"]
        == "4 of 4 compiled cases spill registers"
    )


def test_answers_hits_and_drafts(full: str) -> None:
    *gates, share, paired = cells(section(full, "accuracy"))
    assert [(line[0].partition("<")[0], *line[1:4]) for line in gates] == [
        ("right answers, strict", "0.98 <small>(0.93 to 0.99)</small>", "250", "–"),
        ("acceptance length", "3.78 tokens", "180", "–"),
        (
            "KL per token, cached answers against uncached scoring",
            "0",
            "2,048",
            '<b class="pass">✓ pass</b>',
        ),
        ("the same without cache hits: the noise", "0", "2,048", "–"),
    ]
    assert share[1:] == ["98.0 % <small>(93.0 % to 99.0 %)</small>", "250", "2"]
    assert paired[1:6] == [
        "-5.2 points <small>(-8.4 to -2.0)</small>",
        "15",
        "2",
        "0.0004",
        "+3.8 points",
    ]
    hits = cells(section(full, "hits-and-drafts"))
    assert [line[1:] for line in hits] == [
        [rate, "13.0 %", "92.0 %"] for rate in ("0", "71.2 %", "71.9 %")
    ]


def test_a_swarm_that_was_saved_twice_counts_once(full: str, tmp_path: Path) -> None:
    found = cells(section(full, "swarms"))
    runs = {tuple(line[2:5]) for line in found if len(line) == 6}
    assert runs == {("300", "5,400", "70 of 87"), ("5,000", "90,000", "86 of 87")}
    rules = {line[0]: line[1] for line in found if len(line) == 4}
    assert rules == {
        '<span class="name-of">copy-bytes</span>': "7",
        '<span class="name-of">&lt;b&gt;tokens</span>': "1",
    }
    assert not histories(results(tmp_path, *swarms()).of(SWARM))
    none = page_of(results(tmp_path, *swarm(1, 0, 0, 0, "pass")))
    assert titles(none)["swarms"] == "Swarms ran 0 exact requests; the newest violated no rules"


def test_each_suite_and_machine_has_a_tile(full: str, tmp_path: Path) -> None:
    own = section(full, "suites")
    for machine, word, suite in (
        ("rack, H200", "fail", "guard"),
        ("box", "stale", "guard"),
        ("", "stale", "static"),
    ):
        tile = (
            rf'<li class="tile" data-machine="{machine}"><b '
            rf'class="{word}">[^<]*</b><span class="name">{suite}'
        )
        assert re.search(tile, own)
    assert "stale: a commit that this checkout lacks: hybrid-kv guard --record</span>" in own
    guard = {"suite": "guard", "benchmark": "block ids", "unit": "", "verdict": "pass"}
    rows = [row(1, {"unfit": "others took 33% <b>"}, **guard), row(1, machine="rack", **guard)]
    tiles = section(page_of(results(tmp_path, *rows)), "suites")
    assert tiles.count("not fit for times: others took 33% &lt;b&gt;</span>") == 1
