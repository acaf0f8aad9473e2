"""The folder that asv is given: the benchmarks of `bench/` as classes, made by `bench.harness.asv_classes`.

asv imports all of its folder for every benchmark; of `bench/` that would be more than an older `hybrid_kv` can import.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]

if __name__ == "asv_suite":
    # asv knows this folder alone. On sys.path the checkout would bring its `hybrid_kv`, not the one that asv installed.
    spec = importlib.util.spec_from_file_location(
        "bench", BENCH / "__init__.py", submodule_search_locations=[str(BENCH)]
    )
    sys.modules["bench"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["bench"])

globals().update(importlib.import_module("bench.harness.asv_classes").classes())
