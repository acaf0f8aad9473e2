"""SGLang, in an environment of its own, with the exact model on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_kv.check.targets.remote import remote_kind
from hybrid_kv.check.targets.target import Inside, Known

FACTORS = {
    "prefix": ("off", "on"),
    # Where the states of prefixes come from, see --mamba-radix-cache-strategy.
    "buffer": ("none", "extra", "lazy"),
    "overlap": ("off", "on"),
    "page": ("1", "16", "64"),  # tokens
    "chunk": ("whole", "32", "48"),  # tokens of prompts in a step
    "tree": ("rust", "python"),  # the core of the radix tree
}
MATRIX = ("prefix=on buffer=extra overlap=on",)
KNOWN: tuple[Known, ...] = ()


def _is_slow(settings: Mapping[str, str]) -> bool:
    """Return whether Triton's interpreter runs kernels in each step."""
    return settings.get("buffer", "none") != "none"


KIND = remote_kind(
    "sglang",
    "sglang",
    FACTORS,
    inside=Inside(FACTORS, MATRIX, is_central=True, model="gdn", is_only=True),
    known=KNOWN,
    is_slow=_is_slow,
)
