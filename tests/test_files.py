"""Files that a command makes: checked before the work, whole or absent after it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.files import MAX_BYTES, check_outputs, new_folder, read_text, write_whole
from tests.cli.run import raising


def test_a_file_is_written_whole_with_its_folders(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b.json"
    check_outputs(file, None)
    assert not (tmp_path / "a").exists()  # a look leaves nothing
    write_whole(file, "2 \u00d7 \udcff")
    assert file.read_bytes() == b"2 \xc3\x97 \\udcff"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    write_whole(file, b"new")
    assert [one.name for one in file.parent.iterdir()] == ["b.json"] and file.read_bytes() == b"new"


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, said in (
        (
            "file/x.json",
            r"file/x.json: .*/file cannot be written: Not a directory; choose another folder",
        ),
        (".", "is a folder; name a file in it"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_outputs(tmp_path / name)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_protected_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o400)
    with pytest.raises(ConfigError, match="is write-protected"):
        check_outputs(tmp_path / "file")


@pytest.mark.parametrize("step", ["os.replace", "os.chmod"])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    monkeypatch.setattr(step, raising(OSError(28, "No space left on device")))
    with pytest.raises(HybridKVError, match="file cannot be written: No space left on device"):
        write_whole(file, "after")
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and file.read_text() == "before"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_is_written_to_and_not_replaced() -> None:
    check_outputs("/dev/null")
    write_whole("/dev/null", "x")
    with pytest.raises(HybridKVError, match="/dev/full cannot be written: No space left"):
        write_whole("/dev/full", "x" * 100_000)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match=f"{place} is not a regular file; name one"):
            read_text(place)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="large has more than 268,435,456 bytes"):
        read_text(tmp_path / "large")
    (tmp_path / "odd").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match="odd is not text: byte 2 is not UTF-8"):
        read_text(tmp_path / "odd")
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "nowhere")


def test_a_folder_gets_its_name_when_it_is_full(tmp_path: Path) -> None:
    with new_folder(tmp_path / "deep" / "made") as folder:
        (folder / "file").write_text("1")
        assert not (tmp_path / "deep" / "made").exists()
    assert (tmp_path / "deep" / "made" / "file").read_text() == "1"
    with (
        pytest.raises(ConfigError, match="made is there and not an empty folder; give another one"),
        new_folder(tmp_path / "deep" / "made"),
    ):
        raise AssertionError
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "file").touch()
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == [
        "deep",
        "made",
        "file",
        "empty",
        "file",
    ]


def test_a_folder_that_is_not_filled_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), new_folder(tmp_path / "made") as folder:
        (folder / "file").touch()
        raise ValueError("no")
    with (
        pytest.raises(HybridKVError, match="made cannot be written: No such"),
        new_folder(tmp_path / "made"),
    ):
        raise FileNotFoundError(2, "No such file")
    with pytest.raises(HybridKVError, match="file/made cannot be written: File exists"):
        (tmp_path / "file").touch()
        with new_folder(tmp_path / "file" / "made"):
            raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
