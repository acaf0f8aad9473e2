"""SGLang, in an environment of its own, with the exact model on a CPU."""

from __future__ import annotations

from hybrid_kv.check.targets.remote import remote_kind
from hybrid_kv.check.targets.target import Inside, Known
from hybrid_kv.check.targets.workers.sglang import LEVELS

FACTORS = {factor: tuple(levels) for factor, levels in LEVELS.items()}
# A default check runs them in this order: the slowest first, so that no core waits at the end.
MATRIX = (
    "prefix=on buffer=extra overlap=on blocks=tight host=through",
    "prefix=on buffer=extra overlap=on spec=ngram4 graph=on",
    "prefix=on buffer=extra overlap=on mixed=on chunk=32",
    "prefix=on buffer=lazy overlap=on page=16 chunk=48",
    "prefix=on buffer=extra overlap=on blocks=tight retract=7",
    "prefix=on buffer=extra overlap=on tree=python",
    "prefix=on buffer=extra overlap=on graph=on",
    "prefix=on blocks=tight",
)
# Of layers whose states SGLang keeps by other code than those of a delta net.
FURTHER = {
    "mamba2": ("prefix=on buffer=extra overlap=on graph=on",),
    "short_conv": ("prefix=on graph=on", "prefix=on spec=ngram4"),
}
RELEASE = "0.5.23"
KNOWN = (
    Known(RELEASE, "sglang_ngram_breadth_1", ("spec=ngram1",), words="token"),
    Known(RELEASE, "sglang_short_conv_tree", ("spec",), words="token", model="short_conv"),
    Known(RELEASE, "sglang_mixed_off_the_page", ("buffer", "mixed", "page"), words="token"),
    # Without extra buffers a state is kept at the end of a text alone, and serves what goes on with
    # all of it.
    Known(RELEASE, "buffer=none", ("prefix", "buffer=none"), words="cached stayed 0"),
    # It admits no more requests than the pool has room for.
    Known(RELEASE, "blocks=tight", ("blocks=tight",), "a pool too small", "preemptions stayed 0"),
)


KIND = remote_kind(
    "sglang",
    "sglang",
    FACTORS,
    inside=Inside(FACTORS, MATRIX, FURTHER, is_central=True, model="gdn", is_only=True),
    known=KNOWN,
)
