"""The worker's end of the pipe: a JSON object a line, `{"op": …, …}` in, `{"result": …}` or `{"error": …}` out.

An engine whose imports take long has a `load`. It is called once, and each start is a fork behind it. `{"ended": …}`
says that a fork is over, with its exit code; the next line may start another one.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from itertools import chain
from typing import Any, TextIO


def serve(engine: Any) -> None:
    """Answer until the other side closes, or says `{"op": "end"}`.

    Args:
        engine: has `start(folder, settings)` -> {"version", "can", "longest"}, `ask(requests, preempt_every)`,
            `counters()` and `reset()`, with the fields of `targets.target` as plain JSON. A
            `ValueError` in `start` is the user's to mend.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print; what they print is no answer
    lines: Iterator[str] = iter(sys.stdin.readline, "")
    if not hasattr(engine, "load"):
        _answer(engine, lines, out)
        return
    engine.load()
    for line in lines:
        if not (child := os.fork()):
            _answer(engine, chain([line], lines), out)
            os._exit(0)  # to free what vLLM has imported takes 2 s
        _, status = os.waitpid(child, 0)
        out.write(json.dumps({"ended": os.waitstatus_to_exitcode(status)}) + "\n")


def _answer(engine: Any, lines: Iterator[str], out: TextIO) -> None:
    for line in lines:
        message = json.loads(line)
        if message["op"] == "end":
            return
        try:
            reply = {"result": getattr(engine, message.pop("op"))(**message)}
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip().splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {text[0]}", "usage": isinstance(error, ValueError)}
        out.write(json.dumps(reply) + "\n")
