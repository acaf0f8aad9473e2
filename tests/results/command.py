"""`hybrid-kv` in this process."""

import pytest

from hybrid_kv.cli import main


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code or 0, stop
