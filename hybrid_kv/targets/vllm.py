"""vLLM, in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_kv.targets.remote import Remote, python_of

name = "vllm"
factors = {
    "prefix": (
        "off",
        "all",
        "on",
    ),  # on: the mode that vLLM takes by itself; all: a `mamba_cache_mode` of some versions
    "spec": ("none", "ngram3", "mtp1", "mtp3"),
    "chunk": ("whole", "17"),
    "blocks": ("ample", "tight"),
    "block": ("own", "32"),  # tokens; a hybrid's grow until a Mamba state fits
    "match": ("block", "32"),  # prefix_match_unit: hits may end inside a block
    "retain": ("last", "all"),  # prefix_cache_retention_interval: which Mamba states stay
    "async": ("off", "on"),
    "dtype": ("float32", "bfloat16"),
}


def start(folder: str, settings: Mapping[str, str]) -> Remote:
    """See `targets.target.Kind`."""
    return Remote(name, python_of(name, "vllm"), folder, settings)
