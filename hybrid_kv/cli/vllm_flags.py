"""The flags of `vllm serve` as options of this package, and what says nothing about the cache.

Names, values and defaults are those of vLLM 0.33 (`engine/arg_utils.py`, `config/cache.py`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hybrid_kv.config import ConfigError

# Options with the same name and meaning here.
_NUMBERS = {
    "block_size",
    "decode_context_parallel_size",
    "mamba_block_size",
    "mamba_cache_philox_rounds",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "pipeline_parallel_size",
    "prefix_cache_retention_interval",
    "prefix_match_unit",
    "tensor_parallel_size",
}
_TEXTS = {
    "attention_backend",
    "dtype",
    "kv_cache_dtype",
    "mamba_cache_mode",
    "mamba_ssm_cache_dtype",
}
_SWITCHES = {"enable_prefix_caching", "enable_mamba_cache_stochastic_rounding"}
# Hybrids run with the prefix cache, and keep states where prompts are resumed.
_DEFAULTS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "prefix_cache_retention_interval": 0,
}
_SHORT = {
    "-dcp": "--decode-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
_VALUES = {"fp8_e4m3": "fp8"}
# Sources of drafts; the names of a checkpoint's own head end with `mtp`.
_METHODS = {"ngram": "ngram", "mtp": "mtp", "dflash": "dflash", "dspark": "dflash"}
_DRAFTS = {
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "prompt_lookup_max",
    "prompt_lookup_min",
}
_WHY = {
    "enable_mamba_shared_prefix_checkpoint": "the state where two prompts part is always kept here",
    "mamba_backend": "it chooses the kernel of the states",
    "mamba_ssu_algorithm": "it chooses the kernel of the states",
    "spec_model": "the layers of a drafter of its own are not counted",
}


@dataclass(frozen=True)
class VLLMFlags:
    """What flags of `vllm serve` say.

    Attributes:
        options: of `config.engine_config`, of `cache.ranks.Ranks`, and `max_model_len`.
        left_out: flags that change nothing about the cache here, and why.
    """

    options: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> VLLMFlags:
        """Read flags as they stand in a command line.

        Raises:
            ConfigError: a value is missing or of the wrong kind.
        """
        flags = cls(dict(_DEFAULTS))
        for flag, value in _pairs(text):
            flags._take(flag, value)
        if not flags.options["enable_prefix_caching"]:
            del flags.options["mamba_cache_mode"], flags.options["prefix_cache_retention_interval"]
        return flags

    def _take(self, flag: str, value: str | None) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        if name.removeprefix("no_") in _SWITCHES:
            self.options[name.removeprefix("no_")] = not name.startswith("no_")
        elif name in _NUMBERS:
            self.options[name] = _number(flag, value)
        elif name in _TEXTS:
            given = _required(flag, value)
            self.options[name] = _VALUES.get(given, given)
        elif name == "num_gpu_blocks_override":
            self.options["num_blocks"] = _number(flag, value)
        elif name == "spec_tokens":
            self.options["num_speculative_tokens"] = _number(flag, value)
        elif name == "spec_method":
            self.options["speculative_method"] = _method(flag, _required(flag, value))
        elif name == "speculative_config":
            self._take_drafts(flag, _required(flag, value))
        else:
            self.left_out[flag] = _WHY.get(name, "it says nothing about the cache")

    def _take_drafts(self, flag: str, text: str) -> None:
        try:
            given = json.loads(text)
            method = str(given.pop("method"))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(
                f"{flag} {text[:80]}: give a JSON object with the method and num_speculative_tokens"
            ) from None
        self.options["speculative_method"] = _method(flag, method)
        for name, value in given.items():
            if name in _DRAFTS:
                self.options[name] = value
            else:
                why = _WHY.get(f"spec_{name}", "it does not change how many drafts there are")
                self.left_out[f"{flag} {name}"] = why


def _pairs(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each flag with its value; None: none follows.

    Raises:
        ConfigError: a quote is not closed, or a word belongs to no flag.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--vllm-flags {text[:80]}: {error}") from None
    flag: str | None = None
    for word in words:
        if word.startswith("-") and not word[1:].isdigit():
            if flag is not None:
                yield flag, None
            name, has_value, value = word.partition("=")
            name = _SHORT.get(name, name)
            flag = name
            if has_value:
                yield name, value
                flag = None
        elif flag is not None:
            yield flag, word
            flag = None
        else:
            raise ConfigError(f"--vllm-flags: {word!r} belongs to no flag; give flags alone")
    if flag is not None:
        yield flag, None


def _required(flag: str, value: str | None) -> str:
    if value is None:
        raise ConfigError(f"--vllm-flags: {flag} has no value")
    return value


def _method(flag: str, given: str) -> str:
    known = _METHODS.get("mtp" if given.endswith("_mtp") else given)
    if known is None:
        raise ConfigError(
            f"{flag}: method {given!r} is unknown here; known are {', '.join(_METHODS)}"
        )
    return known


def _number(flag: str, value: str | None) -> int:
    given = _required(flag, value)
    if not given.isdecimal():
        raise ConfigError(f"--vllm-flags: {flag} {given} is no number")
    return int(given)
