"""A target in a worker process with an environment of its own, over a pipe; see `workers.pipe` for what is said."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid_kv.config import ConfigError
from hybrid_kv.errors import deaf_to_ctrl_c
from hybrid_kv.targets.target import Answer, Ask, TargetError

WORKERS = Path(__file__).parent / "workers"
START_SECONDS = 600.0  # vLLM takes about one minute
REPLY_SECONDS = 600.0


def python_of(name: str, package: str) -> str:
    """The interpreter that has the engine: `HYBRID_KV_PYTHON_<NAME>`, `.venv-<name>` here, or this one.

    Raises:
        ConfigError: none has it.
    """
    from importlib.util import find_spec

    variable = f"HYBRID_KV_PYTHON_{name.upper()}"
    if given := os.environ.get(variable):
        if not Path(given).exists():
            raise ConfigError(f"{variable}={given}: there is no such file; give a Python that has {package}")
        return given
    own = Path(f".venv-{name}") / "bin" / "python"
    if own.exists():
        return str(own.absolute())
    if find_spec(package) is None:
        raise ConfigError(f"{name} is not installed: run `make peers`, or name a Python that has it in {variable}")
    return sys.executable


class Remote:
    """See `targets.target.Target`.

    Raises:
        ConfigError: the engine does not know a setting or the model.
        TargetError: it does not start.
    """

    def __init__(
        self,
        name: str,
        python: str,
        folder: str,
        settings: Mapping[str, str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.settings = name, dict(settings)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the worker)
        with deaf_to_ctrl_c():
            self._process = subprocess.Popen(
                [python, str(WORKERS / f"{name}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                bufsize=1,
                env={**os.environ, **(environment or {})},
            )
        try:
            about = self._call("start", START_SECONDS, folder=str(Path(folder).absolute()), settings=self.settings)
        except BaseException:
            self.close()
            raise
        self.version: str = about["version"]
        self.can = frozenset(about["can"])
        self.longest: int = about["longest"]

    def ask(self, asks: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        plain = [asdict(one) for one in asks]
        return [_answer(one) for one in self._call("ask", REPLY_SECONDS, asks=plain, preempt_every=preempt_every)]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        scores: list[float] = self._call("score", REPLY_SECONDS, token_ids=list(token_ids))
        return scores

    def counters(self) -> Mapping[str, float]:
        counters: dict[str, float] = self._call("counters", REPLY_SECONDS)
        return counters

    def reset(self) -> None:
        self._call("reset", REPLY_SECONDS)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError, ValueError):
                assert stream is not None
                stream.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _call(self, op: str, seconds: float, **arguments: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(stdout, selectors.EVENT_READ)
                if not selector.select(seconds):
                    self._process.kill()
                    raise TargetError(f"{self.name} said nothing for {seconds:.0f} s after {op}; {self._last_words()}")
            line = stdout.readline()
        except (OSError, ValueError):
            line = ""
        if not line:
            raise TargetError(f"{self.name} died at {op}; {self._last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            kind = ConfigError if reply["usage"] and op == "start" else TargetError
            raise kind(f"{self.name}, {op}: {reply['error']}")
        return reply["result"]

    def _last_words(self) -> str:
        with suppress(OSError, ValueError):
            self._log.seek(0)
            lines = [line.strip() for line in self._log if line.strip()]
            errors = [line for line in lines if "Error" in line]
            return f"its last words: {(errors or lines)[-1][:400]}" if lines else "it said nothing"
        return "it said nothing"


def _answer(told: Mapping[str, Any]) -> Answer:
    return Answer(
        tuple(told["token_ids"]),
        told.get("cached_tokens"),
        tuple({int(token): value for token, value in one.items()} for one in told.get("logprobs", ())),
        tuple(tuple(one) for one in told.get("others", ())),
        told.get("error", ""),
    )
