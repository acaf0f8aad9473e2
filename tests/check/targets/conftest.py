"""A small model on disk."""

import pytest

from hybrid_kv.models.random_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lfm2")
    plain = {"rope_type": "default", "rope_theta": 10000.0}  # mlx-lm reads no other
    return str(folder), write_checkpoint("lfm2", folder, keys={"rope_parameters": plain})


@pytest.fixture(scope="module")
def folder(hybrid):
    return hybrid[0]
