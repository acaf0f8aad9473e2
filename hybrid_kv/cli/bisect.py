"""`hybrid-kv bisect`: from red to culprit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hybrid_kv.cli.options import AsJson, OutFile, show


def bisect(
    good: Annotated[str, typer.Argument(help="A git revision at which it was right, or fast.")],
    bad: Annotated[str, typer.Argument(help="A later one at which it is not.")] = "HEAD",
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Who broke this scenario, which the guard wrote?")
    ] = None,
    cache: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For what was answered so far: the same command again goes on.")
    ] = Path("out/bisect"),
    as_json: AsJson = False,
    out: OutFile = None,
) -> None:
    """Name the commit that broke something, or made it slower: halves the commits between GOOD and BAD."""
    from bench.harness.compare import ROOT
    from hybrid_kv.bisect.history import Trees, describe, fill_package, read_history
    from hybrid_kv.bisect.memory import ENDS, Memory, Outcome, workplace
    from hybrid_kv.bisect.replay import Replay
    from hybrid_kv.bisect.run import find
    from hybrid_kv.bisect.told import document, print_finding
    from hybrid_kv.config import ConfigError
    from hybrid_kv.files import check_outputs
    from hybrid_kv.guard.replay import read_scenario

    if replay is None:
        raise ConfigError("say what went red: --replay FILE")
    read_scenario(replay)
    check_outputs(out, cache / "any" / "state.json")
    history = read_history(ROOT, good, bad)
    asked = {"good": history.good.commit, "bad": history.bad.commit, "replay": replay.read_text()}

    def tell(key: str, outcome: Outcome, seconds: float) -> None:
        name = describe(ROOT, key).line if key in history.commits else key
        print(f"{name}: {outcome.answer}, {outcome.detail} ({seconds:.1f} s)", file=sys.stderr, flush=True)

    with workplace(cache, asked) as place:
        memory = Memory(place / "state.json")
        if num_known := len(memory.outcomes.keys() - {ENDS}):
            print(f"goes on: {num_known} commits have answered before", file=sys.stderr)
        question = Replay(Trees(place / "trees", fill_package(ROOT)), replay)
        finding = find(history.good.commit, history.commits, question, memory, tell)
    show(document(history, finding), as_json, out, lambda: print_finding(history, finding))
    if finding.verdict != "found":
        raise typer.Exit(1)
