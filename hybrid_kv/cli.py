"""The `hybrid-kv` command. Exit code 0: fine; 1: a check failed; 2: it could not run, with one line on stderr."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from hybrid_kv.cache.plan import CachePlan

app = typer.Typer(
    name="hybrid-kv",
    help="See, test and time the cache of hybrid (attention + Mamba) language models.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Platform = Literal["cuda", "xpu", "cpu"]
CacheMode = Literal["none", "align", "all"]
DraftMethod = Literal["ngram", "mtp"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@app.callback()
def _commands() -> None:
    # Without a callback, typer would turn a single command into the whole program.
    pass


@app.command()
def plan(
    config: Annotated[str, typer.Argument(help="A Hugging Face config.json, or the folder that holds it.")],
    platform: Annotated[Platform, typer.Option(help="Decides the default backend and its block size.")] = "cuda",
    backend: Annotated[str, typer.Option(help="Attention backend, such as FLASH_ATTN or FLASHINFER.")] = "auto",
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory for the cache alone, weights already subtracted: 80GiB, 512MB or bytes.")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks in the pool, instead of --gpu-memory.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of the longest request; default: the config's.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests that shall fit at once; only adds a note when they do not.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per attention block.")] = None,
    mamba_block_size: Annotated[int | None, typer.Option(help="Tokens per Mamba block (mode all).")] = None,
    mamba_cache_mode: Annotated[CacheMode, typer.Option(help="Which Mamba states are kept.")] = "none",
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft tokens verified per step (K).")] = 0,
    dtype: Annotated[str, typer.Option(help="Model dtype; auto takes the config's.")] = "auto",
    cache_dtype: Annotated[str, typer.Option(help="K/V dtype; auto takes the model's.")] = "auto",
    mamba_ssm_cache_dtype: Annotated[
        str, typer.Option(help="SSM state dtype; auto takes the config's or the family's.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Print block sizes, padding, groups and capacity of a model's cache. Nothing is allocated."""
    from hybrid_kv.cache.backend import BackendContext, get_backend
    from hybrid_kv.cache.plan import describe, plan_cache
    from hybrid_kv.config import CacheConfig, ConfigError
    from hybrid_kv.models.shapes import model_shape

    _require_at_least_one(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    cache = CacheConfig(
        block_size=block_size,
        mamba_block_size=mamba_block_size,
        mamba_cache_mode=mamba_cache_mode,
        cache_dtype=cache_dtype,
        mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        num_blocks=num_blocks,
        memory_bytes=None if gpu_memory is None else parse_memory(gpu_memory),
    )
    shape = model_shape(config, cache=cache, num_speculative_tokens=num_speculative_tokens, dtype=dtype)
    model_len = max_model_len or shape.max_position_embeddings
    if model_len is None:
        raise ConfigError(f"{config} names no max_position_embeddings; give --max-model-len")
    attention = get_backend(backend, platform)
    context = BackendContext.for_layers(platform, shape.layers)
    result = plan_cache(
        shape.layers, cache, attention, context, model_len, shape.mamba_chunk_size, num_speculative_tokens
    )
    document = {
        "model_type": shape.model_type,
        "num_hidden_layers": shape.num_hidden_layers,
        "cached_layers": shape.counts,
        "platform": platform,
        "backend": attention.name,
        "mamba_cache_mode": mamba_cache_mode,
        "num_speculative_tokens": num_speculative_tokens,
        **describe(result),
    }
    document["notes"] += _model_notes(result, shape.counts, mamba_cache_mode, max_num_seqs)
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _print_plan(document)


def parse_memory(text: str) -> int:
    """Bytes in `80GiB` (binary), `80GB` (decimal) or `85899345920`.

    Raises:
        ConfigError: anything else.
    """
    from hybrid_kv.config import ConfigError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is not a memory size; write 80GiB, 80GB, 512MiB or a number of bytes")
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * _UNITS[match[2].upper()])


def _require_at_least_one(**options: int | None) -> None:
    from hybrid_kv.config import ConfigError

    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer >= 1")


def _model_notes(plan: CachePlan, counts: dict[str, int], mode: str, max_num_seqs: int | None) -> list[str]:
    notes = []
    if mode == "all" and "gdn_attention" in counts:
        notes.append("vLLM 0.22 falls back to mode align for gated delta net layers, which have no mode all there")
    if max_num_seqs is not None and plan.max_concurrency < max_num_seqs:
        notes.append(
            f"{plan.max_concurrency:.2f} requests of {plan.max_model_len} tokens fit at once, not {max_num_seqs}; "
            "lower --max-num-seqs or --max-model-len, or give the cache more memory"
        )
    return notes


def _print_plan(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    kinds = ", ".join(f"{count} {kind}" for kind, count in document["cached_layers"].items())
    rows = {
        "model": f"{document['model_type']}, {document['num_hidden_layers']} layers: {kinds}",
        "platform": f"{document['platform']}, {document['backend']}",
        "Mamba cache mode": f"{document['mamba_cache_mode']}, K={document['num_speculative_tokens']}",
        "block size": f"{document['block_size']:,} tokens",
        "Mamba block size": _or_none(document["mamba_block_size"], "tokens"),
        "page": f"{document['page_size_bytes']:,} B",
        "Mamba state": f"{document['mamba_state_bytes']:,} B, padded by {document['mamba_padding_percent']:.2f} %",
        "blocks": f"{document['num_blocks']:,}, one of them the null block",
        "memory": f"{document['total_bytes']:,} B ({document['total_bytes'] / 2**30:.2f} GiB)",
        "capacity": f"{document['token_capacity']:,} tokens",
        "longest request": f"{document['longest_request']:,} of {document['max_model_len']:,} tokens",
        "requests at once": f"{document['max_concurrency']:,} of {document['blocks_per_request']:,} blocks each",
    }
    summary = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        if document["mamba_block_size"] is not None or "Mamba" not in name:
            summary.add_row(name, value)
    console.print(summary)

    groups = Table("groups", "layers each", "kind", "block", "kernel block", "blocks per request", box=None)
    keys = ("num_layers", "kind", "block_size", "kernel_block_size", "blocks_per_request")
    for values, count in Counter(tuple(group[key] for key in keys) for group in document["groups"]).items():
        groups.add_row(str(count), *map(str, values))
    console.print()
    console.print(groups)
    for note in document["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def _or_none(value: int | None, unit: str) -> str:
    return "none" if value is None else f"{value:,} {unit}"


@app.command()
def guard(
    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of five.")] = False,
    long: Annotated[
        bool, typer.Option("--long", help="100,000 requests, of a fresh seed unless one is given.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed is other traffic; default: 0.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write every check with its figure here.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder whose guard.csv gets a row per check.")] = Path("results"),
) -> None:
    """Say whether the cache is right and fast: engine against oracles, accuracy, cost of block ids. Needs no GPU."""
    from hybrid_kv.config import ConfigError
    from hybrid_kv.guard.report import FULL, LONG, QUICK, print_results, result_rows, run_guard, write_json
    from hybrid_kv.results import append_rows, check_writable

    if quick and long:
        raise ConfigError("--quick and --long exclude each other; give one of them")
    rows_file = results / "guard.csv"
    check_writable(rows_file)
    if json_file is not None:
        _require_folder(json_file)
    if seed is None:
        seed = secrets.randbelow(2**31) if long else 0
    if long:
        print(f"the same run again: hybrid-kv guard --long --seed {seed}")
    checks = run_guard(QUICK if quick else LONG if long else FULL, seed)
    print_results(checks)
    append_rows(rows_file, result_rows(checks))
    if json_file is not None:
        write_json(checks, json_file)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, one per line of stdin.")] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint folder; default: the embedded guard model.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")] = None,
    max_model_len: Annotated[int, typer.Option(help="Tokens of prompt and answer at most.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 16,
    block_size: Annotated[int | None, typer.Option(help="Tokens per attention block.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks in the pool.")] = None,
    attention_backend: Annotated[str, typer.Option(help="Layout and kernel block sizes to use.")] = "auto",
    mamba_cache_mode: Annotated[CacheMode, typer.Option(help="align and all turn prefix caching on.")] = "none",
    speculative_method: Annotated[DraftMethod | None, typer.Option(help="Where drafts come from.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft tokens verified per step (K).")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Continue prompts with a checkpoint, through paged block tables."""
    from hybrid_kv import LLM, SamplingParams
    from hybrid_kv.config import ConfigError

    texts = prompts or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise ConfigError("no prompt: give one as an argument or on standard input")
    params = SamplingParams(max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    if model is None:
        from accuracy.guard_model import FOLDER

        model = str(FOLDER)
    llm = LLM(
        model,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        num_blocks=num_blocks,
        attention_backend=attention_backend,
        mamba_cache_mode=mamba_cache_mode,
        speculative_method=speculative_method,
        num_speculative_tokens=num_speculative_tokens,
        device=device,
    )
    outputs = llm.generate(texts, params, progress=len(texts) > 1)
    for output in outputs:
        if output.error is None:
            print(f"{output.prompt}{output.text}")
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise ConfigError("; ".join(errors))


def _require_folder(file: Path) -> None:
    from hybrid_kv.config import ConfigError

    if not file.parent.is_dir():
        raise ConfigError(f"{file}: the folder {file.parent} does not exist; make it first")


@app.command()
def accuracy(
    model: Annotated[str | None, typer.Option(help="A checkpoint folder; default: the embedded guard model.")] = None,
    task: Annotated[str, typer.Option(help="gsm8k_synth (generated, offline) or gsm8k.")] = "gsm8k_synth",
    gsm8k_dir: Annotated[
        str | None, typer.Option(help="Folder with train.jsonl and test.jsonl for gsm8k; default: the hub.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Ask the first so many questions.")] = 250,
    seed: Annotated[int, typer.Option(help="Of the documents (gsm8k_synth) or of the shots (gsm8k).")] = 0,
    out: Annotated[str, typer.Option(help="CSV to which the averages are appended.")] = "results/accuracy.csv",
    samples: Annotated[
        str | None, typer.Option(help="Write one line per question to this .jsonl or .jsonl.gz file.")
    ] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Write the summary to this file.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens per step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of the longest request.")] = None,
    attention_backend: Annotated[str | None, typer.Option(help="Such as FLASH_ATTN or FLASHINFER.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per attention block.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks in the pool; few of them force preemptions.")] = None,
    mamba_cache_mode: Annotated[CacheMode | None, typer.Option(help="align and all turn prefix caching on.")] = None,
    speculative_method: Annotated[DraftMethod | None, typer.Option(help="Where drafts come from.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Draft tokens verified per step (K).")] = None,
    kv_offload_bytes: Annotated[int | None, typer.Option(help="Host memory for cached blocks.")] = None,
    kv_offload_folder: Annotated[str | None, typer.Option(help="Folder for cached blocks.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
) -> None:
    """Answer GSM8K-format questions through lm-eval; append the averages to a CSV, keep every answer."""
    from hybrid_kv.config import ConfigError
    from hybrid_kv.results import append_rows, check_writable

    try:
        from accuracy import run
    except ImportError as error:
        raise ConfigError(f"{error}; pip install 'hybrid_kv[accuracy]'") from None

    options = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "attention_backend": attention_backend,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "mamba_cache_mode": mamba_cache_mode,
        "speculative_method": speculative_method,
        "num_speculative_tokens": num_speculative_tokens,
        "kv_offload_bytes": kv_offload_bytes,
        "kv_offload_folder": kv_offload_folder,
        "device": device,
    }
    check_writable(out)
    run.check_outputs(samples, json_file)
    given = {name: value for name, value in options.items() if value is not None}
    result = run.evaluate(model, task, limit=limit, seed=seed, gsm8k_dir=gsm8k_dir, **given)
    run.print_result(result)  # Before writing: a full disk must not cost the result.
    if samples is not None:
        run.write_samples(result, samples)
    if json_file is not None:
        run.write_summary(result, json_file)
    append_rows(out, run.rows(result))


@app.command()
def kernels(
    targets: Annotated[str, typer.Option(help="Of sm_80, sm_90, sm_100 and gfx942.")] = "sm_80,sm_90,sm_100,gfx942",
    baseline: Annotated[
        Path | None, typer.Option(help="CSV to compare with; default: results/kernels.csv if there is one.")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Accept what changed: append it to the baseline.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write every metric here.")] = None,
) -> None:
    """Compile every kernel ahead of time and compare registers, spills, access and instructions. Needs no GPU."""
    from hybrid_kv.config import ConfigError
    from hybrid_kv.kernels import aot
    from hybrid_kv.results import append_rows, check_writable

    names = aot.parse_targets(targets)
    if baseline is not None and not update and not baseline.exists():
        raise ConfigError(f"{baseline} does not exist, so nothing would be compared; --update makes it")
    baseline = baseline or Path("results/kernels.csv")
    if update:
        check_writable(baseline)
    if json_file is not None:
        _require_folder(json_file)
    verdicts = aot.run(aot.kernel_modules(), names, baseline, accept=update)
    aot.print_table(verdicts)
    if json_file is not None:
        aot.write_json(verdicts, json_file)
    if any(verdict.failures for verdict in verdicts):
        raise typer.Exit(1)
    if update:
        append_rows(baseline, aot.changed_rows(verdicts, baseline))


def main(args: list[str] | None = None) -> None:
    """Run the command line. The one place where an error becomes a line on stderr and exit code 2.

    A sanitizer's report is a check that failed: its lines as they are, and exit code 1.
    """
    try:
        app(args=args)
    except Exception as error:
        from hybrid_kv.config import HybridKVError  # Imports torch: not for --help.

        if isinstance(error, ModuleNotFoundError):
            error = HybridKVError(f"{error.name} is not installed; run: pip install -e '.[all]' in a checkout")
        if not isinstance(error, HybridKVError):
            from hybrid_kv.sanitizer import SanitizerError

            if not isinstance(error, SanitizerError):
                raise
            print(error, file=sys.stderr)
            sys.exit(1)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
