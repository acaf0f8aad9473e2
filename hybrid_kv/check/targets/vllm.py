"""vLLM, in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_kv.check.targets.exact import is_exact
from hybrid_kv.check.targets.remote import remote_kind
from hybrid_kv.check.targets.target import Inside, Known

# A default guard runs them in this order: the slowest first, so that no core waits at the end; what
# vLLM rejects or dies of at its start last.
_FACTORS = {
    # on: the mode that vLLM takes by itself; all: a `mamba_cache_mode` of some versions
    "prefix": ("off", "all", "on"),
    "chunk": ("whole", "17", "100"),
    "blocks": ("ample", "tight"),
    "rows": ("8", "1"),  # requests that run at a time, at most
    # prefix_cache_retention_interval: which Mamba states stay; a number: each at so many tokens
    "retain": ("last", "all", "32"),
    "block": ("own", "32"),  # tokens; a hybrid's grow until a Mamba state fits
    "match": ("block", "32"),  # prefix_match_unit: hits may end inside a block
    "dtype": ("float32", "bfloat16"),
    "spec": ("none", "ngram3", "mtp3", "mtp1"),
    "async": ("off", "on"),
}


def _keeps(settings: Mapping[str, str]) -> bool:
    """Return whether states stay where prompts end and part, at multiples of the block.

    With a draft head a hit ends a block earlier, and the state there need not be kept.
    """
    return (
        settings.get("prefix", "off") != "off"
        and settings.get("blocks", "ample") == "ample"
        and settings.get("match", "block") == "block"
        and not settings.get("spec", "none").startswith("mtp")
    )


def _looks_up(settings: Mapping[str, str]) -> bool:
    """Return whether n-grams propose drafts, and neither a chunk nor the pool cuts them short."""
    cut = settings.get("chunk", "whole") != "whole" or settings.get("blocks", "ample") != "ample"
    return settings.get("spec", "none").startswith("ngram") and not cut


# The exact model inside it, on a GPU that is not there: as vLLM is served.
_INSIDE = Inside(
    {
        # A model runner of GPUs, on one that is not there, or that of CPUs.
        "runner": ("v2", "v1", "cpu"),
        "graph": ("off", "decode", "full", "broken"),
        # The content that a copy to the host brings: the latest that it may, or the earliest.
        "copies": ("late", "early"),
        "prefix": ("off", "on", "align", "all"),
        "chunk": ("whole", "24", "40"),
        "blocks": ("ample", "tight"),
        "rows": ("8", "1"),
        "retain": ("last", "all", "32"),
        "block": ("own", "32"),
        "kernel": ("own", "4"),  # tokens of a block as attention takes it
        "match": ("block", "8", "4"),
        "spec": ("none", "ngram3", "mtp3"),
        "async": ("off", "on"),
        "sanitize": ("off", "on"),  # at about half of the speed; not with async
    },
    (
        "runner=v2 graph=decode spec=mtp3 prefix=align",
        "runner=v2 kernel=4 prefix=align chunk=40",
        "runner=v2 prefix=on blocks=tight",
        "runner=v2 spec=mtp3 async=on copies=early",
        "runner=v2 graph=full async=on",
        "runner=v1 kernel=4 prefix=align chunk=40",
        "runner=v1 prefix=on blocks=tight",
        "runner=v1 async=on copies=early",
    ),
    is_central=True,
    keeps=_keeps,
    looks_up=_looks_up,
    has_windows=True,
)


_NAMED = ("0.32.0", "0.33.0")  # releases whose failures a default check names


def _one_token(setting: str) -> list[Known]:
    """Return what a run without a seed reports of `vllm_one_token_beside_drafts`.

    Longer prompts are right in this setting.
    """
    name = "vllm_one_token_beside_drafts"
    words = {
        "one token beside others": "token 3 is 29, not 10",
        "traffic": "token 1 is 36, not 70",
    }
    return [
        Known(release, name, (), probe, said, setting, shortest=2)
        for release in _NAMED
        for probe, said in words.items()
    ]


_KNOWN = (
    Known("0.32.0", "vllm_seed_in_chunks", words="CPU Generator does not use offset"),
    Known("0.32.0", "vllm_top_k_without_drafts", ("spec",), words="max(): Expected reduction dim"),
    Known("0.32.0", "vllm_temperature_of_drafts", ("spec",), probe="seeds"),
    *(
        Known(
            f"0.{minor}.0",
            "vllm_prefix_and_drafts",
            ("prefix", "spec"),
            words="object is not subscriptable",
        )
        for minor in (22, 24, 28, 32, 33)
    ),
    # Not of the exact model: there it would hide `vllm_copies_in_a_chain`.
    *(
        Known(f"0.{minor}.0", "vllm_hit_inside_a_block", ("match",), model="random")
        for minor in (32, 33)
    ),
    *_one_token("runner=v2 graph=decode spec=mtp3 prefix=align"),
    *_one_token("runner=v2 spec=mtp3 async=on copies=early"),
    # On CPUs with AMX.
    *(
        Known(
            release,
            "vllm_prompt_of_one_token",
            words="causal_conv1d_fwd_cpu: expect x to be transposed",
            shortest=2,
        )
        for release in _NAMED
    ),
    # A state is kept at a prompt's end, but with `retain=all`.
    Known(
        "0.32.0",
        "retain=last",
        ("prefix",),
        probe="together across a boundary",
        words="cached stayed 0",
    ),
    # A draft head reads the token after each: where that differs a hit ends a block earlier, and
    # the state there is not kept.
    Known(
        "0.33.0",
        "retain=last",
        ("prefix", "spec"),
        probe="one token behind a hit",
        words="cached stayed 0",
    ),
)


def _variant_of(folder: str, settings: Mapping[str, str]) -> str:
    """Return `gpu` for the model runners of GPUs, else an empty string.

    Only the exact model can have those: kernels of layers need a real GPU.
    """
    return "" if settings.get("runner", "v2") == "cpu" or not is_exact(folder) else "gpu"


def _is_slow(settings: Mapping[str, str]) -> bool:
    """Return whether Triton's interpreter runs the kernels of an exact model."""
    return settings.get("runner", "v2") != "cpu"


# Its kernels for CPUs refuse the widths of a tiny checkpoint.
KIND = remote_kind(
    "vllm",
    "vllm",
    _FACTORS,
    _variant_of,
    size="small",
    inside=_INSIDE,
    known=_KNOWN,
    is_slow=_is_slow,
)
