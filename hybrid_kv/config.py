"""The settings of an engine and of a plan, validated where they are set.

Every configuration is a frozen dataclass; an impossible value raises `ConfigError` with the value,
the limit and the way out. A field's annotation has its help: options of the command line are
derived from name, type, default and help (`hybrid_kv.cli.options`). Block sizes are *wishes* here:
`hybrid_kv.cache.plan` is the only place that decides them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from hybrid_kv import environment
from hybrid_kv.cache.modes import MODES
from hybrid_kv.errors import CheckFailedError as CheckFailedError  # exported here, too
from hybrid_kv.errors import ConfigError as ConfigError
from hybrid_kv.errors import HybridKVError as HybridKVError

if TYPE_CHECKING:
    import torch

    CacheMode = str
else:  # The command line reads this module before torch, which takes seconds to import.
    CacheMode = Literal[tuple(MODES)]

DraftMethod = Literal["ngram", "mtp", "dflash"]
Kernels = Literal["auto", "torch", "triton"]
DraftRanges = tuple[tuple[int, int, int], ...]
# By name, the attribute of torch.
DTYPES = {name: name for name in ("float64", "float32", "float16", "bfloat16")} | {
    "fp8": "float8_e4m3fn"
}
STATE_DTYPES = DTYPES | {"int8": "int8"}
# Those that a state is rounded to token by token; others hold it as it is computed.
ROUNDED_DTYPES = ("int8", "fp8")
MakeDtype = Callable[[str], "torch.dtype"]


class PlannedDtype(str):
    """The name of a `torch.dtype`, in its place where nothing is allocated.

    A plan needs its bytes, and no torch.
    """

    @property
    def itemsize(self) -> int:
        return int(re.findall(r"\d+", self)[0]) // 8

    def __str__(self) -> str:
        return "torch." + self


def planned_dtype(name: str) -> torch.dtype:
    """Return a dtype as `torch_dtype` does, without torch."""
    return cast("torch.dtype", PlannedDtype(name))


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype, an attribute of torch."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def parse_dtype(
    name: str,
    what: str,
    make: MakeDtype = torch_dtype,
    dtypes: Mapping[str, str] = DTYPES,
) -> torch.dtype:
    """Return the dtype called `name`; `what` names the setting in the error."""
    require_dtype(name, what, dtypes)
    return make(dtypes[name])


def require_dtype(name: str, what: str, dtypes: Mapping[str, str] = DTYPES) -> None:
    """Raise `ConfigError` unless there is a dtype called `name`."""
    if not isinstance(name, str) or name not in dtypes:
        raise ConfigError(f"{what}={name!r} is not a dtype; use one of {', '.join(dtypes)}")


def require_int(config: Any, least: int, *names: str) -> None:
    """Raise `ConfigError` unless each named field is an integer >= `least`.

    None is one where it is the field's default.
    """
    for name in names:
        value = getattr(config, name)
        if not (is_int(value) and value >= least) and (
            value is not None or getattr(type(config), name) is not None
        ):
            raise ConfigError(f"{name}={value!r} must be an integer >= {least}")


def require_bool(config: Any, *names: str) -> None:
    """Raise `ConfigError` unless each named field is None, True or False.

    "false" and "off" are true to Python.
    """
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{name}={value!r} must be True or False")


def is_int(value: object) -> bool:
    """Return whether it is an integer, numpy's included, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_path(value: object) -> bool:
    """Return whether it is a path that an operating system takes.

    It is not empty, and has no null character and no half of a surrogate pair.
    """
    if not isinstance(value, str | os.PathLike):
        return False
    text = os.fspath(value)
    try:
        return isinstance(text, str) and text != "" and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def parse_model_dtype(name: str, what: str = "dtype", make: MakeDtype = torch_dtype) -> torch.dtype:
    """Return a dtype that a model can compute in: 8 bits can be stored, not computed with."""
    dtype = parse_dtype(name, what, make)
    if dtype.itemsize < 2:
        raise ConfigError(
            f"{what}={name!r} can't be computed with; use bfloat16, float16, float32 or float64"
        )
    return dtype


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """Return `cls(**values)`; reject an unknown key by name."""
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"{cls.__name__} does not know {', '.join(unknown)}; it takes "
            f"{', '.join(sorted(known))}"
        )
    return cls(**values)


@dataclass(frozen=True)
class CacheConfig:
    """The user's wishes for the cache; None means: let the plan decide.

    `block_size` and `mamba_block_size` are in tokens. A given one is kept, raised to a multiple of
    itself with a note in the plan, or rejected; never replaced silently (vllm!37467). `num_blocks`
    overrides `memory_bytes`.

    Prefix caching needs Mamba states to be kept: it is on in modes `align` and `all`, and turning
    it on without a mode chooses `all`. Published blocks of the prefix cache can also be kept in
    `kv_offload_bytes` of host memory and in files of a folder.

    `state_scheme` says how a Mamba layer rolls back rejected drafts: `slots` writes the state after
    every token of a step into a block of its own; `recompute` keeps one state and a ring with the
    inputs of the `recompute_ring_len` tokens since, and runs these again (see `kernels.recompute`).
    """

    block_size: Annotated[int | None, "Tokens per attention block."] = None
    mamba_block_size: Annotated[int | None, "Tokens per Mamba block (mode all)."] = None
    mamba_cache_mode: Annotated[
        CacheMode,
        "Mamba states that are kept; align and all turn on prefix caching (default: none).",
    ] = None  # type: ignore[assignment]  # resolved below
    state_scheme: Annotated[
        str,
        "How rejected drafts are rolled back: a state per token (slots), or one state and its last "
        "inputs (recompute).",
    ] = "slots"
    recompute_ring_len: Annotated[int | None, "Inputs kept per request (scheme recompute)."] = None
    enable_prefix_caching: Annotated[
        bool, "Reuse the blocks of earlier requests; without --mamba-cache-mode in mode all."
    ] = None  # type: ignore[assignment]  # resolved below
    prefix_cache_retention_interval: Annotated[
        int | None,
        "States and windows that stay in the prefix cache: those that a prompt is resumed from (0),"
        " and one in so many tokens; default: all.",
    ] = None
    prefix_match_unit: Annotated[
        int | None,
        "Tokens of which a hit is a multiple, inside a block, too (mode align); default: a block.",
    ] = None
    kv_cache_dtype: Annotated[str, "K/V dtype; auto takes the model's."] = "auto"
    mamba_ssm_cache_dtype: Annotated[
        str,
        "SSM state dtype; int8 and fp8 have scales; auto takes the config's or the family's.",
    ] = "auto"
    enable_mamba_cache_stochastic_rounding: Annotated[
        bool, "Round SSM states of dtype float16, int8 or fp8 up or down at random."
    ] = False
    mamba_cache_philox_rounds: Annotated[
        int, "Rounds of the random numbers of that; 0 is the default, 10."
    ] = 0
    num_blocks: Annotated[int | None, "Blocks in the pool; few of them force preemptions."] = None
    memory_bytes: Annotated[int | None, "Memory of the pool, instead of --num-blocks."] = None
    kv_offload_bytes: Annotated[int, "Host memory for cached blocks."] = 0
    kv_offload_folder: Annotated[str | None, "Folder for cached blocks."] = None
    kv_offload_folder_bytes: Annotated[int | None, "Limit of that folder."] = None

    def __post_init__(self) -> None:
        require_int(
            self,
            1,
            "block_size",
            "mamba_block_size",
            "num_blocks",
            "memory_bytes",
            "recompute_ring_len",
            "prefix_match_unit",
        )
        require_int(self, 1, "kv_offload_folder_bytes")
        require_int(self, 0, "kv_offload_bytes", "prefix_cache_retention_interval")
        require_bool(self, "enable_prefix_caching")
        self._resolve_mode()
        self._check_offload()
        if not isinstance(self.state_scheme, str):
            raise ConfigError(f"state_scheme={self.state_scheme!r} must be a name, such as slots")
        if self.kv_cache_dtype != "auto":
            require_dtype(self.kv_cache_dtype, "kv_cache_dtype")
        if self.mamba_ssm_cache_dtype != "auto":
            require_dtype(self.mamba_ssm_cache_dtype, "mamba_ssm_cache_dtype", STATE_DTYPES)
        self._check_rounding()

    def _resolve_mode(self) -> None:
        """Let the cache mode and prefix caching decide each other where one is not given."""
        if self.mamba_cache_mode is None:
            object.__setattr__(
                self, "mamba_cache_mode", "all" if self.enable_prefix_caching else "none"
            )
        if not isinstance(self.mamba_cache_mode, str) or self.mamba_cache_mode not in MODES:
            raise ConfigError(
                f"mamba_cache_mode={self.mamba_cache_mode!r}; use one of {', '.join(MODES)}"
            )
        keeps_states = MODES[self.mamba_cache_mode].keeps_states
        if self.enable_prefix_caching is None:
            object.__setattr__(self, "enable_prefix_caching", keeps_states)
        if keeps_states and not self.enable_prefix_caching:
            raise ConfigError(
                f"mamba_cache_mode={self.mamba_cache_mode!r} keeps states for the prefix cache, "
                "which enable_prefix_caching=False turns off; use mode none"
            )

    @property
    def rounds_states(self) -> bool:
        """True if the state after each token is what its stored form says."""
        return (
            self.enable_mamba_cache_stochastic_rounding
            or self.mamba_ssm_cache_dtype in ROUNDED_DTYPES
        )

    def _check_rounding(self) -> None:
        require_int(self, 0, "mamba_cache_philox_rounds")
        require_bool(self, "enable_mamba_cache_stochastic_rounding")
        dtype = self.mamba_ssm_cache_dtype
        stochastic = self.enable_mamba_cache_stochastic_rounding
        if stochastic and dtype not in ("float16", *ROUNDED_DTYPES):
            raise ConfigError(
                f"enable_mamba_cache_stochastic_rounding: mamba_ssm_cache_dtype={dtype!r} is not "
                "rounded; give float16, int8 or fp8"
            )
        if self.mamba_cache_philox_rounds and not stochastic:
            raise ConfigError(
                f"mamba_cache_philox_rounds={self.mamba_cache_philox_rounds} is of stochastic "
                "rounding, which is off; add enable_mamba_cache_stochastic_rounding=True"
            )

    def _check_offload(self) -> None:
        folder = self.kv_offload_folder
        if folder is not None and not is_path(folder):
            raise ConfigError(f"kv_offload_folder={folder!r} must be the path of a folder")
        if self.kv_offload_folder_bytes is not None and folder is None:
            raise ConfigError(
                f"kv_offload_folder_bytes={self.kv_offload_folder_bytes} limits a folder that is "
                "not set; give kv_offload_folder, or kv_offload_bytes for host memory"
            )
        if (self.kv_offload_bytes or folder is not None) and not self.enable_prefix_caching:
            name = "kv_offload_bytes" if self.kv_offload_bytes else "kv_offload_folder"
            raise ConfigError(
                f"{name}={getattr(self, name)!r} keeps blocks of the prefix cache, which is off; "
                "add enable_prefix_caching=True"
            )
        if self.prefix_cache_retention_interval is not None and not self.enable_prefix_caching:
            raise ConfigError(
                f"prefix_cache_retention_interval={self.prefix_cache_retention_interval} says what "
                "stays in the prefix cache, which is off; add enable_prefix_caching=True"
            )
        if self.prefix_match_unit is not None and not MODES[self.mamba_cache_mode].takes_match_unit:
            able = " or ".join(name for name, mode in MODES.items() if mode.takes_match_unit)
            raise ConfigError(
                f"prefix_match_unit={self.prefix_match_unit} is for mamba_cache_mode {able}, not "
                f"{self.mamba_cache_mode}; choose that or leave it out"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one engine step.

    `max_num_batched_tokens` is the chunk budget: longer prompts go in chunks.
    """

    max_num_seqs: Annotated[int, "Concurrent requests."] = 64
    max_num_batched_tokens: Annotated[int, "Tokens per step."] = 2048
    max_model_len: Annotated[int, "Tokens of prompt and output."] = 4096

    def __post_init__(self) -> None:
        require_int(self, 1, "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: a step could not decode one token of every "
                "request; raise the first or lower the second"
            )


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafts: each step verifies up to K = `num_speculative_tokens` of them.

    `ngram` looks the last `prompt_lookup_min` to `prompt_lookup_max` tokens up in the request
    itself; `mtp` is the checkpoint's own multi-token-prediction head, `dflash` a head that drafts
    all K tokens at once (DFlash, DSpark), from the folder `speculative_model`.

    `num_speculative_tokens_per_batch_size` has ranges `(first, last, K)` of requests in a step,
    both included, from 1 on: the step proposes at most K drafts for each, and none if K is 0. As in
    vLLM (vllm#32374), a gap and all after the last range have the K before them, and no K is larger
    than `num_speculative_tokens`, for which the cache is built.
    """

    speculative_method: Annotated[DraftMethod | None, "Source of drafts."] = None
    speculative_model: Annotated[str | None, "Folder of a block drafter (dflash)."] = None
    num_speculative_tokens: Annotated[int, "Draft tokens verified per step (K)."] = 0
    num_speculative_tokens_per_batch_size: Annotated[
        DraftRanges,
        "K by requests in a step, as vLLM has it, such as [[1, 4, 3], [5, 64, 0]].",
    ] = ()
    prompt_lookup_min: Annotated[int, "Shortest n-gram to look up."] = 2
    prompt_lookup_max: Annotated[int, "Longest n-gram to look up."] = 4

    def __post_init__(self) -> None:
        require_int(self, 1, "prompt_lookup_min", "prompt_lookup_max")
        if self.speculative_method not in (None, *get_args(DraftMethod)):
            raise ConfigError(
                f"speculative_method={self.speculative_method!r}; use "
                f"{' or '.join(get_args(DraftMethod))}"
            )
        self._check_drafter()
        if not is_int(self.num_speculative_tokens) or not 0 <= self.num_speculative_tokens <= 16:
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} must be in [0, 16]"
            )
        if self.speculative_method is not None and not self.num_speculative_tokens:
            raise ConfigError(
                f"speculative_method={self.speculative_method!r} needs num_speculative_tokens >= 1"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is above "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        ranges = _draft_ranges(self.num_speculative_tokens_per_batch_size)
        if ranges and not self.num_speculative_tokens:
            raise ConfigError(
                "num_speculative_tokens_per_batch_size needs num_speculative_tokens, the largest K"
            )
        object.__setattr__(self, "num_speculative_tokens_per_batch_size", ranges)

    def _check_drafter(self) -> None:
        drafter = self.speculative_model
        if drafter is None:
            return
        if not is_path(drafter):
            raise ConfigError(f"speculative_model={drafter!r} must be the path of a folder")
        if self.speculative_method != "dflash":
            raise ConfigError(
                f"speculative_model={drafter!r} drafts with speculative_method='dflash', not "
                f"{self.speculative_method!r}; choose that or leave it out"
            )

    def drafts_after(self, num_requests: int) -> int:
        """Return K of the drafts that a step of so many requests proposes."""
        most = self.num_speculative_tokens
        allowed = most
        for first, _, count in self.num_speculative_tokens_per_batch_size:
            if first > num_requests:
                break
            allowed = count
        return min(most, allowed)


def _draft_ranges(value: Any) -> DraftRanges:
    """Return ranges of requests and their K, of lists or of JSON.

    Raises:
        ConfigError: they are no triples of integers, overlap, or do not begin at 1.
    """
    try:
        given = json.loads(value) if isinstance(value, str) else value
        ranges = tuple((first, last, count) for first, last, count in given)
    except (TypeError, ValueError):
        ranges = None
    if ranges is None or not _rise_from_one(ranges):
        raise ConfigError(
            f"num_speculative_tokens_per_batch_size={value!r}; give [first, last, K] for requests "
            "in a step, from 1 on and rising, such as [[1, 4, 3], [5, 64, 0]]"
        )
    return ranges


def _rise_from_one(ranges: DraftRanges) -> bool:
    if not all(is_int(number) for triple in ranges for number in triple):
        return False
    ends = [last for _, last, _ in ranges]
    begins_at_one = not ranges or ranges[0][0] == 1
    return begins_at_one and all(
        end < first <= last and count >= 0
        for end, (first, last, count) in zip([0, *ends], ranges, strict=False)
    )


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an `LLM` besides the model.

    `captured_batch_sizes` are the row counts that an engine with CUDA graphs captures; here none is
    captured outside of `bench.gpu`. A pure decode step is padded up to the next of them on every
    device, the CPU included, so that padded and stale rows are exercised without a GPU; larger
    steps run unpadded. With `async_scheduling` each step is scheduled before the tokens of the step
    before are known, and blocks are published and freed one step late. `sanitize` follows every
    slot and block and stops at the first one that does not hold what it should
    (`hybrid_kv.sanitizer`); `HYBRID_KV_SANITIZE=1` is its default.

    `kernels` chooses how a step is computed: by plain torch, or by one Triton kernel for each
    operation of the cache (block tables, convolution, states, norm, attention); `auto` takes Triton
    on a GPU where it is installed. Layers that the kernels do not support, such as float64 ones,
    run in torch.
    """

    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    attention_backend: Annotated[
        str, "Layout and kernel block sizes, such as FLASH_ATTN or FLASHINFER."
    ] = "auto"
    platform: Annotated[str, "Platform that chooses the backend: cuda, xpu or cpu."] = "auto"
    device: Annotated[str, "Device: cpu or cuda."] = "auto"
    dtype: Annotated[str, "Model dtype; auto takes the config's."] = "auto"
    captured_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    async_scheduling: Annotated[
        bool, "Schedule a step before the tokens of the last one are known."
    ] = False
    sanitize: Annotated[bool | None, "Check every slot and block at each step."] = None
    seed: Annotated[int, "Seed of sampling."] = 0
    kernels: Annotated[Kernels, "Implementation of the cache's operations."] = "auto"

    def __post_init__(self) -> None:
        require_bool(self, "async_scheduling", "sanitize")
        # Times 1,000,003 plus a request's number it must fit in 64 bits.
        if not is_int(self.seed) or not -(2**42) <= self.seed < 2**42:
            raise ConfigError(f"seed={self.seed!r} must be an integer of at most 42 bits")
        if self.sanitize is None:
            object.__setattr__(self, "sanitize", environment.sanitizes())
        if self.dtype != "auto":
            parse_model_dtype(self.dtype, make=planned_dtype)
        if self.kernels not in get_args(Kernels):
            raise ConfigError(
                f"kernels={self.kernels!r}; use one of {', '.join(get_args(Kernels))}"
            )
        if list(self.captured_batch_sizes) != sorted(set(self.captured_batch_sizes)):
            raise ConfigError(
                f"captured_batch_sizes={self.captured_batch_sizes} must rise strictly"
            )
        if self.captured_batch_sizes and self.captured_batch_sizes[0] < 1:
            raise ConfigError(f"captured_batch_sizes={self.captured_batch_sizes} must be >= 1")


# The parts of `EngineConfig`; no two fields of them have the same name.
PARTS: dict[str, Any] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "speculative": SpeculativeConfig,
}


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """Return an `EngineConfig` from flat options, such as `num_blocks=64, max_num_seqs=8`.

    Raises:
        ConfigError: an unknown option.
    """
    given = sorted(options.keys() & PARTS.keys())
    if given:
        raise ConfigError(f"give the options of {given[0]} by their own names, not as an object")
    left = dict(options)
    parts = dict[str, Any]()
    for name, kind in PARTS.items():
        parts[name] = kind(**{f.name: left.pop(f.name) for f in fields(kind) if f.name in left})
    config: EngineConfig = from_dict(EngineConfig, {**parts, **left})
    return config
