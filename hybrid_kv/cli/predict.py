"""`hybrid-kv predict`: microseconds of the cache's kernels in one step, before a GPU is rented."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from hybrid_kv.cli.options import AsJson, OutFile, dataclass_options, derived_options, show
from hybrid_kv.cli.plan import parse_memory, planned
from hybrid_kv.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    SpeculativeConfig,
    engine_config,
)

_PRICED = {
    "block_size",
    "mamba_block_size",
    "mamba_cache_mode",
    "state_scheme",
    "recompute_ring_len",
    "dtype",
    "num_speculative_tokens",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds",
}
_BATCHES = (1, 8, 32, 128, 512)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The step whose time is predicted."""

    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests in the step; may be repeated.")
    ] = None
    context: Annotated[int, typer.Option(min=1, help="Tokens of each request so far.")] = 4096
    acceptance: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Probability that a draft is accepted if those before it are."
        ),
    ] = 0.75
    waits: Annotated[
        int, typer.Option(min=0, help="How often the host waits for the GPU in a step.")
    ] = 1
    eager: Annotated[
        bool, typer.Option("--eager", help="Python launches each kernel, not a CUDA graph.")
    ] = False
    weights: Annotated[
        str | None,
        typer.Option(
            help="Bytes of weights that a step reads, such as 8GB; adds its matrix products "
            "(bfloat16)."
        ),
    ] = None


@derived_options(CacheConfig, SpeculativeConfig, EngineConfig, only=_PRICED)
@dataclass_options
def predict(
    config: Annotated[
        str,
        typer.Argument(help="A Hugging Face config.json, the folder that holds it, or owner/name."),
    ],
    gpu: Annotated[str, typer.Option(help="Such as h100, h200 or b200.")],
    load: Load,
    as_json: AsJson = False,
    out: OutFile = None,
    **options: Any,
) -> None:
    """Print predicted microseconds of the cache's kernels per step.

    Each has a 90 % interval, and the step what bounds it.
    """
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.predict.gpu import GPUS
    from hybrid_kv.measure.predict.step import cache_kernels, other_kernels, step_time

    name = gpu.lower()
    if name not in GPUS:
        raise ConfigError(f"--gpu {gpu}: no constants for it; use one of {', '.join(GPUS)}")
    weight_bytes = None if load.weights is None else parse_memory(load.weights)
    check_outputs(out)
    engine = replace(engine_config(options), platform="cuda")
    shape, plan = planned(config, engine)
    layers = [spec for group in plan.config.groups for spec in group.layer_specs]
    num_drafts = engine.speculative.num_speculative_tokens
    steps = []
    for num_reqs in load.batch or _BATCHES:
        kernels = cache_kernels(layers, num_reqs, load.context, load.acceptance)
        if weight_bytes is not None:
            tokens = num_reqs * (1 + num_drafts)
            kernels += other_kernels(shape.num_hidden_layers, tokens, weight_bytes)
        step, times = step_time(kernels, GPUS[name], load.waits, load.eager)
        rows = [
            {**asdict(kernel), **asdict(time)} for kernel, time in zip(kernels, times, strict=True)
        ]
        steps.append({"batch": num_reqs, **asdict(step), "kernels": rows})
    document = {
        "kind": "predicted",
        "model_type": shape.model_type,
        "gpu": name,
        "mamba_cache_mode": engine.cache.mamba_cache_mode,
        "state_scheme": engine.cache.state_scheme,
        "num_speculative_tokens": num_drafts,
        "context": load.context,
        "acceptance": load.acceptance,
        "waits": load.waits,
        "eager": load.eager,
        "weight_bytes": weight_bytes,
        "steps": steps,
    }
    show(document, as_json, out, _print, document)


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    mode, scheme, drafts = (
        document[k] for k in ("mamba_cache_mode", "state_scheme", "num_speculative_tokens")
    )
    subject = "cache's kernels" if document["weight_bytes"] is None else "step"
    console.print(
        f"{document['model_type']} on {document['gpu']}, mode {mode}, {scheme}, K={drafts}"
    )
    console.print(f"predicted µs of the {subject}; low to high is a 90 % interval")
    names = [kernel["name"] for kernel in document["steps"][0]["kernels"]]
    table = Table(
        "batch",
        *names,
        "predicted",
        "low",
        "high",
        "bound by",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    for step in document["steps"]:
        shown = [f"{kernel['us']:,.0f}" for kernel in step["kernels"]]
        shown += [f"{step[name]:,.0f}" for name in ("us", "low", "high")]
        table.add_row(str(step["batch"]), *shown, step["bound"])
    console.print(table)
