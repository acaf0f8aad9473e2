"""The series of the first screen: a few that show whether HEAD is slower, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.measure.dashboard.data import ACCURACY, is_ours
from hybrid_kv.measure.dashboard.series import Series

_ENGINE_STEP = "engine_step.DecodeBlock.time_decode_block"


@dataclass(frozen=True)
class Line:
    """A choice among series with these names: the engine's, with most of `case` in its own.

    Of several the longest is drawn.

    Attributes:
        unit: of its figures, where the rows have none.
    """

    suite: str
    benchmark: str
    metric: str = "cpu_time"
    case: tuple[str, ...] = ()
    unit: str = ""

    def choose(self, series: Sequence[Series]) -> Series | None:
        """Return the series; None if none of them has these names."""
        names = (self.suite, self.benchmark, self.metric)
        fitting = [each for each in series if each.key[:3] == names and is_ours(each.key[3])]
        return max(fitting, key=self._rank, default=None)

    def _rank(self, series: Series) -> tuple[int, int]:
        words = series.key[3].split(", ")
        return sum(word in words for word in self.case), len(series.rows)


@dataclass(frozen=True)
class Chart:
    """One of the small multiples.

    Attributes:
        line: the series that is drawn.
        asv: the benchmark's name there; empty: asv does not measure it.
        rival: how the subject begins of which it is said how many times the engine's time it takes.
        second: a series that is drawn below the first, and what its newest figure is.
    """

    title: str
    line: Line
    asv: str = ""
    rival: str = ""
    second: Line | None = None
    second_name: str = ""


CHARTS = (
    Chart(
        "Block tables, a step",
        Line("block_tables", "total"),
        "block_tables.Total.time_total",
        "vllm",
    ),
    Chart(
        "Scheduler, decode",
        Line("scheduler", "decode", case=("K=0",)),
        "scheduler.Decode.time_decode",
    ),
    Chart("Scheduler, prefill", Line("scheduler", "admit"), "scheduler.Admit.time_admit"),
    Chart("Engine, decode", Line("engine_step", "decode_block", case=("K=0",)), _ENGINE_STEP),
    Chart(
        "Engine, verify 3 drafts", Line("engine_step", "decode_block", case=("K=3",)), _ENGINE_STEP
    ),
    Chart("End to end", Line("end_to_end", "nemotron"), "end_to_end.Nemotron.time_nemotron"),
    Chart(
        "Kernel-block expansion",
        Line("kernel_blocks", "step"),
        "kernel_blocks.Step.time_step",
        "vllm",
    ),
    Chart(
        "Memory of a request",
        Line("memory", "plan", "bytes_per_request", ("model=nemotron-3-nano", "mode=all", "K=3")),
        "memory.Plan.track_bytes_per_request",
    ),
    Chart("Guard, all its checks", Line("guard", "whole", "seconds", ("size=full",), "s")),
    Chart(
        "GSM8K-format answers",
        Line(ACCURACY, "gsm8k_synth", "exact_match_strict", ("speculative_method=mtp",), "share"),
        second=Line(
            ACCURACY, "gsm8k_synth", "draft_acceptance", ("speculative_method=mtp",), "share"
        ),
        second_name="of drafts accepted",
    ),
)


def charted(series: Sequence[Series]) -> dict[Chart, Series]:
    """Return the charts that have a series among these."""
    chosen = {chart: chart.line.choose(series) for chart in CHARTS}
    return {chart: line for chart, line in chosen.items() if line is not None}
