"""Files that a command is given or makes.

They are read to a limit, checked before the work, and written whole or not at all.
"""

from __future__ import annotations

import gzip
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid_kv.errors import ConfigError, HybridKVError

MAX_BYTES = 2**28  # of a file that is read as a whole; a large model's tokenizer.json has 35 MB


def require_regular(file: Path) -> None:
    """Refuse a device, which may have no end, and a pipe, which waits for its writer.

    Raises:
        ConfigError: it is not a regular file.
        OSError: there is no such file.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise ConfigError(f"{file} is not a regular file; name one")


def read_text(file: Path, unpack: bool = False) -> str:
    """Return the UTF-8 text of a file that a user named; with `unpack` that in a gzip file.

    Raises:
        ConfigError: it is not a regular file, has more than `MAX_BYTES`, or is not text.
        OSError, EOFError, zlib.error: it cannot be read.
    """
    require_regular(file)
    with gzip.open(file) if unpack else file.open("rb") as opened:
        data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{file} has more than {MAX_BYTES:,} bytes; is it another file?")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not text: byte {error.start} is not UTF-8; write it as UTF-8 text"
        ) from None


def check_outputs(*files: str | Path | None) -> None:
    """Refuse files that `write_whole` could not write.

    It is asked before hours of work depend on them. Nothing is made yet.

    Raises:
        ConfigError: a folder that cannot be made or written, or a file that cannot be replaced.
    """
    for file in (Path(file) for file in files if file is not None):
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; name a file in it")
        folder = next(folder for folder in file.absolute().parents if folder.exists())
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"{file}: {folder} cannot be written: {error.strerror}; choose another folder"
            ) from None
        if file.exists() and not os.access(file, os.W_OK):
            raise ConfigError(f"{file} is write-protected; choose another file")


def write_whole(file: str | Path, data: str | bytes) -> None:
    """Write a file and its folders, or leave what was there before; text is UTF-8.

    Raises:
        HybridKVError: it cannot be written.
    """
    file = Path(file)
    data = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    if file.exists() and not file.is_file():
        # A device or a pipe, such as /dev/stdout, cannot be replaced.
        try:
            file.write_bytes(data)
        except OSError as error:
            raise HybridKVError(f"{file} cannot be written: {error.strerror}") from None
        return
    unfinished = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=file.parent, prefix=".hybrid-kv.", suffix=".part", delete=False
        ) as made:
            unfinished = made.name
            made.write(data)
        os.chmod(unfinished, 0o644)
        os.replace(unfinished, file)
    except OSError as error:
        raise HybridKVError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        if unfinished is not None:
            Path(unfinished).unlink(missing_ok=True)


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a folder to fill, which gets its name when it is full.

    After an error nothing is there.

    Raises:
        ConfigError: something is there already; an empty folder may be.
        HybridKVError: it cannot be written.
    """
    folder = Path(folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there and not an empty folder; give another one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=".hybrid-kv.", suffix=".part"
        ) as unfinished:
            made = Path(unfinished) / "made"
            made.mkdir()
            yield made
            os.replace(made, folder)
    except OSError as error:
        raise HybridKVError(f"{folder} cannot be written: {error.strerror}") from None
