"""`make figures`: the tables of numbers in README and docs/, from the rows in `results/` and their schema.

A block stands between `<!-- figures:NAME -->` and `<!-- /figures -->`; what is between is written here, nowhere else.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hybrid_kv.arguments import ArgumentParser
from hybrid_kv.cache.modes import MODES
from hybrid_kv.dashboard.beside import beside_table
from hybrid_kv.dashboard.bisected import bisected_table
from hybrid_kv.dashboard.data import STATIC_SUITE, Results, column, each, fullest_run, last_words, load
from hybrid_kv.dashboard.page import build_page
from hybrid_kv.dashboard.planted import classes_table, generated_table, planted_table, small_table, triton_table
from hybrid_kv.dashboard.report import Report
from hybrid_kv.dashboard.sections.answers import answers_table
from hybrid_kv.dashboard.sections.block_ids import ENGINE, block_id_rows
from hybrid_kv.dashboard.sections.kernels import static_table
from hybrid_kv.dashboard.sections.operating_curve import WHOLE, curve_rows
from hybrid_kv.dashboard.words import about, metric_name, number
from hybrid_kv.errors import HybridKVError, run_command
from hybrid_kv.files import write_whole
from hybrid_kv.results import TIME_UNITS, UNITS, head
from hybrid_kv.results.schema import SCHEMA_COLUMNS
from hybrid_kv.results.store import PARQUET_TYPES

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"(<!-- figures:([\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def rewrite(text: str, results: Results) -> str:
    """A page with every block made anew; one whose rows are not there stays as it is.

    Raises:
        HybridKVError: a block has a name that nothing here makes, or no end.
    """
    if len(re.findall(r"<!-- figures:", text)) != len(_BLOCK.findall(text)):
        raise HybridKVError("a block that starts with <!-- figures:… --> has no end; add <!-- /figures -->")

    def block(found: re.Match[str]) -> str:
        if found[2] not in BLOCKS:
            raise HybridKVError(f"no figures are called {found[2]!r}; use one of {', '.join(BLOCKS)}")
        made = BLOCKS[found[2]](results)
        return found[0] if made is None else f"{found[1]}{made.strip()}\n{found[3]}"

    return _BLOCK.sub(block, text)


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """The first column left, the others right."""
    lines = [re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |") for line in [head, *rows]]
    return "\n".join([lines[0], f"|---|{'--:|' * (len(head) - 1)}", *lines[1:]])


def _timed(results: Results, benchmark: str) -> pd.DataFrame:
    return block_id_rows(results.of("kernel_blocks", benchmark))


STEP_SUBJECTS = ("vllm 0.22 V1", "vllm 0.22 V2", "vllm 0.32 V2")
STEP_BLOCKS = 8


def step_table(results: Results) -> str | None:
    """CPU time of a whole block-table step, host and device part, beside the real code of other engines."""
    rows = block_id_rows(results.of("block_tables", "total")).dropna(subset=["subject", "scenario"])
    peers = sorted(set(rows["subject"]) - {ENGINE})
    if not peers:
        return None
    found = {(row.scenario, row.subject, row.metric): row for row in each(rows)}
    lines = []
    for scenario in dict.fromkeys(rows["scenario"]):
        line = [scenario.replace(" x ", " × ").replace("1024", "1,024").replace("1000", "1,000")]
        for peer in peers:
            time, ratio = (found.get((scenario, peer, metric)) for metric in ("cpu_time", "ratio_to_engine"))
            if time is None or ratio is None:
                line.append("–")
                continue
            times = f"{ratio.value:.1f}; {ratio.ci_low:.1f} to {ratio.ci_high:.1f}"
            line.append(f"{_round(time.value / 1000)} ({times})")
        own = found.get((scenario, ENGINE, "cpu_time"))
        lines.append([*line, "–" if own is None else f"**{_round(own.value / 1000)}**"])
    return markdown_table(["step", *(peer.replace("vllm", "vLLM") for peer in peers), "engine"], lines)


def staging_table(results: Results) -> str | None:
    """CPU time of what the host does with a step's block ids, by scenario and subject."""
    rows = _timed(results, "step").dropna(subset=["subject", "scenario"])
    rows = rows[rows["blocks_per_kv_block"] == STEP_BLOCKS]
    if rows.empty:
        return None
    values = {(row.scenario, row.subject, row.metric): row.value for row in each(rows)}

    def time(scenario: str, subject: str) -> str:
        nanoseconds = values.get((scenario, subject, "cpu_time"))
        return "–" if nanoseconds is None else _round(nanoseconds / 1000)

    lines = []
    for scenario in dict.fromkeys(rows["scenario"]):
        line = [re.sub(r" x (\d+)$", r" × \1 blocks", scenario)]
        for subject in STEP_SUBJECTS:
            ratio = values.get((scenario, subject, "ratio_to_engine"))
            line.append(time(scenario, subject) + ("" if ratio is None else f" ({_round(ratio)})"))
        lines.append([*line, f"**{time(scenario, ENGINE)}**", time(scenario, "device")])
    head = ["step", *(s.replace("vllm", "vLLM") for s in STEP_SUBJECTS), "engine", "engine with device (CPU)"]
    return markdown_table(head, lines)


def families_table(results: Results) -> str | None:
    """What the newest full guard found of each family: its distance from transformers, and its cells in float64."""
    rows = fullest_run(results.of("guard", "families"))
    rows = rows.assign(family=column(rows, "family", str)).dropna(subset=["family"])
    lines = []
    for family in sorted(set(rows["family"].map(str))):
        own = {row.metric.partition("/")[0]: row for row in each(rows[rows["family"] == family])}
        exact, distance = own["largest_logit_difference"], own["distance_from_transformers"]
        cells = [name for name in exact.parsed if name.split("_")[0] in MODES]
        words = {word for name in cells for word in name.split("_")}
        lines.append([
            f"`{family}`",
            f"{distance.value:.1e}",
            f"{exact.value:.1e}",
            ", ".join(mode for mode in MODES if mode in words),
            "scripted, MTP" if "mtp" in words else "scripted",
            "slots, replay" if "replay" in words else "slots",
            str(len(cells)),
        ])  # fmt: skip
    head = ["family", "from transformers", "exact", "modes", "drafts", "schemes", "cells"]
    return markdown_table(head, lines) if lines else None


def models_table(results: Results) -> str | None:
    """How many times as long a model of vLLM takes to stage a step's ids as the real code."""
    rows = block_id_rows(results.of("kernel_blocks", "model_without_kernels", metric="ratio_to_real"))
    rows = rows.dropna(subset=["model", "scenario"])
    if rows.empty:
        return None
    found = {(row.scenario, row.model): row for row in each(rows)}
    models = list(dict.fromkeys(rows["model"]))
    lines = []
    for scenario in dict.fromkeys(rows["scenario"]):
        line = [re.sub(r" x (\d+)$", r" × \1 blocks", scenario)]
        for model in models:
            row = found.get((scenario, model))
            line.append("–" if row is None else f"{row.value:.2f} ({row.ci_low:.2f} to {row.ci_high:.2f})")
        lines.append(line)
    return markdown_table(["step", *(model.replace("vllm", "vLLM") for model in models)], lines)


def _round(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def append_text(results: Results) -> str | None:
    """What one append costs, and the nearest rival."""
    rows = _timed(results, "expand").dropna(subset=["subject", "num_blocks", "blocks_per_kv_block"])
    engine = rows[(rows["subject"] == ENGINE) & (rows["metric"] == "cpu_time")]
    rivals = rows[rows["metric"] == "ratio_to_engine"]
    if engine.empty or rivals.empty:
        return None
    nearest = next(each(rivals.sort_values("value")))
    low, high = (number(value / 1000, 2) for value in (engine["value"].min(), engine["value"].max()))
    sizes = rows["num_blocks"].astype(int)
    names = {"list": "a list comprehension"}
    blocks = f"{nearest.num_blocks:,} block{'s' if nearest.num_blocks > 1 else ''}"
    return (
        f"One append costs the engine {low} to {high} µs for {sizes.min():,} to {sizes.max():,} blocks, whatever the "
        f"kernel block; the nearest rival in\nany of the {len(engine)} cells "
        f"({names.get(nearest.subject, nearest.subject)}, {blocks} of {nearest.blocks_per_kv_block} kernel blocks) "
        f"takes {about(nearest.value)} times as long."
    )


KERNEL_TARGETS = ("sm_90", "gfx942")
KERNEL_HEAD = {
    "registers": "regs",
    "spill_bytes": "spill",
    "shared_bytes": "shared",
    "blocks_per_sm": "blocks",
    "load_bits": "load",
    "store_bits": "store",
}


def kernels_table(results: Results) -> str | None:
    """Each kernel once, at Nemotron-3-Nano's shape with the most usual K, for two targets."""
    rows = static_table(results)
    if rows.empty:
        return None
    rows = rows[rows["target"].isin(KERNEL_TARGETS)]
    nano = rows["shape"].str.startswith("Nemotron-3-Nano")
    best = nano * 2 + rows["shape"].str.endswith("K=3")
    shown = rows[best == best.groupby(rows["benchmark"]).transform("max")].drop_duplicates(["benchmark", "target"])
    lines = [["kernel", "shape", "dtype", "target", *KERNEL_HEAD.values()]]
    for row in each(shown):
        named = row.target == KERNEL_TARGETS[0]
        case = [row.benchmark, row.shape, row.dtype] if named else ["", "", ""]
        lines.append([*case, row.target, *(f"{getattr(row, name):.0f}" for name in KERNEL_HEAD)])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = "\n".join(
        "  ".join(
            cell.ljust(width) if i < 4 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    command = f"$ hybrid-kv kernels --targets {','.join(KERNEL_TARGETS)}"
    note = f"# {len(lines) - 1} of {len(rows)} lines, the last columns left out"
    return f"```console\n{command}     {note}\n{text}\n```"


def hits_table(results: Results) -> str | None:
    """Hit rate and accepted drafts by cache mode."""
    found = answers_table(results)
    if found is None:
        return None
    head, lines = found
    for index, line in enumerate(lines):
        line[0] = f"`{line[0]}`"
        if index == 0 and len(line) > 2:
            line[2] += " accepted"
    return markdown_table(["", *head[1:]], lines)


def guard_table(results: Results) -> str | None:
    """What `make guard` printed in the newest full run."""
    from hybrid_kv.guard.registry import CheckResult
    from hybrid_kv.guard.report import print_results

    rows = results.of("guard")
    full = rows[rows["run_id"].isin(rows[rows["benchmark"] == "answers"]["run_id"])]
    if full.empty:
        return None
    run = full[full["run_id"] == full["run_id"].iloc[-1]]
    seconds = column(run, "seconds", int, float).astype(float).fillna(0.0)
    run = run.assign(limit=column(run, "limit", str).fillna(""), seconds=seconds)
    checks = [_check(row, CheckResult) for row in each(run)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_results(checks)
    text = "\n".join(line.rstrip() for line in printed.getvalue().splitlines())
    return f"```console\n$ make guard\n{text}\n```"


def guard_short(results: Results) -> str | None:
    """The same, one line of each section."""
    table = guard_table(results)
    if table is None:
        return None
    lines, sections = table.splitlines(), set[str]()
    shown = lines[:3]
    for line in lines[3:]:
        if line.endswith(("  ok", "  FAILED")) and line[:12] not in sections:
            sections.add(line[:12])
            shown.append(line)
    return "\n".join([*shown, "…", *lines[-3:]])


def _check_name(row: Any) -> str:
    """As the guard printed it; a row of an older guard has it as it was."""
    from hybrid_kv.guard.checks.answers import figures_in_words

    if " " in row.check:
        return str(row.check)
    name = metric_name(row.check)
    if row.benchmark != "answers":
        return name
    hit_rate, accepted, drafted = (row.parsed[figure] for figure in ("hit_rate", "accepted", "drafted"))
    shown = figures_in_words(row.parsed["mode"], hit_rate, accepted, drafted, row.parsed.get("loaded_blocks"))
    return f"{name}: {shown}" if shown else name


def _check(row: Any, make: Callable[..., Any]) -> Any:
    value = int(row.value) if row.value == int(row.value) and row.unit != "share" else row.value
    limit = str(row.limit)
    return make(row.benchmark, _check_name(row), row.verdict == "pass", value, row.unit, limit, row.n, row.seconds)


SCHEME_SHAPE = re.compile(r"Nemotron-3-Nano, K=(\d+)")


def bytes_table(results: Results) -> str | None:
    """Counted bytes of a verify step in both state schemes, by K."""
    rows = last_words(results.of(STATIC_SUITE, metric="bytes"))
    found: dict[int, dict[str, float]] = {}
    for row in each(rows[rows["benchmark"].isin(["bytes.slots", "bytes.replay"])]):
        if shape := SCHEME_SHAPE.fullmatch(str(row.parsed.get("shape"))):
            found.setdefault(int(shape[1]), {})[row.benchmark] = row.value
    lines = []
    for k, both in sorted(found.items()):
        if len(both) == 2 and both["bytes.replay"] > 0:
            slots, replay = both["bytes.slots"], both["bytes.replay"]
            lines.append([f"K = {k}", f"{slots / 1024:,.0f}", f"{replay / 1024:,.0f}", f"{slots / replay:.1f}"])
    return markdown_table(["KiB", "`slots`", "`replay`", "times fewer"], lines) if lines else None


MODELS = {"random": ", 21 M random weights"}
VARIANTS = {"plain": "", "cached": ", prefix caching", "drafts": ", prefix caching and MTP drafts (K = 3)"}


def generate_table(results: Results) -> str | None:
    """How many times as long transformers takes as the engine, by workload and how many run at a time."""
    cells: dict[str, dict[int, str]] = {}
    rows = last_words(results.of("generate", metric="ratio_to_engine"))
    rows = rows.assign(
        **{name: column(rows, name, str).fillna("") for name in ("model", "variant")},
        **{name: column(rows, name, int) for name in ("prompt", "count", "batch")},
    )
    for row in each(rows.dropna(subset="batch")):
        if row.benchmark == "greedy":
            name = f"32 tokens after prompts of {row.prompt}{MODELS.get(row.model, '')}"
        else:
            name = f"{row.count} five-shot questions{VARIANTS.get(row.variant, '')}"
        cells.setdefault(name, {})[row.batch] = f"{row.value:.2f} ({row.ci_low:.2f} to {row.ci_high:.2f})"
    batches = sorted({batch for line in cells.values() for batch in line})
    head = ["", *(f"{batch} at a time" for batch in batches)]
    lines = [[name, *(line.get(batch, "") for batch in batches)] for name, line in cells.items()]
    return markdown_table(head, lines) if lines else None


def curve_table(results: Results) -> str | None:
    """Alarms of the newest self-test: in comparisons of equal code, and of planted slowdowns."""
    rows = curve_rows(results)
    alarms = rows[(rows["metric"] == "false_alarm_rate") & (rows["benchmark"] == WHOLE)]
    found = rows[rows["metric"] == "detection_rate"]
    if alarms.empty or found.empty:
        return None
    plants = sorted(found["plant"].unique())
    lines = [["equal code, any benchmark", _of(next(each(alarms.tail(1)))), *[""] * len(plants)]]
    for benchmark, group in found.groupby("benchmark", sort=False):
        by_plant = {row.plant: _of(row) for row in each(group)}
        lines.append([f"`{benchmark}`", "", *(by_plant.get(plant, "") for plant in plants)])
    return markdown_table(["alarms", "same", *(f"{plant} % slower" for plant in plants)], lines)


def _of(row: Any) -> str:
    return f"{round(row.value * row.n)} of {row.n}"


def columns_table(_: Results) -> str:
    """The data dictionary of the rows."""
    lines = [
        [
            f"`{column.name}`",
            column.kind.takes if column.kind.name == "word" else column.kind.name,
            f"`{PARQUET_TYPES[column.name]}`",
            column.unit or "–",
            column.meaning,
            f"`{column.example}`" if column.example else "–",
        ]
        for column in SCHEMA_COLUMNS
    ]
    head = "| column | type | in Parquet | unit | meaning | example |\n|---|---|---|---|---|---|"
    return "\n".join([head, *(f"| {' | '.join(line)} |" for line in lines)])


def units_text(_: Results) -> str:
    """All units; those of a timing first."""
    timed, other = (", ".join(f"`{u}`" for u in units) for units in (TIME_UNITS, sorted(UNITS - {*TIME_UNITS, ""})))
    return textwrap.fill(f"A timing: {timed}. Anything else: {other}, or none.", 120)


BLOCKS: dict[str, Callable[[Results], str | None]] = {
    "guard": guard_table,
    "guard_short": guard_short,
    "step": step_table,
    "staging": staging_table,
    "models": models_table,
    "append": append_text,
    "kernels": kernels_table,
    "hits": hits_table,
    "bytes": bytes_table,
    "generate": generate_table,
    "curve": curve_table,
    "columns": columns_table,
    "families": families_table,
    "beside": lambda results: markdown_table(*found) if (found := beside_table(results)) else None,
    "bisected": lambda results: markdown_table(*found) if (found := bisected_table(results)) else None,
    "units": units_text,
    "planted": planted_table,
    "planted_classes": classes_table,
    "planted_generated": generated_table,
    "planted_triton": triton_table,
    "planted_small": small_table,
}


def pages() -> list[Path]:
    """README and the pages in docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def screenshot(page: Path, file: Path, browser: str) -> None:
    """A PNG of the top of the page, 1280 pixels wide.

    Raises:
        HybridKVError: the browser made none.
    """
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1280,1600",
        ]
        command += [f"--user-data-dir={profile}", "--virtual-time-budget=20000", f"--screenshot={file.resolve()}"]
        done = subprocess.run([*command, page.resolve().as_uri()], capture_output=True, text=True, timeout=120)
    if done.returncode or not file.exists():
        raise HybridKVError(f"{browser} made no screenshot: {done.stderr.strip()[-200:]}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite README and docs/*.md, and docs/dashboard.png where a browser is found."""
    ArgumentParser("python -m hybrid_kv.dashboard.readme", main.__doc__).parse_args(arguments)
    results = load(ROOT / "results")
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = rewrite(before, results)
        if after != before:
            write_whole(page, after)
        print(f"{page.relative_to(ROOT)}: {'rewritten' if after != before else 'up to date'}")
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print(f"docs/dashboard.png: left as it is, none of {', '.join(BROWSERS)} is installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "index.html"
        write_whole(page, build_page(Report(results, head())))
        screenshot(page, ROOT / "docs" / "dashboard.png", browser)
    print("docs/dashboard.png: made")


if __name__ == "__main__":
    run_command(main)
