"""A target in a process with an environment of its own, over a socket.

See `workers.pipe` for the protocol.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import Any, cast
from uuid import uuid4

from hybrid_kv import environment
from hybrid_kv.check.targets.target import Answer, Ask, Kind, TargetError
from hybrid_kv.config import ConfigError

WORKERS = Path(__file__).parent / "workers"
START_SECONDS = 600.0  # vLLM takes about one minute
REPLY_SECONDS = 600.0
END_SECONDS = 20.0
MAKES = {"sglang": "peers-sglang"}  # what makes an environment, where that is not `make peers`
# What faulthandler writes of a signal: its name, and the innermost frame that is in a file.
FATAL = re.compile(
    r"Fatal Python error: (.+)\n(?:.*\n)*?Current thread .*\n"
    r'(?:  File "<.*\n)*  File "(.+)", line (\d+)'
)
SOCKET, LOG = "socket", "log"  # in a loader's folder


def python_of(name: str, package: str) -> str:
    """Return the interpreter that has the engine: `.venv-<name>` here, or this one.

    Raises:
        ConfigError: none has it.
    """
    from importlib.util import find_spec

    own = Path(f".venv-{name}") / "bin" / "python"
    if own.exists():
        return str(own.absolute())
    if find_spec(package) is None:
        make = MAKES.get(name, "peers")
        raise ConfigError(
            f"{name} is not installed: run `make {make}`, "
            "or name a Python that has it with --python"
        )
    return sys.executable


def only_one(folder: str, settings: Mapping[str, str]) -> str:
    """Return the variant of an engine that has no others."""
    return ""


def remote_kind(
    name: str,
    package: str,
    factors: Mapping[str, Sequence[str]],
    variant_of: Callable[[str, Mapping[str, str]], str] = only_one,
    **about: Any,
) -> Kind:
    """Return an engine in the environment that `python_of` finds.

    `about` has the other attributes of `Kind`.

    Args:
        variant_of: gets the folder of a checkpoint and levels by factor, and says which of the
            engine's variants runs them: each has a process that imports it.
    """

    def start(folder: str, settings: Mapping[str, str]) -> Remote:
        return Remote(
            name, python_of(name, package), folder, settings, variant_of(folder, settings)
        )

    def begin(folder: str, settings: Mapping[str, str]) -> Path:
        return load(name, python_of(name, package), variant_of(folder, settings))

    return Kind(name, factors, start, package=package, load=begin, variant_of=variant_of, **about)


def build_of(kind: Kind, python: str) -> Kind:
    """Return an engine in the environment of a Python that the user names.

    Raises:
        ConfigError: it is no Python, or its environment lacks the package.
    """
    finds = f"import sys, importlib.util as u; sys.exit(u.find_spec({kind.package!r}) is None)"
    try:
        has_it = not subprocess.run(
            [python, "-c", finds], capture_output=True, check=False
        ).returncode
    except OSError as error:
        raise ConfigError(
            f"{python}: {error.strerror}; give the Python of an environment"
        ) from None
    if not has_it:
        raise ConfigError(
            f"{python} has no {kind.package}; give the Python of an environment with it"
        )

    def start(folder: str, settings: Mapping[str, str]) -> Remote:
        return Remote(kind.name, python, folder, settings, kind.variant_of(folder, settings))

    def begin(folder: str, settings: Mapping[str, str]) -> Path:
        return load(kind.name, python, kind.variant_of(folder, settings))

    return replace(kind, start=start, load=begin, python=python)


class Loader:
    """A process that imports an engine once and forks for each of its targets.

    Args:
        variant: of the engine, as its worker calls it.
        early: import what does not belong to the engine before a target is started, and the engine
            only then.
    """

    def __init__(self, name: str, python: str, variant: str = "", early: bool = False) -> None:
        self._scratch = tempfile.TemporaryDirectory()  # a fork leaves its temporary files behind
        self.folder = Path(self._scratch.name)
        with socket.socket(socket.AF_UNIX) as listener, (self.folder / LOG).open("w") as log:
            listener.bind(str(self.folder / SOCKET))
            listener.listen()
            words = [variant] * bool(variant) + ["early"] * early
            self.process = subprocess.Popen(
                [python, str(WORKERS / f"{name}.py"), str(listener.fileno()), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                env=environment.child_environment(
                    environment.WORKER_DEFAULTS, TMPDIR=self._scratch.name
                ),
                start_new_session=True,  # Ctrl-C is not for it, and its forks end with it
            )

    def kill(self) -> None:
        """Kill the process and its forks."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._scratch.cleanup()


_loaders: dict[tuple[Any, ...], Loader] = {}  # by what they were started with
_one_at_a_time = Lock()
# Folders of another process's loaders, by name, Python and variant.
_shared: dict[tuple[str, str, str], Path] = {}


@atexit.register
def end_loaders() -> None:
    """End all engines of this process."""
    while _loaders:
        _loaders.popitem()[1].kill()


def renew_loader(name: str, python: str) -> None:
    """End all engines, which may have changed, and import all that has not.

    Each variant that ran gets a new loader.
    """
    variants = {key[2] for key in _loaders if key[:2] == (name, python)} or {""}
    end_loaders()
    for variant in variants:
        _loaders[_key(name, python, variant)] = Loader(name, python, variant, early=True)


def load(name: str, python: str, variant: str = "") -> Path:
    """Begin to import an engine, unless a process has; its folder."""
    if (name, python, variant) in _shared:
        return _shared[name, python, variant]
    key = _key(name, python, variant)
    with _one_at_a_time:
        if key not in _loaders or _loaders[key].process.poll() is not None:
            if key in _loaders:
                _loaders.pop(key).kill()
            _loaders[key] = Loader(name, python, variant)
        return _loaders[key].folder


def shared_loaders() -> dict[tuple[str, str, str], Path]:
    """Return the folder of each loader, for `share_loaders` of another process.

    It then starts targets without imports of its own.
    """
    return {
        (name, python, variant): loader.folder
        for (name, python, variant, *_), loader in _loaders.items()
    }


def share_loaders(shared: Mapping[tuple[str, str, str], Path]) -> None:
    """Let the loaders of another process start the targets of this one."""
    _shared.update(shared)


def _key(name: str, python: str, variant: str) -> tuple[Any, ...]:
    return name, python, variant, WORKERS, tuple(sorted(environment.child_environment().items()))


class Remote:
    """See `targets.target.Target`.

    Args:
        variant: of the engine, as its worker calls it.

    Raises:
        ConfigError: the engine does not know a setting or the model.
        TargetError: it does not start.
    """

    def __init__(
        self, name: str, python: str, folder: str, settings: Mapping[str, str], variant: str = ""
    ) -> None:
        self.name = name
        self.settings: Mapping[str, str] = dict(settings)
        loader, self._is_asked = load(name, python, variant), False
        self._pid, self.version, self._log, self._loader_log = (
            0,
            "",
            loader / uuid4().hex,
            loader / LOG,
        )
        self._connection: socket.socket | None = socket.socket(socket.AF_UNIX)
        self._lines = self._connection.makefile("r")
        try:
            with suppress(OSError):  # why a loader is gone is in its log
                self._connection.connect(str(loader / SOCKET))
            hello = self._exchange("start", START_SECONDS, {"log": str(self._log)})
            self._pid, self.version = hello["pid"], hello["version"]
            where = str(Path(folder).absolute())
            about = self._call("start", START_SECONDS, folder=where, settings=self.settings)
        except BaseException as error:
            if isinstance(error, TargetError):
                error.version = self.version
            self.close()
            raise
        self.can = frozenset(about["can"])
        self.longest: int = about["longest"]

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        plain = [asdict(one) for one in requests]
        return [
            _answer(one)
            for one in self._call("ask", REPLY_SECONDS, requests=plain, preempt_every=preempt_every)
        ]

    def counters(self) -> Mapping[str, float]:
        return self._call("counters", REPLY_SECONDS)

    def wrong_read(self) -> str:
        """Return the first wrong read that the sanitizer of an exact model saw; empty: none."""
        return self._call("wrong_read", REPLY_SECONDS)

    def reset(self) -> None:
        self._call("reset", REPLY_SECONDS)

    def close(self) -> None:
        """End the target; one that does not end by itself is killed."""
        if self._connection is None:
            return
        if self._pid and not self._is_asked:
            with suppress(OSError, TargetError):
                self._connection.shutdown(socket.SHUT_WR)
                self._line("end", END_SECONDS)
        else:
            self._kill()
        self._lines.close()
        self._connection.close()
        self._connection = None

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            if self._pid:
                os.kill(self._pid, signal.SIGKILL)
        self._pid = 0

    def _call(self, op: str, seconds: float, **arguments: Any) -> Any:
        """Return the engine's result of an operation.

        Raises:
            ConfigError: it refuses to start.
            TargetError: it failed, died, or said nothing for so long.
        """
        reply = self._exchange(op, seconds, {"op": op, **arguments})
        if "error" in reply:
            kind = ConfigError if reply["usage"] and op == "start" else TargetError
            raise kind(f"{self.name}, {op}: {reply['error']}")
        return reply["result"]

    def _exchange(self, op: str, seconds: float, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            raise TargetError(f"{self.name} was closed before {op}")
        self._is_asked, reply = True, {}
        with suppress(OSError, ValueError):  # a line that ends early is one of a process that died
            self._connection.sendall(json.dumps(message).encode() + b"\n")
            reply = json.loads(self._line(op, seconds))
        self._is_asked = False
        if not reply:
            raise TargetError(f"{self.name} died at {op}; {self._last_words()}")
        return cast(dict[str, Any], reply)

    def _line(self, op: str, seconds: float) -> str:
        """Return the next line from the target; empty if it is dead.

        Raises:
            TargetError: it says nothing for so long, and was killed.
        """
        assert self._connection is not None
        if not select.select([self._connection], [], [], seconds)[0]:
            self._kill()
            raise TargetError(
                f"{self.name} said nothing for {seconds:.0f} s after {op}; {self._last_words()}"
            )
        return self._lines.readline()

    def _last_words(self) -> str:
        for log in (self._log, self._loader_log):
            with suppress(OSError, ValueError):
                if words := last_words(log.read_text()):
                    return f"its last words: {words[:400]}"
        return "it said nothing"


def last_words(log: str) -> str:
    """Return the signal that ended a process and where; else its last error, else its last line."""
    if fatal := FATAL.search(log):
        signal_name, file, line = fatal.groups()
        return f"{signal_name} in {'/'.join(Path(file).parts[-3:])}, line {line}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return next(iter(errors[-1:] or lines[-1:]), "")


def _answer(reply: Mapping[str, Any]) -> Answer:
    return Answer(
        tuple(reply["token_ids"]),
        reply.get("cached_tokens"),
        tuple(
            {int(token): value for token, value in one.items()} for one in reply.get("logprobs", ())
        ),
        tuple(tuple(one) for one in reply.get("others", ())),
        reply.get("error", ""),
        prompt_logprobs=tuple(
            {int(token): value for token, value in one.items()}
            for one in reply.get("prompt_logprobs", ())
        ),
    )
