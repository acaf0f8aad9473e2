"""`make figures`: the tables of numbers in README and docs/, from the rows in `results/`.

A block stands between `<!-- figures:NAME -->` and `<!-- /figures -->`; what is between is written
here, nowhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from bench.harness.arguments import ArgumentParser
from hybrid_kv.cache.modes import MODES
from hybrid_kv.errors import HybridKVError, run_command
from hybrid_kv.files import write_whole
from hybrid_kv.measure.dashboard.data import MUTANTS, Results, each, fullest_run, load, with_params
from hybrid_kv.measure.dashboard.sections import expansion
from hybrid_kv.measure.dashboard.sections.times import WHOLE, count_text, curve_rows
from hybrid_kv.measure.dashboard.words import number

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"(<!-- figures:([\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
SAID = ("right", "known", "found")  # of a setting: by a check with a model
EXACT = "exact_weights"
RUNS = (
    "quick",
    "sanitizer",
    "full",
)  # runs of the mutants; a later one counts where no earlier one caught the bug
SOON = 30  # seconds of one core in which the quick guard is to catch a bug
SHORT_BLOCKS_PER_KV_BLOCK = 8  # of the table in README
CLASSES = {
    "A": "geometry, page sizes, planning",
    "B": "block tables, slots, units of a block",
    "C": "metadata, persistent buffers, padding",
    "D": "prefill or decode, first states, batches",
    "E": "drafts: accepted tokens, rollback",
    "F": "prefix cache: what is kept, what a hit restores",
    "G": "lifetime: stale memory, preemption, leaks",
    "H": "kernels: scans, offsets, dtypes",
    "I": "admission, capacity, liveness",
    "J": "offload, other tiers, several devices",
    "K": "metrics, speed",
    "L": "reported in November 2026",
    "M": "shapes, steps in flight, lost hits, hand-over, heads",
}


def rewrite(text: str, results: Results) -> str:
    """Return a page with every block made anew; a block without rows stays as it is.

    Raises:
        HybridKVError: the name of a block is unknown, or its end is missing.
    """
    if len(re.findall(r"<!-- figures:", text)) != len(_BLOCK.findall(text)):
        raise HybridKVError(
            "a block that starts with <!-- figures:… --> has no end; add <!-- /figures -->"
        )

    def block(found: re.Match[str]) -> str:
        if found[2] not in BLOCKS:
            raise HybridKVError(f"figures {found[2]!r} are unknown; use one of {', '.join(BLOCKS)}")
        made = BLOCKS[found[2]](results)
        return found[0] if made is None else f"{found[1]}{made.strip()}\n{found[3]}"

    return _BLOCK.sub(block, text)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its first column left, the others right."""
    lines = [re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |") for line in [head, *rows]]
    return "\n".join([lines[0], f"|---|{'--:|' * (len(head) - 1)}", *lines[1:]])


def mutants_table(results: Results) -> str | None:
    """Return the known bugs by class: how many are caught, how soon, and what catches them."""
    rows = first_catches(results)
    if rows.empty:
        return None
    lines = []
    for letter, name in CLASSES.items():
        own = rows[rows["benchmark"].str.startswith(letter)]
        found = own[own["value"] == 1]
        median = found["seconds"].median()
        seconds = "–" if pd.isna(median) else f"{median:.1f}"
        lines.append([letter, name, f"{len(found)} of {len(own)}", seconds])
    caught = rows[rows["value"] == 1]
    quick = caught[caught["by"] == "quick"]
    text = (
        f"{len(caught)} of {len(rows)} are caught, {len(quick)} of them by the quick guard or unit "
        f"tests, {sum(quick['seconds'] <= SOON)} in {SOON} s of one core at most; the median takes "
        f"{quick['seconds'].median():.1f} s."
    )
    firsts = Counter(caught["section"]).most_common()
    text += f" First by {', '.join(f'{section} {count}' for section, count in firsts)}."
    if missed := sorted(rows[rows["value"] == 0]["benchmark"]):
        text += f" Not caught: {' '.join(missed)}."
    return f"{text}\n\n{markdown_table(['', 'class', 'caught', 's'], lines)}"


def first_catches(results: Results) -> pd.DataFrame:
    """Return a row for each known bug: that of the first of `RUNS` that caught it, if one did.

    Of each the newest row counts.
    """
    rows = results.of(MUTANTS)
    rows = with_params(rows[rows["benchmark"].str.fullmatch(r"[A-M]\d{2,3}")], by=str, section=str)
    rows = rows[rows["by"].isin(RUNS)].drop_duplicates(["benchmark", "by", "metric"], keep="last")
    keys = ["benchmark", "by"]
    seconds = rows[rows["metric"] == "seconds"].set_index(keys)["value"].rename("seconds")
    rows = rows[rows["metric"] == "caught"].join(seconds, on=keys)
    late = rows["by"].map(RUNS.index) + len(RUNS) * (rows["value"] == 0)
    return rows.assign(late=late).sort_values("late", kind="stable").drop_duplicates("benchmark")


def families_table(results: Results) -> str | None:
    """Return what the newest full guard found for each family.

    That is its distance from transformers, and its cells in float64.
    """
    rows = results.of("guard", "families")
    # A guard that is not long computes states next to other activations of all families, logits of
    # a few.
    rows = rows[rows["metric"].str.match("largest_logit_difference|distance_from_transformers")]
    rows = with_params(fullest_run(rows), family=str).dropna(subset=["family"])
    ran, numbers = {}, {}
    for family, group in rows.groupby("family"):
        own = {row.metric.partition("/")[0]: row for row in each(group)}
        exact, distance = own["largest_logit_difference"], own["distance_from_transformers"]
        cells = [name for name in exact.parsed if name.split("_")[0] in MODES]
        words = {word for name in cells for word in name.split("_")}
        ran[f"`{family}`"] = [
            word for word in (*MODES, "MTP", "recompute") if word.lower() in words
        ]
        numbers[f"`{family}`"] = [f"{distance.value:.1e}", f"{exact.value:.1e}", str(len(cells))]
    if not ran:
        return None
    common = [word for word in next(iter(ran.values())) if all(word in own for own in ran.values())]
    lines = [
        [name, *numbers[name], ", ".join(word for word in own if word not in common)]
        for name, own in ran.items()
    ]
    table = markdown_table(["family", "from transformers", "exact", "cells", "also"], lines)
    return f"All with {', '.join(common)}; scripted drafts; scheme `slots`.\n\n{table}"


def step_table(results: Results) -> str | None:
    """Return the CPU times of a whole block-table step, with the real code of other engines.

    Host and device part count together.

    Of the scenarios those in which an engine is nearest to ours, and furthest from it.
    """
    rows = with_params(fullest_run(results.of("block_tables", "total")), subject=str, scenario=str)
    rows = rows.dropna(subset=["subject", "scenario"])
    subjects = [*sorted(set(rows["subject"]) - {"engine"}), "engine"]
    found = {(row.scenario, row.subject, row.metric): row for row in each(rows)}

    def cell(scenario: str, subject: str) -> str:
        time, ratio = (
            found.get((scenario, subject, metric)) for metric in ("cpu_time", "ratio_to_engine")
        )
        if time is None:
            return "–"
        times = f" ({ratio.value:.1f}; {ratio.ci_low:.1f} to {ratio.ci_high:.1f})" if ratio else ""
        return number(time.value / 1000) + times

    ratios = rows[rows["metric"] == "ratio_to_engine"].groupby("subject")["value"]
    shown = set(rows.loc[[*ratios.idxmin(), *ratios.idxmax()], "scenario"])
    lines = [
        [one, *(cell(one, name) for name in subjects)]
        for one in dict.fromkeys(rows["scenario"])
        if one in shown
    ]
    return markdown_table(["µs", *subjects], lines) if len(subjects) > 1 else None


def curve_table(results: Results) -> str | None:
    """Return the alarms of the newest self-test, in equal code and with injected slowdowns."""
    rows = curve_rows(results)
    alarms = rows[(rows["metric"] == "false_alarm_rate") & (rows["benchmark"] == WHOLE)]
    found = rows[rows["metric"] == "detection_rate"]
    if alarms.empty or found.empty:
        return None
    percents = sorted(found["inject"].unique())
    lines = [
        ["equal code, any benchmark", count_text(next(each(alarms.tail(1)))), *[""] * len(percents)]
    ]
    for benchmark, group in found.groupby("benchmark", sort=False):
        by_percent = {row.inject: count_text(row) for row in each(group)}
        lines.append([f"`{benchmark}`", "", *(by_percent.get(percent, "") for percent in percents)])
    return markdown_table(
        ["alarms", "same", *(f"{percent} % slower" for percent in percents)], lines
    )


def expansion_table(results: Results) -> str | None:
    """Return the ways and sizes of block ids to kernel blocks, and what is known without a GPU."""
    found = expansion.ways(results)
    if not found:
        return None
    lines = [
        [f"{way.blocks_per_kv_block}, {way.name}", *_marked(expansion.cells(way))] for way in found
    ]
    text = f"{expansion.crossover_text(found)} {expansion.launch_text()}"
    made = f"{text}\n\n{markdown_table([expansion.WAY_HEAD, *expansion.head()], lines)}"
    if compiled := expansion.predicted(results):
        table = markdown_table(expansion.PREDICTED_HEAD, compiled)
        made += f"\n\n{expansion.PREDICTED_TEXT}\n\n{table}"
    return made


def expansion_short_table(results: Results) -> str | None:
    """Return the table of expansions at 8 kernel blocks per block."""
    found = expansion.ways(results)
    if not found:
        return None
    metrics = ("end_to_end_time",)
    ways = [way for way in found if way.blocks_per_kv_block == SHORT_BLOCKS_PER_KV_BLOCK]
    lines = [[way.name, *_marked(expansion.cells(way, metrics=metrics))] for way in ways]
    table = markdown_table(["way", *expansion.head(metrics=metrics)], lines)
    return f"{table}\n\n{expansion.crossover_text(found)} {expansion.launch_text()}"


def exact_engines_table(results: Results) -> str | None:
    """Return the dtypes in which each engine computes exact checkpoints to the bit, by family.

    Each difference follows.
    """
    rows = with_params(
        results.of(EXACT, "engines"),
        family=str,
        engine=str,
        version=str,
        dtype=str,
        setting=str,
        problem=str,
    )
    rows = rows.drop_duplicates(["family", "engine", "version", "dtype", "setting"], keep="last")
    if rows.empty:
        return None
    families = sorted({*rows["family"]})
    lines, notes = [], list[str]()
    for (engine, version), group in rows.groupby(["engine", "version"]):
        cells = []
        for family in families:
            words = []
            for dtype, own in group[group["family"] == family].groupby("dtype"):
                served = own[own["metric"] == "equal"]
                equal = int((served["value"] == 1).sum())
                count = f"{equal} of {len(served)}" if len(served) else "not served"
                words.append(f"{dtype} {count}")
                notes += [
                    f"{engine}, {family}, {dtype}, {row.setting}: {row.problem}"
                    for row in each(own)
                    if row.value != 1
                ]
            cells.append("; ".join(words) or "–")
        lines.append([f"{engine} {version}", *cells])
    table = markdown_table(
        ["settings that are equal to the bit", *(f"`{family}`" for family in families)], lines
    )
    return "\n".join([table, "", *(f"- {note}" for note in notes)]) if notes else table


def exact_damage_table(results: Results) -> str | None:
    """Return how often damage shows in the tokens of exact checkpoints, by family.

    It is in one layer / in all.
    """
    rows = with_params(results.of(EXACT, "damage"), family=str, cache=str, scope=str, kind=str)
    if rows.empty:
        return None
    # A family's checkpoint may have changed since another one's rows.
    rows = rows[rows["commit"] == rows.groupby("family")["commit"].transform("last")]
    rows = rows.assign(shown=rows["value"] * rows["n"])
    sums = rows.groupby(["cache", "kind", "scope", "family"])[["shown", "n"]].sum()
    families = sorted({*rows["family"]})

    def cell(cache: str, kind: str, family: str) -> str:
        keys = [(cache, kind, scope, family) for scope in ("one layer", "all layers")]
        return " / ".join(
            f"{sums.loc[key, 'shown'] / sums.loc[key, 'n']:.1%}"
            for key in keys
            if key in sums.index
        )

    pairs = rows[["cache", "kind"]].drop_duplicates().itertuples(index=False)
    lines = [
        [f"{cache}, {kind}", *(cell(cache, kind, family) or "–" for family in families)]
        for cache, kind in pairs
    ]
    trials = int(sums["n"].min()), int(sums["n"].max())
    said = (
        f"{trials[0]} trials each"
        if trials[0] == trials[1]
        else f"{trials[0]} to {trials[1]} trials each"
    )
    table = markdown_table(["", *(f"`{family}`" for family in families)], lines)
    return f"One layer / all layers; {said}.\n\n{table}"


def exact_mutants_text(results: Results) -> str | None:
    """Return how many of the known bugs exact weights find by themselves.

    The bugs are those that make the quick guard see wrong tokens.
    """
    rows = with_params(results.of(MUTANTS), by=str, rule=str)
    newest = rows.drop_duplicates(["benchmark", "by", "metric"], keep="last")
    caught = newest[newest["metric"] == "caught"]
    changing = {*caught[(caught["by"] == "quick") & (caught["rule"] == "step-tokens")]["benchmark"]}
    own = caught[(caught["by"] == "weights") & caught["benchmark"].isin(changing)]
    if own.empty:
        return None
    seconds = newest[(newest["by"] == "weights") & (newest["metric"] == "seconds")].set_index(
        "benchmark"
    )["value"]
    found = own[own["value"] == 1]["benchmark"]
    missed = " ".join(sorted({*own["benchmark"]} - {*found}))
    text = (
        f"Of {len(changing)} known bugs that change tokens, {len(own)} were run: {len(found)} are "
        f"found ({len(found) / len(own):.0%}), in a median of {seconds[found].median():.1f} s of "
        f"one core, at most {seconds[found].max():.0f} s."
    )
    return f"{text} Not found: {missed}." if missed else text


def _marked(cells: Sequence[str]) -> list[str]:
    """Return the cells with what is not measured in italics, so that it looks like no number."""
    return [f"*{cell}*" if cell == expansion.NOT_MEASURED else cell for cell in cells]


def engines_table(results: Results) -> str | None:
    """Return the settings of each engine's newest release by what its checks said last."""
    rows = results.of("target")
    rows = rows[rows["metric"] == "tokens"]
    rows = with_params(rows, version=str, model=str, setting=str, word=str, runner=str)
    if rows.empty:
        return None
    lines = []
    for engine, own in rows.groupby("benchmark", sort=False):
        newest = own[own["version"] == max(own["version"], key=_release)]
        for runner, tested in newest.groupby(newest["runner"].fillna("")):
            last = tested.drop_duplicates(["model", "setting"], keep="last")
            words = last["word"].value_counts()
            name = f", runner {runner}" if runner not in ("", "cpu") else ""
            release = f"[{engine} {last['version'].iloc[0]}](docs/engines/{engine}.md){name}"
            counts = [words.get(word, 0) for word in SAID]
            others = len(last) - sum(counts)
            tokens = int(tested["value"].sum())
            lines.append([release, *(f"{number:,}" for number in (*counts, others, tokens))])
    return markdown_table(["engine", *SAID, "refused or void", "tokens"], lines)


def _release(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]


BLOCKS = {
    "curve": curve_table,
    "engines": engines_table,
    "exact-damage": exact_damage_table,
    "exact-engines": exact_engines_table,
    "exact-mutants": exact_mutants_text,
    "expansion": expansion_table,
    "expansion-short": expansion_short_table,
    "families": families_table,
    "mutants": mutants_table,
    "step": step_table,
}


def read(folder: Path) -> Results:
    """Return the rows of a folder, and those of the engines' pages."""
    results, engines = load(folder), load(ROOT / "docs" / "engines")
    return replace(results, rows=pd.concat([results.rows, engines.rows], ignore_index=True))


def pages() -> list[Path]:
    """Return README and the pages in docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the generated tables of README and docs/*.md."""
    ArgumentParser("python -m bench.figures", main.__doc__).parse_args(arguments)
    results = read(ROOT / "results")
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = rewrite(before, results)
        if after != before:
            write_whole(page, after)
        print(f"{page.relative_to(ROOT)}: {'rewritten' if after != before else 'up to date'}")


if __name__ == "__main__":
    run_command(main)
