"""Documents of `hybrid-kv guard --target … --out FILE` as one Markdown table for each engine.

    python -m hybrid_kv.probes.table FILE…

A row is a setting and the models of which the same was said in it. What several documents say of a model is taken
together: the worst verdict, the sum of what was asked. Counters are sums of the row's models, answers of all probes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hybrid_kv.config import ConfigError

WORST_FIRST = ("wrong", "inconclusive", "void", "right", "cannot be asked here")
NUMBERS = ("cached", "drafts", "accepted", "preemptions", "answers", "tokens")
FEW = 6  # probes, which are named, whatever the others said
HEAD = ("setting", "models", "right", "not right", *NUMBERS)


class Row:
    """A model in one setting."""

    def __init__(self) -> None:
        self.verdicts: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.refusal = ""

    def add(self, outcome: dict[str, Any]) -> None:
        probe, verdict = outcome["probe"], outcome["verdict"]
        self.verdicts[probe] = min(verdict, self.verdicts.get(probe, verdict), key=WORST_FIRST.index)
        if probe == "start":
            self.refusal = outcome["detail"]
        self.counts.update({name: outcome["moved"].get(name, 0) for name in NUMBERS[:4]})
        self.counts.update(answers=outcome["num_answers"], tokens=outcome["num_tokens"])

    def not_right(self) -> str:
        probes = defaultdict(list)
        for probe, verdict in self.verdicts.items():
            probes[verdict].append(probe)
        asked = [probe for probe, verdict in self.verdicts.items() if verdict != "cannot be asked here"]
        told = [f"{verdict}: {_named(probes[verdict], asked)}" for verdict in WORST_FIRST[:3] if verdict in probes]
        return "; ".join([*told, *([self.refusal] if self.refusal else [])])

    @property
    def num_asked(self) -> int:
        return sum(verdict != "cannot be asked here" for verdict in self.verdicts.values())

    def right(self) -> str:
        num_right = sum(verdict == "right" for verdict in self.verdicts.values())
        if not self.num_asked:
            return "cannot be asked here"
        return "all" if num_right == self.num_asked else f"{num_right} of {self.num_asked}"


def _named(some: Sequence[str], asked: Sequence[str]) -> str:
    """These probes of those that were asked, or the fewer others."""
    others = [probe for probe in asked if probe not in some]
    if len(some) < FEW or len(some) < len(others):
        return ", ".join(some)
    return f"all but {', '.join(others)}" if others else "all"


def tables(documents: Iterable[dict[str, Any]]) -> str:
    """Markdown.

    Args:
        documents: as `hybrid-kv guard --target` writes them.
    """
    engines: dict[str, dict[tuple[str, str], Row]] = {}
    for document in documents:
        rows = engines.setdefault(f"{document['target']} {document['version']}", {})
        for outcome in document["outcomes"]:
            setting = " ".join(f"{factor}={level}" for factor, level in outcome["settings"].items()) or "plain"
            rows.setdefault((document["model"], setting), Row()).add(outcome)
    return "\n".join(_table(engine, rows) for engine, rows in engines.items())


def _table(engine: str, rows: dict[tuple[str, str], Row]) -> str:
    lines, alike = [HEAD, ["---"] * 4 + ["--:"] * len(NUMBERS)], defaultdict[Any, dict[str, Row]](dict)
    for (model, setting), row in rows.items():
        alike[setting, row.right(), row.not_right()][_short(model)] = row
    order = list(dict.fromkeys(setting for _, setting in rows))
    for (setting, *said), some in sorted(alike.items(), key=lambda item: order.index(item[0][0])):
        counts = [sum(int(row.counts[name]) for row in some.values()) for name in NUMBERS]
        if said[0] == "all":
            fewest, *_, most = sorted(row.num_asked for row in (*some.values(), *some.values()))
            said[0] = f"all of {most}" if fewest == most else f"all of {fewest} to {most}"
        cells = [setting, ", ".join(some), *said, *(f"{count:,}" for count in counts)]
        lines.append([cell.replace("|", "\\|") for cell in cells])
    total = {name: sum(row.counts[name] for row in rows.values()) for name in ("answers", "tokens")}
    begin = f"{engine}: {total['answers']:,} answers, {total['tokens']:,} tokens with their prompts."
    return "\n".join([begin, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def _short(model: str) -> str:
    """A family without its size, a folder without what it is in."""
    return Path(model).name.partition(":")[0]


def main(files: Sequence[str]) -> int:
    """Print the tables of these documents."""
    documents = []
    try:
        for file in files:
            found = json.loads(Path(file).read_text())
            if not isinstance(found, dict) or not {"target", "model", "outcomes"} <= found.keys():
                raise ConfigError("it is no document of `hybrid-kv guard --target … --out FILE`")
            documents.append(found)
    except (OSError, ValueError, ConfigError) as error:
        print(f"{file}: {error}", file=sys.stderr)
        return 2
    print(tables(documents), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
