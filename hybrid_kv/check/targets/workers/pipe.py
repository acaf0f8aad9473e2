"""The worker's end: a process that imports an engine once and forks for each target.

Each target has a connection of its own.

On a connection there is a JSON object a line: `{"log": …}` in, a file for what the engine prints,
and `{"pid": …, "version": …}` out; then `{"op": …, …}` in and `{"result": …}` or `{"error": …}`
out, until the other side closes. The listening socket is the descriptor argv[1]; the process ends
when its standard input does. Further arguments are for the engine, which may have variants. With
the argument `early`, what an engine imports from other packages is imported at once, and its own
modules with the first connection: they may change until then.
"""

import faulthandler
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any


def serve(engine: Any) -> None:
    """Fork for each connection until standard input ends.

    Args:
        engine: has `version()`, `start(folder, settings)` -> {"can", "longest"},
            `ask(requests, preempt_every)`, `counters()` and `reset()`, with the fields of
            `targets.target` as plain JSON; and `load()`, if imports take long and may be followed
            by a fork. A `ValueError` in `start` is the user's to mend.
    """
    faulthandler.enable()  # a signal that ends a process is in its log then, with the place
    listener, is_loaded = socket.socket(fileno=int(sys.argv[1])), "early" not in sys.argv
    if is_loaded:
        _load(engine)
    else:
        _load_others(engine)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a fork that ends is gone
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if not is_loaded:
            _load(engine)
            is_loaded = True
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _answer(engine, connection)
            os._exit(0)  # to free what vLLM has imported takes 2 s
        connection.close()


def _load(engine: Any) -> None:
    if hasattr(engine, "load"):
        engine.load()
        gc.freeze()  # vLLM's start collects three times, 1 s each


def _load_others(engine: Any) -> None:
    """Import all that `load` imports, but for the packages `engine.late`.

    The first of these is the engine's own; a fork finds out what `load` imports.
    """
    read, write = os.pipe()
    if not (child := os.fork()):
        engine.load()
        names = [name for name in sys.modules if name.partition(".")[0] not in engine.late]
        with open(write, "w") as file:
            file.write("\n".join(names))
        os._exit(0)
    os.close(write)
    with open(read) as file:
        for name in file.read().split():
            with suppress(Exception):
                import_module(name)
    os.waitpid(child, 0)


def _answer(engine: Any, connection: socket.socket) -> None:
    lines = connection.makefile("r")
    log = os.open(json.loads(next(lines))["log"], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _say(connection, {"pid": os.getpid(), "version": engine.version()})
    for line in lines:
        message = json.loads(line)
        try:
            reply = {"result": getattr(engine, message.pop("op"))(**message)}
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip().splitlines() or [""]
            reply = {
                "error": f"{type(error).__name__}: {text[0]}",
                "usage": isinstance(error, ValueError),
            }
        _say(connection, reply)


def _say(connection: socket.socket, reply: dict[str, Any]) -> None:
    connection.sendall(json.dumps(reply).encode() + b"\n")


def sibling(name: str) -> Any:
    """Import and return another file or folder of this folder.

    The folder cannot be in the path: in it, an engine's package is its worker.
    """
    path = f"{os.path.dirname(__file__)}/{name}"
    file, inside = (f"{path}/__init__.py", [path]) if os.path.isdir(path) else (f"{path}.py", None)
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
