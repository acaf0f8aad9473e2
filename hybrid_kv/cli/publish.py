"""`hybrid-kv guard --target ENGINE --publish FOLDER`: rows of each run, and from all of them setting × release."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hybrid_kv.check.ci import plain
from hybrid_kv.check.probes.run import text_of
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.files import write_whole
from hybrid_kv.measure.results import Row, append_rows, read_rows

FILE = "rows.csv"
# Of a setting's probes the first of these that there is; each with the word of the page, and the verdict of the row.
WORST = {
    "wrong": ("found", "fail"),
    "known": ("known", "fail"),
    "void": ("void", "void"),
    "inconclusive": ("inconclusive", "void"),
    "right": ("right", "pass"),
    "not supported": ("refused", "void"),
}


def publish(folder: Path, engine: str, version: str, model: str, seed: int, seen: Sequence[Outcome]) -> None:
    """Append a row for each setting of a run, and write the engine's page anew; the newest row of a cell counts.

    Raises:
        HybridKVError: the folder cannot be written, or holds rows of another schema.
    """
    rows = []
    for setting in dict.fromkeys(text_of(one.settings) for one in seen):
        own = [one for one in seen if text_of(one.settings) == setting]
        worst = next((one for word in WORST for one in own if one.verdict == word), own[0])
        word, verdict = WORST.get(worst.verdict, (worst.verdict, "pass"))
        said = "" if word == "right" else plain(f"{worst.probe}: {worst.detail}")
        params = {"version": version, "model": model, "setting": setting, "seed": seed, "word": word, "said": said}
        wrong, tokens = sum(one.verdict == "wrong" for one in own), sum(one.num_tokens for one in own)
        answers = sum(one.num_answers for one in own)
        for metric, value in (("wrong_probes", wrong), ("tokens", tokens)):
            rows.append(Row("target", engine, metric, value, params=params, n=answers, better="lower", verdict=verdict))
    append_rows(folder / FILE, rows)
    name = re.sub(r"[^\w.]+", "-", engine)  # of a server it is an address
    write_whole(folder / f"{name}.md", page(folder / FILE, engine))


def page(file: Path, engine: str) -> str:
    """Setting × release for each model of an engine, and what was said where a cell is not right."""
    frame = read_rows(file)
    frame = frame[(frame["benchmark"] == engine) & (frame["metric"] == "tokens")]
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    tokens, seeds = Counter[tuple[str, str]](), dict[str, set[int]]()
    for text, value in zip(frame["params"], frame["value"], strict=True):
        one = json.loads(text)
        tokens[one["model"], one["version"]] += int(value)
        seeds.setdefault(one["model"], set()).add(one["seed"])
        said = one["said"].replace(f" {one['version']}", "")  # so that releases can say the same
        cells[one["model"], one["setting"], one["version"]] = {"word": one["word"], "said": said}
    lines = [
        f"# {engine}: setting by release\n",
        f"{frame['n'].sum():,} answers, {int(frame['value'].sum()):,} tokens with their prompts.",
    ]
    for model in dict.fromkeys(model for model, _, _ in cells):
        own = {key[1:]: one for key, one in cells.items() if key[0] == model}
        versions = sorted({version for _, version in own}, key=_number)
        lines += [f"\n## {model}\n", f"| setting | {' | '.join(versions)} |", f"|---|{'---|' * len(versions)}"]
        for setting in dict.fromkeys(setting for setting, _ in own):
            words = (own.get((setting, version), {"word": "–"})["word"] for version in versions)
            lines.append(f"| {plain(setting)} | {' | '.join(words)} |")
        lines.append(f"| tokens | {' | '.join(f'{tokens[model, version]:,}' for version in versions)} |")
        lines.append(f"\nSeeds {', '.join(map(str, sorted(seeds[model])))}.")
        texts: dict[tuple[str, str], list[str]] = {}
        for setting, text in dict.fromkeys((setting, one["said"]) for (setting, _), one in own.items() if one["said"]):
            those = [version for version in versions if own.get((setting, version), {}).get("said") == text]
            texts.setdefault((", ".join(those), text), []).append(setting)
        found = [f"- {who}, {'; '.join(settings)}: {text}" for (who, text), settings in texts.items()]
        lines += ["", *found] if found else []
    return "\n".join(lines) + "\n"


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]
