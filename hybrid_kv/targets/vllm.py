"""vLLM, in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_kv.targets.remote import Remote, python_of

name, package = "vllm", "vllm"
size = "small"  # its kernels for CPUs refuse the tiny one's widths
# A default guard runs them in this order: the slowest first, so that no core waits at the end; what vLLM rejects or
# dies of at its start last.
factors = {
    "prefix": (
        "off",
        "all",
        "on",
    ),  # on: the mode that vLLM takes by itself; all: a `mamba_cache_mode` of some versions
    "chunk": ("whole", "17", "100"),
    "blocks": ("ample", "tight"),
    "retain": ("last", "all"),  # prefix_cache_retention_interval: which Mamba states stay
    "block": ("own", "32"),  # tokens; a hybrid's grow until a Mamba state fits
    "match": ("block", "32"),  # prefix_match_unit: hits may end inside a block
    "dtype": ("float32", "bfloat16"),
    "spec": ("none", "ngram3", "mtp3", "mtp1"),
    "async": ("off", "on"),
}


def start(folder: str, settings: Mapping[str, str]) -> Remote:
    """See `targets.target.Kind`."""
    return Remote(name, python_of(name, package), folder, settings)
