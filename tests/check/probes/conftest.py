"""The toy engine, guarded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_kv.check.probes import guarded as module
from hybrid_kv.check.probes.guarded import Guarded
from tests.check.probes.toy import ToyKind, ToyOracle


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Guarded]:
    (tmp_path / "config.json").write_text('{"model_type": "toy", "vocab_size": 50}')
    monkeypatch.setattr(module, "Oracle", lambda folder, dtype: ToyOracle())
    return lambda **how: Guarded(ToyKind(**how), str(tmp_path))
