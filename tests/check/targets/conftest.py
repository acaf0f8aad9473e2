"""A small model on disk."""

from __future__ import annotations

import pytest

from hybrid_kv.models.random_checkpoint import write_checkpoint
from tests.check.targets.models import Hybrid


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    folder = tmp_path_factory.mktemp("lfm2")
    plain = {"rope_type": "default", "rope_theta": 10000.0}  # mlx-lm reads no other
    return str(folder), write_checkpoint("lfm2", folder, keys={"rope_parameters": plain})


@pytest.fixture(scope="module")
def folder(hybrid: Hybrid) -> str:
    return hybrid[0]
