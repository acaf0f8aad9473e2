"""The `hybrid-kv` command. Exit code 0: fine; 1: a check failed; 2: it could not run, with one line on stderr."""

from __future__ import annotations

import importlib
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
StateScheme = Literal["slots", "replay"]
Tier = Literal["count", "cpu", "gpu"]
_SCHEME_HELP = "How drafts are undone: a state after each token (slots), or one state and a ring of inputs (replay)."

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
        int | None,
        typer.Option(
            help="Requests that shall fit at once: a note says if they do not. Rows of rings (replay; else 64)."
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per attention block.")] = None,
    mamba_block_size: Annotated[int | None, typer.Option(help="Tokens per Mamba block (mode all).")] = None,
    mamba_cache_mode: Annotated[CacheMode, typer.Option(help="Which Mamba states are kept.")] = "none",
    state_scheme: Annotated[StateScheme, typer.Option(help=_SCHEME_HELP)] = "slots",
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
    from hybrid_kv.cache.spec import replay_spec, with_speculation
    from hybrid_kv.config import CacheConfig, ConfigError, SchedulerConfig
    from hybrid_kv.models.shapes import model_shape

    _require_at_least_one(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
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
    shape = model_shape(config, cache=cache, num_speculative_tokens=num_speculative_tokens, dtype=dtype)
    model_len = max_model_len or shape.max_position_embeddings
    if model_len is None:
        raise ConfigError(f"{config} names no max_position_embeddings; give --max-model-len")
    attention = get_backend(backend, platform)
    K, rows = num_speculative_tokens, max_num_seqs or SchedulerConfig().max_num_seqs
    replay = replay_spec(cache, K, False, list(shape.layers.values()))
    layers = {name: with_speculation(spec, K, replay) for name, spec in shape.layers.items()}
    context = BackendContext.for_layers(platform, layers)
    result = plan_cache(layers, cache, attention, context, model_len, shape.mamba_chunk_size, K, rows)
    document = {
        "model_type": shape.model_type,
        "num_hidden_layers": shape.num_hidden_layers,
        "cached_layers": shape.counts,
        "platform": platform,
        "backend": attention.name,
        "mamba_cache_mode": mamba_cache_mode,
        "state_scheme": state_scheme,
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
        "Mamba cache mode": f"{document['mamba_cache_mode']}, {document['state_scheme']}, "
        f"K={document['num_speculative_tokens']}",
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
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the guard model runs on.")] = "cpu",
) -> None:
    """Say whether the cache is right and fast: engine against oracles, accuracy, cost of block ids. Needs no GPU."""
    import torch

    from hybrid_kv.config import ConfigError
    from hybrid_kv.guard.report import FULL, LONG, QUICK, print_results, result_rows, run_guard, write_json
    from hybrid_kv.results import append_rows, check_writable

    if quick and long:
        raise ConfigError("--quick and --long exclude each other; give one of them")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use cpu")
    rows_file = results / "guard.csv"
    check_writable(rows_file)
    if json_file is not None:
        _require_folder(json_file)
    if seed is None:
        seed = secrets.randbelow(2**31) if long else 0
    if long:
        print(f"the same run again: hybrid-kv guard --long --seed {seed}")
    checks = run_guard(QUICK if quick else LONG if long else FULL, seed, device=device)
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
    state_scheme: Annotated[StateScheme, typer.Option(help=_SCHEME_HELP)] = "slots",
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
        state_scheme=state_scheme,
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
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; name a file in it")


accuracy_app = typer.Typer(invoke_without_command=True, help="Answer GSM8K-format questions; compare two runs.")
app.add_typer(accuracy_app, name="accuracy")
AnswerFilter = Literal["strict-match", "flexible-extract"]


@accuracy_app.callback()
def accuracy(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="A checkpoint folder; default: the embedded guard model.")] = None,
    task: Annotated[str | None, typer.Option(help="gsm8k_synth (generated, offline; the default) or gsm8k.")] = None,
    gsm8k_dir: Annotated[
        str | None, typer.Option(help="Folder with train.jsonl and test.jsonl for gsm8k; default: the hub.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Ask the first so many questions; default: 250.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the documents (gsm8k_synth) or of the shots (gsm8k); default: 0.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with this run's --samples file, which says what is asked: 250 questions first, "
            "all of them if those do not decide."
        ),
    ] = None,
    check_floor: Annotated[
        bool, typer.Option("--check-floor", help="Fail below the floor in accuracy/thresholds.yaml.")
    ] = False,
    answer_filter: Annotated[
        AnswerFilter, typer.Option("--filter", help="Decides, for --against and --check-floor, what is right.")
    ] = "strict-match",
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
    state_scheme: Annotated[StateScheme | None, typer.Option(help=_SCHEME_HELP)] = None,
    speculative_method: Annotated[DraftMethod | None, typer.Option(help="Where drafts come from.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Draft tokens verified per step (K).")] = None,
    kv_offload_bytes: Annotated[int | None, typer.Option(help="Host memory for cached blocks.")] = None,
    kv_offload_folder: Annotated[str | None, typer.Option(help="Folder for cached blocks.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
) -> None:
    """Answer GSM8K-format questions through lm-eval; append the averages to a CSV, keep every answer."""
    from hybrid_kv.config import ConfigError
    from hybrid_kv.results import append_rows, check_writable

    if context.invoked_subcommand is not None:
        if given := [name for name in context.params if _is_given(context, name)]:
            raise ConfigError(f"{given[0]} belongs to a run; give options after {context.invoked_subcommand!r}")
        return
    run = _accuracy_module("run")
    comparing, threshold = _accuracy_module("compare"), _accuracy_module("threshold")
    _require_at_least_one(limit=limit)

    options = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "attention_backend": attention_backend,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "mamba_cache_mode": mamba_cache_mode,
        "state_scheme": state_scheme,
        "speculative_method": speculative_method,
        "num_speculative_tokens": num_speculative_tokens,
        "kv_offload_bytes": kv_offload_bytes,
        "kv_offload_folder": kv_offload_folder,
        "device": device,
    }
    check_writable(out)
    run.check_outputs(samples, json_file)
    options = {name: value for name, value in options.items() if value is not None}
    baseline = None if against is None else comparing.read_answers(against, answer_filter)
    if baseline is not None:
        baseline = baseline.first(len(baseline.by_doc) if limit is None else limit)
        task = _same("task", task, baseline.task or None)
        seed = _same("seed", seed, baseline.params.get("seed"))
    task, seed = task or "gsm8k_synth", seed or 0

    def ask(questions: int) -> Any:
        return run.evaluate(model, task, limit=questions, seed=seed, gsm8k_dir=gsm8k_dir, **options)

    asked = 250 if limit is None else limit
    floor = None
    if check_floor:
        if baseline is not None:
            raise ConfigError(
                "--check-floor and --against exclude each other: a floor is for a fixed number of questions"
            )
        floor = threshold.find_floor(Path(model or "guard_model").name, task, answer_filter, asked)
    result, comparison = (
        (ask(asked), None) if baseline is None else comparing.compare_live(baseline, ask, answer_filter)
    )

    run.print_result(result)  # Before writing: a full disk must not cost the result.
    rows, document, passed = run.rows(result), result.summary(), True
    if comparison is not None:
        comparing.print_comparison(comparison)
        rows += comparing.rows(comparison)
        document["comparison"] = comparison.summary()
        passed = comparison.verdict != "worse"
    if floor is not None:
        passed, line = threshold.check(result, floor)
        rows = threshold.mark(rows, floor, passed)
        print(line)
    if samples is not None:
        run.write_samples(result, samples)
    if json_file is not None:
        run.write_summary(document, json_file)
    append_rows(out, rows)
    if not passed:
        raise typer.Exit(1)


def _accuracy_module(name: str) -> Any:
    from hybrid_kv.config import ConfigError

    try:
        return importlib.import_module(f"accuracy.{name}")
    except ImportError as error:
        raise ConfigError(f"{error}; pip install 'hybrid_kv[accuracy]'") from None


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _same(name: str, given: Any, recorded: Any) -> Any:
    from hybrid_kv.config import ConfigError

    if given is not None and recorded is not None and given != recorded:
        raise ConfigError(f"--{name} {given} does not fit --against, whose run had {recorded}; leave --{name} out")
    return recorded if given is None else given


@accuracy_app.command("compare")
def accuracy_compare(
    baseline: Annotated[str, typer.Argument(help="A --samples file, or a samples_*.jsonl of lm-eval.")],
    candidate: Annotated[str, typer.Argument(help="The same questions, answered by the changed version.")],
    answer_filter: Annotated[AnswerFilter, typer.Option("--filter", help="Decides what is right.")] = "strict-match",
    out: Annotated[str, typer.Option(help="CSV to which the comparison is appended.")] = "results/accuracy.csv",
    json_file: Annotated[str | None, typer.Option("--json", help="Write the comparison to this file.")] = None,
) -> None:
    """Say whether the candidate lost answers: paired by question, exact McNemar. Exit code 1 when it did."""
    from hybrid_kv.results import append_rows, check_writable

    run, comparing = _accuracy_module("run"), _accuracy_module("compare")
    check_writable(out)
    run.check_outputs(json_file)
    runs = (comparing.read_answers(file, answer_filter) for file in (baseline, candidate))
    comparison = comparing.compare(*runs, answer_filter=answer_filter)
    rows = comparing.rows(comparison)  # Before writing: it may refuse what stands in a file.
    comparing.print_comparison(comparison)
    if json_file is not None:
        run.write_summary(comparison.summary(), json_file)
    append_rows(out, rows)
    if comparison.verdict == "worse":
        raise typer.Exit(1)


@accuracy_app.command("threshold")
def accuracy_threshold(
    rows_file: Annotated[str, typer.Option("--rows", help="CSV with the runs.")] = "results/accuracy.csv",
    model: Annotated[str, typer.Option(help="Name of the model in the rows.")] = "guard_model",
    task: Annotated[str, typer.Option(help="Name of the task in the rows.")] = "gsm8k_synth",
    limit: Annotated[int, typer.Option(help="Questions of each run.")] = 250,
    file: Annotated[Path | None, typer.Option(help="To write to; default: accuracy/thresholds.yaml.")] = None,
) -> None:
    """Compute the floors for --check-floor from ten or more runs and write them down."""
    from hybrid_kv.results import read_rows

    threshold = _accuracy_module("threshold")
    _require_at_least_one(limit=limit)
    file = file or threshold.FILE
    frame = read_rows(rows_file)
    floors = [threshold.floor_from_rows(frame, model, task, name, limit) for name in threshold.METRICS]
    for floor in floors:
        before = threshold.write_floor(floor, file)
        was = "" if before is None else f" (was {before.floor:.2%})"
        print(
            f"{floor.filter}: floor {floor.floor:.2%}{was}, mean {floor.mean:.2%}, sd {floor.sd:.2%}, {floor.runs} runs"
        )


@app.command()
def results(
    places: Annotated[list[Path] | None, typer.Argument(help="CSVs, or folders of them; default: results.")] = None,
    suite: Annotated[str | None, typer.Option(help="The whole name of a suite, such as accuracy.")] = None,
    benchmark: Annotated[str | None, typer.Option(help="A part of a benchmark's name.")] = None,
    metric: Annotated[str | None, typer.Option(help="A part of a metric's name.")] = None,
    commit: Annotated[str | None, typer.Option(help="The start of a commit hash.")] = None,
    machine: Annotated[str | None, typer.Option(help="A part of a machine's name.")] = None,
    device: Annotated[str | None, typer.Option(help="A part of a device's name.")] = None,
    since: Annotated[str | None, typer.Option(help="A day or moment in UTC, such as 2026-11-21.")] = None,
    last: Annotated[int | None, typer.Option(help="The newest so many rows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV only.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check every row of the files instead.")] = False,
) -> None:
    """Print rows of results/, or check that they are what later readers rely on."""
    import pandas as pd

    from hybrid_kv.config import ConfigError
    from hybrid_kv.results import check_file, read_rows
    from hybrid_kv.results_view import print_rows, result_files, select_rows, to_json

    if as_json and as_csv:
        raise ConfigError("--json and --csv exclude each other; give one of them")
    if check and (as_json or as_csv or any((suite, benchmark, metric, commit, machine, device, since, last))):
        raise ConfigError("--check looks at every row and prints lines; leave the other options out")
    files = result_files(places or [Path("results")])
    if check:
        problems = [problem for file in files for problem in check_file(file)]
        print(*problems, f"{len(problems)} problem{'s' * (len(problems) != 1)} in {len(files)} files", sep="\n")
        raise typer.Exit(1 if problems else 0)
    frame = select_rows(
        pd.concat([read_rows(file) for file in files], ignore_index=True),
        equal={"suite": suite},
        containing={"benchmark": benchmark, "metric": metric, "machine": machine, "device": device},
        commit=commit,
        since=since,
        last=last,
    )
    if as_json:
        print(to_json(frame))
    elif as_csv:
        print(frame.to_csv(index=False, lineterminator="\n"), end="")
    else:
        print_rows(frame)


@app.command()
def kernels(
    targets: Annotated[str, typer.Option(help="Of sm_80, sm_90, sm_100 and gfx942.")] = "sm_80,sm_90,sm_100,gfx942",
    baseline: Annotated[
        Path | None, typer.Option(help="CSV to compare with; default: results/kernels.csv if there is one.")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Accept what changed: append it to the baseline.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write every metric here.")] = None,
    with_peers: Annotated[
        bool, typer.Option("--peers", help="Also compile the Triton kernels of vLLM and mamba_ssm, for comparison.")
    ] = False,
) -> None:
    """Compile every kernel ahead of time and compare registers, spills, access and instructions. Needs no GPU.

    Also count, in Triton's interpreter, the launches of a decode step and the bytes of both state schemes.
    """
    from hybrid_kv.config import ConfigError
    from hybrid_kv.kernels import aot, counts
    from hybrid_kv.results import append_rows, check_writable, provenance

    names = aot.parse_targets(targets)
    if baseline is not None and not update and not baseline.exists():
        raise ConfigError(f"{baseline} does not exist, so nothing would be compared; --update makes it")
    baseline = baseline or Path("results/kernels.csv")
    if update:
        check_writable(baseline)
    if json_file is not None:
        _require_folder(json_file)
    modules, absent = aot.kernel_modules(), []
    if with_peers:
        from hybrid_kv.kernels import peers

        absent = peers.find()[1]
    verdicts = aot.run(modules, names, baseline, accept=update)
    counted = counts.count_all()
    known = {} if update else aot.read_baseline(baseline, provenance().triton)
    wrong = [counts.failures(one, known) for one in counted]
    aot.print_table(verdicts)
    counts.print_counts(counted, wrong)
    others = aot.run_peers(names) if with_peers else []
    if with_peers:
        print("\nkernels of other packages, not gated:\n")
        aot.print_table(others)
        print(*absent, sep="\n")
    if json_file is not None:
        aot.write_json(verdicts, json_file, others)
    if any(verdict.failures for verdict in verdicts) or any(wrong):
        raise typer.Exit(1)
    if update:
        append_rows(baseline, [*aot.changed_rows(verdicts, baseline), *counts.changed_rows(counted, baseline)])


@app.command()
def compare(
    base: Annotated[str, typer.Argument(help="A git revision; . is the working tree.")] = "HEAD",
    head: Annotated[str, typer.Argument(help="What may have become slower: a revision, or the working tree.")] = ".",
    every: Annotated[bool, typer.Option("--all", help="All benchmarks, not only the quick ones: minutes.")] = False,
    suite: Annotated[
        list[str] | None, typer.Option("--suite", "-k", help="Only benchmarks whose name contains this; repeatable.")
    ] = None,
    tier: Annotated[Tier | None, typer.Option(help="Only counts, times of host code (cpu), or of a GPU.")] = None,
    pairs: Annotated[int, typer.Option(help="Pairs of processes of the first look; the repeat has twice as many.")] = 6,
    seed: Annotated[int | None, typer.Option(min=0, help="Of orders and memory layouts; default: a fresh one.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="CSV for the rows; default: results/compare.csv or operating_curve.csv.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write everything measured here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write a comment for a pull request here.")] = None,
    acknowledge: Annotated[
        str | None, typer.Option(help="Accept the changed counts for this reason: append to acknowledged.csv.")
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Compare BASE with itself, as it is and slowed: rates of errors. Hours.")
    ] = False,
    repetitions: Annotated[int, typer.Option(help="With --self-test: comparisons of equal code.")] = 50,
    trials: Annotated[int, typer.Option(help="With --self-test: comparisons per planted slowdown.")] = 20,
) -> None:
    """Say whether HEAD is slower than BASE, or counts otherwise: both run side by side, now, in a checkout."""
    from bench import operating_curve, verdicts
    from bench.cases import TIERS
    from bench.compare import ROOT, Design
    from bench.compare import compare as measure
    from hybrid_kv.config import ConfigError
    from hybrid_kv.results import append_rows, check_writable

    results = ROOT / "results"
    design = Design(pairs=pairs)
    out = out or results / ("operating_curve.csv" if self_test else "compare.csv")
    acknowledged = results / "acknowledged.csv"
    if acknowledge is not None and not acknowledge.strip():
        raise ConfigError("--acknowledge needs a reason, such as 'one block more per request'")
    check_writable(out)
    for file in (json_file, markdown):
        if file is not None:
            _require_folder(file)
    if self_test:
        _require_at_least_one(repetitions=repetitions, trials=trials)
        operating_curve.print_rates(
            operating_curve.self_test(base, out, root=ROOT, repetitions=repetitions, plants=trials, design=design)
        )
        return
    seed = secrets.randbelow(2**31) if seed is None else seed
    tiers = TIERS if tier is None else (tier,)
    comparison = measure(
        base, head, root=ROOT, quick=not every, select=suite or [""], tiers=tiers, design=design, seed=seed
    )
    outcomes = verdicts.outcomes_of(comparison, results)
    if acknowledge is not None:
        append_rows(acknowledged, verdicts.acknowledging_rows(outcomes, acknowledge, comparison.base.commit))
        outcomes = verdicts.outcomes_of(comparison, results)
    verdicts.print_table(outcomes)
    print(verdicts.verdict_line(comparison, outcomes))
    append_rows(out, list(verdicts.rows(comparison, outcomes)), commit=comparison.head.commit)
    if json_file is not None:
        json_file.write_text(json.dumps(verdicts.document(comparison, outcomes), indent=2) + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(verdicts.markdown(comparison, outcomes), encoding="utf-8")
    if any(one.alarm for one in outcomes):
        raise typer.Exit(1)


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="Folder with the CSVs.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder that gets index.html.")] = Path("site"),
    machine: Annotated[str, typer.Option(help="Start with this machine's rows; default: all.")] = "",
    markdown: Annotated[Path | None, typer.Option(help="Also write a short summary for a pull request here.")] = None,
    repository: Annotated[
        str, typer.Option(help="URL to which commits are linked, such as https://HOST/OWNER/NAME.")
    ] = "",
) -> None:
    """Draw all results as one page that opens offline."""
    from hybrid_kv.dashboard.data import load
    from hybrid_kv.dashboard.markdown import summary
    from hybrid_kv.dashboard.page import ASV_PAGES, build_page, write_page

    if markdown is not None:
        _require_folder(markdown)
    rows = load(results)
    page = write_page(build_page(rows, repository, machine, (out / ASV_PAGES).exists()), out)
    if markdown is not None:
        markdown.write_text(summary(rows, machine), encoding="utf-8")
    print(page)


def _print_usage_error(error: Any) -> int:
    """One line with the value and where the options are, but for a command without arguments: its help was printed."""
    if message := " ".join(error.format_message().replace("Value error, ", "").split()).rstrip("."):
        # What pydantic, which newer versions of typer ask, was given: not in its message.
        for one in getattr(error.__cause__, "errors", list)():
            if repr(one["input"]) not in message:
                message += f", given {one['input']!r}"
        command = error.ctx.command_path if error.ctx else "hybrid-kv"
        print(f"error: {message}; see {command} --help", file=sys.stderr)
    return int(error.exit_code)


def main(args: list[str] | None = None) -> None:
    """Run the command line. The one place where an error becomes a line on stderr and exit code 2.

    A sanitizer's report is a check that failed: its lines as they are, and exit code 1.
    """
    try:
        sys.exit(app(args=args, prog_name="hybrid-kv", standalone_mode=False) or 0)
    except Exception as error:
        # Wrong usage, known by its method: click's classes are typer's own in some versions and click's in others.
        if hasattr(error, "format_message"):
            sys.exit(_print_usage_error(error))

        from hybrid_kv.config import HybridKVError  # Imports torch: not for --help.

        if isinstance(error, OSError) and error.filename:
            error = HybridKVError(f"{error.filename}: {error.strerror}")
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
