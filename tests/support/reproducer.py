"""A case that a reproducer replays."""

from hybrid_kv.check.probes.registry import Round
from hybrid_kv.check.probes.reproducer import ProbeCase
from hybrid_kv.check.targets.target import Ask

CASE = ProbeCase(
    "ours",
    "0.1.0",
    "lfm2",
    {"prefix": "align"},
    "repeat",
    "token 1 is 5; alone it was 6",
    (
        Round((Ask((3, 4), 2),)),
        Round((Ask((3, 4, 5), 3), Ask((3, 4), 2, logprobs=True, after=1)), 7),
    ),
    1,
    (7, 8),
    (7, 9),
    0.5,
    -1.0,
    0,
    1e-4,
)
