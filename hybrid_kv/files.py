"""Files that a command makes: checked before the work, then whole or not there at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid_kv.errors import ConfigError, HybridKVError


def refuse_device(file: Path) -> None:
    """Refuse a file such as /dev/zero, which has no end to be read to; a pipe has one.

    Raises:
        ConfigError: it is a device.
    """
    if file.is_char_device() and file != Path(os.devnull):  # which ends at once
        raise ConfigError(f"{file} is a device; name a file")


def check_outputs(*files: str | Path | None) -> None:
    """Refuse files that `write_whole` could not write, before hours of work depend on them. Nothing is made yet.

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
            raise ConfigError(f"{file}: {folder} cannot be written: {error.strerror}; choose another folder") from None
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
    part = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".hybrid-kv.", suffix=".part", delete=False) as made:
            part = made.name
            made.write(data)
        os.chmod(part, 0o644)
        os.replace(part, file)
    except OSError as error:
        raise HybridKVError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is full; after an error nothing is there.

    Raises:
        ConfigError: something is there already; an empty folder may be.
        HybridKVError: it cannot be written.
    """
    folder = Path(folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there and not an empty folder; give another one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".hybrid-kv.", suffix=".part") as part:
            made = Path(part) / "made"
            made.mkdir()
            yield made
            os.replace(made, folder)
    except OSError as error:
        raise HybridKVError(f"{folder} cannot be written: {error.strerror}") from None
