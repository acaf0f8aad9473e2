"""A target in a worker process with an environment of its own, over a pipe; see `workers.pipe` for what is said."""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybrid_kv import environment
from hybrid_kv.config import ConfigError
from hybrid_kv.targets.target import Answer, Ask, Kind, TargetError

WORKERS = Path(__file__).parent / "workers"
START_SECONDS = 600.0  # vLLM takes about one minute
REPLY_SECONDS = 600.0
END_SECONDS = 20.0


def python_of(name: str, package: str) -> str:
    """The interpreter that has the engine: `.venv-<name>` here, or this one.

    Raises:
        ConfigError: none has it.
    """
    from importlib.util import find_spec

    own = Path(f".venv-{name}") / "bin" / "python"
    if own.exists():
        return str(own.absolute())
    if find_spec(package) is None:
        raise ConfigError(f"{name} is not installed: run `make peers`, or name a Python that has it with --python")
    return sys.executable


def build_of(kind: Kind, package: str, python: str) -> Kind:
    """An engine in the environment of a Python that the user names.

    Raises:
        ConfigError: it is no Python, or its environment lacks the package.
    """
    finds = f"import sys, importlib.util as u; sys.exit(u.find_spec({package!r}) is None)"
    try:
        has_it = not subprocess.run([python, "-c", finds], capture_output=True, check=False).returncode
    except OSError as error:
        raise ConfigError(f"{python}: {error.strerror}; give the Python of an environment") from None
    if not has_it:
        raise ConfigError(f"{python} has no {package}; give the Python of an environment with it")
    start = partial(Remote, kind.name, python)
    more = {name: getattr(kind, name) for name in ("inside", "known") if hasattr(kind, name)}
    more |= {"package": package, "python": python}
    return SimpleNamespace(name=kind.name, size=kind.size, factors=kind.factors, start=start, **more)


class Worker:
    """A process that serves one target after another, if its engine can be forked; else one.

    Args:
        early: import what does not belong to the engine before a target is started, and the engine only then.
    """

    def __init__(self, name: str, python: str, early: bool = False) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        self._scratch = tempfile.TemporaryDirectory()  # a fork leaves its temporary files behind
        self._begin = 0  # of what the last target said
        self._serves = self._is_asked = False
        self._process = subprocess.Popen(
            [python, str(WORKERS / f"{name}.py"), *(["early"] if early else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=environment.child_environment(environment.WORKER_DEFAULTS, TMPDIR=self._scratch.name),
            start_new_session=True,  # Ctrl-C is not for it, and its forks end with it
        )

    def call(self, op: str, seconds: float, **arguments: Any) -> Any:
        """What the engine returns.

        Raises:
            ConfigError: it refuses to start.
            TargetError: it failed, died, or said nothing for so long.
        """
        if op == "start":
            self._begin, self._serves = self._log.seek(0, os.SEEK_END), True
        elif not self._serves:
            raise TargetError(f"{self._name} died before {op}; {self._last_words()}")
        reply = self._exchange(op, seconds, **arguments)
        if not reply or "ended" in reply:
            self._serves = False
            raise TargetError(f"{self._name} died at {op}; {self._last_words()}")
        if "error" in reply:
            kind = ConfigError if reply["usage"] and op == "start" else TargetError
            raise kind(f"{self._name}, {op}: {reply['error']}")
        return reply["result"]

    def end(self) -> bool:
        """End the target; whether another one can be started here."""
        if self._serves and not self._is_asked:
            with suppress(TargetError):
                self._serves = "ended" not in self._exchange("end", END_SECONDS)
        if not self._serves and self._process.poll() is None:
            return True
        self.kill()
        return False

    def kill(self) -> None:
        """Kill the process and its forks, if it lives."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with suppress(OSError):
                assert stream is not None
                stream.close()
        self._scratch.cleanup()

    def _exchange(self, op: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """What it says to this; nothing if it is dead.

        Raises:
            TargetError: it says nothing for so long, and was killed.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        self._is_asked = True
        reply: dict[str, Any] = {}
        with suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            stdin.flush()
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                said = f"{self._name} said nothing for {seconds:.0f} s after {op}; {self._last_words()}"
                self.kill()
                raise TargetError(said)
            reply = json.loads(stdout.readline())  # a line that ends early is one of a process that died
        self._is_asked = False
        return reply

    def _last_words(self) -> str:
        with suppress(OSError, ValueError):
            self._log.seek(self._begin)
            lines = [line.strip() for line in self._log if line.strip()]
            errors = [line for line in lines if "Error" in line]
            return f"its last words: {(errors or lines)[-1][:400]}" if lines else "it said nothing"
        return "it said nothing"


_free: dict[tuple[Any, ...], list[Worker]] = {}  # workers without a target, by what they were started with


@atexit.register
def _end_workers() -> None:
    while _free:
        for worker in _free.popitem()[1]:
            worker.kill()


def renew_worker(name: str, python: str) -> None:
    """End the workers without a target, whose engine may have changed, and let a new one import what has not."""
    _end_workers()
    _free[_key(name, python)] = [Worker(name, python, early=True)]


def _key(name: str, python: str) -> tuple[Any, ...]:
    return name, python, WORKERS, tuple(sorted(environment.child_environment().items()))


class Remote:
    """See `targets.target.Target`.

    Raises:
        ConfigError: the engine does not know a setting or the model.
        TargetError: it does not start.
    """

    def __init__(self, name: str, python: str, folder: str, settings: Mapping[str, str]) -> None:
        self.name, self.settings = name, dict(settings)
        self._key = _key(name, python)
        free = _free.get(self._key)
        self._worker: Worker | None = free.pop() if free else Worker(name, python)
        try:
            about = self._worker.call(
                "start", START_SECONDS, folder=str(Path(folder).absolute()), settings=self.settings
            )
        except BaseException:
            self.close()
            raise
        self.version: str = about["version"]
        self.can = frozenset(about["can"])
        self.longest: int = about["longest"]

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        plain = [asdict(one) for one in requests]
        return [_answer(one) for one in self._call("ask", REPLY_SECONDS, requests=plain, preempt_every=preempt_every)]

    def counters(self) -> Mapping[str, float]:
        counters: dict[str, float] = self._call("counters", REPLY_SECONDS)
        return counters

    def wrong_read(self) -> str:
        """What the sanitizer beside an exact model saw first; empty: nothing."""
        line: str = self._call("wrong_read", REPLY_SECONDS)
        return line

    def reset(self) -> None:
        self._call("reset", REPLY_SECONDS)

    def close(self) -> None:
        if self._worker is not None and self._worker.end():
            _free.setdefault(self._key, []).append(self._worker)
        self._worker = None

    def _call(self, op: str, seconds: float, **arguments: Any) -> Any:
        if self._worker is None:
            raise TargetError(f"{self.name} was closed before {op}")
        return self._worker.call(op, seconds, **arguments)


def _answer(reply: Mapping[str, Any]) -> Answer:
    return Answer(
        tuple(reply["token_ids"]),
        reply.get("cached_tokens"),
        tuple({int(token): value for token, value in one.items()} for one in reply.get("logprobs", ())),
        tuple(tuple(one) for one in reply.get("others", ())),
        reply.get("error", ""),
    )
