"""The worker's end of the pipe: a JSON object a line, `{"op": …, …}` in, `{"result": …}` or `{"error": …}` out.

An engine whose imports take long has a `load`. It is called once, and each start is a fork behind it. `{"ended": …}`
says that a fork is over, with its exit code; the next line may start another one. With the argument `early` what an
engine imports from other packages is imported at once, and its own modules with the first line: they may change until
then.
"""

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
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
    if "early" in sys.argv:
        _load_others(engine)
    for number, line in enumerate(lines):
        if number == 0:
            engine.load()
        if not (child := os.fork()):
            _answer(engine, chain([line], lines), out)
            os._exit(0)  # to free what vLLM has imported takes 2 s
        _, status = os.waitpid(child, 0)
        out.write(json.dumps({"ended": os.waitstatus_to_exitcode(status)}) + "\n")


def _load_others(engine: Any) -> None:
    """Import what `load` does, but for the engine's own package `engine.package`; a fork finds out what that is."""
    read, write = os.pipe()
    if not (child := os.fork()):
        engine.load()
        names = [name for name in sys.modules if name.partition(".")[0] != engine.package]
        with open(write, "w") as file:
            file.write("\n".join(names))
        os._exit(0)
    os.close(write)
    with open(read) as file:
        for name in file.read().split():
            with suppress(Exception):
                import_module(name)
    os.waitpid(child, 0)


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


def sibling(name: str) -> Any:
    """Another file of this folder, which cannot be in the path: in it, an engine's package is its worker."""
    spec = importlib.util.spec_from_file_location(name, f"{os.path.dirname(__file__)}/{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
