import random

import pytest

from hybrid_kv.check.probes.checks.cache import boundaries
from hybrid_kv.check.probes.registry import Traffic

UNIT = 16


@pytest.mark.parametrize(("thorough", "reach", "multiples"), [(True, 3, 3), (False, 1, 2)])
def test_lengths_around_multiples_of_a_block_are_fewer_where_another_model_runs(
    thorough: bool, reach: int, multiples: int
) -> None:
    rounds = boundaries(Traffic(random.Random(0), 50, UNIT, 640, 640, thorough=thorough))
    lengths = [[len(ask.prompt) for ask in sent.requests] for sent in rounds]
    assert lengths == [
        [blocks * UNIT + off for off in range(-reach, reach + 1)]
        for blocks in range(1, multiples + 1)
        for _ in range(2)
    ]
