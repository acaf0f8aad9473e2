"""The benchmarks that asv lists, a file for each suite of `bench/`.

asv puts this folder's parent on `sys.path` and nothing else of the checkout. `bench` is loaded from
where it lies: with the whole checkout on the path, its `hybrid_kv` would hide the one of the commit
that asv has installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]


def load_bench() -> None:
    """Make `import bench` find the package beside this folder."""
    spec = importlib.util.spec_from_file_location(
        "bench", BENCH / "__init__.py", submodule_search_locations=[str(BENCH)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = package
    spec.loader.exec_module(package)


if "bench" not in sys.modules:
    load_bench()
