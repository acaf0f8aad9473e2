"""An engine in a process of its own: what it answers, and what becomes of it when it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_kv.config import ConfigError
from hybrid_kv.targets import remote
from hybrid_kv.targets.remote import Remote, python_of
from hybrid_kv.targets.target import Ask, TargetError

WORKER = """
import os, sys, time
sys.path.append({pipe!r})
import pipe

class Engine:
    def start(self, folder, settings):
        print("loading", folder)
        os.system("echo a library prints, too")
        if settings.get("prefix") == "all":
            raise ValueError("no such mode\\nand more")
        return {{"version": "1", "can": ["cached"], "longest": 64}}

    def ask(self, asks, preempt_every):
        print("asked", flush=True)
        {ask}
        return [dict(token_ids=one["prompt"], cached_tokens=preempt_every, logprobs=[{{7: -0.5}}]) for one in asks]

    def score(self, token_ids):
        return [-1.0] * (len(token_ids) - 1)

    def counters(self):
        return {{"hits": 3.0}}

    def reset(self):
        raise RuntimeError("it did not")

pipe.serve(Engine())
"""
Start = Callable[..., Remote]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A worker that answers with its prompts, behind one statement of the test's own."""
    pipe = str(remote.WORKERS)
    monkeypatch.setattr(remote, "WORKERS", tmp_path)

    def started(ask: str = "pass", **settings: str) -> Remote:
        (tmp_path / "toy.py").write_text(WORKER.format(pipe=pipe, ask=ask))
        return Remote("toy", sys.executable, str(tmp_path), settings)

    return started


def test_answers_come_back_though_the_engine_prints(start: Start) -> None:
    target = start()
    (one, other) = target.ask([Ask((1, 2)), Ask((3,))], preempt_every=5)
    assert (one.token_ids, one.cached_tokens, one.logprobs) == ((1, 2), 5, ({7: -0.5},))
    assert other.token_ids == (3,)
    assert (target.version, target.can, target.longest) == ("1", {"cached"}, 64)
    assert target.score([1, 2, 3]) == [-1.0, -1.0]
    assert target.counters() == {"hits": 3.0}
    target.close()
    target.close()


def test_what_the_engine_refuses_is_the_users_to_mend(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"^toy, start: ValueError: no such mode$"):
        start(prefix="all")


def test_what_the_engine_fails_at_is_its_own(start: Start) -> None:
    target = start()
    with pytest.raises(TargetError, match="toy, reset: RuntimeError: it did not"):
        target.reset()
    assert target.counters() == {"hits": 3.0}  # it lives on
    target.close()


def test_an_engine_that_dies_says_its_last_words(start: Start) -> None:
    target = start("print('MemoryError: no room', file=sys.stderr); sys.stderr.flush(); os._exit(3)")
    with pytest.raises(TargetError, match="toy died at ask; its last words: MemoryError: no room"):
        target.ask([Ask((1,))])
    with pytest.raises(TargetError, match="toy died"):
        target.counters()
    target.close()


def test_an_engine_that_hangs_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    target = start("time.sleep(600)")
    monkeypatch.setattr(remote, "REPLY_SECONDS", 0.2)
    with pytest.raises(TargetError, match="toy said nothing for 0 s after ask"):
        target.ask([Ask((1,))])
    assert target._process.wait(60) != 0
    target.close()


def test_the_python_of_an_engine_is_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYBRID_KV_PYTHON_TOY", raising=False)
    with pytest.raises(ConfigError, match="toy is not installed"):
        python_of("toy", "no_such_package")
    own = tmp_path / ".venv-toy" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert python_of("toy", "no_such_package") == str(own)
    monkeypatch.setenv("HYBRID_KV_PYTHON_TOY", sys.executable)
    assert python_of("toy", "no_such_package") == sys.executable
    monkeypatch.setenv("HYBRID_KV_PYTHON_TOY", "/nowhere/python")
    with pytest.raises(ConfigError, match="/nowhere/python: there is no such file"):
        python_of("toy", "no_such_package")


def test_a_bad_value_inside_the_engine_is_its_own(start: Start) -> None:
    target = start("raise ValueError('shapes differ')")
    with pytest.raises(TargetError, match="toy, ask: ValueError: shapes differ"):
        target.ask([Ask((1,))])
    target.close()
