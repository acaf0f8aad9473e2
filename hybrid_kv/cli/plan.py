"""`hybrid-kv plan`: sizes and capacity of a model's cache."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hybrid_kv.cache.ranks import Ranks
from hybrid_kv.cli.options import AsJson, OutFile, derived_options, require_at_least_one, show
from hybrid_kv.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    SchedulerConfig,
    SpeculativeConfig,
    engine_config,
    planned_dtype,
)

if TYPE_CHECKING:
    from hybrid_kv.cache.plan import CachePlan
    from hybrid_kv.cli.lengths import Ints
    from hybrid_kv.models.shapes import ModelShape

Platform = Literal["cuda", "xpu", "cpu"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# What depends on the size of the pool.
_CAPACITY = ("num_blocks", "total_bytes", "longest_request", "max_concurrency", "token_capacity")
# Options that change a plan.
_PLANNED = {
    "attention_backend",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "mamba_block_size",
    "mamba_cache_mode",
    "enable_prefix_caching",
    "prefix_match_unit",
    "state_scheme",
    "recompute_ring_len",
    "speculative_method",
    "speculative_model",
    "num_speculative_tokens",
    "dtype",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds",
    *(field.name for field in fields(Ranks)),
    "vllm_flags",
}


@dataclass(frozen=True)
class Flags:
    """Another engine's command line."""

    vllm_flags: Annotated[
        str | None, "Flags of `vllm serve` in one text; those of this command go before them."
    ] = None


@derived_options(
    *(CacheConfig, SchedulerConfig, SpeculativeConfig, EngineConfig, Ranks, Flags), only=_PLANNED
)
def plan(
    config: Annotated[
        str,
        typer.Argument(help="A Hugging Face config.json, the folder that holds it, or owner/name."),
    ],
    platform: Annotated[
        Platform,
        typer.Option(
            help="Decides the default backend and its block size; on a CPU that of this package, "
            "vLLM's is --attention-backend CPU_ATTN."
        ),
    ] = "cuda",
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a GPU for the cache alone, weights already subtracted: 80GiB, 512MB; "
            "without it and --num-blocks the sizes are printed, not what fits."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the longest request; default: the config's."),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIST",
            help="How many requests of these lengths fit: a .csv or .jsonl with prompt_tokens and "
            "output_tokens, or lognormal:prompt=MEAN/P99,output=MEAN/P99.",
        ),
    ] = None,
    as_json: AsJson = False,
    out: OutFile = None,
    **options: Any,
) -> None:
    """Print block sizes, padding, groups and capacity of a model's cache. Nothing is allocated."""
    from hybrid_kv.files import check_outputs

    flag_notes = list[str]()
    if "vllm_flags" in options:
        flags, flag_notes = _read_flags(options.pop("vllm_flags"), config)
        options = flags | options
        model_len = options.pop("max_model_len", None)
        max_model_len = max_model_len or model_len
    max_num_seqs = options.pop("max_num_seqs", None)
    require_at_least_one(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    check_outputs(out)
    if gpu_memory is not None:
        options["memory_bytes"] = parse_memory(gpu_memory)
    ranks = Ranks(**{field.name: options.pop(field.name, field.default) for field in fields(Ranks)})
    engine = replace(engine_config(options), platform=platform)
    has_pool = (engine.cache.num_blocks, engine.cache.memory_bytes) != (None, None)
    if requests is not None and not has_pool:
        raise ConfigError(
            f"--requests {requests}: what fits depends on the pool; "
            "add --gpu-memory or --num-blocks"
        )
    lengths = None
    if requests is not None:
        from hybrid_kv.cli.lengths import read_lengths

        lengths = read_lengths(requests)
    shape, result = planned(config, engine, max_model_len, max_num_seqs, ranks)
    document = _document(shape, result, engine, ranks)
    if not has_pool:
        document |= dict.fromkeys(_CAPACITY)
        document["stages"] = [{**stage, "total_bytes": None} for stage in document["stages"]]
    if lengths is not None:
        num_drafts = engine.speculative.num_speculative_tokens
        document["requests"] = _fit(result, *lengths, num_drafts)
    document["notes"] += _notes(document, result, max_num_seqs)
    document["notes"] += _copies_note(config, engine, shape, ranks)
    document["notes"] += flag_notes
    show(document, as_json, out, _print_plan, document)


def _read_flags(text: str, config: str) -> tuple[dict[str, Any], list[str]]:
    """Return what flags of `vllm serve` say of a model's plan, and notes on what they do not."""
    from hybrid_kv.cli.vllm_flags import VLLMFlags
    from hybrid_kv.models.config_file import ConfigFile
    from hybrid_kv.models.shapes import has_head

    flags = VLLMFlags.read(text)
    notes = [f"{flag} is left out: {why}" for flag, why in flags.left_out.items()]
    options = flags.options
    method = options.get("speculative_method")
    if method == "dflash" or (method == "mtp" and not has_head(ConfigFile.read(config))):
        del options["speculative_method"]
        notes.append("the layers of the drafter are not in the plan, its drafts are")
    return options, notes


def _document(
    shape: ModelShape, plan: CachePlan, engine: EngineConfig, ranks: Ranks
) -> dict[str, Any]:
    from hybrid_kv.cache.backend import get_backend
    from hybrid_kv.cache.plan import describe

    return {
        "model_type": shape.model_type,
        "num_hidden_layers": shape.num_hidden_layers,
        "cached_layers": shape.counts,
        "platform": engine.platform,
        "backend": get_backend(engine.attention_backend, engine.platform).name,
        "mamba_cache_mode": engine.cache.mamba_cache_mode,
        "state_scheme": engine.cache.state_scheme,
        "speculative_method": engine.speculative.speculative_method,
        "num_speculative_tokens": engine.speculative.num_speculative_tokens,
        **asdict(ranks),
        **describe(plan),
        "bytes_per_request": plan.blocks_per_request * plan.fullest.block_bytes,
    }


def _notes(document: dict[str, Any], plan: CachePlan, max_num_seqs: int | None) -> list[str]:
    """Return notes on requests that are left out, and on too many at once."""
    notes = []
    fit = document.get("requests")
    if fit is not None and fit["num_refused"]:
        notes.append(
            f"{fit['num_refused']:,} of {fit['num_given']:,} requests are left out: the engine "
            "would reject them, because their prompt has --max-model-len tokens or more, or they "
            "never fit"
        )
    if max_num_seqs is not None and plan.max_concurrency < max_num_seqs:
        notes.append(
            f"{plan.max_concurrency:.2f} requests of {plan.max_model_len} tokens fit at once, not "
            f"{max_num_seqs}; lower --max-num-seqs or --max-model-len, or give the cache more "
            "memory"
        )
    return notes


def planned(
    model: str,
    engine: EngineConfig,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    ranks: Ranks | None = None,
) -> tuple[ModelShape, CachePlan]:
    """Return the shape that a config.json describes for one rank, and the plan of its cache.

    Nothing is loaded, and torch not imported. Without a pool's size the pool is larger than any.

    Raises:
        ConfigError: it can't be planned.
    """
    from hybrid_kv.attention.rollback import rollback_spec
    from hybrid_kv.cache.backend import BackendContext, get_backend
    from hybrid_kv.cache.plan import plan_cache
    from hybrid_kv.cache.spec import with_max_step_tokens, with_rollback
    from hybrid_kv.models.config_file import ConfigFile
    from hybrid_kv.models.drafter_file import drafter_layers
    from hybrid_kv.models.shapes import model_shape

    ranks = ranks or Ranks()
    cache = engine.cache
    num_drafts = engine.speculative.num_speculative_tokens
    drafter = engine.speculative.speculative_model
    has_draft_head = engine.speculative.speculative_method == "mtp"
    if (cache.num_blocks, cache.memory_bytes) == (None, None):
        cache = replace(cache, memory_bytes=2**62)
    shape = model_shape(
        model,
        num_speculative_tokens=num_drafts,
        cache=cache,
        dtype=engine.dtype,
        ranks=ranks,
        make_dtype=planned_dtype,
        has_draft_head=has_draft_head,
    )
    if drafter is not None:
        dtype = str(shape.dtype).removeprefix("torch.")
        options = {"cache": cache, "dtype": dtype, "ranks": ranks, "make_dtype": planned_dtype}
        head = drafter_layers(ConfigFile.read(drafter), **options)
        shape = replace(shape, layers=shape.layers | head)
    model_len = max_model_len or shape.max_position_embeddings
    if model_len is None:
        raise ConfigError(f"{model} names no max_position_embeddings; give --max-model-len")
    is_async = False
    rollback = rollback_spec(cache, num_drafts, is_async, list(shape.layers.values()))
    # Bounds what a request holds of a window, as in `engine.build`.
    num_ahead = 1 + num_drafts if drafter is not None else num_drafts * has_draft_head
    max_step_tokens = engine.scheduler.max_num_batched_tokens + num_ahead
    layers = {
        name: with_max_step_tokens(with_rollback(spec, rollback), max_step_tokens)
        for name, spec in shape.layers.items()
    }
    plan = plan_cache(
        layers,
        cache,
        get_backend(engine.attention_backend, engine.platform),
        BackendContext.for_layers(engine.platform, layers),
        model_len,
        shape.mamba_chunk_size,
        max_num_seqs or engine.scheduler.max_num_seqs,
        shape.stages(ranks),
        ranks.decode_context_parallel_size,
    )
    return shape, plan


def report_memory(model: str, options: dict[str, Any]) -> None:
    """Print the bytes of a checkpoint's weights, and the memory of a request of full length.

    The line goes to stderr before the checkpoint is loaded.

    Raises:
        ConfigError: config.json cannot be run; then nothing is printed.
    """
    from hybrid_kv.models.loader import check_model, resolve_folder

    config = engine_config(options)
    folder = resolve_folder(model)
    check_model(folder, config)
    length = config.scheduler.max_model_len
    platform = "cpu" if config.platform == "auto" else config.platform
    shape, plan = planned(str(folder), replace(config, platform=platform), length)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    blocks = plan.config.max_blocks_per_request(length)
    dtype = str(shape.dtype).removeprefix("torch.")
    num_bytes = blocks * plan.config.block_bytes
    request = f"a request of {length:,} tokens takes {blocks:,} blocks, {num_bytes:,} B"
    loaded = f"loading {shape.model_type} in {dtype}: {weights:,} B of weights on disk"
    print(f"{loaded}; {request}", file=sys.stderr)


def parse_memory(text: str) -> int:
    """Return the bytes of `80GiB` (binary), `80GB` (decimal) or `85899345920`.

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(
            f"{text[:50]!r} is not a memory size; write 80GiB, 80GB, 512MiB or a number of bytes"
        )
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * _UNITS[match[2].upper()])


def _copies_note(config: str, engine: EngineConfig, shape: ModelShape, ranks: Ranks) -> list[str]:
    """Return a note if more ranks keep the same K and V than divide their tokens."""
    from hybrid_kv.cache.spec import FullAttentionSpec
    from hybrid_kv.models.shapes import model_shape

    if ranks.tensor_parallel_size == 1:
        return []
    whole = model_shape(config, cache=engine.cache, dtype=engine.dtype, make_dtype=planned_dtype)
    sizes = (
        (shape.layers[name].page_size_bytes, spec.page_size_bytes)
        for name, spec in whole.layers.items()
        if isinstance(spec, FullAttentionSpec)
    )
    size_of_rank, size_of_all = next(sizes, (1, ranks.tensor_parallel_size))
    copies = ranks.tensor_parallel_size * size_of_rank // size_of_all
    if copies == ranks.decode_context_parallel_size:
        return []
    times = copies // ranks.decode_context_parallel_size
    return [
        f"K and V of each token are kept {times} times, because there are more tensor parallel "
        f"GPUs than KV heads; --decode-context-parallel-size {copies} divides the tokens instead"
    ]


def _fit(plan: CachePlan, prompts: Ints, outputs: Ints, num_drafts: int) -> dict[str, Any]:
    """Return the number of requests of these lengths that fit at once, in JSON types."""
    from hybrid_kv.cache.capacity import capacity

    fit = capacity(plan.counted, prompts, outputs, plan.max_model_len, num_drafts)
    return {
        "num_given": len(prompts),
        "num_refused": fit.num_refused,
        "num_fit": fit.num_fit,
        "most_blocks": round(fit.most_blocks, 2),
        "num_fit_running": round(plan.usable_blocks / fit.running_blocks, 2),
        "running_blocks": round(fit.running_blocks, 2),
    }


def _print_plan(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    summary = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _summary(document).items():
        if document["mamba_block_size"] is not None or "Mamba" not in name:
            summary.add_row(name, value)
    console.print(summary)
    if document["pipeline_parallel_size"] > 1:
        stages = Table("stage", "layers with a cache", "bytes per block", "memory", box=None)
        for number, stage in enumerate(document["stages"]):
            memory = "" if stage["total_bytes"] is None else f"{stage['total_bytes']:,} B"
            num_layers = str(len(stage["layers"]))
            stages.add_row(str(number), num_layers, f"{stage['block_bytes']:,}", memory)
        console.print("", stages, sep="\n")
    columns = ("groups", "layers each", "kind", "block", "kernel block", "blocks per request")
    groups = Table(*columns, box=None)
    keys = ("num_layers", "kind", "block_size", "kernel_block_size", "blocks_per_request")
    kinds = Counter(tuple(group[key] for key in keys) for group in document["groups"])
    for values, count in kinds.items():
        groups.add_row(str(count), *map(str, values))
    console.print("", groups, sep="\n")
    for note in document["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def _summary(plan: dict[str, Any]) -> dict[str, str]:
    """Return the lines of the first table."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in plan["cached_layers"].items())
    names = (name for group in plan["groups"] for name in group["layers"])
    if not all(name.startswith("layers.") for name in names):
        kinds += ", the draft head's included"
    context = plan["decode_context_parallel_size"]
    scheme = f"{plan['state_scheme']}, K={plan['num_speculative_tokens']}"
    block_size = f"{plan['block_size']:,} tokens"
    if context > 1:
        block_size += f" on each of {context} GPUs"
    states = plan["mamba_block_size"]
    padding = f"padded by {plan['mamba_padding_percent']:.2f} %"
    rows = {
        "model": f"{plan['model_type']}, {plan['num_hidden_layers']} layers: {kinds}",
        "platform": f"{plan['platform']}, {plan['backend']}",
        "Mamba cache mode": f"{plan['mamba_cache_mode']}, {scheme}",
        **_gpus(plan),
        "block size": block_size,
        "Mamba block size": "none" if states is None else f"{states:,} tokens",
        "page": _page(plan),
        "Mamba state": f"{plan['mamba_state_bytes']:,} B, {padding}",
        **_capacity(plan),
    }
    fit = plan.get("requests")
    if fit is not None:
        rows["of these lengths"] = (
            f"{fit['num_fit']:,} of {fit['most_blocks']:,} blocks at most, or "
            f"{fit['num_fit_running']:,} of {fit['running_blocks']:,} on average"
        )
    if "ring_len" in plan:
        row = f"{plan['ring_rows']} rows of {plan['ring_bytes_per_row']:,} B"
        tokens = f"{plan['ring_len']} tokens in each layer"
        rows["rings"] = f"{plan['ring_total_bytes']:,} B: {row}, {tokens}"
    return rows


def _gpus(plan: dict[str, Any]) -> dict[str, str]:
    """Return the line about GPUs, if there are several."""
    tensor = plan["tensor_parallel_size"]
    pipeline = plan["pipeline_parallel_size"]
    if tensor * pipeline == 1:
        return {}
    context = plan["decode_context_parallel_size"]
    sizes = f"{tensor} tensor × {pipeline} pipeline, context {context}"
    return {"GPUs": f"{tensor * pipeline}: {sizes}; below is one of them"}


def _page(plan: dict[str, Any]) -> str:
    pages = sorted({size for group in plan["groups"] for size in group["page_sizes_bytes"]})
    if len(pages) == 1:
        return f"{pages[0]:,} B"
    return f"{pages[0]:,} to {pages[-1]:,} B, each layer its own"


def _capacity(plan: dict[str, Any]) -> dict[str, str]:
    """Return lines about the pool, or about a request where the pool has no size."""
    blocks = plan["blocks_per_request"]
    if plan["num_blocks"] is None:
        size = plan["bytes_per_request"]
        memory = f"{size:,} B ({size / 2**30:.2f} GiB)"
        line = f"{blocks:,} blocks, {memory} for {plan['max_model_len']:,} tokens"
        return {"one request": line}
    total = plan["total_bytes"]
    with_null = plan["num_blocks"] / blocks
    return {
        "blocks": f"{plan['num_blocks']:,}, one of them the null block",
        "memory": f"{total:,} B ({total / 2**30:.2f} GiB)",
        "capacity": f"{plan['token_capacity']:,} tokens",
        "longest request": f"{plan['longest_request']:,} of {plan['max_model_len']:,} tokens",
        "requests at once": f"{plan['max_concurrency']:,.2f} of {blocks:,} blocks each "
        f"(vLLM: {with_null:,.2f}, with the null block)",
    }
