"""Block ids to kernel blocks, five ways: time of the host, uploads, launches, time of a GPU.

Rows come from `python -m bench --suite kernel_blocks` and, of a GPU, from `python -m bench.gpu`;
docs/measuring.md and README show the same tables. What no GPU has measured says so, and predictions
have a table of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.measure.dashboard.data import STATIC_SUITE, Results, each, fullest_run, with_params
from hybrid_kv.measure.dashboard.draw import folded, paragraph, table
from hybrid_kv.measure.dashboard.report import Report, Section
from hybrid_kv.measure.dashboard.words import day, number
from hybrid_kv.measure.predict.gpu import GPUS, LAUNCH, WIDTH_LAST
from hybrid_kv.measure.predict.step import Kernel, priced

SUITE = "kernel_blocks"
SUBJECTS = {
    "list": "list",
    "numpy": "numpy",
    "torch": "torch",
    "triton": "Triton",
    "engine": "engine",
}
SHOWN_IDS = (1, 32, 1024, 65536)
GPU_IDS = 1024
REVIEWED = (
    32  # blocks from which numpy was measured to be faster than a list in the review of vllm!38831
)
NOT_MEASURED = "not measured"
GPU_METRICS = ("host_time", "gpu_time", "end_to_end_time")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
PREDICTED_ON = ("h100", "b200")
PREDICTED_IDS = (1024, 65536)
KERNEL = "kernel_blocks.expand"
WAY_HEAD = "kernel blocks per block, way"
SHAPE = r"^([1-9]\d{0,4}) per block$"  # of its compiled cases
PROGRAM = 1024  # kernel blocks of one program of the kernel


@dataclass(frozen=True)
class Way:
    """Measurements of a way at a number of kernel blocks per block.

    Attributes:
        host: by number of ids, the row of the host's part.
        counts: uploads, their bytes and launches of `GPU_IDS` ids; empty if they were not counted.
        gpu: by metric, the row of `GPU_IDS` ids; empty without a GPU.
    """

    blocks_per_kv_block: int
    subject: str
    host: Mapping[int, Any]
    counts: Mapping[str, float]
    gpu: Mapping[str, Any]

    @property
    def name(self) -> str:
        return SUBJECTS[self.subject]


@dataclass(frozen=True)
class Crossover:
    """The number of ids from which numpy is faster than a list, and its interval.

    Its ends are where both times' intervals cross. Infinite: at no number of ids that was measured.
    """

    ids: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """Whole numbers of ids: 14 (12 to 17), or 7 where the ends are equal."""
        first, low, high = (
            number(math.ceil(ids)) if ids < math.inf else "∞"
            for ids in (self.ids, self.low, self.high)
        )
        return first if low == high else f"{first} ({low} to {high})"


def ways(results: Results) -> list[Way]:
    """Return the newest full run by kernel blocks per block and subject; empty without any."""
    rows = with_params(
        results.of(SUITE, "expand"), num_ids=int, blocks_per_kv_block=int, subject=str
    )
    rows = rows[(rows["metric"] == "cpu_time") & rows["subject"].isin(SUBJECTS)]
    rows = rows.dropna(subset=["num_ids", "blocks_per_kv_block"])
    if rows.empty:
        return []
    rows = fullest_run(rows)
    counted = _by_way(results.of(SUITE, "expand_counts"))
    on_gpu = _by_way(results.of("gpu", SUITE))
    measured = []
    for bpk in sorted(set(rows["blocks_per_kv_block"])):
        for subject in SUBJECTS:
            way_rows = rows[(rows["blocks_per_kv_block"] == bpk) & (rows["subject"] == subject)]
            counts = {name: row.value for name, row in counted.get((bpk, subject), {}).items()}
            host = {row.num_ids: row for row in each(way_rows)}
            measured.append(Way(bpk, subject, host, counts, on_gpu.get((bpk, subject), {})))
    return measured


def _by_way(rows: pd.DataFrame) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the last row of each metric at `GPU_IDS` ids."""
    rows = with_params(rows, num_ids=int, blocks_per_kv_block=int, subject=str)
    by_way: dict[tuple[int, str], dict[str, Any]] = {}
    for row in each(rows[rows["num_ids"] == GPU_IDS]):
        by_way.setdefault((row.blocks_per_kv_block, row.subject), {})[row.metric] = row
    return by_way


def crossover(listed: Mapping[int, Any], numpys: Mapping[int, Any]) -> Crossover:
    """Return the number of ids at which the host's parts of both take equally long.

    It lies on a straight line between the measured numbers of ids.
    """
    sizes = sorted(set(listed) & set(numpys))
    middle = [listed[n].value - numpys[n].value for n in sizes]
    earliest = [listed[n].ci_high - numpys[n].ci_low for n in sizes]
    latest = [listed[n].ci_low - numpys[n].ci_high for n in sizes]
    return Crossover(
        _last_zero(sizes, middle), _last_zero(sizes, earliest), _last_zero(sizes, latest)
    )


def _last_zero(sizes: Sequence[int], differences: Sequence[float]) -> float:
    """Return the place where the differences become positive for good."""
    if not sizes or differences[-1] <= 0:
        return math.inf
    last = max(
        (index for index, difference in enumerate(differences) if difference <= 0), default=-1
    )
    if last < 0:
        return float(sizes[0])
    before = differences[last]
    after = differences[last + 1]
    return sizes[last] + (sizes[last + 1] - sizes[last]) * before / (before - after)


def crossovers(measured: Sequence[Way]) -> dict[int, Crossover]:
    """Return the crossovers by kernel blocks per block."""
    host = {(way.blocks_per_kv_block, way.subject): way.host for way in measured}
    sizes = dict.fromkeys(way.blocks_per_kv_block for way in measured)
    return {bpk: crossover(host[bpk, "list"], host[bpk, "numpy"]) for bpk in sizes}


def crossover_text(measured: Sequence[Way]) -> str:
    """Return the crossover of list and numpy in words, with the reviewed one."""
    places = [f"{crossing.text} with {bpk}" for bpk, crossing in crossovers(measured).items()]
    return (
        "numpy overtakes a list at this many ids, by kernel blocks per block: "
        f"{', '.join(places)}. In the review of vllm!38831 it was {REVIEWED}."
    )


def launch_text() -> str:
    """Return the work that the host's parts leave out, in words."""
    return (
        f"A launch costs the host a predicted {number(LAUNCH)} µs more. torch and Triton prepare "
        "the same ids; the engine's launch serves a whole step."
    )


def head(ids: Sequence[int] = SHOWN_IDS, metrics: Sequence[str] = GPU_METRICS) -> list[str]:
    """Return the head of `cells`."""
    named = {
        "host_time": "GPU: host, µs",
        "gpu_time": "GPU: device, µs",
        "end_to_end_time": "GPU: end to end, µs",
    }
    sizes = [f"{n:,} {'id' if n == 1 else 'ids'}, µs" for n in ids]
    return [*sizes, "uploaded, B", "launches", *(named[metric] for metric in metrics)]


def cells(
    way: Way, ids: Sequence[int] = SHOWN_IDS, metrics: Sequence[str] = GPU_METRICS
) -> list[str]:
    """Return µs of the host's part by number of ids; then, of `GPU_IDS` ids, the rest.

    The rest is uploads, launches, and µs on a GPU.
    """
    host = [_microseconds(way.host.get(n)) for n in ids]
    counts = [
        number(way.counts[name]) if name in way.counts else NOT_MEASURED
        for name in ("upload_bytes", "launches")
    ]
    return [*host, *counts, *(_microseconds(way.gpu.get(metric)) for metric in metrics)]


def _microseconds(row: Any) -> str:
    return NOT_MEASURED if row is None else number(row.value / 1000)


# ---- what is known without a GPU ----

PREDICTED_TEXT = (
    "Triton's kernel as compiled, in instructions of a thread for each kernel block, and as "
    "predicted, in µs of a launch on the device with their 90 % interval. Nothing here is measured:"
)
PREDICTED_HEAD = [
    "kernel blocks per block",
    *(f"instructions, {target}" for target in TARGETS),
    *(f"predicted µs, {gpu.upper()}, {n:,} ids" for gpu in PREDICTED_ON for n in PREDICTED_IDS),
]


def predicted(results: Results) -> list[list[str]]:
    """Return a line by kernel blocks per block: instructions of a thread, and predicted µs.

    Instructions are those of the compiled kernel, which has no loop. A launch reads each id once
    and writes its kernel blocks: `hybrid_kv.measure.predict.gpu` has the formula. Neither is a time
    that was measured.
    """
    rows = with_params(results.of(STATIC_SUITE, KERNEL), shape=str, target=str)
    rows = rows[rows["metric"].str.endswith("_instructions_per_byte")]
    rows = rows.assign(bpk=rows["shape"].astype(str).str.extract(SHAPE, expand=False)).dropna(
        subset=["bpk"]
    )
    per_byte = {(int(row.bpk), row.target): row.value for row in each(rows)}  # the last one stays
    lines = []
    for bpk in sorted({bpk for bpk, _ in per_byte}):
        bytes_per_kernel_block = 4 * (PROGRAM + PROGRAM // bpk) / PROGRAM
        line = [str(bpk)]
        for target in TARGETS:
            known = per_byte.get((bpk, target))
            line.append("–" if known is None else number(known * bytes_per_kernel_block))
        lines.append(
            line + [_predicted_time(gpu, n, bpk) for gpu in PREDICTED_ON for n in PREDICTED_IDS]
        )
    return lines


def _predicted_time(gpu: str, num_ids: int, bpk: int) -> str:
    """Return µs and their 90 % interval.

    The ids have just been uploaded, so that a cache holds those that fit.
    """
    moved = 4 * num_ids * (1 + bpk)
    price = priced(Kernel("expand", 1, moved, WIDTH_LAST), GPUS[gpu], moved)
    return f"{number(price.us)} ({number(price.low)} to {number(price.high)})"


# ---- the section ----


def kernel_blocks(report: Report) -> Section | None:
    """Return the section on block ids and kernel blocks, five ways."""
    measured = ways(report.results)
    if not measured:
        return None
    firsts = ", ".join(
        crossing.text.partition(" ")[0] for crossing in crossovers(measured).values()
    )
    on_gpu = (
        "on a GPU nothing is measured"
        if not any(way.gpu for way in measured)
        else "measured on a GPU, too"
    )
    finding = f"numpy is faster than a list from {firsts} ids on; {on_gpu}"
    lines = [
        [f"{way.blocks_per_kv_block}, {way.name}", *map(escape, cells(way))] for way in measured
    ]
    body = paragraph(f"{crossover_text(measured)} {launch_text()}")
    body += table([WAY_HEAD, *head()], lines, limit=1000)
    first = next(row for way in measured for row in way.host.values())
    measured_on = f"Measured on {first.machine}, {day(first)}. " if first.machine else ""
    body += paragraph(
        f"{measured_on}Uploads, launches and times on a GPU are those of {GPU_IDS:,} ids."
    )
    compiled = predicted(report.results)
    if compiled:
        text = paragraph(PREDICTED_TEXT)
        body += folded("Known without a GPU", text + table(PREDICTED_HEAD, compiled))
    return Section("Kernel blocks", finding, body)
