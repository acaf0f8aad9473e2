"""`hybrid-kv plan`: sizes and capacity of a model's cache."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import asdict, fields, replace
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
    "attention_backend", "num_blocks", "max_num_seqs", "block_size", "mamba_block_size", "mamba_cache_mode",
    "state_scheme", "recompute_ring_len", "num_speculative_tokens", "dtype", "kv_cache_dtype", "mamba_ssm_cache_dtype",
    *(field.name for field in fields(Ranks)),
}  # fmt: skip


@derived_options(
    CacheConfig, SchedulerConfig, SpeculativeConfig, EngineConfig, Ranks, only=_PLANNED
)
def plan(
    config: Annotated[
        str,
        typer.Argument(help="A Hugging Face config.json, the folder that holds it, or owner/name."),
    ],
    platform: Annotated[
        Platform, typer.Option(help="Decides the default backend and its block size.")
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
            help="How many requests of these lengths fit: a .csv or .jsonl with prompt_tokens and output_tokens, "
            "or lognormal:prompt=MEAN/P99,output=MEAN/P99.",
        ),
    ] = None,
    as_json: AsJson = False,
    out: OutFile = None,
    **options: Any,
) -> None:
    """Print block sizes, padding, groups and capacity of a model's cache. Nothing is allocated."""
    from hybrid_kv.cache.backend import get_backend
    from hybrid_kv.cache.plan import describe
    from hybrid_kv.files import check_outputs

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
            f"--requests {requests}: what fits depends on the pool; add --gpu-memory or --num-blocks"
        )
    lengths = None
    if requests is not None:
        from hybrid_kv.cli.lengths import read_lengths

        lengths = read_lengths(requests)
    shape, result = planned(config, engine, max_model_len, max_num_seqs, ranks)
    document = {
        "model_type": shape.model_type,
        "num_hidden_layers": shape.num_hidden_layers,
        "cached_layers": shape.counts,
        "platform": platform,
        "backend": get_backend(engine.attention_backend, platform).name,
        "mamba_cache_mode": engine.cache.mamba_cache_mode,
        "state_scheme": engine.cache.state_scheme,
        "num_speculative_tokens": engine.speculative.num_speculative_tokens,
        **asdict(ranks),
        **describe(result),
        "bytes_per_request": result.blocks_per_request * result.fullest.block_bytes,
    }
    if not has_pool:
        document |= dict.fromkeys(_CAPACITY)
        document["stages"] = [{**stage, "total_bytes": None} for stage in document["stages"]]
    if lengths is not None:
        document["requests"] = fit = _fit(
            result, *lengths, engine.speculative.num_speculative_tokens
        )
        if fit["num_refused"]:
            document["notes"].append(
                f"{fit['num_refused']:,} of {fit['num_given']:,} requests are left out: the engine would reject them, "
                "because their prompt has --max-model-len tokens or more, or they never fit"
            )
    if max_num_seqs is not None and result.max_concurrency < max_num_seqs:
        document["notes"].append(
            f"{result.max_concurrency:.2f} requests of {result.max_model_len} tokens fit at once, not {max_num_seqs}; "
            "lower --max-num-seqs or --max-model-len, or give the cache more memory"
        )
    document["notes"] += _copies_note(config, engine, shape, ranks)
    show(document, as_json, out, lambda: _print_plan(document))


def planned(
    model: str,
    engine: EngineConfig,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    ranks: Ranks | None = None,
) -> tuple[ModelShape, CachePlan]:
    """What a config.json describes for one rank, and the plan of its cache; nothing is loaded, and torch not imported.

    Without a pool's size the pool is larger than any.

    Raises:
        ConfigError: it can't be planned.
    """
    from hybrid_kv.attention.rollback import rollback_spec
    from hybrid_kv.cache.backend import BackendContext, get_backend
    from hybrid_kv.cache.plan import plan_cache
    from hybrid_kv.cache.spec import with_rollback
    from hybrid_kv.models.shapes import model_shape

    ranks, cache, num_drafts = (
        ranks or Ranks(),
        engine.cache,
        engine.speculative.num_speculative_tokens,
    )
    if (cache.num_blocks, cache.memory_bytes) == (None, None):
        cache = replace(cache, memory_bytes=2**62)
    options: dict[str, Any] = {
        "cache": cache,
        "dtype": engine.dtype,
        "ranks": ranks,
        "make_dtype": planned_dtype,
    }
    shape = model_shape(model, num_speculative_tokens=num_drafts, **options)
    model_len = max_model_len or shape.max_position_embeddings
    if model_len is None:
        raise ConfigError(f"{model} names no max_position_embeddings; give --max-model-len")
    rollback = rollback_spec(cache, num_drafts, False, list(shape.layers.values()))
    layers = {name: with_rollback(spec, rollback) for name, spec in shape.layers.items()}
    plan = plan_cache(
        layers, cache, get_backend(engine.attention_backend, engine.platform),
        BackendContext.for_layers(engine.platform, layers), model_len, shape.mamba_chunk_size,
        max_num_seqs or engine.scheduler.max_num_seqs, shape.stages(ranks), ranks.decode_context_parallel_size,
    )  # fmt: skip
    return shape, plan


def report_memory(model: str, options: dict[str, Any]) -> None:
    """One line on stderr before a checkpoint is loaded: its weights, and the memory of a request of full length.

    Raises:
        ConfigError: config.json cannot be run; then nothing is printed.
    """
    from hybrid_kv.models.loader import check_model, resolve_folder

    config, folder = engine_config(options), resolve_folder(model)
    check_model(folder, config)
    length = config.scheduler.max_model_len
    platform = "cpu" if config.platform == "auto" else config.platform
    shape, plan = planned(str(folder), replace(config, platform=platform), length)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    blocks = plan.config.max_blocks_per_request(length)
    dtype = str(shape.dtype).removeprefix("torch.")
    takes = f"a request of {length:,} tokens takes {blocks:,} blocks, {blocks * plan.config.block_bytes:,} B"
    print(
        f"loading {shape.model_type} in {dtype}: {weights:,} B of weights on disk; {takes}",
        file=sys.stderr,
    )


def parse_memory(text: str) -> int:
    """Bytes in `80GiB` (binary), `80GB` (decimal) or `85899345920`.

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
    """Where more ranks keep the same K and V than divide their tokens."""
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
    own, of_all = next(sizes, (1, ranks.tensor_parallel_size))
    copies = ranks.tensor_parallel_size * own // of_all
    if copies == ranks.decode_context_parallel_size:
        return []
    return [
        f"K and V of each token are kept {copies // ranks.decode_context_parallel_size} times, because there are more "
        f"tensor parallel GPUs than KV heads; --decode-context-parallel-size {copies} divides the tokens instead"
    ]


def _fit(plan: CachePlan, prompts: Ints, outputs: Ints, num_drafts: int) -> dict[str, Any]:
    """How many requests of these lengths fit at once, in JSON types."""
    from hybrid_kv.cache.capacity import capacity

    found = capacity(plan.counted, prompts, outputs, plan.max_model_len, num_drafts)
    return {
        "num_given": len(prompts),
        "num_refused": found.num_refused,
        "num_fit": found.num_fit,
        "most_blocks": round(found.most_blocks, 2),
        "num_fit_running": round(plan.usable_blocks / found.running_blocks, 2),
        "running_blocks": round(found.running_blocks, 2),
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
            sizes = f"{stage['block_bytes']:,}", memory
            stages.add_row(str(number), str(len(stage["layers"])), *sizes)
        console.print("", stages, sep="\n")
    groups = Table(
        "groups", "layers each", "kind", "block", "kernel block", "blocks per request", box=None
    )
    keys = ("num_layers", "kind", "block_size", "kernel_block_size", "blocks_per_request")
    for values, count in Counter(
        tuple(group[key] for key in keys) for group in document["groups"]
    ).items():
        groups.add_row(str(count), *map(str, values))
    console.print("", groups, sep="\n")
    for note in document["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def _summary(plan: dict[str, Any]) -> dict[str, str]:
    """Lines of the first table."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in plan["cached_layers"].items())
    tensor, pipeline, context = (plan[field.name] for field in fields(Ranks))
    pages = sorted({size for group in plan["groups"] for size in group["page_sizes_bytes"]})
    states = plan["mamba_block_size"]
    rows = {
        "model": f"{plan['model_type']}, {plan['num_hidden_layers']} layers: {kinds}",
        "platform": f"{plan['platform']}, {plan['backend']}",
        "Mamba cache mode": f"{plan['mamba_cache_mode']}, {plan['state_scheme']}, K={plan['num_speculative_tokens']}",
        "GPUs": f"{tensor * pipeline}: {tensor} tensor × {pipeline} pipeline, context {context}; below is one of them",
        "block size": f"{plan['block_size']:,} tokens"
        + (f" on each of {context} GPUs" if context > 1 else ""),
        "Mamba block size": "none" if states is None else f"{states:,} tokens",
        "page": f"{pages[0]:,} B"
        if len(pages) == 1
        else f"{pages[0]:,} to {pages[-1]:,} B, each layer its own",
        "Mamba state": f"{plan['mamba_state_bytes']:,} B, padded by {plan['mamba_padding_percent']:.2f} %",
    }
    if plan["num_blocks"] is None:
        tokens, blocks, size = (
            plan[key] for key in ("max_model_len", "blocks_per_request", "bytes_per_request")
        )
        rows["one request"] = (
            f"{blocks:,} blocks, {size:,} B ({size / 2**30:.2f} GiB) for {tokens:,} tokens"
        )
    else:
        rows |= {
            "blocks": f"{plan['num_blocks']:,}, one of them the null block",
            "memory": f"{plan['total_bytes']:,} B ({plan['total_bytes'] / 2**30:.2f} GiB)",
            "capacity": f"{plan['token_capacity']:,} tokens",
            "longest request": f"{plan['longest_request']:,} of {plan['max_model_len']:,} tokens",
            "requests at once": f"{plan['max_concurrency']:,} of {plan['blocks_per_request']:,} blocks each",
        }
    if tensor * pipeline == 1:
        del rows["GPUs"]
    if (fit := plan.get("requests")) is not None:
        rows["of these lengths"] = (
            f"{fit['num_fit']:,} of {fit['most_blocks']:,} blocks at most, or {fit['num_fit_running']:,} of "
            f"{fit['running_blocks']:,} on average"
        )
    if "ring_len" in plan:
        rows["rings"] = (
            f"{plan['ring_total_bytes']:,} B: {plan['ring_rows']} rows of {plan['ring_bytes_per_row']:,} B, "
            f"{plan['ring_len']} tokens in each layer"
        )
    return rows
