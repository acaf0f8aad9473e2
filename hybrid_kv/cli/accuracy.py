"""`hybrid-kv accuracy`: GSM8K-format questions, pairs of runs, floors."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hybrid_kv.cli.help import Command
from hybrid_kv.cli.options import (
    MAX_SEED,
    AsJson,
    JUnitFile,
    Model,
    OutFile,
    Record,
    ResultsFolder,
    engine_options,
    given_options,
    rows_file,
    show,
)

app = typer.Typer(
    invoke_without_command=True, help="Answer GSM8K-format questions; compare two runs."
)
AnswerFilter = Literal["strict-match", "flexible-extract"]
Target = Annotated[
    str | None, typer.Option(help="Another engine, or the URL of a server that has loaded --model.")
]
Gsm8kFolder = Annotated[
    str | None,
    typer.Option(help="Folder with train.jsonl and test.jsonl for gsm8k; default: the hub."),
]


@app.callback()
@engine_options
def accuracy(
    context: typer.Context,
    model: Model = None,
    target: Target = None,
    task: Annotated[
        str | None, typer.Option(help="gsm8k_synth (generated, offline; the default) or gsm8k.")
    ] = None,
    gsm8k_dir: Gsm8kFolder = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of questions; default: 250.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            max=MAX_SEED,
            min=0,
            help="Of the documents (gsm8k_synth) or of the shots (gsm8k); default: 0.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with this run's --samples file, by its questions: 250 first, all if those do not decide."
        ),
    ] = None,
    check_floor: Annotated[
        bool, typer.Option("--check-floor", help="Fail below the recorded floor.")
    ] = False,
    answer_filter: Annotated[
        AnswerFilter,
        typer.Option("--filter", help="What counts as right for --against and --check-floor."),
    ] = "strict-match",
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template",
            help="Put the questions as a conversation, by the model's template.",
        ),
    ] = False,
    think_end_token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="What ends the reasoning, which is not read, such as </think>."
        ),
    ] = None,
    max_gen_toks: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer with its reasoning; default: 256."),
    ] = None,
    min_acceptance_length: Annotated[
        float | None,
        typer.Option(min=1, help="Fail below this number of tokens per step with drafts."),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Write one line per question to this .jsonl or .jsonl.gz file."),
    ] = None,
    repro: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder for the questions that --against shows to be lost."
        ),
    ] = Path("repro"),
    as_json: AsJson = False,
    out: OutFile = None,
    junit_xml: JUnitFile = None,
    results: ResultsFolder = None,
    record: Record = False,
    **options: Any,
) -> None:
    """Answer GSM8K-format questions through lm-eval; append the averages to a CSV, keep every answer."""
    from dataclasses import replace

    from hybrid_kv.check.ci import exit_code, published
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import append_rows

    if context.invoked_subcommand is not None:
        if given := [*given_options(context).values()]:
            raise ConfigError(
                f"{given[0]} belongs to a run; give options after {context.invoked_subcommand!r}"
            )
        return
    require("safetensors", "tokenizers", "transformers", "lm_eval", "datasets", "scipy")
    from hybrid_kv.check.guard_model import FOLDERS, embedded
    from hybrid_kv.cli.plan import report_memory
    from hybrid_kv.measure.accuracy.chat import ChatMode
    from hybrid_kv.measure.accuracy.judge import judge
    from hybrid_kv.measure.accuracy.run import write_samples

    if target is not None:
        options["target"] = target
    csv = rows_file("accuracy.csv", results, record)
    check_outputs(samples, out, junit_xml)
    if (
        samples is not None
        and against is not None
        and Path(samples).resolve() == Path(against).resolve()
    ):
        raise ConfigError(f"--samples {samples} would replace the baseline; name another file")
    if target is None and model is not None and (folder := embedded(model)) not in FOLDERS.values():
        with suppress(ConfigError):  # errors of the task come first
            report_memory(str(folder), options)
    with published("hybrid-kv accuracy", junit_xml) as keep:
        judged = judge(
            model,
            task=task,
            limit=limit,
            seed=seed,
            gsm8k_dir=gsm8k_dir,
            against=against,
            check_floor=check_floor,
            answer_filter=answer_filter,
            repro=repro,
            mode=ChatMode(apply_chat_template, think_end_token, max_gen_toks),
            **options,
        )
        judged = replace(judged, min_acceptance_length=min_acceptance_length)
        keep(judged.verdicts)
    with ExitStack() as done:  # in reverse order, and each one even if another fails
        done.callback(show, judged.summary(), as_json, out, judged.print)
        if samples is not None:
            done.callback(write_samples, judged.result, samples)
        done.callback(lambda: append_rows(csv, judged.rows()))
    raise typer.Exit(exit_code(judged.verdicts))


@app.command("divergence", cls=Command)
@engine_options
def accuracy_divergence(
    model: Model = None,
    target: Target = None,
    task: Annotated[
        str, typer.Option(help="Where the prompts are from: gsm8k_synth or gsm8k.")
    ] = "gsm8k_synth",
    gsm8k_dir: Gsm8kFolder = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 32,
    seed: Annotated[int, typer.Option(max=MAX_SEED, min=0, help="As for a run.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="An absolute limit besides, in nats per token.")
    ] = None,
    as_json: AsJson = False,
    out: OutFile = None,
    junit_xml: JUnitFile = None,
    results: ResultsFolder = None,
    record: Record = False,
    **options: Any,
) -> None:
    """Compare log-probabilities of cached answers with uncached ones; exit code 1 if the cache changes them."""
    from hybrid_kv.check.ci import exit_code, published
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import append_rows

    require("safetensors", "tokenizers", "transformers", "lm_eval", "datasets", "scipy")
    from hybrid_kv.measure.accuracy.divergence import evaluate

    csv = rows_file("accuracy.csv", results, record)
    check_outputs(out, junit_xml)
    with published("hybrid-kv accuracy divergence", junit_xml) as keep:
        found = evaluate(
            model,
            target,
            task=task,
            gsm8k_dir=gsm8k_dir,
            num_prompts=limit,
            seed=seed,
            max_tokens=max_tokens,
            max_kl=max_kl,
            **options,
        )
        keep(found.verdicts)
    try:
        append_rows(csv, found.rows())
    finally:
        show(found.summary(), as_json, out, found.print)
    raise typer.Exit(exit_code(found.verdicts))


@app.command("compare", cls=Command)
def accuracy_compare(
    baseline: Annotated[
        str, typer.Argument(help="A --samples file, or one of lm-eval, sgl-eval or vLLM.")
    ],
    candidate: Annotated[
        str, typer.Argument(help="The same questions, answered by the changed version.")
    ],
    answer_filter: Annotated[
        AnswerFilter, typer.Option("--filter", help="What counts as right.")
    ] = "strict-match",
    as_json: AsJson = False,
    out: OutFile = None,
    junit_xml: JUnitFile = None,
    results: ResultsFolder = None,
    record: Record = False,
) -> None:
    """Compare two runs, paired by question, by McNemar's exact test; exit code 1 if answers were lost."""
    from hybrid_kv.check.ci import exit_code, published
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import append_rows

    require("scipy")
    from hybrid_kv.measure.accuracy.unpaired import compare_files

    csv = rows_file("accuracy.csv", results, record)
    check_outputs(out, junit_xml)
    with published("hybrid-kv accuracy compare", junit_xml) as keep:
        comparison = compare_files(baseline, candidate, answer_filter)
        keep(comparison.verdicts)
    rows = comparison.rows()  # raises for invalid files
    try:
        append_rows(csv, rows)
    finally:
        show(comparison.summary(), as_json, out, comparison.print)
    raise typer.Exit(exit_code(comparison.verdicts))


@app.command("threshold", cls=Command)
def accuracy_threshold(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="With --for: files of ten or more equal runs, as compare reads them."),
    ] = None,
    engine: Annotated[
        Literal["vllm", "sglang", "trtllm"] | None,
        typer.Option("--for", help="Print the lines of this engine's own gate instead."),
    ] = None,
    false_alarms: Annotated[
        float,
        typer.Option(
            min=1e-6, max=0.5, help="With --for: share of unchanged runs that may be below."
        ),
    ] = 0.01,
    rows: Annotated[str, typer.Option(help="CSV with the runs.")] = "results/accuracy.csv",
    model: Annotated[str, typer.Option(help="Name of the model in the rows.")] = "guard_model",
    task: Annotated[str, typer.Option(help="Name of the task in the rows.")] = "gsm8k_synth",
    limit: Annotated[int, typer.Option(min=1, help="Questions of each run.")] = 250,
    file: Annotated[
        Path | None, typer.Option(help="File of floors; default: the package's.")
    ] = None,
    as_json: AsJson = False,
    out: OutFile = None,
) -> None:
    """Compute the floors for --check-floor from ten or more runs and write them to a file; or an engine's lines."""
    from dataclasses import asdict

    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import read_rows

    require("scipy", "yaml")
    check_outputs(out)
    if (engine is None) != (not runs):
        raise ConfigError(
            "--for and files of runs go together: hybrid-kv accuracy threshold --for vllm RUN RUN …"
        )
    if engine is not None and runs:
        _show_engine_threshold(engine, runs, false_alarms, as_json, out)
        return
    from hybrid_kv.measure.accuracy import threshold

    file = file or threshold.FILE
    frame = read_rows(rows)
    floors = [
        threshold.floor_from_rows(frame, model, task, name, limit) for name in threshold.METRICS
    ]
    before = [threshold.write_floor(floor, file) for floor in floors]

    def lines() -> None:
        for floor, old in zip(floors, before, strict=True):
            was = "" if old is None else f" (was {old.floor:.2%})"
            spread = f"mean {floor.mean:.2%}, sd {floor.sd:.2%}, {floor.runs} runs"
            print(f"{floor.filter}: floor {floor.floor:.2%}{was}, {spread}")

    show({"floors": [asdict(floor) for floor in floors]}, as_json, out, lines)


def _show_engine_threshold(
    engine: str, runs: list[str], false_alarms: float, as_json: bool, out: Path | None
) -> None:
    from hybrid_kv.measure.accuracy.engine_threshold import ENGINES, threshold_from_files

    made = threshold_from_files(runs, false_alarms)
    lines = ENGINES[engine](made)
    show(
        made.summary() | {"for": engine, "lines": lines},
        as_json,
        out,
        lambda: print("\n".join(lines)),
    )
