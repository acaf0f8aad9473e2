"""A study of the stub, for all tests of this folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from hybrid_kv.measure.study import matrix
from hybrid_kv.measure.study.matrix import StudyCell, read_study

Study = Callable[..., list[StudyCell]]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """Write a study of the stub and read it."""
    monkeypatch.setitem(matrix.PROGRAMS, "guard", (("tests.measure.study.stub",), "--results", ""))

    def write(*runs: str, levels: Sequence[int] = (0,)) -> list[StudyCell]:
        file = tmp_path / "study.yaml"
        file.write_text(yaml.safe_dump({"runs": list(runs), "axes": {"n": list(levels)}}))
        return read_study(file)

    return write
