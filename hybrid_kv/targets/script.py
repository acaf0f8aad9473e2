"""What the scripts of failing cases share. A `case` is a `probes.reproducer.Case`, which is of a higher floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_kv.models.registry import sized
from hybrid_kv.targets.target import Ask


def beginning(case: Any, uses: str = "") -> str:
    """What fails; `uses`: how the script is run, where it takes anything."""
    settings = " ".join(f"{factor}={level}" for factor, level in case.settings.items()) or "plain"
    problem = case.problem.replace("\\", "/").replace('"', "'").rstrip(".")
    return f'''"""{case.target} {case.version}, {settings}, {case.probe}: {problem}.
{uses}Exit code 1 while the bug lives."""
'''


def with_folder(model: str) -> str:
    """How a script is run that takes a checkpoint's folder."""
    family, _, size = model.partition(":")
    if family not in sized():
        return f"python SCRIPT FOLDER, with a folder of {model}. "
    made = f"hybrid-kv checkpoint {family} FOLDER" + (f" --size {size}" if size else "")
    return f"{made}; python SCRIPT FOLDER. "


def ending(case: Any, logprob: str, cached: str) -> str:
    """Says what is wrong with `got`, the tokens of the last answer.

    Args:
        logprob: expression of the log-probability of `expected[-1]`.
        cached: expression of the number of cached tokens.
    """
    wrong = "got[: len(expected)] != expected"
    if case.logprob is not None:
        wrong += f" or not abs({logprob} - {case.logprob}) <= {case.limit}"
    if case.most_cached is not None:
        wrong = f"{cached} > {case.most_cached}"
    return f"""expected = {list(case.expected)}
print("got     ", got, "\\nexpected", expected, "likelier by {case.margin:.3g}")
raise SystemExit({wrong})
"""


def in_turns(asks: Sequence[Ask], one_by_one: bool) -> list[list[int]]:
    """Which asks of a round an engine answers together that takes no other before these are complete.

    Args:
        one_by_one: it never answers several together.
    """
    waiting, turns = list(range(len(asks))), list[list[int]]()
    while waiting:
        complete = len(asks) - len(waiting)
        ready = [i for i in waiting if asks[i].after <= complete] or waiting[:1]
        turns.append(ready[:1] if one_by_one else ready)
        waiting = [i for i in waiting if i not in turns[-1]]
    return turns


def turns_of(case: Any, one_by_one: bool) -> list[list[tuple[list[int], int]]]:
    """Prompts and how long their answers may be, of all turns up to the one that has the answer that fails."""
    turns = []
    for one in case.rounds:
        for turn in in_turns(one.asks, one_by_one):
            turns.append([(list(one.asks[i].prompt), one.asks[i].max_tokens) for i in turn])
            if one is case.rounds[-1] and case.index in turn:
                break
    return turns
