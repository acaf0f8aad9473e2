"""A folder tier of KV offload, played with and held against a list of the files that should be there.

What happens is drawn: other engines write, use and delete blocks in the same folder, files are damaged or replaced by
something strange, disks are full, processes die. Time is told, not waited for. The rules are those that
`cache.folder_tier` promises, written anew: its own figures and functions are not asked. What happens and what is due
stand in one file, 590 lines, because each is read against the other.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hybrid_kv.cache import folder_tier
from hybrid_kv.cache.block_pool import BlockKey
from hybrid_kv.cache.folder_tier import FolderTier, OffloadStats

FRAME = 72  # bytes of a file before its payload: a header, which begins with format and model, and a checksum
HEADER, SAME_MODEL = 56, 28
PAYLOADS = (40, 64)  # bytes of a block, by group
KEYS: list[BlockKey] = [(group, bytes([number]) * 16) for group in (0, 1) for number in range(5)]
MODELS = OWN, OTHER = b"own." * 4, b"else" * 4
LIMITS = (None, 111, 112, 112 + 136, 2 * 112 + 136, 2 * 112 + 2 * 136, 5 * 112)  # a file has 112 or 136 bytes
LOOK, SCAN, SHARE, DAY = 1.0, 30.0, 0.02, 24 * 3600.0  # seconds, and the share of time that looking may take
STEPS = (*[0.5, 1.0] * 5, 29.0, 30.0)  # seconds from one event to the next
NO_PROCESS, FOREIGN_PROCESS = 2**22 + 1, 2**22 + 2  # Linux has none of these; the second is said to be another user's
MUST_HAPPEN = ("spared", "folder_evictions", "corrupt_files", "foreign_files", "truncated_files", "write_failures")
AHEAD = 10**6  # seconds of the told time before the real one: what the system has just touched looks old


class Clock:
    """Stands in for the module `time`. A look at it takes `tick` seconds; else it stands still."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = float(int(time.time()) + AHEAD), tick
        self.num_looks = 0

    def monotonic(self) -> float:
        self.num_looks += 1
        self.now += self.tick
        return self.now

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


@dataclass
class File:
    """`used`: when, in ns; `fault`: what is wrong with it, or empty."""

    content: bytes
    used: int
    fault: str = ""


def _content(model: bytes, key: BlockKey, payload: bytes) -> bytes:
    """A file: format, version, model, group, digest and bytes of the payload, a checksum of all that, the payload."""
    group, digest = key
    header = b"hybridkv" + (1).to_bytes(4, "little") + model + group.to_bytes(4, "little") + digest
    header += len(payload).to_bytes(8, "little")
    return header + blake2b(header + payload, digest_size=16).digest() + payload


class Shelf:
    """What a folder should have, and what the tier of one engine should know of it.

    Args:
        root: a folder without blocks.
        warnings: those that the tier has given.

    Attributes:
        due: how often what is counted has happened; and `spared`: files that were next to go, but another engine had
            used them.
    """

    def __init__(self, root: Path, rng: np.random.Generator, clock: Clock, warnings: list[str]) -> None:
        self.root, self.rng, self.clock, self.warnings = root, rng, clock, warnings
        self.stats, self.due = OffloadStats(), Counter[str]()
        self.others = {model: FolderTier(root, model, None, OffloadStats()) for model in MODELS}
        self.files: dict[Path, File] = {}
        self.strangers: dict[Path, bytes] = {}
        self.num_warnings = 0
        self._start(LIMITS[-1])

    @property
    def events(self) -> list[Callable[[], None]]:
        """What may happen; what every engine does comes up more often."""
        often = [self.write, self.read, self.ask, self.another_writes, self.another_reads]
        return often * 3 + [
            self.another_deletes, self.write_on_a_full_disk, self.read_what_nobody_may_delete,
            self.something_strange_has_the_name, self.a_folder_is_a_link, self.strangers_come, self.start_again,
            self.fill_behind_a_hit, self.another_is_first, self.a_file_becomes_a_link, self.the_folder_vanishes,
        ]  # fmt: skip

    def path(self, key: BlockKey, model: bytes = OWN) -> Path:
        return self._folder(model) / f"{key[0]}-{key[1].hex()}.kv"

    def _folder(self, model: bytes) -> Path:
        return self.root / f"hybrid-kv-{model.hex()}"

    # ---- what should come of it ----

    def _start(self, limit: int | None) -> None:
        self.limit = limit
        self.tier = FolderTier(self.root, OWN, limit, self.stats)
        self.has_warned = False
        self.undeletable: set[BlockKey] = set()
        self._list()
        self.counted: dict[Path, tuple[int, int]] = {}
        self.scan_due = self.clock.now  # with the first block that wants room

    def _list(self) -> None:
        self.listed = {path for path in self.files if path.parent == self._folder(OWN)}
        self.look_due = self.clock.now + LOOK

    def _scan(self) -> None:
        """The least recently used comes first."""
        by_use = sorted(self.files.items(), key=lambda item: (item[1].used, str(item[0])))
        self.counted = {path: (len(file.content), file.used) for path, file in by_use}
        self.scan_due = self.clock.now + SCAN

    def _make_room(self, size: int) -> bool:
        """The least recently used go; one that another engine has used since the last look is spared for now."""
        if self.limit is None:
            return True
        if size > self.limit:
            return False
        if self.clock.now >= self.scan_due:
            self._scan()
        while sum(held for held, _ in self.counted.values()) + size > self.limit:
            path, (held, used) = next(iter(self.counted.items()))
            del self.counted[path]
            file = self.files.get(path)
            if file is not None and file.used > used:
                self.counted[path] = held, file.used
                self.due["spared"] += 1
            elif file is not None:
                del self.files[path]
                self.due["folder_evictions"] += 1
        return True

    def _warn_once(self) -> None:
        self.num_warnings += not self.has_warned
        self.has_warned = True

    def _expect(self, found: object, due: object, what: str) -> None:
        assert found == due, f"{what}: {found}, not {due}"

    def check(self) -> None:
        """Raise AssertionError unless files, their times of use, counts and warnings are as they should be."""
        found = {}
        for path in self.root.rglob("*"):
            if path.is_file() and path not in self.strangers:
                if path.stat().st_mtime < self.clock.now - AHEAD / 2:  # by the real time: just now
                    os.utime(path, ns=(self.clock.time_ns(),) * 2)
                found[path] = path.read_bytes(), path.stat().st_mtime_ns
        for path in found.keys() | self.files.keys():
            assert path in self.files, f"{path.name} should have gone"
            assert path in found, f"{path.name} should be there"
            content, used = found[path]
            assert content == self.files[path].content, f"{path.name} has another content"
            assert used == self.files[path].used, f"{path.name} was used at another time"
        for path, content in self.strangers.items():
            assert path.exists() and path.read_bytes() == content, f"{path.name} is nobody's to touch"
        counts = asdict(self.stats)
        self._expect(counts, {name: self.due[name] for name in counts}, "counts")
        self._expect(len(self.warnings), self.num_warnings, f"warnings, the last of them {self.warnings[-1:]}")

    # ---- what happens ----

    def write(self) -> None:
        """The limit may refuse any of the blocks."""
        self._write([self._block() for _ in range(self.rng.integers(1, 4))])

    def _write(self, blocks: Sequence[tuple[BlockKey, torch.Tensor]], fails: bool = False) -> None:
        self.tier.write(blocks)
        for key, data in blocks:
            if not self._make_room(FRAME + len(data)) or fails:
                self.due["write_failures"] += 1
                self._warn_once()
                return
            path = self._put(OWN, key, data)
            self.listed.add(path)
            self.undeletable.discard(key)
            if self.limit is not None:
                self.counted.pop(path, None)
                self.counted[path] = FRAME + len(data), self.files[path].used

    def _fill(self, but: BlockKey | None = None) -> None:
        """More than any limit allows, in one moment, and not of this block."""
        for key in (KEYS[i] for i in self.rng.permutation(len(KEYS))):
            if key != but:
                self._write([(key, self._payload(key))])

    def _put(self, model: bytes, key: BlockKey, data: torch.Tensor) -> Path:
        path = self.path(key, model)
        self.files[path] = File(_content(model, key, data.numpy().tobytes()), self.clock.time_ns())
        return path

    def write_on_a_full_disk(self) -> None:
        """It takes a part of a file and no more."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            self._write([self._block()], fails=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def read(self) -> None:
        """A file may go, or be damaged, behind the look whether it is there."""
        for key in self._keys():
            if self._exists(key):
                path, file = self.path(key), self.files[self.path(key)]
                if self.rng.random() < 0.1:
                    path.unlink()
                    del self.files[path]
                elif not file.fault and self.rng.random() < 0.4:
                    self._damage(path, file)
                self._read(key)

    def read_what_nobody_may_delete(self) -> None:
        """A damaged block is told of once, and a new one in its place is as good as any."""
        for key in self._keys():
            if self._exists(key):
                if not self.files[self.path(key)].fault:
                    self._damage(self.path(key), self.files[self.path(key)])
                with patch.object(Path, "unlink", side_effect=PermissionError("a read-only folder")):
                    self._read(key, stays=True)
                self.undeletable.add(key)
                self._exists(key)

    def fill_behind_a_hit(self) -> None:
        """A block that was read goes in its turn, and what it took is known to be free."""
        if self.limit not in LIMITS[3:]:
            self._start(LIMITS[-1])
        key, data = self._block()
        self._write([(key, data)])
        self._read(key)
        self._fill(key)

    def another_is_first(self) -> None:
        """It deletes a damaged file before this engine does, and the block that it writes then is as good as any."""
        key = self._key()
        if not self._exists(key):
            return
        if not self.files[self.path(key)].fault:
            self._damage(self.path(key), self.files[self.path(key)])
        unlink = Path.unlink

        def unlink_twice(path: Path, missing_ok: bool = False) -> None:
            unlink(path)
            unlink(path, missing_ok)

        with patch.object(Path, "unlink", unlink_twice):
            self._read(key)
        self._another_writes(OWN, key)
        self._exists(key)

    def a_file_becomes_a_link(self) -> None:
        """Behind the reading and before its time of use is noted: that of what the link names stays."""
        key, aside, utime = self._key(), self.root / "aside", os.utime
        path = self.path(key)
        if not self._exists(key) or self.files[path].fault:
            return

        def utime_of_a_link(path: Path, **more: Any) -> None:
            path.rename(aside)
            path.symlink_to(aside)
            utime(path, **more)

        with patch.object(os, "utime", utime_of_a_link):
            assert self.tier.read(key, torch.zeros(PAYLOADS[key[0]], dtype=torch.uint8)), f"{path.name} is not read"
        path.unlink()
        aside.rename(path)
        if path in self.counted:
            self.counted[path] = self.counted.pop(path)[0], self.clock.time_ns()

    def _exists(self, key: BlockKey) -> bool:
        path = self.path(key)
        due = key not in self.undeletable and path in self.files
        self._expect(self.tier.exists(key), due, f"whether {path.name} exists")
        (self.listed.add if due else self.listed.discard)(path)
        return due

    def _read(self, key: BlockKey, stays: bool = False) -> None:
        path, data = self.path(key), torch.zeros(PAYLOADS[key[0]], dtype=torch.uint8)
        file = self.files.get(path)
        self._expect(self.tier.read(key, data), file is not None and not file.fault, f"whether {path.name} is read")
        if file is None:
            return
        if not file.fault:
            assert file.content.endswith(data.numpy().tobytes()), f"{path.name} is read as another content"
            file.used = self.clock.time_ns()
            if path in self.counted:
                self.counted[path] = self.counted.pop(path)[0], file.used
            return
        self.num_warnings += 1
        self.due[f"{file.fault}_files"] += 1
        if not stays:
            del self.files[path]
            self.counted.pop(path, None)

    def _damage(self, path: Path, file: File) -> None:
        data, how = bytearray(file.content), int(self.rng.integers(5))
        if how == 0:
            data += b"0"
        elif how == 1:
            del data[self.rng.integers(len(data)) :]
        elif how == 2:
            data[:] = _content(OWN, (0, self.rng.bytes(16)), bytes(len(data) - FRAME))  # of another block
        else:
            data[self.rng.integers(SAME_MODEL) if how == 3 else self.rng.integers(HEADER, len(data))] ^= 1
        file.fault = ("corrupt", "truncated", "corrupt", "foreign", "corrupt")[how]
        file.content = bytes(data)
        path.write_bytes(data)
        os.utime(path, ns=(file.used,) * 2)

    def ask(self) -> None:
        """Others' blocks may be found a moment late; a block that is said to be there is."""
        for key in KEYS:
            path = self.path(key)
            if path not in self.listed and self.clock.now >= self.look_due:
                self._list()
            due = path in self.listed and path in self.files and key not in self.undeletable
            self._expect(self.tier.contains(key), due, f"whether {path.name} is found")
            if not due:
                self.listed.discard(path)

    def another_writes(self) -> None:
        """An engine of this model or of another one."""
        path = self._another_writes(self._model())
        if self.rng.random() < 0.3:  # its clock is behind
            self.files[path].used -= 100 * 10**9
            os.utime(path, ns=(self.files[path].used,) * 2)

    def _another_writes(self, model: bytes, key: BlockKey | None = None) -> Path:
        key = key or self._key()
        data = self._payload(key)
        self.others[model].write([(key, data)])
        return self._put(model, key, data)

    def another_reads(self) -> None:
        """What it has read is not the first to go."""
        model = self._model()
        for key in KEYS:
            file = self.files.get(self.path(key, model))
            if file is not None and not file.fault:
                data = torch.zeros(PAYLOADS[key[0]], dtype=torch.uint8)
                assert self.others[model].read(key, data), "another engine reads nothing"
                file.used = self.clock.time_ns()
        self.check()
        self.write()

    def another_deletes(self) -> None:
        """It makes room; or somebody clears everything."""
        for path in [*self.files]:
            if self.rng.random() < 0.3:
                path.unlink()
                del self.files[path]
        if self.rng.random() < 0.2:
            shutil.rmtree(self.root, ignore_errors=True)
            self.files.clear()
            self.strangers.clear()

    def something_strange_has_the_name(self) -> None:
        """A link, even to a good block, a folder or a pipe is neither read nor replaced nor deleted."""
        key, data = self._block()
        path, aside = self.path(key), self.root / "aside"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self.files.pop(path, None)
        path.rename(aside) if file is not None else aside.touch()
        kind = int(self.rng.integers(3))
        path.symlink_to(aside) if kind == 0 else path.mkdir() if kind == 1 else os.mkfifo(path)
        before = path.lstat()
        self._exists(key)
        if kind != 2:
            self._read(key)
            self._warn_once()
        self._write([(key, data)], fails=True)
        self._fill(key)
        assert os.path.lexists(path), f"{path.name} is strange, and has gone"
        self._expect((path.lstat().st_ino, path.lstat().st_mode), (before.st_ino, before.st_mode), "what was strange")
        path.rmdir() if kind == 1 else path.unlink()
        aside.rename(path) if file is not None else aside.unlink()
        if file is not None:
            self.files[path] = file

    def a_folder_is_a_link(self) -> None:
        """What lies behind it is not asked for, not counted and not deleted, and nothing is written there."""
        model = self._model()
        folder = self._folder(model)
        if model == OTHER:
            self._another_writes(OTHER)
            self.check()  # what it wrote has the told time
            self.clock.now += SCAN
            self.write()
            self.check()
        if not folder.is_dir():
            return
        with self._set_aside(folder) as aside:
            folder.symlink_to(aside)
            if self.rng.random() < 0.5:
                self._start(self.limit)
            for key in self._keys():
                self._exists(key)
            if model == OWN:
                self._write_nothing()
            else:
                self._fill()
            folder.unlink()

    def the_folder_vanishes(self) -> None:
        """Once it is made: no other model's blocks go for one that nothing can be written of."""
        for key in KEYS:
            self._another_writes(OTHER, key)
        self.check()
        with self._set_aside(self._folder(OWN)), patch.object(Path, "mkdir"):
            self._start(self.limit)
            self._write_nothing()

    def _write_nothing(self) -> None:
        """There is no folder to write to."""
        self.tier.write([self._block()])
        self.due["write_failures"] += 1
        self._warn_once()

    @contextmanager
    def _set_aside(self, folder: Path) -> Iterator[Path]:
        """Where it lies meanwhile, with what is in it."""
        aside, behind = self.root / "aside", {path: file for path, file in self.files.items() if path.parent == folder}
        self.files = {path: file for path, file in self.files.items() if path not in behind}
        if is_there := folder.is_dir():
            folder.rename(aside)
        yield aside
        if is_there:
            aside.rename(folder)
        self.files |= behind

    def strangers_come(self) -> None:
        """Old and large, under names and in folders that are nearly those of blocks."""
        name, own = self.path(KEYS[0]).name, self._folder(OWN)
        near = [own / "song.kv", own / name[:-4], own / f"x{name}"]
        for path in (*near, self.root / "music" / name, own.with_suffix(".x") / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(500))
            os.utime(path, (self.clock.now - DAY,) * 2)
            self.strangers[path] = bytes(500)
        for link in (own / f"9{name[1:]}", own / f"{socket.gethostname()}.{NO_PROCESS}.ab.tmp"):
            if not link.is_symlink():
                link.symlink_to(near[0])
            self.strangers[link] = bytes(500)

    def start_again(self) -> None:
        """Of the temporary files in all folders those of dead processes go, and old ones."""
        host = socket.gethostname()
        folder = self._folder(self._model())
        folder.mkdir(parents=True, exist_ok=True)
        old, young = self.clock.now - DAY - 1, self.clock.now - DAY + 1
        with a_process() as living:
            stays = {
                f"{host}.{NO_PROCESS}.cd.tmp": (young, False), f"{host}.{10**30}.ab.tmp": (young, False),
                f"{host}.{living}.ab.tmp": (young, True), f"{host}.{living}.cd.tmp": (old, False),
                f"{host}.{FOREIGN_PROCESS}.ab.tmp": (young, True), f"{host}.{living}.ef.tmp": (old + 1, True),
                f"!{host}.{NO_PROCESS}.ab.tmp": (young, True), f"~{host}.{NO_PROCESS}.ab.tmp": (young, True),
                f"~{host}.{living}.ab.tmp": (old, False), f"{host}.tmp": (old, True),
            }  # fmt: skip
            for name, (used, _) in stays.items():
                (folder / name).touch()
                os.utime(folder / name, (used, used))
            self._start(LIMITS[self.rng.integers(len(LIMITS))])
        for name, (_, does) in stays.items():
            self._expect((folder / name).exists(), does, f"whether {name} stays")
            (folder / name).unlink(missing_ok=True)

    # ---- what is drawn ----

    def _model(self) -> bytes:
        return MODELS[self.rng.integers(2)]

    def _keys(self) -> list[BlockKey]:
        return [KEYS[i] for i in self.rng.permutation(len(KEYS))[:3]]

    def _block(self) -> tuple[BlockKey, torch.Tensor]:
        key = self._key()
        return key, self._payload(key)

    def _key(self) -> BlockKey:
        return KEYS[self.rng.integers(len(KEYS))]

    def _payload(self, key: BlockKey) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(0, 256, size=PAYLOADS[key[0]], dtype=np.uint8))


def play_shelf(root: Path, rng: np.random.Generator, num_events: int) -> tuple[str, dict[str, int]]:
    """The first thing that is not as it should be, or nothing; and how often each of `MUST_HAPPEN` has happened.

    Args:
        num_events: at least; up to four times as many, until all has happened.
    """
    clock, happened = Clock(), dict[str, int]()
    with told(clock) as warnings:
        shelf = Shelf(root, rng, clock, warnings)
        for number in range(4 * num_events):
            event = shelf.events[rng.integers(len(shelf.events))]
            clock.now += STEPS[rng.integers(len(STEPS))]
            try:
                event()
                shelf.check()
            except AssertionError as error:
                return f"event {number}, {event.__name__.replace('_', ' ')}: {error}", happened
            happened = {name: shelf.due[name] for name in MUST_HAPPEN}
            if number >= num_events and all(happened.values()):
                break
    missing = [name for name, count in happened.items() if not count]
    return f"void: {', '.join(missing)} never happened" if missing else "", happened


def looks_wrong(root: Path, tick: float) -> str:
    """When a tier looks at its folder, if not exactly when it should: where a look takes `tick` seconds, it is due
    after a second (every byte counted: 30) or 50 times as long, whatever is more. Empty: it is right.
    """
    data = torch.zeros(PAYLOADS[0], dtype=torch.uint8)
    with told(clock := Clock(tick)):
        tier = FolderTier(root, OWN, 10**6, OffloadStats())
        for least, is_asked in ((LOOK, True), (SCAN, False)):
            due = clock.now + DAY  # by then, whatever has been before
            for number, early in enumerate((0.0, 0.5, 0.0, 0.5, 0.0)):
                clock.now, before = due - early - tick, clock.num_looks
                key = (0, bytes([number]) * 16)
                tier.contains(key) if is_asked else tier.write([(key, data)])
                looks = clock.num_looks > before + 1  # that one asks what time it is
                if looks == bool(early):
                    return f"least {least:.0f} s, {tick} s a look: {early} s before the next is due it looks: {looks}"
                due = due if early else clock.now + max(least, tick / SHARE)
    return ""


@contextmanager
def a_process() -> Iterator[int]:
    """A living one that nobody minds losing; another user's cannot be asked for anything."""
    kill = os.kill

    def kill_own(pid: int, number: int) -> None:
        if pid == FOREIGN_PROCESS:
            raise PermissionError(f"process {pid} is another user's")
        kill(pid, number)

    with Popen(["cat"], stdin=PIPE) as child, patch.object(os, "kill", kill_own):
        yield child.pid
        child.communicate()
    assert not child.returncode, f"a process that was asked after ended with {child.returncode}"


@contextmanager
def told(clock: Clock) -> Iterator[list[str]]:
    """A tier that reads this clock; what it warns of is kept, and said to nobody."""
    warnings: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logger, keeper = folder_tier.LOGGER, Keeper()
    before = logger.propagate, logger.level
    logger.addHandler(keeper)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        with patch.object(folder_tier, "time", clock):
            yield warnings
    finally:
        logger.propagate = before[0]
        logger.setLevel(before[1])
        logger.removeHandler(keeper)
