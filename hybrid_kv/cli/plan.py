"""`hybrid-kv plan`: sizes and capacity of a model's cache."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hybrid_kv.choices import StateScheme
from hybrid_kv.cli.options import SCHEME_HELP, AsJson, CacheMode, OutFile, require_at_least_one, show

if TYPE_CHECKING:
    from hybrid_kv.cache.plan import CachePlan
    from hybrid_kv.cache.ranks import Ranks
    from hybrid_kv.cli.lengths import Ints
    from hybrid_kv.config import CacheConfig
    from hybrid_kv.models.shapes import ModelShape

Platform = Literal["cuda", "xpu", "cpu"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def plan(
    config: Annotated[str, typer.Argument(help="A Hugging Face config.json, or the folder that holds it.")],
    platform: Annotated[Platform, typer.Option(help="Decides the default backend and its block size.")] = "cuda",
    backend: Annotated[str, typer.Option(help="Attention backend, such as FLASH_ATTN or FLASHINFER.")] = "auto",
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Memory of a GPU for the cache alone, weights already subtracted: 80GiB, 512MB."),
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks in the pool, instead of --gpu-memory.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of the longest request; default: the config's.")
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Requests that shall fit at once: a note says if they do not. Rows of rings (replay; else 64)."
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per attention block.")] = None,
    mamba_block_size: Annotated[int | None, typer.Option(help="Tokens per Mamba block (mode all).")] = None,
    mamba_cache_mode: Annotated[CacheMode, typer.Option(help="Which Mamba states are kept.")] = "none",
    state_scheme: Annotated[StateScheme, typer.Option(help=SCHEME_HELP)] = "slots",
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft tokens verified per step (K).")] = 0,
    dtype: Annotated[str, typer.Option(help="Model dtype; auto takes the config's.")] = "auto",
    cache_dtype: Annotated[str, typer.Option(help="K/V dtype; auto takes the model's.")] = "auto",
    mamba_ssm_cache_dtype: Annotated[
        str, typer.Option(help="SSM state dtype; auto takes the config's or the family's.")
    ] = "auto",
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that divide the heads of every layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(help="Stages that divide the layers.")] = 1,
    context_parallel: Annotated[
        int, typer.Option(help="Of the tensor parallel GPUs, how many divide the tokens that each KV head keeps.")
    ] = 1,
    requests: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIST",
            help="Say how many requests of these lengths fit: a .csv or .jsonl with prompt_tokens and output_tokens, "
            "or lognormal:prompt=MEAN/P99,output=MEAN/P99.",
        ),
    ] = None,
    as_json: AsJson = False,
    out: OutFile = None,
) -> None:
    """Print block sizes, padding, groups and capacity of a model's cache. Nothing is allocated."""
    from hybrid_kv.cache.backend import get_backend
    from hybrid_kv.cache.plan import describe
    from hybrid_kv.cache.ranks import Ranks
    from hybrid_kv.cli.lengths import read_lengths
    from hybrid_kv.config import CacheConfig
    from hybrid_kv.files import check_outputs

    require_at_least_one(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    check_outputs(out)
    cache = CacheConfig(
        block_size=block_size,
        mamba_block_size=mamba_block_size,
        mamba_cache_mode=mamba_cache_mode,
        state_scheme=state_scheme,
        cache_dtype=cache_dtype,
        mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        num_blocks=num_blocks,
        memory_bytes=None if gpu_memory is None else parse_memory(gpu_memory),
    )
    ranks = Ranks(tensor_parallel, pipeline_parallel, context_parallel)
    lengths = None if requests is None else read_lengths(requests)
    shape, result = planned(
        config, cache, num_speculative_tokens, dtype, backend, platform, max_model_len, max_num_seqs, ranks
    )
    attention = get_backend(backend, platform)
    document = {
        "model_type": shape.model_type,
        "num_hidden_layers": shape.num_hidden_layers,
        "cached_layers": shape.counts,
        "platform": platform,
        "backend": attention.name,
        "mamba_cache_mode": mamba_cache_mode,
        "state_scheme": state_scheme,
        "num_speculative_tokens": num_speculative_tokens,
        **asdict(ranks),
        **describe(result),
    }
    if lengths is not None:
        document["requests"] = fit = _fit(result, *lengths, num_speculative_tokens)
        if fit["num_refused"]:
            document["notes"].append(
                f"{fit['num_refused']:,} of {fit['num_given']:,} requests are left out: the engine would refuse them, "
                "because their prompt has --max-model-len tokens or more, or they never fit"
            )
    document["notes"] += _model_notes(result, max_num_seqs) + _copies_note(config, cache, dtype, shape, ranks)
    show(document, as_json, out, lambda: _print_plan(document))


def planned(
    model: str,
    cache: CacheConfig,
    num_speculative_tokens: int = 0,
    dtype: str = "auto",
    backend: str = "auto",
    platform: str = "cpu",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    ranks: Ranks | None = None,
) -> tuple[ModelShape, CachePlan]:
    """What a config.json describes for one rank, and the plan of its cache; nothing is loaded.

    Raises:
        ConfigError: it can't be planned.
    """
    from hybrid_kv.attention.undo import undo_spec
    from hybrid_kv.cache.backend import BackendContext, get_backend
    from hybrid_kv.cache.plan import plan_cache
    from hybrid_kv.cache.ranks import Ranks
    from hybrid_kv.cache.spec import with_undo
    from hybrid_kv.config import ConfigError, SchedulerConfig
    from hybrid_kv.models.shapes import model_shape

    ranks = ranks or Ranks()
    shape = model_shape(model, cache=cache, num_speculative_tokens=num_speculative_tokens, dtype=dtype, ranks=ranks)
    model_len = max_model_len or shape.max_position_embeddings
    if model_len is None:
        raise ConfigError(f"{model} names no max_position_embeddings; give --max-model-len")
    rows = max_num_seqs or SchedulerConfig().max_num_seqs
    undo = undo_spec(cache, num_speculative_tokens, False, list(shape.layers.values()))
    layers = {name: with_undo(spec, undo) for name, spec in shape.layers.items()}
    context = BackendContext.for_layers(platform, layers)
    attention = get_backend(backend, platform)
    plan = plan_cache(
        layers, cache, attention, context, model_len, shape.mamba_chunk_size, rows,
        shape.stages(ranks), ranks.context_parallel,
    )  # fmt: skip
    return shape, plan


def tell_memory(model: str, options: dict[str, Any]) -> None:
    """One line on stderr before a checkpoint is loaded: its weights, and what a request of full length takes.

    Raises:
        ConfigError: config.json cannot be run; then nothing is told.
    """
    from dataclasses import replace

    from hybrid_kv.config import engine_config
    from hybrid_kv.models.loader import check_model, resolve_folder

    config = engine_config(options)
    cache, folder = config.cache, resolve_folder(model)
    check_model(folder, config)
    if cache.num_blocks is None and cache.memory_bytes is None:
        cache = replace(cache, memory_bytes=2**40)  # how many fit is not asked
    shape, plan = planned(
        str(folder), cache, config.speculative.num_speculative_tokens, config.dtype, config.attention_backend,
        max_model_len=config.scheduler.max_model_len, max_num_seqs=config.scheduler.max_num_seqs,
    )  # fmt: skip
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    length = config.scheduler.max_model_len
    blocks = plan.config.max_blocks_per_request(length)
    dtype = str(shape.dtype).removeprefix("torch.")
    takes = f"a request of {length:,} tokens takes {blocks:,} blocks, {blocks * plan.config.block_bytes:,} B"
    print(f"loading {shape.model_type} in {dtype}: {weights:,} B of weights on disk; {takes}", file=sys.stderr)


def parse_memory(text: str) -> int:
    """Bytes in `80GiB` (binary), `80GB` (decimal) or `85899345920`.

    Raises:
        ConfigError: anything else.
    """
    from hybrid_kv.config import ConfigError

    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{text[:50]!r} is not a memory size; write 80GiB, 80GB, 512MiB or a number of bytes")
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * _UNITS[match[2].upper()])


def _model_notes(plan: CachePlan, max_num_seqs: int | None) -> list[str]:
    notes = []
    if max_num_seqs is not None and plan.max_concurrency < max_num_seqs:
        notes.append(
            f"{plan.max_concurrency:.2f} requests of {plan.max_model_len} tokens fit at once, not {max_num_seqs}; "
            "lower --max-num-seqs or --max-model-len, or give the cache more memory"
        )
    return notes


def _copies_note(config: str, cache: CacheConfig, dtype: str, shape: ModelShape, ranks: Ranks) -> list[str]:
    """Where more ranks keep the same K and V than divide their tokens."""
    from hybrid_kv.cache.spec import FullAttentionSpec
    from hybrid_kv.models.shapes import model_shape

    whole = model_shape(config, cache=cache, dtype=dtype)
    sizes = (
        (shape.layers[name].page_size_bytes, spec.page_size_bytes)
        for name, spec in whole.layers.items()
        if isinstance(spec, FullAttentionSpec)
    )
    own, of_all = next(sizes, (1, ranks.tensor_parallel))
    copies = ranks.tensor_parallel * own // of_all
    if copies == ranks.context_parallel:
        return []
    return [
        f"K and V of each token are kept {copies // ranks.context_parallel} times, because there are more tensor "
        f"parallel GPUs than KV heads; --context-parallel {copies} divides the tokens instead"
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
    kinds = ", ".join(f"{count} {kind}" for kind, count in document["cached_layers"].items())
    rows = {
        "model": f"{document['model_type']}, {document['num_hidden_layers']} layers: {kinds}",
        "platform": f"{document['platform']}, {document['backend']}",
        "Mamba cache mode": f"{document['mamba_cache_mode']}, {document['state_scheme']}, "
        f"K={document['num_speculative_tokens']}",
        **_gpus(document),
        "block size": f"{document['block_size']:,} tokens{_on_each(document['context_parallel'])}",
        "Mamba block size": _or_none(document["mamba_block_size"], "tokens"),
        "page": _pages(document),
        "Mamba state": f"{document['mamba_state_bytes']:,} B, padded by {document['mamba_padding_percent']:.2f} %",
        "blocks": f"{document['num_blocks']:,}, one of them the null block",
        "memory": f"{document['total_bytes']:,} B ({document['total_bytes'] / 2**30:.2f} GiB)",
        "capacity": f"{document['token_capacity']:,} tokens",
        "longest request": f"{document['longest_request']:,} of {document['max_model_len']:,} tokens",
        "requests at once": f"{document['max_concurrency']:,} of {document['blocks_per_request']:,} blocks each",
    }
    if (fit := document.get("requests")) is not None:
        rows["of these lengths"] = (
            f"{fit['num_fit']:,} of {fit['most_blocks']:,} blocks at most, or {fit['num_fit_running']:,} of "
            f"{fit['running_blocks']:,} on average"
        )
    if "ring_len" in document:
        rows["rings"] = (
            f"{document['ring_total_bytes']:,} B: {document['ring_rows']} rows of "
            f"{document['ring_bytes_per_row']:,} B, {document['ring_len']} tokens in each layer"
        )
    summary = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        if document["mamba_block_size"] is not None or "Mamba" not in name:
            summary.add_row(name, value)
    console.print(summary)

    if document["pipeline_parallel"] > 1:
        stages = Table("stage", "layers with a cache", "bytes per block", "memory", box=None)
        for number, stage in enumerate(document["stages"]):
            stages.add_row(
                str(number), str(len(stage["layers"])), f"{stage['block_bytes']:,}", f"{stage['total_bytes']:,} B"
            )
        console.print()
        console.print(stages)

    groups = Table("groups", "layers each", "kind", "block", "kernel block", "blocks per request", box=None)
    keys = ("num_layers", "kind", "block_size", "kernel_block_size", "blocks_per_request")
    for values, count in Counter(tuple(group[key] for key in keys) for group in document["groups"]).items():
        groups.add_row(str(count), *map(str, values))
    console.print()
    console.print(groups)
    for note in document["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def _gpus(document: dict[str, Any]) -> dict[str, str]:
    """A row where there is more than one."""
    tensor, pipeline, context = (document[f"{name}_parallel"] for name in ("tensor", "pipeline", "context"))
    if (count := tensor * pipeline) == 1:
        return {}
    return {"GPUs": f"{count}: {tensor} tensor × {pipeline} pipeline, context {context}; below is one of them"}


def _on_each(context_parallel: int) -> str:
    return f" on each of {context_parallel} GPUs" if context_parallel > 1 else ""


def _pages(document: dict[str, Any]) -> str:
    """The page, or the smallest and largest where layers have pages of their own."""
    sizes = sorted({size for group in document["groups"] for size in group["page_sizes_bytes"]})
    return f"{sizes[0]:,} B" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,} B, each layer its own"


def _or_none(value: int | None, unit: str) -> str:
    return "none" if value is None else f"{value:,} {unit}"
