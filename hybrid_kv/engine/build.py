"""From a model and its options to the parts of an engine: check, load, plan, allocate, wire."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import gcd
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from hybrid_kv.attention.rollback import rollback_spec
from hybrid_kv.cache.backend import (
    AttentionBackend,
    BackendContext,
    get_backend,
    init_attn_backend,
)
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.offload import KVOffload, check_offloadable
from hybrid_kv.cache.plan import (
    CachePlan,
    apply_block_sizes,
    plan_cache,
    update_block_size_for_backend,
)
from hybrid_kv.cache.spec import (
    KVCacheConfig,
    KVCacheSpec,
    group_layers,
    window_of,
    with_max_step_tokens,
    with_rollback,
    with_rounding,
)
from hybrid_kv.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from hybrid_kv.engine.host_memory import keep_freed_memory
from hybrid_kv.engine.runner import DraftSource, ModelRunner, Proposer
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.engine.text import Tokenizer
from hybrid_kv.kernels.common.rounding import StateRounding
from hybrid_kv.kernels.state_codec import DEFAULT_ROUNDS
from hybrid_kv.models.interface import BlockDraftHead, Model
from hybrid_kv.models.loader import (
    check_model,
    fingerprint,
    load_block_head,
    load_eos_token_ids,
    load_head,
    load_model,
    load_tokenizer,
)
from hybrid_kv.observe import EngineObserver
from hybrid_kv.sanitizer import DraftLayers, Sanitizer
from hybrid_kv.spec_decode.propose import NgramProposer

DEFAULT_CPU_CACHE_BYTES = 2**30
# What the host keeps besides the cache, to tell sizes that can never fit: of a token its id,
# position or slot in 64 bits; of a table's entry the table, the input table and what is staged; of
# a block the pool's and the manager's part.
TOKEN_BYTES = 8
TABLE_BYTES = 12
BLOCK_BYTES = 22

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """The parts of an `LLM`."""

    model: Model
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    plan: CachePlan
    manager: KVCacheManager
    runner: ModelRunner
    scheduler: Scheduler


def build(
    model: str | Path | Model,
    tokenizer: Tokenizer | None,
    proposer: Proposer | None,
    config: EngineConfig,
) -> Parts:
    """Return the parts of an engine, wired; the arguments are those of `engine.llm.LLM`.

    Raises:
        ConfigError: the model, an option or the cache plan cannot be used; no cache is allocated
            then.
    """
    _check_together(model, proposer, config)
    device = _device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    target, tokenizer, eos_token_ids = _load(model, tokenizer, config, device)
    drafts = _drafts(model, target, proposer, config)
    layers = _layers(target, drafts, config)
    platform = config.platform if config.platform != "auto" else device.type
    backend = get_backend(config.attention_backend, platform)
    context = BackendContext.for_layers(platform, layers)
    plan = _plan(layers, config, backend, context, target.mamba_chunk_size, device)
    _check_memory(plan, config.scheduler, device)
    observers: list[EngineObserver] = []
    manager = _manager(plan, drafts, config, observers)
    if drafts.head is not None:
        # Hits end at multiples of the block size, or of a unit. Without a cache too, so that the
        # head drafts the same there.
        drafts.head.grid = config.cache.prefix_match_unit or plan.sizes.block_size
    groups = init_attn_backend(plan.config, backend, context)
    runner = ModelRunner(target, plan, groups, config, device, observers, drafts)
    if manager.partial is not None:
        manager.partial.copy_blocks = runner.copy_blocks
    if _has_offload(config.cache):
        manager.offload = _offload(model, plan, runner, backend, config)
    if config.sanitize:
        observers.append(_sanitizer(manager, runner, drafts, config))
    speculative = config.speculative
    scheduler = Scheduler(
        config.scheduler,
        manager,
        speculative.num_speculative_tokens,
        runner.flush,
        speculative.drafts_after if speculative.num_speculative_tokens_per_batch_size else None,
    )
    return Parts(target, tokenizer, eos_token_ids, plan, manager, runner, scheduler)


def _layers(target: Model, drafts: DraftSource, config: EngineConfig) -> dict[str, KVCacheSpec]:
    """Return the cache of every layer, with the memory that rolling back drafts takes."""
    layers = target.layer_specs | drafts.layer_specs
    rollback = rollback_spec(
        config.cache,
        config.speculative.num_speculative_tokens,
        config.async_scheduling,
        list(layers.values()),
    )
    max_step_tokens = config.scheduler.max_num_batched_tokens * (1 + config.async_scheduling)
    max_step_tokens += drafts.num_ahead(config.speculative.num_speculative_tokens)
    rounding = rounding_of(config)
    return {
        name: with_max_step_tokens(
            with_rounding(with_rollback(spec, rollback), rounding), max_step_tokens
        )
        for name, spec in layers.items()
    }


def rounding_of(config: EngineConfig) -> StateRounding | None:
    """Return how the states of an engine are rounded; None: to the nearest value, or not at all."""
    cache = config.cache
    if not cache.enable_mamba_cache_stochastic_rounding:
        return None
    return StateRounding(config.seed, cache.mamba_cache_philox_rounds or DEFAULT_ROUNDS)


def _manager(
    plan: CachePlan, drafts: DraftSource, config: EngineConfig, observers: list[EngineObserver]
) -> KVCacheManager:
    num_speculative_tokens = config.speculative.num_speculative_tokens
    manager = KVCacheManager(
        plan.config,
        config.cache.enable_prefix_caching,
        num_lookahead_tokens=drafts.num_ahead(num_speculative_tokens),
        max_model_len=config.scheduler.max_model_len,
        num_uncertain_tokens=num_speculative_tokens if config.async_scheduling else 0,
        observers=observers,
        retention_interval=config.cache.prefix_cache_retention_interval,
    )
    if config.cache.prefix_match_unit is not None:
        manager.match_at(config.cache.prefix_match_unit)
    return manager


def _sanitizer(
    manager: KVCacheManager, runner: ModelRunner, drafts: DraftSource, config: EngineConfig
) -> Sanitizer:
    head, block_head = drafts.head, drafts.block_head
    return Sanitizer(
        manager.pool,
        runner.groups,
        runner.raw_buffers,
        config.scheduler,
        config.cache.kv_offload_folder is None,
        runner.row_memory,
        DraftLayers(
            in_passes=() if head is None else head.layer_specs,
            stored=() if block_head is None else block_head.layer_specs,
        ),
    )


def _check_together(
    model: str | Path | Model, proposer: Proposer | None, config: EngineConfig
) -> None:
    """Refuse what is no model, and options that contradict the other arguments.

    Nothing is loaded yet.
    """
    if not isinstance(model, str | Path) and not hasattr(model, "layer_specs"):
        raise ConfigError(
            f"a model of type {type(model).__name__} is neither a checkpoint folder nor a model "
            "with layer_specs"
        )
    if config.kernels == "triton" and config.cache.rounds_states:
        raise ConfigError(
            f"kernels='triton' stores states as they are computed, and "
            f"mamba_ssm_cache_dtype={config.cache.mamba_ssm_cache_dtype!r} is rounded after each "
            "token; use kernels='torch'"
        )
    speculative = config.speculative
    if proposer is not None and speculative.speculative_method is not None:
        raise ConfigError(
            f"speculative_method={speculative.speculative_method!r} and proposer= are two sources "
            "of drafts; give one of them"
        )
    if proposer is not None and not speculative.num_speculative_tokens:
        raise ConfigError("a proposer needs num_speculative_tokens >= 1")
    if (
        speculative.num_speculative_tokens
        and proposer is None
        and speculative.speculative_method is None
    ):
        # Not refused: the logical blocks of K drafts that are never made are a layout worth
        # testing.
        LOGGER.warning(
            "num_speculative_tokens=%d takes cache, but nothing drafts; give speculative_method or "
            "proposer=",
            speculative.num_speculative_tokens,
        )
    text = getattr(model, "fingerprint", None)
    is_known = isinstance(model, str | Path | torch.nn.Module) or (isinstance(text, str) and text)
    if config.cache.kv_offload_folder is not None and not is_known:
        raise ConfigError(
            "kv_offload_folder: files outlive this process, and nothing tells the weights of this "
            f"{type(model).__name__} from another's; give it a text `fingerprint`, or use "
            "kv_offload_bytes alone"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is unknown; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch sees no GPU here; use cpu")
    return device


def _load(
    model: str | Path | Model,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    device: torch.device,
) -> tuple[Model, Tokenizer | None, frozenset[int]]:
    """Return the model, its tokenizer and the tokens that end a text."""
    eos_token_ids: frozenset[int] = frozenset()
    if isinstance(model, str | Path):
        check_model(model, config)  # before transformers reads the same file, and says less
        tokenizer = tokenizer or load_tokenizer(model)
        eos_token_ids = load_eos_token_ids(model)
        model = load_model(model, config, device)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_token_ids |= {tokenizer.eos_token_id}
    return model, tokenizer, eos_token_ids


def _drafts(
    model: str | Path | Model, target: Model, proposer: Proposer | None, config: EngineConfig
) -> DraftSource:
    """Return the source of drafts: a proposer, a head of the checkpoint, or neither."""
    speculative = config.speculative
    if proposer is not None or speculative.speculative_method is None:
        return DraftSource(proposer)
    if speculative.speculative_method == "ngram":
        return DraftSource(
            NgramProposer(
                speculative.num_speculative_tokens,
                speculative.prompt_lookup_max,
                speculative.prompt_lookup_min,
            )
        )
    if speculative.speculative_method == "dflash":
        return DraftSource(block_head=_block_head(model, target, config))
    if not isinstance(model, str | Path):
        raise ConfigError(
            'speculative_method="mtp" needs a checkpoint folder; give LLM(..., proposer=...) '
            "instead"
        )
    return DraftSource(head=load_head(model, target))


def _block_head(model: str | Path | Model, target: Model, config: EngineConfig) -> BlockDraftHead:
    """Return the block drafter of a folder of its own, or that a model object brings along.

    Raises:
        ConfigError: there is none, or none for this target.
    """
    drafter = config.speculative.speculative_model
    if drafter is not None:
        return load_block_head(drafter, target, config.cache)
    head = getattr(target, "block_head", None)
    if head is None:
        whose = model if isinstance(model, str | Path) else f"this {type(model).__name__}"
        raise ConfigError(
            f'speculative_method="dflash": {whose} has no block drafter of its own; give one\'s '
            "folder as speculative_model, or draft with n-grams instead"
        )
    return cast(BlockDraftHead, head)


def _plan(
    layers: dict[str, KVCacheSpec],
    config: EngineConfig,
    backend: type[AttentionBackend],
    context: BackendContext,
    mamba_chunk_size: int | None,
    device: torch.device,
) -> CachePlan:
    cache = config.cache
    arguments = (backend, context, config.scheduler.max_model_len, mamba_chunk_size)
    if cache.num_blocks is None and cache.memory_bytes is None:
        cache = replace(cache, num_blocks=_default_num_blocks(layers, config, arguments, device))
    plan = plan_cache(layers, cache, *arguments, config.scheduler.max_num_seqs)
    if _has_offload(cache):
        check_offloadable(plan.config, _hash_block_size(plan))
    return plan


def _hash_block_size(plan: CachePlan) -> int:
    """Return the tokens that the blocks of all groups are multiples of.

    Those of a window with wide tokens are smaller than those of the other groups.
    """
    specs = [group.layer_specs[0] for group in plan.config.groups]
    windows = [spec.block_size for spec in specs if window_of(spec) is not None]
    return gcd(plan.sizes.block_size, *windows)


def _check_memory(plan: CachePlan, limits: SchedulerConfig, device: torch.device) -> None:
    """Refuse what cannot be allocated, before any of it is.

    Zeroed memory is granted first and missed later.
    """
    cache = plan.config.total_bytes + plan.row_bytes
    widths = [
        group.spec.block_table_width(limits.max_model_len)
        * (group.spec.block_size // kernel_block_size)
        for group, kernel_block_size in zip(
            plan.config.groups, plan.kernel_block_sizes, strict=True
        )
    ]
    rows = limits.max_num_seqs * (TOKEN_BYTES * limits.max_model_len + TABLE_BYTES * sum(widths))
    steps = TOKEN_BYTES * (2 + len(widths)) * limits.max_num_batched_tokens
    needed = cache + rows + steps + BLOCK_BYTES * plan.config.num_blocks
    is_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_gpu else psutil.virtual_memory().available
    if (cache if is_gpu else needed) > free:
        raise ConfigError(
            f"num_blocks={plan.config.num_blocks} ({cache} B), max_num_seqs={limits.max_num_seqs}, "
            f"max_model_len={limits.max_model_len} and "
            f"max_num_batched_tokens={limits.max_num_batched_tokens} take {needed} B "
            f"({needed / 2**30:,.1f} GiB), {free} B ({free / 2**30:,.1f} GiB) are free on "
            f"{device.type}; lower the largest of them"
        )


def _default_num_blocks(
    layers: dict[str, KVCacheSpec],
    config: EngineConfig,
    arguments: tuple[Any, ...],
    device: torch.device,
) -> int:
    """Return the blocks of `max_num_seqs` requests of full length.

    They take at most 1 GiB on a CPU, or 90 % of a GPU's free memory.
    """
    scheduler = config.scheduler
    sizes = update_block_size_for_backend(layers, config.cache, *arguments)
    groups = group_layers(apply_block_sizes(layers, sizes, config.cache.mamba_cache_mode))
    num_blocks = 1 + scheduler.max_num_seqs * sum(
        g.spec.max_blocks_per_request(scheduler.max_model_len) for g in groups
    )
    memory = DEFAULT_CPU_CACHE_BYTES
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[0] * 9 // 10
    empty = KVCacheConfig(0, groups)
    memory -= scheduler.max_num_seqs * empty.bytes_per_row
    return max(2, min(num_blocks, memory // empty.block_bytes))


def _has_offload(cache: CacheConfig) -> bool:
    return bool(cache.kv_offload_bytes) or cache.kv_offload_folder is not None


def _offload(
    model: str | Path | Model,
    plan: CachePlan,
    runner: ModelRunner,
    backend: type[AttentionBackend],
    config: EngineConfig,
) -> KVOffload:
    cache = config.cache
    namespace = ""
    if cache.kv_offload_folder is not None:
        namespace = _identity(model, runner, backend) + drafter_identity(config)
    offload = KVOffload(
        plan.config,
        runner.raw_buffers,
        _hash_block_size(plan),
        host_bytes=cache.kv_offload_bytes,
        folder=cache.kv_offload_folder,
        folder_bytes=cache.kv_offload_folder_bytes,
        namespace=namespace,
    )
    if 0 < cache.kv_offload_bytes < (largest := max(offload.block_bytes)):
        LOGGER.warning(
            "kv_offload_bytes=%d is less than one block of %d B: host memory will restore nothing; "
            "raise it",
            cache.kv_offload_bytes,
            largest,
        )
    return offload


def _identity(
    model: str | Path | Model, runner: ModelRunner, backend: type[AttentionBackend]
) -> str:
    """Return what a stored block depends on besides the plan: the weights, and a page's layout."""
    layout = [backend.name, *(str(group.kernel_block_size) for group in runner.groups)]
    return " ".join([*layout, weights_identity(model, runner.model)])


def drafter_identity(config: EngineConfig) -> str:
    """Return what a cached value of a block drafter's own folder depends on; "" without one."""
    drafter = config.speculative.speculative_model
    return "" if drafter is None else f" {fingerprint(drafter)}"


def weights_identity(model: str | Path | Model, loaded: Model) -> str:
    """Return what a cached value depends on besides the tokens.

    That is the weights, and the dtype of the arithmetic.

    Args:
        model: what the user gave.
        loaded: the model that runs.

    Raises:
        ConfigError: nothing tells the weights of a model object.
    """
    if isinstance(model, str | Path):
        # The dtype of the arithmetic is not always the cache's.
        dtypes = {str(weight.dtype) for weight in cast(torch.nn.Module, loaded).parameters()}
        return " ".join([str(loaded.vocab_size), *sorted(dtypes), fingerprint(model)])
    if not isinstance(model, torch.nn.Module):
        if not (isinstance(text := getattr(model, "fingerprint", None), str) and text):
            raise ConfigError(
                f"nothing tells the weights of this {type(model).__name__} from another's; give it "
                "a text `fingerprint`"
            )
        return text
    weights = blake2b(repr(model).encode())
    for name, tensor in model.state_dict().items():
        weights.update(
            name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return weights.hexdigest()
