"""What the command line offers is what there is."""

from typing import get_args

from hybrid_kv.attention.undo import SCHEMES
from hybrid_kv.cache.modes import MODES
from hybrid_kv.choices import StateScheme
from hybrid_kv.cli.options import CacheMode


def test_the_command_line_offers_every_scheme_and_every_mode():
    assert get_args(StateScheme) == tuple(SCHEMES)
    assert get_args(CacheMode) == tuple(MODES)
