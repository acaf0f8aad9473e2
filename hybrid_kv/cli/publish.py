"""`hybrid-kv check ENGINE --publish FOLDER`: rows of each run, and a page of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_kv.check.ci import plain
from hybrid_kv.check.probes.run import text_of
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.files import write_whole
from hybrid_kv.measure.results import Row, append_rows, read_rows
from hybrid_kv.models.registry import sized

FILE = "rows.csv"
ON_CPU = "cpu"  # the runner of rows that name none
# The first of these verdicts that a setting's probes have; each with the word of the page, and the
# verdict of the row.
WORST = {
    "wrong": ("found", "fail"),
    "known": ("known", "fail"),
    "void": ("void", "void"),
    "inconclusive": ("inconclusive", "void"),
    "right": ("right", "pass"),
    "not supported": ("refused", "void"),
}


@dataclass(frozen=True)
class EngineRun:
    """A run of an engine, as its rows name it.

    Attributes:
        runner: the plainest level of the factor `runner`, where the engine has it.
    """

    engine: str
    version: str
    model: str
    seed: int
    runner: str = ""

    def place(self, outcome: Outcome) -> tuple[str, str]:
        """Return the runner of an outcome, and its setting without that."""
        settings = {**outcome.settings}
        runner = settings.pop("runner", self.runner)
        return runner, text_of(settings)


def publish(folder: Path, run: EngineRun, outcomes: Sequence[Outcome]) -> None:
    """Append a row for each setting of a run, and write the engine's page anew.

    The newest row of a cell counts.

    Raises:
        HybridKVError: the folder cannot be written, or holds rows of another schema.
    """
    rows = []
    for place in dict.fromkeys(run.place(outcome) for outcome in outcomes):
        same = [outcome for outcome in outcomes if run.place(outcome) == place]
        rows += _rows(run, place, same)
    append_rows(folder / FILE, rows)
    name = re.sub(r"[^\w.]+", "-", run.engine)  # of a server it is an address
    write_whole(folder / f"{name}.md", page(folder / FILE, run.engine))


def _rows(run: EngineRun, place: tuple[str, str], outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the rows of a runner's setting: wrong probes, and tokens."""
    runner, setting = place
    worst = next(
        (outcome for word in WORST for outcome in outcomes if outcome.verdict == word), outcomes[0]
    )
    word, verdict = WORST.get(worst.verdict, (worst.verdict, "pass"))
    params = {
        "version": run.version,
        "model": run.model,
        "setting": setting,
        "seed": run.seed,
        "word": word,
        **({"runner": runner} if runner else {}),
        "said": "" if word == "right" else plain(f"{worst.probe}: {worst.detail}"),
    }
    values = {
        "wrong_probes": sum(outcome.verdict == "wrong" for outcome in outcomes),
        "tokens": sum(outcome.num_tokens for outcome in outcomes),
    }
    num_answers = sum(outcome.num_answers for outcome in outcomes)
    return [
        Row(
            "target",
            run.engine,
            metric,
            value,
            params=params,
            n=num_answers,
            better="lower",
            verdict=verdict,
        )
        for metric, value in values.items()
    ]


@dataclass
class _ModelTable:
    """The newest word of each setting and release of a model, the reasons, tokens and seeds."""

    words: dict[tuple[str, str], str] = field(default_factory=dict)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    seeds: set[int] = field(default_factory=set)

    def add(self, params: dict[str, Any], tokens: float) -> None:
        """Add a row."""
        version = _column(params)
        cell = params["setting"], version
        self.words[cell] = params["word"]
        # Without the version, so that releases can have the same reason.
        self.reasons[cell] = params["said"].replace(f" {params['version']}", "")
        self.tokens[version] += int(tokens)
        self.seeds.add(params["seed"])

    def lines(self, model: str) -> list[str]:
        """Return the lines of the page."""
        versions = sorted({version for _, version in self.words}, key=_number)
        lines = [
            f"\n## {model}\n",
            f"| setting | {' | '.join(versions)} |",
            f"|---|{'---|' * len(versions)}",
        ]
        for setting in dict.fromkeys(setting for setting, _ in self.words):
            words = [self.words.get((setting, version), "–") for version in versions]
            lines.append(f"| {plain(setting)} | {' | '.join(words)} |")
        tokens = [f"{self.tokens[version]:,}" for version in versions]
        lines.append(f"| tokens | {' | '.join(tokens)} |")
        lines.append(f"\nSeeds {', '.join(map(str, sorted(self.seeds)))}.")
        reasons = self._reason_lines(versions)
        return [*lines, "", *reasons] if reasons else lines

    def _reason_lines(self, versions: Sequence[str]) -> list[str]:
        """Return a line for each reason: the releases and the settings that have it."""
        settings: dict[tuple[str, str], list[str]] = {}
        pairs = dict.fromkeys(
            (setting, reason) for (setting, _), reason in self.reasons.items() if reason
        )
        for setting, reason in pairs:
            same = [
                version for version in versions if self.reasons.get((setting, version)) == reason
            ]
            settings.setdefault((", ".join(same), reason), []).append(setting)
        return [
            f"- {releases}, {'; '.join(names)}: {reason}"
            for (releases, reason), names in settings.items()
        ]


def page(file: Path, engine: str) -> str:
    """Return the page of an engine: settings by release for each model, with reasons."""
    frame = read_rows(file)
    frame = frame[(frame["benchmark"] == engine) & (frame["metric"] == "tokens")]
    tables: dict[str, _ModelTable] = {}
    for text, value in zip(frame["params"], frame["value"], strict=True):
        params = json.loads(text)
        tables.setdefault(params["model"], _ModelTable()).add(params, value)
    amount = f"{frame['n'].sum():,} answers, {int(frame['value'].sum()):,} tokens"
    lines = [f"# {engine}: setting by release\n", f"{amount} with their prompts."]
    if any(" " in version for table in tables.values() for _, version in table.words):
        lines.append("A release without a runner is its runner for CPUs.")
    families = {model: table for model, table in tables.items() if _is_family(model)}
    if len(families) > 1:
        lines += _family_lines(families)
    for model, table in tables.items():
        if len(families) < 2 or model not in families:
            lines += table.lines(model)
    return "\n".join(lines) + "\n"


def _is_family(model: str) -> bool:
    return model.partition(":")[0] in sized()


def _family_lines(tables: Mapping[str, _ModelTable]) -> list[str]:
    """Return family × setting, the newest word of each, and the reasons without their numbers."""
    settings = list(
        dict.fromkeys(setting for table in tables.values() for setting, _ in table.words)
    )
    lines = [
        f"\n## Families\n\n| family | {' | '.join(map(plain, settings))} |",
        f"|---|{'---|' * len(settings)}",
    ]
    reasons: dict[str, list[str]] = {}
    for model, table in tables.items():
        newest = {setting: word for (setting, _), word in table.words.items()}
        # What is refused in the plain setting is asked in no other.
        other = "refused" if set(newest.values()) == {"refused"} else "–"
        words = [newest.get(setting, other) for setting in settings]
        lines.append(f"| {model} | {' | '.join(words)} |")
        for (setting, _), reason in table.reasons.items():
            if reason:
                said = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", reason)
                reasons.setdefault(said, []).append(f"{model}, {plain(setting)}")
    return [*lines, "", *(f"- {'; '.join(cells)}: {said}" for said, cells in reasons.items())]


def _column(params: dict[str, Any]) -> str:
    """Return a release, with its runner if that is one of GPUs."""
    runner = params.get("runner", ON_CPU)
    return params["version"] if runner == ON_CPU else f"{params['version']} {runner}"


def _number(column: str) -> list[int]:
    version, _, runner = column.partition(" ")
    # The newest runner comes first.
    newest = -int(runner[1:]) if runner[1:].isdecimal() else 0
    return [*(int(digits) for digits in version.split(".") if digits.isdecimal()), newest]
