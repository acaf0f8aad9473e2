"""The tables of docs/ are those of `results/`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bench import figures
from tests.measure.dashboard.kinds import everything
from tests.measure.dashboard.rows import RECEIPT, results, row

ROOT = Path(__file__).resolve().parents[2]


def committed(folder: Path) -> Path | None:
    """Return the committed results, without rows appended since; None outside of git."""
    packed = folder / "results.zip"
    if subprocess.run(
        ["git", "archive", "-o", packed, "HEAD", "results"], cwd=ROOT, capture_output=True
    ).returncode:
        return None
    shutil.unpack_archive(packed, folder)
    return folder / "results"


def test_every_page_shows_the_rows_of_the_repository(tmp_path: Path) -> None:
    """Those of the working tree, or those of the last commit: `make guard` leaves rows behind."""
    found = [
        figures.read(folder)
        for folder in (ROOT / "results", committed(tmp_path))
        if folder is not None
    ]
    texts = {page.name: page.read_text(encoding="utf-8") for page in figures.pages()}
    for name, text in texts.items():
        made = [figures.rewrite(text, rows) for rows in found]
        assert text in made, f"{name} is behind results/*.csv; run: make figures"
    blocks = [
        name for text in texts.values() for name in re.findall(r"<!-- figures:([\w-]+) -->", text)
    ]
    assert sorted(blocks) == sorted(figures.BLOCKS)


def test_blocks_are_rewritten_and_nothing_else_is(tmp_path: Path) -> None:
    text = "before\n<!-- figures:curve -->\nold\n<!-- /figures -->\nbetween\n"
    made = figures.rewrite(text, results(tmp_path, *everything()))
    assert made.startswith("before\n<!-- figures:curve -->\n| alarms | same |")
    assert made.endswith("|\n<!-- /figures -->\nbetween\n")
    assert "old" not in made


def test_a_block_without_rows_stays(tmp_path: Path) -> None:
    text = "".join(
        f"<!-- figures:{name} -->\nold {name}\n<!-- /figures -->\n" for name in figures.BLOCKS
    )
    assert figures.rewrite(text, results(tmp_path)) == text


def test_step_and_curve(tmp_path: Path) -> None:
    params = {"receipt": RECEIPT, "scenario": "8 prefills"}
    total = {"suite": "block_tables", "benchmark": "total"}
    ratio = {"metric": "ratio_to_engine", "unit": "time ratio"}
    rows = [row(38, {**params, "subject": "engine"}, value=52e3, **total)]
    rows += [row(38, {**params, "subject": "vllm"}, value=157e3, **total)]
    rows += [
        row(38, {**params, "subject": "vllm"}, value=3.0, ci_low=2.9, ci_high=3.1, **total | ratio)
    ]
    for name, times in (("0 append", 3.5), ("8 append", 9.0)):
        case = {**params, "scenario": name, "subject": "vllm"}
        rows += [
            row(38, case, value=60e3, **total),
            row(38, case, value=times, ci_low=2, ci_high=9, **total | ratio),
        ]
    found = results(tmp_path, *everything(), *rows)
    made = {name: (block(found) or "").splitlines() for name, block in figures.BLOCKS.items()}
    assert made["step"][0] == "| µs | vllm | engine |"
    assert made["step"][2:] == [
        "| 8 prefills | 157 (3.0; 2.9 to 3.1) | 52 |",
        "| 8 append | 60 (9.0; 2.0 to 9.0) | – |",
    ]
    assert made["curve"][2:] == [
        "| equal code, any benchmark | 1 of 50 | | |",
        "| `calm/step[K=3]` | | 19 of 20 | 20 of 20 |",
    ]


def test_the_newest_release_of_an_engine_counts_and_its_last_word(tmp_path: Path) -> None:
    said = [
        ("vllm", "0.9.0", "plain", "found", {}),
        ("vllm", "0.10.0", "plain", "found", {"runner": "v2"}),
        ("vllm", "0.10.0", "plain", "known", {"runner": "v2"}),
        ("vllm", "0.10.0", "spec=mtp3", "right", {"runner": "v2"}),
        ("vllm", "0.10.0", "plain", "right", {"runner": "cpu"}),
        ("mlx", "0.32.2", "plain", "refused", {}),
    ]
    rows = [
        row(
            suite="target",
            benchmark=engine,
            metric="tokens",
            value=1000.0,
            params={"version": version, "model": "m", "setting": setting, "word": word, **more},
            time_utc=f"2026-11-01T00:00:0{i}Z",
        )
        for i, (engine, version, setting, word, more) in enumerate(said)
    ]
    head, _, *lines = (figures.engines_table(results(tmp_path, *rows)) or "").splitlines()
    assert head == "| engine | right | known | found | refused or void | tokens |"
    assert lines == [
        "| [vllm 0.10.0](docs/engines/vllm.md) | 1 | 0 | 0 | 0 | 1,000 |",
        "| [vllm 0.10.0](docs/engines/vllm.md), runner v2 | 1 | 1 | 0 | 0 | 3,000 |",
        "| [mlx 0.32.2](docs/engines/mlx.md) | 0 | 0 | 0 | 1 | 1,000 |",
    ]


def test_families_by_the_cells_that_ran(tmp_path: Path) -> None:
    same = {
        "suite": "guard",
        "benchmark": "families",
        "unit": "logit",
        "params": {"family": "bamba"},
        "value": 2e-14,
    }
    cells = ("none_async", "align_drafts_mixed_recompute", "align_mtp")
    made = [
        row(**same, metric=f"largest_logit_difference/bamba:{name}")
        for name in (*cells, "cached_tokens")
    ]
    made += [row(**same, metric="largest_logit_difference/bamba")]
    made += [row(**{**same, "value": 3e-6}, metric="distance_from_transformers/bamba")]
    other = {**same, "params": {"family": "lfm2"}}
    made += [row(**other, metric=f"largest_logit_difference/lfm2:{name}") for name in cells[:2]]
    made += [
        row(**other, metric=f"{metric}/lfm2")
        for metric in ("largest_logit_difference", "distance_from_transformers")
    ]
    text, *lines = (figures.families_table(results(tmp_path, *made)) or "").splitlines()
    assert text == "All with none, align, recompute; scripted drafts; scheme `slots`."
    assert lines[3:] == [
        "| `bamba` | 3.0e-06 | 2.0e-14 | 3 | MTP |",
        "| `lfm2` | 2.0e-14 | 2.0e-14 | 2 | |",
    ]


def test_damage_is_that_of_each_familys_newest_checkpoint(tmp_path: Path) -> None:
    def shown(run: int, family: str, value: float) -> dict[str, Any]:
        kind = {"cache": "kv", "kind": "zeroed", "scope": "one layer", "family": family}
        same = {"suite": "exact_weights", "benchmark": "damage", "metric": "shown", "n": 40}
        return row(run, params=kind, value=value, **same)

    made = [shown(0, "a", 0.5), shown(0, "b", 0.25), shown(1, "b", 1.0)]
    text = figures.exact_damage_table(results(tmp_path, *made)) or ""
    assert text.splitlines()[-1] == "| kv, zeroed | 50.0% | 100.0% |"


def test_known_bugs_by_what_caught_each_first(tmp_path: Path) -> None:
    def of(
        run: int, bug: str, by: str, section: str = "", seconds: float | None = None
    ) -> list[dict[str, object]]:
        params = {"by": by, **({"section": section} if section else {})}
        values = {
            "caught": float(bool(section)),
            **({} if seconds is None else {"seconds": seconds}),
        }
        common = {"suite": "mutants", "benchmark": bug, "unit": ""}
        return [
            row(run, params, metric=metric, value=value, **common)
            for metric, value in values.items()
        ]

    made = (
        of(1, "A01", "quick")
        + of(2, "A01", "quick", "plan", 4.0)
        + of(3, "A01", "full", "layout", 90.0)
    )
    made += of(1, "A02", "quick", "plan", 40.0) + of(1, "A04", "quick", "", 50.0)
    made += (
        of(2, "A04", "sanitizer", "sanitizer", 6.0) + of(1, "B01", "quick") + of(2, "B01", "full")
    )
    made += (
        of(1, "B02", "http", "probes", 9.0)
        + of(1, "none", "quick")
        + of(1, "runner.py:17", "quick")
    )
    lines = (figures.mutants_table(results(tmp_path, *made)) or "").splitlines()
    assert lines[0] == (
        "3 of 4 are caught, 2 of them by the quick guard or unit tests, 1 in 30 s of one "
        "core at most; the median "
        "takes 22.0 s. First by plan 2, sanitizer 1. Not caught: B01."
    )
    shown = {line[2]: line.split(" | ")[2:] for line in lines[4:]}
    assert shown["A"] == ["3 of 3", "6.0 |"] and shown["B"] == ["0 of 1", "– |"]
    assert {path.stem[0] for path in (ROOT / "mutants").glob("[A-Z]*.yaml")} == set(shown)


def test_a_quick_run_does_not_replace_the_full_ones_tables(tmp_path: Path) -> None:
    quick = [one | {"run_id": "quick", "time_utc": "2030-01-01T00:00:00Z"} for one in everything()]
    chosen = [one for one in quick if one["benchmark"] in ("layout", "expand")][:4]
    with_quick, without = (
        results(tmp_path / "a", *everything(), *chosen),
        results(tmp_path / "b", *everything()),
    )
    for name, block in figures.BLOCKS.items():
        assert block(with_quick) == block(without), name
