"""README's numbers are those of `results/`."""

from __future__ import annotations

import io
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from hybrid_kv.config import HybridKVError
from hybrid_kv.dashboard import planted, readme
from hybrid_kv.dashboard.data import load
from tests.dashboard.kinds import everything, readme_rows
from tests.dashboard.rows import results, row

ROOT = Path(__file__).resolve().parents[2]


def committed(folder: Path) -> Path | None:
    """The results of the last commit, without the rows that commands have appended since; None outside of git."""
    packed = subprocess.run(["git", "archive", "--format=zip", "HEAD", "results"], cwd=ROOT, capture_output=True)
    if packed.returncode:
        return None
    with zipfile.ZipFile(io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder)
    return folder / "results"


def test_every_page_shows_the_rows_of_the_repository(tmp_path: Path) -> None:
    """Those of the working tree, or those of the last commit: `make guard` leaves rows behind."""
    folders = [folder for folder in (ROOT / "results", committed(tmp_path)) if folder is not None]
    found = [load(folder) for folder in folders]
    for page in readme.pages():
        text = page.read_text(encoding="utf-8")
        made = [readme.rewrite(text, rows) for rows in found]
        assert text in made, f"{page.name} is behind results/*.csv; run: make figures"


def test_every_block_is_on_one_page_and_the_screenshot_too() -> None:
    texts = [page.read_text(encoding="utf-8") for page in readme.pages()]
    blocks = [name for text in texts for name in re.findall(r"<!-- figures:([\w-]+) -->", text)]
    assert sorted(blocks) == sorted(readme.BLOCKS)
    assert sum(len(re.findall(r"\((?:docs/)?dashboard\.png\)", text)) for text in texts) == 1
    assert (ROOT / "docs" / "dashboard.png").read_bytes().startswith(b"\x89PNG")


def test_blocks_are_rewritten_and_nothing_else_is(tmp_path: Path) -> None:
    found = results(tmp_path, *everything())
    text = (
        "before\n<!-- figures:hits -->\nold\n<!-- /figures -->\nbetween\n<!-- figures:append -->\n<!-- /figures -->\n"
    )
    made = readme.rewrite(text, found)
    assert made.startswith("before\n<!-- figures:hits -->\n| | hit rate | n-gram 3 | MTP 3 |\n|---|--:|--:|--:|\n")
    assert "old" not in made
    assert "\n<!-- /figures -->\nbetween\n<!-- figures:append -->\nOne append costs the engine 0.4 to 0.66 µs" in made
    assert readme.rewrite(made, found) == made


def test_a_block_without_rows_stays(tmp_path: Path) -> None:
    of_rows = set(readme.BLOCKS) - {"columns", "units"}
    text = "".join(f"<!-- figures:{name} -->\nold {name}\n<!-- /figures -->\n" for name in of_rows)
    assert readme.rewrite(text, results(tmp_path)) == text


def test_wrong_markers_are_one_line(tmp_path: Path) -> None:
    found = results(tmp_path)
    with pytest.raises(HybridKVError, match="no figures are called 'hit'; use one of"):
        readme.rewrite("<!-- figures:hit -->\n<!-- /figures -->", found)
    with pytest.raises(HybridKVError, match="has no end"):
        readme.rewrite("<!-- figures:hits -->\n", found)


def test_the_tables(tmp_path: Path) -> None:
    found = results(tmp_path, *everything(), *readme_rows())
    made = {name: block(found) or "" for name, block in readme.BLOCKS.items()}
    assert made["step"].splitlines() == [
        "| step | vLLM 0.22.0 V1 | vLLM 0.32.0 V1 | engine |",
        "|---|--:|--:|--:|",
        "| 16 of 256 append, width 1,024 | 157 (3.0; 2.9 to 3.1) | 463 (8.9; 8.8 to 9.0) | **52** |",
    ]
    assert (
        made["staging"].splitlines()[2] == "| 8 prefills × 64 blocks | 102 (15) | 68 (10) | 29 (4.3) | **6.8** | 272 |"
    )
    assert made["models"].splitlines() == [
        "| step | vLLM 0.22 V1 | vLLM 0.32 V2 |",
        "|---|--:|--:|",
        "| 8 prefills × 64 blocks | 0.91 (0.81 to 1.01) | 0.50 (0.40 to 0.60) |",
    ]
    assert made["append"].endswith("(torch, 1 block of 8 kernel blocks) takes 2 times as long.")
    assert "any of the 3 cells" in made["append"]
    assert made["hits"].splitlines()[2:] == [
        "| `none` | 0 | 13.0 % accepted | 92.0 % |",
        "| `align` | 71.2 % | 13.0 % | 92.0 % |",
        "| `all` | 71.9 % | 13.0 % | 92.0 % |",
    ]
    kernels = made["kernels"].splitlines()
    assert kernels[1] == "$ hybrid-kv kernels --targets sm_90,gfx942     # 4 of 4 lines, the last columns left out"
    assert " ".join(kernels[3].split()) == "state_update.slots Nemotron-3-Nano, K=3 float32 sm_90 64 0 32 16 128 64"
    assert " ".join(kernels[4].split()) == "gfx942 65 0 32 16 128 64"
    assert made["bytes"].splitlines()[2:] == ["| K = 3 | 12 | 2 | 6.0 |", "| K = 5 | 18 | 2 | 9.0 |"]
    assert made["generate"].splitlines() == [
        "| | 1 at a time | 8 at a time |",
        "|---|--:|--:|",
        "| 32 tokens after prompts of 256, 21 M random weights | 1.25 (1.15 to 1.35) | 1.50 (1.40 to 1.60) |",
        "| 24 five-shot questions, prefix caching | | 3.10 (3.00 to 3.20) |",
    ]
    assert made["curve"].splitlines() == [
        "| alarms | same | 5 % slower | 10 % slower |",
        "|---|--:|--:|--:|",
        "| equal code, any benchmark | 1 of 50 | | |",
        "| `calm/step[K=3]` | | 19 of 20 | 20 of 20 |",
    ]
    assert "layout" in made["guard"] and "10 of 10 checks passed" in made["guard"]


def test_families_are_told_by_the_cells_that_they_were_run_in(tmp_path: Path) -> None:
    same = {"suite": "guard", "benchmark": "families", "unit": "logit", "params": {"family": "bamba"}, "value": 2e-14}
    cells = ("none_async", "align_drafts_mixed_replay", "align_mtp")
    made = [row(**same, metric=f"largest_logit_difference/bamba:{name}") for name in (*cells, "cached_tokens")]
    made += [row(**same, metric="largest_logit_difference/bamba")]
    made += [row(**{**same, "value": 3e-6}, metric="distance_from_transformers/bamba")]
    (line,) = (readme.families_table(results(tmp_path, *made)) or "").splitlines()[2:]
    assert line == "| `bamba` | 3.0e-06 | 2.0e-14 | none, align | scripted, MTP | slots, replay | 3 |"


def test_a_rival_has_ratios_or_what_keeps_it_from_them(tmp_path: Path) -> None:
    common = {"suite": "families", "unit": "share", "benchmark": "tokens", "metric": "equal_requests"}
    who = {"family": "lfm2", "batch": 1}
    made = [row(**common, value=1.0, params={**who, "subject": subject}) for subject in ("engine", "transformers 5")]
    made += [row(**common, value=0.0, params={**who, "subject": "vllm 1"})]
    ratio = {"suite": "families", "unit": "time ratio", "metric": "ratio_to_engine", "benchmark": "decode"}
    made += [row(**ratio, value=1.25, params={**who, "subject": "transformers 5"})]
    refused = {"family": "bamba", "subject": "vllm", "reason": "ValueError: no"}
    made += [row(suite="families", benchmark="runs", metric="runs", unit="", value=0.0, params=refused)]
    made += [row(2, **common, value=1.0, params={**who, "subject": "vllm 1", "dtype": "bfloat16"})]
    lines = (readme.BLOCKS["beside"](results(tmp_path, *made)) or "").splitlines()[2:]
    assert lines[0] == "| `bamba` | vLLM | does not run: ValueError: no | – | – | – | – |"
    assert lines[1] == "| `lfm2` in bfloat16 | vLLM 1 | equal | – | – | – | – |", "it replaces no line in float32"
    assert lines[2].startswith("| `lfm2` | transformers 5 | equal | – | – | 1.25 (")
    assert lines[3] == "| `lfm2` | vLLM 1 | differ | – | – | – | – |"


@pytest.mark.parametrize(("share", "tokens"), [(1.0, "differ by rounding"), (0.5, "differ")])
def test_tokens_that_differ_by_rounding_alone_are_called_so(tmp_path: Path, share: float, tokens: str) -> None:
    common = {"suite": "families", "unit": "share", "benchmark": "tokens"}
    params = {"family": "lfm2", "batch": 8, "subject": "vllm 1"}
    made = [row(**common, metric="equal_requests", value=0.5, params=params)]
    made += [row(**common, metric="rounded_of_unequal", value=share, params=params)]
    assert f"| vLLM 1 | {tokens} |" in (readme.BLOCKS["beside"](results(tmp_path, *made)) or "")


def test_a_planted_bug_is_told_by_its_newest_row(tmp_path: Path) -> None:
    def of(run: int, bug: str, rule: str = "", **more: object) -> dict[str, object]:
        params = {"by": "http", **({"rule": rule} if rule else {}), **more}
        return row(run, params, suite="mutants", benchmark=bug, metric="caught", unit="", value=float(bool(rule)))

    made = [of(1, "C01"), of(2, "C01", "batch", is_first=True), of(1, "A01", "alone", is_first=False)]
    made += [of(1, "L09", "alone"), of(1, "F52"), of(1, "none")]
    made += [row(3, {"by": "quick"}, suite="mutants", benchmark="A01", metric="caught", unit="", value=0.0)]
    text = readme.BLOCKS["planted"](results(tmp_path, *made)) or ""
    assert text.startswith("3 of 4 that were tried are found;") and "differs in 1 of 2:" in text
    assert text.splitlines()[4:] == ["| alone | A01 L09 |", "| batch | C01 |", "| nothing | F52 |"]


def test_a_class_of_bugs_is_told_by_what_caught_each_first(tmp_path: Path) -> None:
    def of(run: int, bug: str, by: str, section: str = "", seconds: float | None = None) -> list[dict[str, object]]:
        params = {"by": by, **({"section": section} if section else {})}
        values = {"caught": float(bool(section)), **({} if seconds is None else {"seconds": seconds})}
        common = {"suite": "mutants", "benchmark": bug, "unit": ""}
        return [row(run, params, metric=metric, value=value, **common) for metric, value in values.items()]

    made = of(1, "A01", "quick") + of(2, "A01", "quick", "plan", 4.0) + of(3, "A01", "full", "layout", 90.0)
    made += (
        of(1, "A02", "quick", "plan", 40.0)
        + of(1, "A04", "quick", "", 50.0)
        + of(2, "A04", "sanitizer", "sanitizer", 6.0)
    )
    made += of(1, "B01", "quick") + of(2, "B01", "full") + of(1, "B02", "http", "probes", 9.0) + of(1, "none", "quick")
    made += of(1, "runner.py:17", "quick") + of(1, "C01", "quick", "exact model")
    made += of(1, "A01", "accuracy") + of(1, "C01", "accuracy", "accuracy")
    lines = (readme.BLOCKS["planted_classes"](results(tmp_path, *made)) or "").splitlines()
    assert lines[0] == (
        "4 of 5 are caught, 3 of them by the quick guard, 1 in 30 s of one core at most; the median takes 22.0 s. "
        "Not caught: B01. Correct answers alone show 1 of 2."
    )
    shown = {line[2]: line.split(" | ")[2:5] for line in lines[4:]}
    assert shown["A"] == ["plan 2, sanitizer 1", "3 of 3", "6.0"] and shown["B"] == ["–", "0 of 1", "–"]
    assert shown["C"] == ["exact model 1", "1 of 1", "–"] and shown["D"] == ["–", "0 of 0", "–"]
    assert {path.stem[0] for path in (ROOT / "mutants").glob("[A-Z]*.yaml")} == set(shown)


def test_generated_bugs_are_told_by_the_part_that_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "is_there", lambda file, change: (file, change) != ("cache/plan.py", "e"))
    monkeypatch.setattr(planted, "read_equivalent", lambda: {("cache/spec.py", "f")})

    def of(run: int, name: str, change: str, section: str = "", by: str = "quick+sanitizer") -> dict[str, object]:
        params = {"by": by, "change": change, **({"section": section} if section else {})}
        value = float(bool(section))
        return row(run, params, suite="mutants", benchmark=name, metric="caught", unit="", value=value)

    made = [of(1, "cache/plan.py:7:AddNot:1", "a"), of(2, "cache/plan.py:9:AddNot:1", "a", "plan")]
    made += [of(1, "cache/spec.py:7:AddNot:1", "b"), of(1, "engine/runner.py:7:AddNot:1", "c", "exact model")]
    made += [of(1, "kernels/ssd/reference.py:7:AddNot:1", "d", "kernels")]
    made += [of(1, "cache/plan.py:7:AddNot:2", "e"), of(1, "cache/spec.py:7:AddNot:2", "f")]
    made += [row(1, {"by": "quick"}, suite="mutants", benchmark="A01", metric="caught", unit="", value=0.0)]
    made += [of(1, "kernels/ssd/slots.py:7:AddNot:1", "g", "tests", by="triton")]
    lines = (readme.BLOCKS["planted_generated"](results(tmp_path, *made)) or "").splitlines()
    assert lines[0].startswith("Of 4 that were hunted, ") and lines[0].endswith("3 are caught (75.0%):")
    assert lines[4:] == [
        "| `cache/` | 2 | 1 | plan 1 |",
        "| `engine/runner.py` | 1 | 1 | exact model 1 |",
        "| `kernels/ssd/` | 1 | 1 | kernels 1 |",
    ]
    lines = (readme.BLOCKS["planted_triton"](results(tmp_path, *made)) or "").splitlines()
    assert lines[0].startswith("Of 1 that were hunted, ") and lines[4:] == ["| `kernels/ssd/` | 1 | 1 | tests 1 |"]


def test_small_cases_are_told_by_their_median_and_the_worst_of_them(tmp_path: Path) -> None:
    def of(run: int, bug: str, *values: float) -> list[dict[str, object]]:
        metrics = [*planted.SIZES, "small_held", "small_passes_unchanged"]
        common = {"suite": "mutants", "benchmark": bug, "unit": "", "n": 20}
        return [
            row(run, {"by": "quick"}, metric=m, value=value, **common) for m, value in zip(metrics, values, strict=True)
        ]

    made = of(1, "A01", 9, 900, 90, 0, 0) + of(2, "A01", 1, 4, 2.5, 1, 1) + of(2, "A02", 3, 64, 7, 0.95, 1)
    made += of(2, "B01", 2, 65, 61.2, 1, 0)
    alone = {"suite": "mutants", "metric": "caught", "unit": "", "value": 1.0}
    made += [row(2, {"by": "quick", "section": "plan"}, benchmark=bug, **alone) for bug in ("A07", "A12", "B01")]
    made += [row(9, {"by": "quick", "section": "plan"}, benchmark=bug, **alone) for bug in ("A13", "A07")]
    lines = (readme.BLOCKS["planted_small"](results(tmp_path, *made)) or "").splitlines()
    assert lines[0] == (
        "Of 3 small cases 2 fail 20 of 20 times with the bug, and 2 pass without it. "
        "2 more were caught without such a case: plan 2."
    )
    assert lines[4:] == [
        "| requests | 2 | 3 (A02) | 3 of 3 have at most 3 |",
        "| prompt tokens | 64 | 65 (B01) | 2 of 3 have at most 64 |",
        "| seconds | 7 | 61.2 (B01) | 2 of 3 have at most 60 |",
    ]


def test_a_quick_run_does_not_replace_the_full_ones_tables(tmp_path: Path) -> None:
    quick = [one | {"run_id": "quick", "time_utc": "2030-01-01T00:00:00Z"} for one in everything()]
    chosen = [one for one in quick if one["benchmark"] in ("layout", "expand")][:4]
    with_quick, without = results(tmp_path / "a", *everything(), *chosen), results(tmp_path / "b", *everything())
    for name, block in readme.BLOCKS.items():
        assert block(with_quick) == block(without), name


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--foo", 2), ("docs", 2)])
def test_arguments_start_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str, code: int
) -> None:
    monkeypatch.setattr(readme, "load", lambda folder: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as left:
        readme.main([argument])
    out, err = capsys.readouterr()
    assert left.value.code == code
    assert "Rewrite README" in out if code == 0 else (out, err.count("\n")) == ("", 1) and argument in err
