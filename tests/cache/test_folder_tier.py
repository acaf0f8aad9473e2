"""A folder of blocks has the right files, whatever other processes, disks and clocks do.

A state machine keeps a list of the files next to a tier that reads a clock of its own. The rules
are those that `cache.folder_tier` promises, implemented again: none of its functions and constants
is used.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_kv.cache import folder_tier
from hybrid_kv.cache.block_pool import BlockKey
from hybrid_kv.cache.folder_tier import FolderTier, OffloadStats
from hybrid_kv.config import ConfigError

# bytes: of header and checksum; of format, version and model in the header
FRAME, SAME_MODEL = (72, 28)
PAYLOADS = (40, 64)  # bytes of a block, by group
KEYS: list[BlockKey] = [(group, bytes([number]) * 16) for group in (0, 1) for number in range(5)]
MODELS = OWN, OTHER = b"own." * 4, b"else" * 4
# a file has 112 or 136 bytes
LIMITS = (None, 111, 112, 112 + 136, 2 * 112 + 136, 2 * 112 + 2 * 136, 5 * 112)
LOOK, SCAN, DAY = 1.0, 30.0, 24 * 3600.0  # seconds
# process ids that Linux never assigns; the second stands for another user's
DEAD, FOREIGN = (2**22 + 1, 2**22 + 2)
# seconds that the machine's clock is ahead: what a tier has just touched looks old
AHEAD = 10**6

KEY, MODEL = st.sampled_from(KEYS), st.sampled_from(MODELS)
SOME = st.lists(KEY, min_size=1, max_size=3, unique=True)
PICK = st.integers(0, 10**6)


class Clock:
    """Stands in for the module `time`; reading it takes `tick` seconds."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick, self.num_reads = float(int(time.time()) + AHEAD), tick, 0

    def monotonic(self) -> float:
        self.num_reads += 1
        self.now += self.tick
        return self.now

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


@dataclass
class File:
    """`used` is in ns; `fault` is what is wrong with it, or empty."""

    content: bytes
    used: int
    fault: str = ""


def file_content(model: bytes, key: BlockKey, payload: bytes) -> bytes:
    header = b"hybridkv" + (1).to_bytes(4, "little") + model + key[0].to_bytes(4, "little") + key[1]
    header += len(payload).to_bytes(8, "little")
    return header + blake2b(header + payload, digest_size=16).digest() + payload


def empty(key: BlockKey) -> torch.Tensor:
    return torch.zeros(PAYLOADS[key[0]], dtype=torch.uint8)


class Folder(RuleBasedStateMachine):
    """The files that should be there, and those the tier should know of (`listed`, `counted`)."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.stack, self.warnings = Clock(), ExitStack(), list[str]()
        self.stack.enter_context(patch.object(folder_tier, "time", self.clock))
        self.stack.enter_context(
            patch.object(
                folder_tier.LOGGER,
                "warning",
                lambda text, *given: self.warnings.append(text % given),
            )
        )
        self.top = Path(tempfile.mkdtemp())
        self.root, self.aside = self.top / "root", self.top / "aside"
        self.stats, self.due, self.num_written, self.num_warnings = (
            OffloadStats(),
            Counter[str](),
            0,
            0,
        )
        self.others = {
            model: FolderTier(self.root, model, None, OffloadStats()) for model in MODELS
        }
        self.files: dict[Path, File] = {}
        self.strangers: dict[Path, bytes] = {}

    def teardown(self) -> None:
        self.stack.close()
        shutil.rmtree(self.top)

    # What should come of it.

    @initialize(limit=st.sampled_from(LIMITS + 3 * LIMITS[3:]))
    def start(self, limit: int | None) -> None:
        self.limit, self.has_warned, self.undeletable = limit, False, set[BlockKey]()
        self.tier = FolderTier(self.root, OWN, limit, self.stats)
        self.list_files()
        self.counted: dict[Path, tuple[int, int]] = {}
        self.scan_due = self.clock.now

    def folder(self, model: bytes) -> Path:
        return self.root / f"hybrid-kv-{model.hex()}"

    def path(self, key: BlockKey, model: bytes = OWN) -> Path:
        return self.folder(model) / f"{key[0]}-{key[1].hex()}.kv"

    def list_files(self) -> None:
        self.listed = {path for path in self.files if path.parent == self.folder(OWN)}
        self.look_due = self.clock.now + LOOK

    def make_room(self, size: int) -> bool:
        """Evict the least recently used files; spare those that others used since the last scan."""
        if self.limit is None or size > self.limit:
            return self.limit is None
        if self.clock.now >= self.scan_due:
            by_use = sorted(self.files.items(), key=lambda item: (item[1].used, str(item[0])))
            self.counted = {path: (len(file.content), file.used) for path, file in by_use}
            self.scan_due = self.clock.now + SCAN
        while sum(held for held, _ in self.counted.values()) + size > self.limit:
            path, (held, used) = next(iter(self.counted.items()))
            del self.counted[path]
            file = self.files.get(path)
            if file is not None and file.used > used:
                self.counted[path] = held, file.used
            elif file is not None:
                del self.files[path]
                self.due["folder_evictions"] += 1
        return True

    def fail_to_write(self) -> None:
        self.due["write_failures"] += 1
        self.warn_once()

    def warn_once(self) -> None:
        self.num_warnings += not self.has_warned
        self.has_warned = True

    def payload(self, key: BlockKey) -> torch.Tensor:
        """Other bytes for every block that is written."""
        self.num_written += 1
        data = blake2b(self.num_written.to_bytes(4, "big"), digest_size=PAYLOADS[key[0]]).digest()
        return torch.tensor(list(data), dtype=torch.uint8)

    def put(self, model: bytes, key: BlockKey, data: torch.Tensor) -> Path:
        path = self.path(key, model)
        self.files[path] = File(
            file_content(model, key, bytes(data.tolist())), self.clock.time_ns()
        )
        return path

    @invariant()
    def agree(self) -> None:
        """Files, their times of use, counts and warnings."""
        found = {}
        for path in self.root.rglob("*"):
            if path.is_file() and path not in self.strangers:
                if path.stat().st_mtime < self.clock.now - AHEAD / 2:  # by the real clock: just now
                    os.utime(path, ns=(self.clock.time_ns(),) * 2)
                found[path] = path.read_bytes(), path.stat().st_mtime_ns
        assert found == {path: (file.content, file.used) for path, file in self.files.items()}
        for path, content in self.strangers.items():
            assert path.exists() and path.read_bytes() == content
        assert asdict(self.stats) == {name: self.due[name] for name in asdict(self.stats)}
        assert len(self.warnings) == self.num_warnings, self.warnings

    # What the tier does.

    @rule(seconds=st.sampled_from([0.5, 1.0, 29.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(keys=SOME)
    def write(self, keys: Sequence[BlockKey], fails: bool = False) -> None:
        blocks = [(key, self.payload(key)) for key in keys]
        self.tier.write(blocks)
        for key, data in blocks:
            if not self.make_room(FRAME + len(data)) or fails:
                self.fail_to_write()
                return
            path = self.put(OWN, key, data)
            self.listed.add(path)
            self.undeletable.discard(key)
            if self.limit is not None:
                self.counted.pop(path, None)
                self.counted[path] = FRAME + len(data), self.files[path].used

    @rule(key=KEY)
    def write_on_a_full_disk(self, key: BlockKey) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            self.write([key], fails=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    @rule(keys=st.permutations(KEYS))
    def fill(self, keys: Sequence[BlockKey], but: BlockKey | None = None) -> None:
        """More than any limit allows."""
        for key in keys:
            if key != but:
                self.write([key])

    @rule(keys=SOME, damage=st.sampled_from([None] * 3 + [*range(6)]), at=PICK)
    def read(self, keys: Sequence[BlockKey], damage: int | None, at: int) -> None:
        for key in keys:
            if self.exists(key):
                path = self.path(key)
                if damage == 5:  # another process deletes it after the look
                    path.unlink()
                    del self.files[path]
                elif damage is not None:
                    self.damage(key, damage, at)
                self.read_file(key)

    @rule(key=KEY, how=st.integers(0, 4), at=PICK)
    def read_what_cannot_be_deleted(self, key: BlockKey, how: int, at: int) -> None:
        """It is reported once, and a new file in its place is as good as any."""
        if self.exists(key):
            self.damage(key, how, at)
            with patch.object(Path, "unlink", side_effect=PermissionError("a read-only folder")):
                self.read_file(key, stays=True)
            self.undeletable.add(key)
            assert not self.exists(key)

    @rule(key=KEY)
    def read_what_cannot_be_read(self, key: BlockKey) -> None:
        if self.exists(key):
            with patch.object(
                folder_tier, "open", side_effect=OSError("input/output error"), create=True
            ):
                assert not self.tier.read(key, empty(key))
            self.warn_once()

    @rule(key=KEY, others=st.permutations(KEYS))
    def fill_after_a_hit(self, key: BlockKey, others: Sequence[BlockKey]) -> None:
        self.write([key])
        self.agree()
        self.clock.now += 1
        self.read_file(key)
        self.agree()
        for other in others:
            if other != key:
                self.write([other])
                self.agree()

    def exists(self, key: BlockKey) -> bool:
        path = self.path(key)
        due = key not in self.undeletable and path in self.files
        assert self.tier.exists(key) == due
        (self.listed.add if due else self.listed.discard)(path)
        return due

    def read_file(self, key: BlockKey, stays: bool = False) -> None:
        path, data = self.path(key), empty(key)
        file = self.files.get(path)
        assert self.tier.read(key, data) == (file is not None and not file.fault)
        if file is None:
            return
        if not file.fault:
            assert file.content.endswith(bytes(data.tolist()))
            file.used = self.clock.time_ns()
            if path in self.counted:
                self.counted[path] = self.counted.pop(path)[0], file.used
            return
        self.num_warnings += 1
        self.due[f"{file.fault}_files"] += 1
        if not stays:
            del self.files[path]
            self.counted.pop(path, None)

    def damage(self, key: BlockKey, how: int, at: int) -> None:
        """The first byte that is wrong says what kind of fault it is."""
        file = self.files[path := self.path(key)]
        if file.fault:
            return
        data = bytearray(file.content)
        if how == 0:
            data += b"0"
        elif how == 1:
            del data[at % len(data) :]
        elif how == 2:
            # of another block
            data[:] = file_content(OWN, (0, bytes([7]) * 16), bytes(len(data) - FRAME))
        else:
            ends = (0, SAME_MODEL) if how == 3 else (SAME_MODEL, len(data))
            data[ends[0] + at % (ends[1] - ends[0])] ^= 1 << at % 8
        file.fault = ("corrupt", "truncated", "corrupt", "foreign", "corrupt")[how]
        file.content = bytes(data)
        path.write_bytes(data)
        os.utime(path, ns=(file.used,) * 2)

    @rule(first=st.lists(KEY, max_size=2))
    def look(self, first: Sequence[BlockKey]) -> None:
        """Look a block up.

        Another process's block may be seen late, unless the files are looked up; a block
        that is seen is there.
        """
        for key in first:
            self.exists(key)
        for key in KEYS:
            path = self.path(key)
            if path not in self.listed and self.clock.now >= self.look_due:
                self.list_files()
            due = path in self.listed and path in self.files and key not in self.undeletable
            assert self.tier.contains(key) == due
            if not due:
                self.listed.discard(path)

    # What other processes do.

    @rule(model=MODEL, key=KEY, late=st.sampled_from([0, 0, 100]))
    def another_writes(self, model: bytes, key: BlockKey, late: int = 0) -> None:
        """Its clock may be behind."""
        data = self.payload(key)
        self.others[model].write([(key, data)])
        path = self.put(model, key, data)
        if late:
            self.files[path].used -= late * 10**9
            os.utime(path, ns=(self.files[path].used,) * 2)

    @rule(
        model=MODEL, read=st.sets(KEY, max_size=6), keys=SOME, seconds=st.sampled_from([0.5, 1.0])
    )
    def another_reads(
        self, model: bytes, read: set[BlockKey], keys: Sequence[BlockKey], seconds: float
    ) -> None:
        """What it has used is not the first to go."""
        self.agree()
        self.clock.now += seconds
        for key in sorted(read):
            file = self.files.get(self.path(key, model))
            if file is not None and not file.fault:
                assert self.others[model].read(key, empty(key))
                file.used = self.clock.time_ns()
        self.agree()
        self.write(keys)

    @precondition(lambda self: self.files)
    @rule(which=PICK, everything=st.sampled_from([False] * 4 + [True]))
    def another_deletes(self, which: int, everything: bool) -> None:
        """A third of the files, to make room; or the user deletes the folder."""
        for i, path in enumerate([*self.files]):
            if (which + i) % 3 == 0:
                path.unlink()
                del self.files[path]
        if everything:
            shutil.rmtree(self.root)
            self.files.clear()
            self.strangers.clear()

    @rule(
        key=KEY,
        kind=st.sampled_from(["link", "dangling link", "folder", "pipe"]),
        others=st.permutations(KEYS),
    )
    def something_strange_has_the_name(
        self, key: BlockKey, kind: str, others: Sequence[BlockKey]
    ) -> None:
        """A link, a folder or a pipe under a block's name is not read, replaced or deleted."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self.files.pop(path, None)
        path.rename(self.aside) if file is not None else self.aside.touch()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(self.aside if kind == "link" else self.top / "nothing")
        before = path.lstat()
        assert not self.exists(key)
        if kind in ("link", "folder"):
            self.read_file(key)
            self.warn_once()
        self.write([key], fails=True)
        self.fill(others, but=key)
        assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
        path.rmdir() if kind == "folder" else path.unlink()
        self.aside.rename(path) if file is not None else self.aside.unlink()
        if file is not None:
            self.files[path] = file

    @rule(model=MODEL, restart=st.booleans(), keys=st.permutations(KEYS))
    def a_folder_is_a_link(self, model: bytes, restart: bool, keys: Sequence[BlockKey]) -> None:
        """What is in its target is not found, counted or deleted, and nothing is written there."""
        folder = self.folder(model)
        self.another_writes(model, keys[0])
        self.agree()
        self.clock.now += SCAN
        self.write(keys[:1])
        self.agree()
        behind = {path: file for path, file in self.files.items() if path.parent == folder}
        self.files = {path: file for path, file in self.files.items() if path not in behind}
        folder.rename(self.aside)
        folder.symlink_to(self.aside)
        if restart:
            self.start(self.limit)
        for key in keys:
            self.exists(key)
        if model == OWN:
            self.tier.write([(keys[0], self.payload(keys[0]))])
            self.fail_to_write()
        else:
            self.fill(keys)
        folder.unlink()
        self.aside.rename(folder)
        self.files |= behind

    @rule()
    def strangers_come(self) -> None:
        """Old and large, under names and in folders that are almost those of blocks."""
        name, own = self.path(KEYS[0]).name, self.folder(OWN)
        near = [own / "song.kv", own / name[:-4], own / f"x{name}", own / f"0-{'ab' * 15}.kv"]
        for path in (*near, self.root / "music" / name, own.with_suffix(".x") / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(500))
            os.utime(path, (self.clock.now - DAY,) * 2)
            self.strangers[path] = bytes(500)
        for link in (own / f"9{name[1:]}", own / f"{socket.gethostname()}.{DEAD}.ab.tmp"):
            if not link.is_symlink():
                link.symlink_to(near[0])
            self.strangers[link] = bytes(500)

    @rule(limit=st.sampled_from(LIMITS), model=MODEL)
    def start_again(self, limit: int | None, model: bytes) -> None:
        """Temporary files of dead processes are deleted in all folders, and old ones."""
        host, alive, folder = socket.gethostname(), os.getpid(), self.folder(model)
        folder.mkdir(parents=True, exist_ok=True)
        old, young = self.clock.now - DAY - 1, self.clock.now - DAY + 1
        stays = {
            f"{host}.{DEAD}.cd.tmp": (young, False),
            f"{host}.{10**30}.ab.tmp": (young, False),
            f"{host}.{alive}.ab.tmp": (young, True),
            f"{host}.{alive}.cd.tmp": (old, False),
            f"{host}.{FOREIGN}.ab.tmp": (young, True),
            f"{host}.{alive}.ef.tmp": (old + 1, True),
            f"!{host}.{DEAD}.ab.tmp": (young, True),
            f"~{host}.{DEAD}.ab.tmp": (young, True),
            f"~{host}.{alive}.ab.tmp": (old, False),
            f"{host}.tmp": (old, True),
        }
        for name, (used, _) in stays.items():
            (folder / name).touch()
            os.utime(folder / name, (used, used))
        kill = os.kill

        def signal_own(pid: int, number: int) -> None:
            assert number == 0
            if pid == FOREIGN:
                raise PermissionError("another user's process")
            kill(pid, number)

        with patch.object(os, "kill", signal_own):
            self.start(limit)
        assert {name: (folder / name).exists() for name in stays} == {
            name: does for name, (_, does) in stays.items()
        }
        for name in stays:
            (folder / name).unlink(missing_ok=True)


TestFolder = Folder.TestCase
TestFolder.settings = settings(stateful_step_count=40)


# One thing at a time.


@pytest.mark.parametrize("tick", [2**-7, 0.25, 1.0])
@pytest.mark.parametrize(("least", "contains"), [(LOOK, True), (SCAN, False)])
def test_the_folder_is_listed_when_due_and_in_two_percent_of_the_time(
    tick: float, least: float, contains: bool, tmp_path: Path
) -> None:
    with patch.object(folder_tier, "time", clock := Clock(tick)):
        tier = FolderTier(tmp_path, OWN, 10**6, OffloadStats())
        due = clock.now + DAY  # by then, whatever has been before
        for number, early in enumerate((0.0, 0.5, 0.0, 0.5, 0.0)):
            clock.now, before = due - early - tick, clock.num_reads
            key = (0, bytes([number]) * 16)
            tier.contains(key) if contains else tier.write([(key, empty(key))])
            assert (clock.num_reads > before + 1) == (not early)  # one reads what time it is
            due = due if early else clock.now + max(least, 50 * tick)


def test_a_miss_costs_no_system_call(tmp_path: Path) -> None:
    with patch.object(folder_tier, "time", Clock()), ExitStack() as stack:
        tier = FolderTier(tmp_path, OWN, None, OffloadStats())
        for name in ("stat", "lstat", "scandir", "listdir"):
            stack.enter_context(patch.object(os, name, side_effect=OSError("a system call")))
        assert not any(map(tier.contains, KEYS))


@pytest.mark.parametrize("where", ["mkdir", "replace"])
def test_a_system_call_that_fails_only_ends_writing(where: str, tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, OWN, None, stats := OffloadStats())
    owner: Any = {"mkdir": Path, "replace": os}[where]
    with patch.object(owner, where, side_effect=PermissionError("permission denied")):
        tier.write([(KEYS[0], empty(KEYS[0]))])
    assert stats.write_failures == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_root_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        FolderTier(tmp_path / "file", OWN, None, OffloadStats())


@pytest.mark.parametrize("gone_after", [1, 2, 3])
def test_a_file_that_goes_while_it_is_looked_at_is_replaced(
    gone_after: int, tmp_path: Path
) -> None:
    """Another process may evict the file after any look, even the last before it is replaced."""
    tier = FolderTier(tmp_path, OWN, None, stats := OffloadStats())
    block = KEYS[0], empty(KEYS[0])
    tier.write([block])
    path, looks, look = tier.path(KEYS[0]), list[Path](), os.lstat

    def lstat(name: Any) -> os.stat_result:
        status = look(name)
        looks.extend([path] * (Path(name) == path))
        if len(looks) == gone_after:
            path.unlink(missing_ok=True)
        return status

    with patch.object(os, "lstat", lstat):
        tier.write([block])
    assert path.exists() and looks
    assert stats.write_failures == 0


@pytest.mark.parametrize(("own", "other"), [(KEYS[1], KEYS[2]), (KEYS[2], KEYS[1])])
def test_the_file_of_another_block_is_corrupt_whichever_comes_first(
    own: BlockKey, other: BlockKey, tmp_path: Path
) -> None:
    tier = FolderTier(tmp_path, OWN, None, OffloadStats())
    tier.write([(own, empty(own))])
    tier.path(own).write_bytes(file_content(OWN, other, bytes(PAYLOADS[0])))
    assert not tier.read(own, empty(own))
    assert tier.stats.corrupt_files == 1


def test_a_damaged_file_that_another_process_deletes_first_is_no_fault_of_its_successor(
    tmp_path: Path,
) -> None:
    tier = FolderTier(tmp_path, OWN, None, OffloadStats())
    tier.write([(KEYS[0], empty(KEYS[0]))])
    (path := tier.path(KEYS[0])).write_bytes(b"")
    unlink = Path.unlink

    def unlink_twice(path: Path, missing_ok: bool = False) -> None:
        unlink(path)
        unlink(path, missing_ok)

    with patch.object(Path, "unlink", unlink_twice):
        assert not tier.read(KEYS[0], empty(KEYS[0]))
    FolderTier(tmp_path, OWN, None, OffloadStats()).write([(KEYS[0], empty(KEYS[0]))])
    assert path.exists() and tier.exists(KEYS[0])


def test_the_target_of_a_link_that_takes_a_files_place_keeps_its_time(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, OWN, None, OffloadStats())
    tier.write([(KEYS[0], empty(KEYS[0]))])
    path, target, utime = tier.path(KEYS[0]), tmp_path / "target", os.utime
    utime(path, (1, 1))

    def utime_of_a_link(name: Path, **options: Any) -> None:
        name.rename(target)
        name.symlink_to(target)
        utime(name, **options)

    with patch.object(os, "utime", utime_of_a_link):
        assert tier.read(KEYS[0], empty(KEYS[0]))
    assert target.stat().st_mtime == 1


# Several writers, one of them killed.

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from hybrid_kv.cache.folder_tier import FolderTier, OffloadStats
tier = FolderTier(Path(sys.argv[1]), b"own." * 4, None, OffloadStats())
def stop(*_):
    print("writing", flush=True)
    signal.pause()
for number in (1, 2):
    tier.write([((0, bytes([number]) * 16), torch.full((40,), number, dtype=torch.uint8))])
    os.replace = stop
"""


def test_a_killed_writer_leaves_a_folder_that_the_next_start_uses(tmp_path: Path) -> None:
    def unfinished() -> list[Path]:
        return [*tmp_path.rglob("*.tmp")]

    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        FolderTier(tmp_path, OWN, None, OffloadStats())  # it lives, so its file is left alone
        assert len(unfinished()) == 1
        process.kill()
    assert process.returncode == -signal.SIGKILL
    tier, data = FolderTier(tmp_path, OWN, None, OffloadStats()), empty(KEYS[1])
    assert not unfinished()
    assert tier.contains(KEYS[1]) and not tier.contains(KEYS[2])
    assert tier.read(KEYS[1], data) and data.tolist() == [1] * 40


def test_two_writers_never_see_half_a_block(tmp_path: Path) -> None:
    tiers = [FolderTier(tmp_path, OWN, 6 * (FRAME + 4000), OffloadStats()) for _ in range(2)]
    keys: list[BlockKey] = [(0, bytes([number]) * 16) for number in range(20)]
    wrong: list[int] = []

    def work(tier: FolderTier, step: int) -> None:
        for i in range(150):
            number, other = i * step % 20, (i - 1) * step % 20
            tier.write([(keys[number], torch.full((4000,), number, dtype=torch.uint8))])
            data = torch.empty(4000, dtype=torch.uint8)
            if tier.read(keys[other], data) and set(data.tolist()) != {other}:
                wrong.append(other)

    threads = [threading.Thread(target=work, args=both) for both in zip(tiers, (1, 3), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not [*tmp_path.rglob("*.tmp")]
    # However the threads share the work: one of them writes more than the six of twenty that fit.
    assert sum(tier.stats.folder_evictions for tier in tiers)
    assert [
        (t.stats.corrupt_files, t.stats.truncated_files, t.stats.write_failures) for t in tiers
    ] == [(0, 0, 0)] * 2
