"""An engine in a process of its own: what it answers, and what becomes of it when it does not."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from hybrid_kv.check.targets import remote
from hybrid_kv.check.targets.remote import Remote, python_of
from hybrid_kv.check.targets.target import Ask, TargetError
from hybrid_kv.config import ConfigError

WORKER = """
import os, sys, tempfile, time
sys.path.append({pipe!r})
import pipe

class Forked:
    def load(self):
        self.num_starts = 0
        self.loaded_by = os.getpid()

class Slow:
    def load(self):
        time.sleep(600)

class Engine({base}):
    def version(self):
        return tempfile.mkstemp()[1] if isinstance(self, Forked) else "1"

    def start(self, folder, settings):
        print("loading", folder)
        os.system("echo a library prints, too")
        if settings.get("prefix") == "all":
            raise ValueError("no such mode\\nand more")
        if settings.get("prefix") == "broken":
            raise RuntimeError("broken")
        if isinstance(self, Forked):
            self.num_starts += 1
            assert (self.loaded_by, self.num_starts) == (os.getppid(), 1)
            return {{"can": [], "longest": os.getpid()}}
        return {{"can": ["cached"], "longest": 64}}

    def ask(self, requests, preempt_every):
        print("started", flush=True)
        {ask}
        same = dict(cached_tokens=preempt_every, logprobs=[{{7: -0.5}}])
        return [dict(token_ids=request["prompt"], **same) for request in requests]

    def counters(self):
        return {{"hits": 3.0}}

    def reset(self):
        raise RuntimeError("it did not")

pipe.serve(Engine())
"""
Start = Callable[..., Remote]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A worker that answers with its prompts, behind one statement of the test's own."""
    pipe = str(remote.WORKERS)
    monkeypatch.setattr(remote, "WORKERS", tmp_path)

    targets = list[Remote]()

    def started(ask: str = "pass", base: str = "object", **settings: str) -> Remote:
        (tmp_path / "toy.py").write_text(WORKER.format(pipe=pipe, ask=ask, base=base))
        targets.append(Remote("toy", sys.executable, str(tmp_path), settings))
        return targets[-1]

    yield started
    for target in targets:
        target.close()
    remote.end_loaders()


def test_answers_come_back_though_the_engine_prints(start: Start) -> None:
    target = start()
    (one, other) = target.ask([Ask((1, 2)), Ask((3,))], preempt_every=5)
    assert (one.token_ids, one.cached_tokens, one.logprobs) == ((1, 2), 5, ({7: -0.5},))
    assert other.token_ids == (3,)
    assert (target.version, target.can, target.longest) == ("1", {"cached"}, 64)
    assert target.counters() == {"hits": 3.0}
    target.close()
    target.close()


def test_what_the_engine_refuses_is_the_users_to_mend(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"^toy, start: ValueError: no such mode$"):
        start(prefix="all")


def test_an_engine_that_does_not_start_says_its_version(start: Start) -> None:
    with pytest.raises(TargetError, match=r"toy, start: RuntimeError: broken") as error:
        start(base="object", prefix="broken")
    assert error.value.version == "1"


def test_what_the_engine_fails_at_is_its_own(start: Start) -> None:
    target = start()
    with pytest.raises(TargetError, match="toy, reset: RuntimeError: it did not"):
        target.reset()
    assert target.counters() == {"hits": 3.0}  # it lives on


BREAKS_OFF = (
    "[os.write(fd, b'[') for fd in range(3, 20) if 'socket' in "
    "os.path.realpath(f'/proc/self/fd/{fd}')]"
)
DIES = "print('MemoryError: no room', file=sys.stderr); sys.stderr.flush(); os._exit(3)"


@pytest.mark.parametrize(
    ("ask", "said", "then"),
    [
        ("raise ValueError('shapes differ')", "toy, ask: ValueError: shapes differ", ""),
        (DIES, "toy died at ask; its last words: MemoryError: no room", "toy died"),
        ("os.kill(os.getpid(), 4)", r"its last words: Illegal instruction in .*, line \d+", "died"),
        (f"{BREAKS_OFF}; os._exit(3)", "toy died at ask", "toy died"),
    ],
)
def test_an_engine_that_fails_or_dies_says_its_last_words(
    start: Start, ask: str, said: str, then: str
) -> None:
    target = start(ask)
    with pytest.raises(TargetError, match=said):
        target.ask([Ask((1,))])
    with pytest.raises(TargetError, match=then) if then else nullcontext():
        target.counters()


def test_an_engine_that_hangs_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    target = start("time.sleep(600)")
    monkeypatch.setattr(remote, "REPLY_SECONDS", 0.2)
    with pytest.raises(TargetError, match="toy said nothing for 0 s after ask"):
        target.ask([Ask((1,))])
    target.close()
    with pytest.raises(TargetError, match="toy was closed before counters"):
        target.counters()


def test_the_python_of_an_engine_is_its_own_or_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="toy is not installed"):
        python_of("toy", "no_such_package")
    own = tmp_path / ".venv-toy" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert python_of("toy", "no_such_package") == str(own)


def test_an_engine_that_can_be_forked_is_loaded_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start("os._exit(3) if requests[0]['prompt'] == [7] else None", base="Forked")
    scratch = Path(first.version)
    with pytest.raises(TargetError, match=r"toy died at ask; its last words: started$"):
        first.ask([Ask((7,))])
    with pytest.raises(TargetError, match="toy died at counters; its last words: started"):
        first.counters()
    first.close()
    with pytest.raises(ConfigError, match=r"^toy, start: ValueError: no such mode$"):
        start(base="Forked", prefix="all")
    second = start(base="Forked")
    assert second.ask([Ask((1,))])[0].token_ids == (1,)
    assert second.longest != first.longest
    assert Path(second.version).parent == scratch.parent
    with pytest.raises(TargetError, match=r"toy died at ask; its last words: started$"):
        second.ask([Ask((7,))])
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another one")
    third = start(base="Forked")
    beside = start(base="Forked")
    assert Path(beside.version).parent == scratch.parent and beside.longest != third.longest
    for target in (second, third, beside):
        target.close()
    assert scratch.exists()
    remote.end_loaders()
    assert not scratch.parent.exists()


EARLY = """
import sys
sys.path.append({pipe!r})
import pipe

class Engine:
    late = "toy_engine",

    def load(self):
        was_there = ["colorsys"] if "colorsys" in sys.modules else []
        import colorsys, toy_engine
        self.found, self.about = toy_engine.VERSION, {{"can": was_there, "longest": 1}}

    def version(self):
        return self.found

    def start(self, folder, settings):
        return self.about

pipe.serve(Engine())
"""


def test_a_renewed_loader_imports_the_engine_at_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.py").write_text(EARLY.format(pipe=str(remote.WORKERS)))
    monkeypatch.setattr(remote, "WORKERS", tmp_path)
    (source := tmp_path / "toy_engine.py").write_text("VERSION = 'old'")
    Remote("toy", sys.executable, "folder", {}).close()
    remote.renew_loader("toy", sys.executable)
    source.write_text("VERSION = 'a longer one'")
    target = Remote("toy", sys.executable, "folder", {})
    assert (target.version, target.can) == ("a longer one", {"colorsys"})
    target.close()
    remote.end_loaders()


def test_one_that_hangs_is_killed_and_no_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = "requests[0]['prompt'] == [1] or time.sleep(600)"
    beside, target = start(sleeps, base="Forked"), start(sleeps, base="Forked")
    monkeypatch.setattr(remote, "REPLY_SECONDS", 0.2)
    process = os.pidfd_open(target.longest)
    with pytest.raises(
        TargetError, match="toy said nothing for 0 s after ask; its last words: started"
    ):
        target.ask([Ask((2,))])
    target.close()
    assert select.select([process], [], [], 60.0)[0], "it still runs"
    os.close(process)
    assert beside.ask([Ask((1,))])[0].token_ids == (1,)


def test_an_import_that_hangs_is_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "START_SECONDS", 0.2)
    with pytest.raises(TargetError, match="toy said nothing for 0 s after start; it said nothing"):
        start(base="Slow")
