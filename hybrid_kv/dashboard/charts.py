"""Which series the first screen shows: a few that say whether HEAD is slower, and since which commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.dashboard.data import is_ours
from hybrid_kv.dashboard.series import Series


@dataclass(frozen=True)
class Line:
    """What is drawn: of all series with these names the engine's with most of `case` in its own, then the longest."""

    suite: str
    benchmark: str
    metric: str = "cpu_time"
    case: tuple[str, ...] = ()

    def choose(self, series: Sequence[Series]) -> Series | None:
        """The series; None if none of them has these names."""
        names = (self.suite, self.benchmark, self.metric)
        fitting = [one for one in series if one.key[:3] == names and is_ours(one.key[3])]
        return max(fitting, key=self._rank, default=None)

    def _rank(self, series: Series) -> tuple[int, int]:
        words = series.key[3].split(", ")
        return sum(wanted in words for wanted in self.case), len(series.rows)


@dataclass(frozen=True)
class Chart:
    """One of the small multiples: a series, beside it another of the same runs, or a rival's newest figure."""

    title: str
    line: Line
    second: Line | None = None
    second_name: str = ""
    rival: str = ""


CHARTS = (
    Chart("Block tables, a step", Line("block_tables", "total"), rival="vllm"),
    Chart("Scheduler, decode", Line("scheduler", "decode")),
    Chart("Engine, decode", Line("engine_step", "decode", case=("K=0",))),
    Chart("Engine, verify 3 drafts", Line("engine_step", "decode", case=("K=3",))),
    Chart("Prefill", Line("end_to_end", "nemotron")),
    Chart("Prefix lookup", Line("prefix_lookup", "hit")),
    Chart("Kernel-block expansion", Line("kernel_blocks", "expand"), rival="list"),
    Chart("Memory of a request", Line("memory", "plan", "bytes_per_request")),
    Chart("Quick guard, CPU seconds", Line("guard", "whole", "cpu_seconds", ("size=quick",))),
    Chart(
        "GSM8K-format answers",
        Line("accuracy", "gsm8k_synth", "exact_match_strict", ("speculative_method=mtp",)),
        Line("accuracy", "gsm8k_synth", "draft_acceptance", ("speculative_method=mtp",)),
        "of drafts accepted",
    ),
)


def charted(series: Sequence[Series]) -> dict[Chart, Series]:
    """The charts that have a series among these."""
    return {chart: found for chart in CHARTS if (found := chart.line.choose(series)) is not None}
