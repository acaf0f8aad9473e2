"""`hybrid-kv accuracy`: GSM8K-format questions, pairs of runs, floors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hybrid_kv.cli.options import SCHEME_HELP, CacheMode, DraftMethod, StateScheme, require_at_least_one

app = typer.Typer(invoke_without_command=True, help="Answer GSM8K-format questions; compare two runs.")
AnswerFilter = Literal["strict-match", "flexible-extract"]


@app.callback()
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
    check_floor: Annotated[bool, typer.Option("--check-floor", help="Fail below the recorded floor.")] = False,
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
    state_scheme: Annotated[StateScheme | None, typer.Option(help=SCHEME_HELP)] = None,
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
    require_at_least_one(limit=limit)

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
        return importlib.import_module(f"hybrid_kv.accuracy.{name}")
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


@app.command("compare")
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


@app.command("threshold")
def accuracy_threshold(
    rows_file: Annotated[str, typer.Option("--rows", help="CSV with the runs.")] = "results/accuracy.csv",
    model: Annotated[str, typer.Option(help="Name of the model in the rows.")] = "guard_model",
    task: Annotated[str, typer.Option(help="Name of the task in the rows.")] = "gsm8k_synth",
    limit: Annotated[int, typer.Option(help="Questions of each run.")] = 250,
    file: Annotated[Path | None, typer.Option(help="To write to; default: those of the package.")] = None,
) -> None:
    """Compute the floors for --check-floor from ten or more runs and write them down."""
    from hybrid_kv.results import read_rows

    threshold = _accuracy_module("threshold")
    require_at_least_one(limit=limit)
    file = file or threshold.FILE
    frame = read_rows(rows_file)
    floors = [threshold.floor_from_rows(frame, model, task, name, limit) for name in threshold.METRICS]
    for floor in floors:
        before = threshold.write_floor(floor, file)
        was = "" if before is None else f" (was {before.floor:.2%})"
        print(
            f"{floor.filter}: floor {floor.floor:.2%}{was}, mean {floor.mean:.2%}, sd {floor.sd:.2%}, {floor.runs} runs"
        )
