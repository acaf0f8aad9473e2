"""The folder tier of KV offload: one file per block, named by its model and its content."""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from hybrid_kv.cache.block_hash import DIGEST_SIZE
from hybrid_kv.cache.block_pool import BlockKey
from hybrid_kv.errors import ConfigError

LOGGER = logging.getLogger(__name__)

FORMAT_VERSION = 1
MAGIC = b"hybridkv"
# Magic, format version, fingerprint, group, digest, payload bytes; the checksum of these and the
# payload follows.
HEADER = struct.Struct(f"<8sI{DIGEST_SIZE}sI{DIGEST_SIZE}sQ")
# Nothing that is named otherwise is touched, nor anything that is a link.
HEX = rf"[0-9a-f]{{{2 * DIGEST_SIZE}}}"
FOLDER_NAME = re.compile(rf"hybrid-kv-{HEX}")
FILE_NAME = re.compile(rf"\d+-{HEX}\.kv")
TEMPORARY_NAME = re.compile(r"(?P<host>.+)\.(?P<pid>\d+)\.[0-9a-f]+\.tmp")
TEMPORARY_SECONDS = 24 * 3600.0
# What other processes do in a folder is looked up this often; less often where looking takes more
# than 2 % of the time.
REFRESH_SECONDS = 1.0  # which blocks there are
SCAN_SECONDS = 30.0  # and their bytes and times of use
SHARE = 0.02


@dataclass
class OffloadStats:
    """Counts since construction.

    Stored: device to host; loaded: host to device; hits: of fetches that succeeded.
    """

    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    host_hits: int = 0
    folder_hits: int = 0
    misses: int = 0
    host_evictions: int = 0
    folder_evictions: int = 0
    corrupt_files: int = 0
    foreign_files: int = 0
    truncated_files: int = 0
    write_failures: int = 0


def _checksum(header: bytes, data: torch.Tensor) -> bytes:
    digest = blake2b(header, digest_size=DIGEST_SIZE)
    digest.update(data.numpy())
    return digest.digest()


def _file_name(key: BlockKey) -> str:
    return f"{key[0]}-{key[1].hex()}.kv"


def _is_folder(path: str | Path) -> bool:
    """Return True for a folder itself, not for a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_file(path: str | Path) -> bool:
    """Return True for a regular file itself, not for a link to one."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_strange(path: str | Path) -> bool:
    """Return True for something else than a regular file.

    There is one look: a file that another process deletes meanwhile is nothing.
    """
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _open_no_link(path: str, flags: int) -> int:
    # A pipe would block, and Windows has neither flag.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _alive(pid: int) -> bool:
    try:
        with suppress(PermissionError):  # another user's
            os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


class FolderTier:
    """A tier of one file per block in `root/hybrid-kv-<fingerprint>`.

    Other processes may write and delete there as well.

    A file appears whole or not at all, and one that is not exactly what was written under its key
    is a miss, one warning and gone. No write fails the caller: a full or read-only folder takes no
    more blocks, with one warning. `limit` bounds the bytes of all such sub-folders of `root`,
    headers included; the least recently used files go. Links are not followed, and what has a
    block's name but is not a regular file is not read, replaced or deleted.

    Which blocks there are and their bytes are kept in memory and listed anew now and then
    (`REFRESH_SECONDS`, `SCAN_SECONDS`), not at every miss and store. So another process's block may
    be found late, and the limit is exceeded by what others have written since; a block that is
    reported is there.
    """

    def __init__(self, root: Path, identity: bytes, limit: int | None, stats: OffloadStats) -> None:
        if os.path.exists(root) and not os.path.isdir(root):
            raise ConfigError(f"offload folder {root} is a file; name a folder")
        self.root = root
        self.limit = limit
        self.stats = stats
        self._identity = identity
        self._folder = root / f"hybrid-kv-{identity.hex()}"
        self._host = socket.gethostname()
        self._warned = False
        self._undeletable: set[BlockKey] = set()
        # Names that may be there; all else is not, or others wrote it a moment ago.
        self._known: set[str]
        self._refresh()
        # Path -> bytes, last use; least recent first.
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._used: int  # their bytes; from the first scan on
        self._scan_at = -math.inf
        with suppress(OSError):
            self._remove_abandoned()

    def path(self, key: BlockKey) -> Path:
        """Return the file of `key`."""
        return self._folder / _file_name(key)

    def contains(self, key: BlockKey) -> bool:
        """Return whether there is a file, good or bad.

        A miss costs no system call, and may be a file of the last second.
        """
        name = _file_name(key)
        if name not in self._known:
            if time.monotonic() < self._refresh_at:
                return False
            self._refresh()
        return name in self._known and self.exists(key)

    def exists(self, key: BlockKey) -> bool:
        """Do `contains` by a look at the file system."""
        if key not in self._undeletable and _is_folder(self._folder) and _is_file(self.path(key)):
            self._known.add(_file_name(key))
            return True
        self._known.discard(_file_name(key))
        return False

    def read(self, key: BlockKey, data: torch.Tensor) -> bool:
        """Fill `data` (`[bytes of the block]` uint8, host) from the file of `key`.

        Returns:
            False if the contents are void.
        """
        try:
            with open(self.path(key), "rb", opener=_open_no_link) as file:
                header = file.read(HEADER.size)
                checksum = file.read(DIGEST_SIZE)
                count = file.readinto(data.numpy())
                whole = count == data.numel()
                fault = self._fault(key, data, header, checksum, whole, bool(file.read(1)))
        except FileNotFoundError:  # another process may delete it between `contains` and here
            return False
        except OSError as error:
            self._warn_once(f"cannot be read: {error}")
            return False
        if fault:
            name = f"{fault}_files"
            setattr(self.stats, name, getattr(self.stats, name) + 1)
            LOGGER.warning(
                "offload file %s is %s; it is deleted and its block computed again",
                self.path(key),
                fault,
            )
            try:
                self.path(key).unlink(missing_ok=True)
                self._forget(str(self.path(key)))
            except OSError:  # or every fetch would read and report it again
                self._undeletable.add(key)
            return False
        with suppress(OSError):
            os.utime(self.path(key), follow_symlinks=False)  # files leave in the order of use
        known = self._files.pop(str(self.path(key)), None)
        if known:
            self._files[str(self.path(key))] = known[0], time.time_ns()
        return True

    def write(self, blocks: Sequence[tuple[BlockKey, torch.Tensor]]) -> None:
        """Write blocks (`[bytes]` uint8 each, host), as many as go before the first failure."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not _is_folder(self._folder):
                raise OSError(f"{self._folder} is a link")
            for key, data in blocks:
                size = HEADER.size + DIGEST_SIZE + data.numel()
                if self.limit is not None:
                    self._make_room(size, self.limit)
                self._write_file(key, data)
                self._known.add(_file_name(key))
                if self.limit is not None:
                    self._forget(str(self.path(key)))
                    self._files[str(self.path(key))] = size, time.time_ns()
                    self._used += size
        except OSError as error:
            self.stats.write_failures += 1
            self._warn_once(f"takes no block: {error}")

    def _make_room(self, size: int, limit: int) -> None:
        if size > limit:
            raise OSError(f"a block of {size} B exceeds folder_bytes={limit}")
        if time.monotonic() >= self._scan_at:
            self._scan()
        while self._used + size > limit:
            path, (freed, last_use) = next(iter(self._files.items()))
            with suppress(FileNotFoundError):  # another process was first
                if _is_file(path) and _is_folder(os.path.dirname(path)):
                    touched = os.lstat(path).st_mtime_ns
                    if touched > last_use:
                        # Another process has used it since; its place is not worth a scan.
                        self._files[path] = freed, touched
                        self._files.move_to_end(path)
                        continue
                    os.unlink(path)
                    self.stats.folder_evictions += 1
            self._forget(path)

    def _forget(self, path: str) -> None:
        known = self._files.pop(path, None)
        if known:
            self._used -= known[0]

    def _write_file(self, key: BlockKey, data: torch.Tensor) -> None:
        header = self._header(key, data)
        temporary = self._folder / f"{self._host}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
        try:
            # Without fsync: a killed process leaves a *.tmp at most, and what a power cut leaves
            # fails the checksum.
            with open(temporary, "xb") as file:
                file.write(header + _checksum(header, data))
                file.write(data.numpy())
            if _is_strange(self.path(key)):
                raise OSError(f"{self.path(key)} is not a regular file")
            os.replace(temporary, self.path(key))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._undeletable.discard(key)

    def _header(self, key: BlockKey, data: torch.Tensor) -> bytes:
        return HEADER.pack(MAGIC, FORMAT_VERSION, self._identity, *key, data.numel())

    def _fault(
        self,
        key: BlockKey,
        data: torch.Tensor,
        header: bytes,
        checksum: bytes,
        whole: bool,
        more: bool,
    ) -> str | None:
        """Return the fault of a file: `truncated`, `foreign`, `corrupt` or None.

        A foreign file has another format, version or model.
        """
        if len(header) < HEADER.size:
            return "truncated"
        if HEADER.unpack(header)[:3] != (MAGIC, FORMAT_VERSION, self._identity):
            return "foreign"
        if not whole:
            return "truncated"
        if more or header != self._header(key, data) or checksum != _checksum(header, data):
            return "corrupt"
        return None

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            LOGGER.warning(
                "offload folder %s %s; going on without it (reported once)", self.root, message
            )
        self._warned = True

    def _refresh(self) -> None:
        """Find out which blocks there are, also of other processes."""
        begin = time.monotonic()
        self._known = set()
        if _is_folder(self._folder):
            with suppress(OSError):
                self._known.update(os.listdir(self._folder))
        end = time.monotonic()
        self._refresh_at = end + max(REFRESH_SECONDS, (end - begin) / SHARE)

    def _scan(self) -> None:
        """Find out how many bytes the blocks of all models take, and which were used when."""
        begin = time.monotonic()
        blocks = []
        for entry in self._entries(FILE_NAME):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                blocks.append((status.st_mtime_ns, entry.path, status.st_size))
        self._files = OrderedDict(
            (path, (size, last_use)) for last_use, path, size in sorted(blocks)
        )
        self._used = sum(size for _, _, size in blocks)
        end = time.monotonic()
        self._scan_at = end + max(SCAN_SECONDS, (end - begin) / SHARE)

    def _remove_abandoned(self) -> None:
        """Delete temporary files whose writer is dead.

        A process id means nothing for another host and may be reused on this one, so age decides as
        well. A living writer whose file is taken by mistake has nothing to rename and loses that
        one block.
        """
        for entry in self._entries(TEMPORARY_NAME):
            name = TEMPORARY_NAME.fullmatch(entry.name)
            dead = name is not None and name["host"] == self._host and not _alive(int(name["pid"]))
            with suppress(OSError):
                if (
                    dead
                    or entry.stat(follow_symlinks=False).st_mtime < time.time() - TEMPORARY_SECONDS
                ):
                    os.unlink(entry.path)

    def _entries(self, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
        """Yield the regular files of that name in the folders of all models."""
        for folder in self.root.glob("hybrid-kv-*"):
            if FOLDER_NAME.fullmatch(folder.name) and _is_folder(folder):
                with suppress(OSError), os.scandir(folder) as entries:
                    for entry in entries:
                        if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                            yield entry
