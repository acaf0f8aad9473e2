"""What a user may set, validated where it is set.

Every configuration is a frozen dataclass; an impossible value raises `ConfigError` with the value, the limit and the
way out. Block sizes are *wishes* here: `hybrid_kv.cache.plan` is the only place that decides them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, get_args

import torch

from hybrid_kv.cache.modes import MODES
from hybrid_kv.choices import DraftMethod, Kernels
from hybrid_kv.errors import CheckFailedError as CheckFailedError  # Named here, too: whoever configures meets them.
from hybrid_kv.errors import ConfigError as ConfigError
from hybrid_kv.errors import HybridKVError as HybridKVError

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


def parse_dtype(name: str, what: str) -> torch.dtype:
    """The torch dtype called `name`; `what` names the setting in the error."""
    if not isinstance(name, str) or name not in DTYPES:
        raise ConfigError(f"{what}={name!r} is not a dtype; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def require_positive(config: Any, *names: str) -> None:
    """Raise `ConfigError` unless each named field is None or an integer >= 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name}={value!r} must be an integer >= 1")


def require_bool(config: Any, *names: str) -> None:
    """Raise `ConfigError` unless each named field is None, True or False: "false" and "off" are true to Python."""
    for name in names:
        if not isinstance(value := getattr(config, name), bool | None):
            raise ConfigError(f"{name}={value!r} must be True or False")


def is_int(value: object) -> bool:
    """An integer, numpy's included, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_path(value: object) -> bool:
    """A path that an operating system takes: not empty, and without a null character."""
    if not isinstance(value, str | os.PathLike):
        return False
    text = os.fspath(value)
    return isinstance(text, str) and text != "" and "\0" not in text


def parse_model_dtype(name: str, what: str = "dtype") -> torch.dtype:
    """`parse_dtype` of what a model computes in: 8 bits can be stored, not computed with."""
    dtype = parse_dtype(name, what)
    if dtype.itemsize < 2:
        raise ConfigError(f"{what}={name!r} can't be computed with; use bfloat16, float16, float32 or float64")
    return dtype


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """`cls(**values)`, with unknown keys refused by name (a key that nobody reads passes silently otherwise)."""
    known = {f.name for f in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"{cls.__name__} does not know {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
    return cls(**values)


@dataclass(frozen=True)
class CacheConfig:
    """What the user asks of the cache; None means: let the plan decide.

    `block_size` and `mamba_block_size` are in tokens. A given one is kept, raised to a multiple of itself with a note
    in the plan, or refused; never replaced silently (vllm!37467). `num_blocks` overrides `memory_bytes`.

    Prefix caching needs Mamba states to be kept: it is on in modes `align` and `all`, and turning it on without a mode
    chooses `all`. Published blocks of the prefix cache can also be kept in `kv_offload_bytes` of host memory and in
    files of a folder.

    `state_scheme` says how a Mamba layer undoes rejected drafts: `slots` writes the state after every token of a step
    into a block of its own; `replay` keeps one state and a ring with the inputs of the `replay_ring_len` tokens since,
    and runs these again (see `kernels.replay`).
    """

    block_size: int | None = None
    mamba_block_size: int | None = None
    mamba_cache_mode: str = None  # type: ignore[assignment]  # resolved below
    state_scheme: str = "slots"
    replay_ring_len: int | None = None
    enable_prefix_caching: bool = None  # type: ignore[assignment]  # resolved below
    cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    num_blocks: int | None = None
    memory_bytes: int | None = None
    kv_offload_bytes: int = 0
    kv_offload_folder: str | None = None
    kv_offload_folder_bytes: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "block_size", "mamba_block_size", "num_blocks", "memory_bytes", "replay_ring_len")
        require_bool(self, "enable_prefix_caching")
        if self.mamba_cache_mode is None:
            object.__setattr__(self, "mamba_cache_mode", "all" if self.enable_prefix_caching else "none")
        if not isinstance(self.mamba_cache_mode, str) or self.mamba_cache_mode not in MODES:
            raise ConfigError(f"mamba_cache_mode={self.mamba_cache_mode!r}; use one of {', '.join(MODES)}")
        keeps_states = MODES[self.mamba_cache_mode].keeps_states
        if self.enable_prefix_caching is None:
            object.__setattr__(self, "enable_prefix_caching", keeps_states)
        if keeps_states and not self.enable_prefix_caching:
            raise ConfigError(
                f"mamba_cache_mode={self.mamba_cache_mode!r} keeps states for the prefix cache, which "
                "enable_prefix_caching=False turns off; use mode none"
            )
        require_positive(self, "kv_offload_folder_bytes")
        if not is_int(self.kv_offload_bytes) or self.kv_offload_bytes < 0:
            raise ConfigError(f"kv_offload_bytes={self.kv_offload_bytes!r} must be an integer >= 0")
        folder = self.kv_offload_folder
        if folder is not None and not is_path(folder):
            raise ConfigError(f"kv_offload_folder={folder!r} must be the path of a folder")
        if self.kv_offload_folder_bytes is not None and folder is None:
            raise ConfigError(
                f"kv_offload_folder_bytes={self.kv_offload_folder_bytes} limits a folder, but there is none; give "
                "kv_offload_folder, or kv_offload_bytes for host memory"
            )
        if (self.kv_offload_bytes or folder is not None) and not self.enable_prefix_caching:
            name = "kv_offload_bytes" if self.kv_offload_bytes else "kv_offload_folder"
            raise ConfigError(
                f"{name}={getattr(self, name)!r} keeps blocks of the prefix cache, which is off; "
                "add enable_prefix_caching=True"
            )
        if not isinstance(self.state_scheme, str):
            raise ConfigError(f"state_scheme={self.state_scheme!r} must be a name, such as slots")
        for name in ("cache_dtype", "mamba_ssm_cache_dtype"):
            if (value := getattr(self, name)) != "auto":
                parse_dtype(value, name)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one engine step. `max_num_batched_tokens` is the chunk budget: longer prompts go in chunks.

    With `pipeline_parallel_size` N > 1 steps are scheduled as for a pipeline of N stages. Up to N of them are under way
    at once, a request is in one of them at most, and the tokens of a step are known N - 1 steps later. Each has at most
    `max_num_seqs` / N requests, rounded up. Only the schedule is a pipeline's: one device runs each step as a whole.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_model_len", "pipeline_parallel_size")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step could not decode one token of every request; raise the first or lower the second"
            )
        if self.pipeline_parallel_size > self.max_num_seqs:
            raise ConfigError(
                f"pipeline_parallel_size={self.pipeline_parallel_size} is above max_num_seqs={self.max_num_seqs}: some "
                "stages would always be empty; lower the first or raise the second"
            )

    @property
    def max_num_seqs_per_step(self) -> int:
        """How many requests one step may run."""
        return -(-self.max_num_seqs // self.pipeline_parallel_size)


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafts: each step verifies up to K = `num_speculative_tokens` of them.

    `ngram` looks the last `prompt_lookup_min` to `prompt_lookup_max` tokens up in the request itself; `mtp` is the
    checkpoint's own multi-token-prediction head.
    """

    speculative_method: DraftMethod | None = None
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        require_positive(self, "prompt_lookup_min", "prompt_lookup_max")
        if self.speculative_method not in (None, *get_args(DraftMethod)):
            raise ConfigError(
                f"speculative_method={self.speculative_method!r}; use {' or '.join(get_args(DraftMethod))}"
            )
        if not is_int(self.num_speculative_tokens) or not 0 <= self.num_speculative_tokens <= 16:
            raise ConfigError(f"num_speculative_tokens={self.num_speculative_tokens!r} must be in [0, 16]")
        if self.speculative_method is not None and not self.num_speculative_tokens:
            raise ConfigError(f"speculative_method={self.speculative_method!r} needs num_speculative_tokens >= 1")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is above prompt_lookup_max={self.prompt_lookup_max}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an `LLM` needs besides the model.

    `captured_batch_sizes` are the row counts for which a GPU would hold a captured graph. A pure decode step is padded
    up to the next of them on every device, the CPU included, so that padded and stale rows are exercised without a GPU;
    larger steps run unpadded. With `async_scheduling` each step is scheduled before the tokens of the step before are
    known, and blocks are published and freed one step late. `sanitize` follows every slot and block and stops at the
    first one that does not hold what it should (`hybrid_kv.sanitizer`); `HYBRID_KV_SANITIZE=1` is its default.

    `kernels` says what computes a step: plain torch, or one Triton kernel for each operation of the cache (block
    tables, convolution, states, norm, attention); `auto` takes Triton on a GPU where it is installed. What the kernels
    do not take, such as float64 layers, runs in torch.
    """

    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    attention_backend: str = "auto"
    platform: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    captured_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    async_scheduling: bool = False
    sanitize: bool | None = None
    seed: int = 0
    kernels: Kernels = "auto"

    def __post_init__(self) -> None:
        require_bool(self, "async_scheduling", "sanitize")
        if self.async_scheduling and (num_stages := self.scheduler.pipeline_parallel_size) > 1:
            raise ConfigError(
                f"async_scheduling needs pipeline_parallel_size=1, not {num_stages}: it schedules a request behind the "
                "step that it is in, a pipeline does not; give one of the two"
            )
        # Times 1,000,003 plus a request's number it must fit in 64 bits.
        if not is_int(self.seed) or not -(2**42) <= self.seed < 2**42:
            raise ConfigError(f"seed={self.seed!r} must be an integer of at most 42 bits")
        if self.sanitize is None:
            object.__setattr__(self, "sanitize", os.environ.get("HYBRID_KV_SANITIZE", "0") not in ("", "0"))
        if self.dtype != "auto":
            parse_model_dtype(self.dtype)
        if self.kernels not in get_args(Kernels):
            raise ConfigError(f"kernels={self.kernels!r}; use one of {', '.join(get_args(Kernels))}")
        if list(self.captured_batch_sizes) != sorted(set(self.captured_batch_sizes)):
            raise ConfigError(f"captured_batch_sizes={self.captured_batch_sizes} must rise strictly")
        if self.captured_batch_sizes and self.captured_batch_sizes[0] < 1:
            raise ConfigError(f"captured_batch_sizes={self.captured_batch_sizes} must be >= 1")


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """An `EngineConfig` from flat options such as `num_blocks=64, max_num_seqs=8, attention_backend="FLASH_ATTN"`.

    Raises:
        ConfigError: an option that no part of the configuration knows.
    """
    parts: tuple[tuple[str, type], ...] = (
        ("cache", CacheConfig),
        ("scheduler", SchedulerConfig),
        ("speculative", SpeculativeConfig),
    )
    nested: dict[str, dict[str, Any]] = {"engine": {}, **{name: {} for name, _ in parts}}
    for key, value in options.items():
        owner = next((name for name, cls in parts if key in {f.name for f in fields(cls)}), "engine")
        nested[owner][key] = value
    engine = nested["engine"]
    if given := sorted(engine.keys() & {name for name, _ in parts}):
        raise ConfigError(f"give the options of {given[0]} by their own names, not as an object")
    for name, cls in parts:
        if nested[name]:
            engine[name] = from_dict(cls, nested[name])
    config: EngineConfig = from_dict(EngineConfig, engine)
    return config
