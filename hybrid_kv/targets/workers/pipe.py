"""The worker's end of the pipe: a JSON object a line, `{"op": …, …}` in, `{"result": …}` or `{"error": …}` out."""

import json
import os
import sys
import traceback
from typing import Any


def serve(engine: Any) -> None:
    """Answer until the other side closes.

    Args:
        engine: has `start(folder, settings)` -> {"version", "can", "longest"}, `ask(asks, preempt_every)`,
            `score(token_ids)`, `counters()` and `reset()`, with the fields of `targets.target` as plain JSON. A
            `ValueError` in `start` is the user's to mend.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print; what they print is no answer
    for line in sys.stdin:
        message = json.loads(line)
        try:
            reply = {"result": getattr(engine, message.pop("op"))(**message)}
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip().splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {text[0]}", "usage": isinstance(error, ValueError)}
        out.write(json.dumps(reply) + "\n")
