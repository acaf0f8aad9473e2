"""A changed config.json, and what the engine says of it."""

import json

import pytest

from hybrid_kv.config import ConfigError
from tests.models.parity import load


def check_refused(folder, keys, message):
    """With `keys` in its config.json, a checkpoint is refused in one line that matches `message`."""
    path = folder / "config.json"
    kept = path.read_text()
    path.write_text(json.dumps(json.loads(kept) | keys))
    try:
        with pytest.raises(ConfigError, match=message) as caught:
            load(folder)
    finally:
        path.write_text(kept)
    assert "\n" not in str(caught.value)
