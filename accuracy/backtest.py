"""Hold our thresholds against published repeated runs, as the table of docs/accuracy-backtest.md.

    python -m accuracy.backtest

For each series: the threshold that its mean and standard deviation give, the runs below it, and
whether the claimed rate of false alarms lies within the binomial interval of what was seen. Beside
it the losses that gates of engines see.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml
from scipy.stats import binomtest

from hybrid_kv.files import read_text, write_whole
from hybrid_kv.measure.accuracy.noise import FALSE_ALARMS, Noise, noise_of, tensorrt_llm_threshold

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).with_name("published_runs.yaml")
PAGE = ROOT / "docs" / "accuracy-backtest.md"
BLOCK = re.compile(r"(<!-- backtest -->\n).*?(<!-- /backtest -->)", re.DOTALL)
VLLM_TOLERANCE, SGLANG_TOLERANCE = 0.08, 0.05  # vLLM's default; SGLang's convention


@dataclass(frozen=True)
class Series:
    """Repeated runs of one configuration, as far as they are published; see published_runs.yaml.

    Attributes:
        scores: number of runs by score, where all are known.
        like: the series whose threshold these runs are held against; empty: their own.
    """

    name: str
    source: str
    questions: int
    runs: int
    mean: float | None = None
    sd: float | None = None
    min: float | None = None
    max: float | None = None
    scores: dict[float, int] = field(default_factory=dict)
    failed_at: float | None = None
    failed: int | None = None
    like: str = ""

    @property
    def every_score(self) -> list[float]:
        """Return the score of each run, in order."""
        return [score for score, count in sorted(self.scores.items()) for _ in range(count)]

    @property
    def noise(self) -> Noise:
        """Return the mean and the standard deviation of its runs."""
        if self.scores:
            return noise_of(self.every_score, self.questions)
        assert self.mean is not None and self.sd is not None
        return Noise(self.runs, self.mean, self.sd, self.questions)


@dataclass(frozen=True)
class Result:
    """A series against a threshold.

    `alarms`: the fewest and the most runs below it that what is known allows.
    """

    series: Series
    noise: Noise
    alarms: tuple[int, int]

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % binomial interval of the rate of alarms (Clopper and Pearson)."""
        ends = [binomtest(count, self.series.runs).proportion_ci(0.95) for count in self.alarms]
        return float(ends[0].low), float(ends[1].high)

    @property
    def holds(self) -> bool:
        """Return whether the claimed rate lies within the interval."""
        low, high = self.interval
        return low <= FALSE_ALARMS <= high


def read_series(file: Path = DATA) -> list[Series]:
    """Return all published series."""
    return [Series(**entry) for entry in yaml.safe_load(read_text(file))]


def backtest(every: Sequence[Series]) -> list[Result]:
    """Hold each series against its threshold."""
    by_name = {series.name: series for series in every if not series.like}
    return [judge_series(series, by_name[series.like or series.name].noise) for series in every]


def judge_series(series: Series, noise: Noise) -> Result:
    threshold = noise.threshold()
    if series.scores:
        count = sum(score < threshold for score in series.every_score)
        return Result(series, noise, (count, count))
    assert series.min is not None
    if series.min >= threshold:
        return Result(series, noise, (0, 0))
    # Cantelli's inequality: how many of so many values can be so far below their mean.
    distance = (noise.mean - threshold) / noise.sd
    return Result(series, noise, (1, int(series.runs / (1 + distance**2))))


def rate_of_ten(series: Series, draws: int = 2_000) -> float:
    """Return the share of a series' runs that lie below thresholds made of ten other runs of it.

    The ten are drawn at random, `draws` times.
    """
    rng = np.random.default_rng(0)
    scores = np.array(series.every_score)
    below = 0
    for _ in range(draws):
        drawn = rng.permutation(scores)
        below += int(
            (drawn[10:] < noise_of(drawn[:10].tolist(), series.questions).threshold()).sum()
        )
    return below / (draws * (len(scores) - 10))


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table; losses in points, seen with a chance of 80 %."""
    head = (
        "of",
        "runs",
        "mean",
        "sd",
        "threshold",
        "below it",
        "95 % of that rate",
        "sees",
        "TRT-LLM",
        "−5",
        "−8",
    )
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for result in results:
        series, noise = result.series, result.noise
        few, most = result.alarms
        low, high = result.interval
        names = f"{series.name} ({series.source})"
        if series.like:
            names = f"{series.name}, threshold of *{series.like}* ({series.source})"
        others = [
            noise.loss_below(tensorrt_llm_threshold(noise.mean, noise.questions)),
            noise.loss_below(noise.mean - SGLANG_TOLERANCE),
            noise.loss_below(noise.mean - VLLM_TOLERANCE),
        ]
        cells = [
            names,
            f"{series.runs} × {series.questions:,}",
            f"{noise.mean:.4f}",
            f"{noise.sd:.4f}",
            f"{noise.threshold():.4f}",
            str(few) if few == most else f"{few} to {most}",
            f"{low:.1%} to {high:.1%}",
            *(f"{100 * loss:.1f}" for loss in (noise.loss(), *others)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with(text: str, results: Sequence[Result]) -> str:
    """Return a page with its table made anew."""
    total = sum(result.series.runs for result in results if not result.series.like)
    holding = sum(result.holds for result in results)
    longest = max(
        (result.series for result in results if result.series.scores),
        key=lambda series: series.runs,
    )
    summary = (
        f"{total:,} published runs, thresholds for {FALSE_ALARMS:.0%} of false alarms: that rate "
        f"is within the interval of {holding} of {len(results)} rows. Ten of the {longest.runs} "
        f"runs of {longest.source}, drawn 2,000 times, give thresholds that "
        f"{rate_of_ten(longest):.2%} of its other runs are below."
    )
    return BLOCK.sub(lambda found: f"{found[1]}{summary}\n\n{table(results)}\n{found[2]}", text)


def main() -> None:
    """Write the table into the page."""
    results = backtest(read_series())
    write_whole(PAGE, page_with(read_text(PAGE), results))
    print(table(results))


if __name__ == "__main__":
    main()
