"""vLLM, in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_kv.targets.remote import Remote, python_of

NAME = "vllm"
FACTORS = {
    "prefix": ("off", "on", "align", "all"),  # on: the mode that vLLM takes by itself
    "spec": ("none", "ngram3", "mtp1", "mtp3"),
    "chunk": ("whole", "17", "64"),
    "blocks": ("ample", "tight"),
    "block": ("own", "16", "32"),  # tokens; a hybrid's grow until a Mamba state fits
    "match": ("block", "32"),  # prefix_match_unit: hits may end inside a block
    "retain": ("last", "all"),  # prefix_cache_retention_interval: which Mamba states stay
    "async": ("off", "on"),
    "dtype": ("float32", "bfloat16"),
}


def start(folder: str, settings: Mapping[str, str]) -> Remote:
    """See `targets.target.Kind`."""
    return Remote(NAME, python_of(NAME, "vllm"), folder, settings)
