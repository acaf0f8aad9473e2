"""Play a setting of `cases.json` in SGLang; the exit code is 1 if a token is wrong."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def wrong_answer(requests: Any, answers: Any, expected: Any) -> str:
    """Return a line about the first answer that is wrong; nothing if all are right."""
    for number, (request, answer, tokens) in enumerate(
        zip(requests, answers, expected, strict=True)
    ):
        got = answer["token_ids"]
        wanted = tokens[: len(got)] if "abort_after" in request else tokens
        if got != wanted:
            return f"request {number} got {got}, not {wanted}"
    return ""


def play(name: str) -> int:
    """Return the exit code of a setting: 1 after the first wrong answer."""
    cases = json.loads((FOLDER / "cases.json").read_text())
    setting = cases["settings"][name]
    os.environ.update(setting["environment"])
    sys.path[0] = str(FOLDER.parent)
    exact = importlib.import_module(FOLDER.name)
    exact.prepare()
    importlib.import_module(f"{FOLDER.name}.interpreter").install()
    exact.finish()
    config = cases["models"][setting["model"]]["config"]
    engine = exact.start(config, setting["options"], setting["changes"])
    traffic = cases["models"][setting["model"]]["traffic"]
    for title in setting["probes"]:
        engine.reset()
        for sent in traffic[title]:
            answers = engine.ask(sent["requests"], sent["preempt_every"])
            problem = wrong_answer(sent["requests"], answers, sent["expected"])
            if problem:
                print(f"{title}: {problem}", flush=True)
                return 1
    return 0


if __name__ == "__main__":
    code = play(sys.argv[1])
    os._exit(code)  # SGLang's threads go on
