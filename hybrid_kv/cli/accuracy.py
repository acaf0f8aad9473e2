"""`hybrid-kv accuracy`: GSM8K-format questions, pairs of runs, floors."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hybrid_kv.cli.help import Command
from hybrid_kv.cli.options import (
    MAX_SEED,
    AsJson,
    Model,
    OutFile,
    RowOutput,
    dataclass_options,
    engine_options,
    given_options,
    rows_file,
    show,
)

if TYPE_CHECKING:
    from hybrid_kv.measure.accuracy.judge import JudgedRun

app = typer.Typer(
    invoke_without_command=True, help="Answer GSM8K-format questions; compare two runs."
)
AnswerFilter = Literal["strict-match", "flexible-extract"]
Target = Annotated[
    str | None,
    typer.Option(help="Another engine, or the URL of a server that has loaded --model."),
]
Gsm8kFolder = Annotated[
    str | None,
    typer.Option(help="Folder with train.jsonl and test.jsonl for gsm8k; default: the hub."),
]
_PACKAGES = ("safetensors", "tokenizers", "transformers", "lm_eval", "datasets", "scipy")


@dataclass(frozen=True, kw_only=True)
class TaskQuestions:
    """The questions of a run; None: the default of a comparison or of a floor."""

    task: Annotated[
        str | None, typer.Option(help="gsm8k_synth (generated, offline; the default) or gsm8k.")
    ] = None
    gsm8k_dir: Gsm8kFolder = None
    limit: Annotated[int | None, typer.Option(min=1, help="Number of questions; default: 250.")] = (
        None
    )
    seed: Annotated[
        int | None,
        typer.Option(
            max=MAX_SEED,
            min=0,
            help="Of the documents (gsm8k_synth) or of the shots (gsm8k); default: 0.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Gates:
    """The baseline and the limits that a run is held against."""

    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with this run's --samples file, by its questions: 250 first, all if "
            "those do not decide."
        ),
    ] = None
    check_floor: Annotated[
        bool, typer.Option("--check-floor", help="Fail below the recorded floor.")
    ] = False
    answer_filter: Annotated[
        AnswerFilter,
        typer.Option("--filter", help="What counts as right for --against and --check-floor."),
    ] = "strict-match"
    min_acceptance_length: Annotated[
        float | None,
        typer.Option(min=1, help="Fail below this number of tokens per step with drafts."),
    ] = None
    repro: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder for the questions that --against shows to be lost."
        ),
    ] = Path("repro")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The form in which questions are put, and the length of answers."""

    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template",
            help="Put the questions as a conversation, by the model's template.",
        ),
    ] = False
    think_end_token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What ends the reasoning, which is not read, such as </think>.",
        ),
    ] = None
    max_gen_toks: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer with its reasoning; default: 256."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AnswersOutput(RowOutput):
    """Places of a run's rows, verdicts and answers."""

    samples: Annotated[
        str | None,
        typer.Option(help="Write one line per question to this .jsonl or .jsonl.gz file."),
    ] = None


@app.callback()
@engine_options
@dataclass_options
def accuracy(
    context: typer.Context,
    questions: TaskQuestions,
    gates: Gates,
    conversation: Conversation,
    output: AnswersOutput,
    model: Model = None,
    target: Target = None,
    **engine: Any,
) -> None:
    """Answer GSM8K-format questions through lm-eval.

    The averages are appended to a CSV; --samples keeps every answer.
    """
    from hybrid_kv.check.ci import exit_code, published
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs

    if context.invoked_subcommand is not None:
        given = [*given_options(context).values()]
        if given:
            place = f"give options after {context.invoked_subcommand!r}"
            raise ConfigError(f"{given[0]} belongs to a run; {place}")
        return
    require(*_PACKAGES)
    from hybrid_kv.measure.accuracy.chat import ChatMode
    from hybrid_kv.measure.accuracy.judge import judge

    if target is not None:
        engine["target"] = target
    csv = rows_file("accuracy.csv", output.results, output.record)
    check_outputs(output.samples, output.out, output.junit_xml)
    _check_baseline(output.samples, gates.against)
    if target is None and model is not None:
        _report_memory(model, engine)
    mode = ChatMode(
        conversation.apply_chat_template, conversation.think_end_token, conversation.max_gen_toks
    )
    with published("hybrid-kv accuracy", output.junit_xml) as keep:
        judged = judge(
            model,
            **asdict(questions),
            against=gates.against,
            check_floor=gates.check_floor,
            answer_filter=gates.answer_filter,
            repro=gates.repro,
            mode=mode,
            **engine,
        )
        judged = replace(judged, min_acceptance_length=gates.min_acceptance_length)
        keep(judged.verdicts)
    _keep(judged, csv, output)
    raise typer.Exit(exit_code(judged.verdicts))


def _check_baseline(samples: str | None, against: str | None) -> None:
    """Raise `ConfigError` if answers would be written over those that they are compared with."""
    from hybrid_kv.config import ConfigError

    if samples is None or against is None:
        return
    if Path(samples).resolve() == Path(against).resolve():
        raise ConfigError(f"--samples {samples} would replace the baseline; name another file")


def _report_memory(model: str, engine: dict[str, Any]) -> None:
    """Print the memory that a checkpoint takes; errors of the task come first."""
    from hybrid_kv.check.guard_model import FOLDERS, embedded
    from hybrid_kv.cli.plan import report_memory
    from hybrid_kv.config import ConfigError

    folder = embedded(model)
    if folder not in FOLDERS.values():
        with suppress(ConfigError):
            report_memory(str(folder), engine)


def _keep(judged: JudgedRun, csv: Path, output: AnswersOutput) -> None:
    """Append the rows, write the answers and print the summary, each even if another fails."""
    from hybrid_kv.measure.accuracy.run import write_samples
    from hybrid_kv.measure.results import append_rows

    def keep_rows() -> None:
        append_rows(csv, judged.rows())

    with ExitStack() as last_first:
        last_first.callback(show, judged.summary(), output.as_json, output.out, judged.print)
        if output.samples is not None:
            last_first.callback(write_samples, judged.result, output.samples)
        last_first.callback(keep_rows)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a comparison of log-probabilities, and its limit."""

    task: Annotated[str, typer.Option(help="Where the prompts are from: gsm8k_synth or gsm8k.")] = (
        "gsm8k_synth"
    )
    gsm8k_dir: Gsm8kFolder = None
    limit: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 32
    seed: Annotated[int, typer.Option(max=MAX_SEED, min=0, help="As for a run.")] = 0
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="An absolute limit besides, in nats per token.")
    ] = None


@app.command("divergence", cls=Command)
@engine_options
@dataclass_options
def accuracy_divergence(
    prompts: Prompts,
    output: RowOutput,
    model: Model = None,
    target: Target = None,
    **engine: Any,
) -> None:
    """Compare log-probabilities of cached answers with uncached ones.

    Exit code 1 if the cache changes them.
    """
    from hybrid_kv.check.ci import exit_code, published
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import append_rows

    require(*_PACKAGES)
    from hybrid_kv.measure.accuracy.divergence import evaluate

    csv = rows_file("accuracy.csv", output.results, output.record)
    check_outputs(output.out, output.junit_xml)
    with published("hybrid-kv accuracy divergence", output.junit_xml) as keep:
        divergence = evaluate(
            model,
            target,
            task=prompts.task,
            gsm8k_dir=prompts.gsm8k_dir,
            num_prompts=prompts.limit,
            seed=prompts.seed,
            max_tokens=prompts.max_tokens,
            max_kl=prompts.max_kl,
            **engine,
        )
        keep(divergence.verdicts)
    try:
        append_rows(csv, divergence.rows())
    finally:
        show(divergence.summary(), output.as_json, output.out, divergence.print)
    raise typer.Exit(exit_code(divergence.verdicts))


@dataclass(frozen=True, kw_only=True)
class FormQuestions:
    """The questions of a comparison of forms of states."""

    task: Annotated[str, typer.Option(help="gsm8k_synth (generated, offline) or gsm8k.")] = (
        "gsm8k_synth"
    )
    gsm8k_dir: Gsm8kFolder = None
    limit: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 250
    seed: Annotated[int, typer.Option(max=MAX_SEED, min=0, help="As for a run.")] = 0


@app.command("states", cls=Command)
@engine_options
@dataclass_options
def accuracy_states(
    questions: FormQuestions,
    output: RowOutput,
    model: Model = None,
    **engine: Any,
) -> None:
    """Answer with states in float16, int8 and fp8, each paired with float32.

    Exit code 1 if answers were lost.
    """
    from hybrid_kv.check.ci import exit_code, published
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import append_rows

    require(*_PACKAGES)
    from hybrid_kv.measure.accuracy.state_forms import evaluate_forms

    csv = rows_file("accuracy.csv", output.results, output.record)
    check_outputs(output.out, output.junit_xml)
    with published("hybrid-kv accuracy states", output.junit_xml) as keep:
        forms = evaluate_forms(model, **asdict(questions), **engine)
        keep(forms.verdicts)
    try:
        append_rows(csv, forms.rows())
    finally:
        show(forms.summary(), output.as_json, output.out, forms.print)
    raise typer.Exit(exit_code(forms.verdicts))


@app.command("compare", cls=Command)
@dataclass_options
def accuracy_compare(
    baseline: Annotated[
        str, typer.Argument(help="A --samples file, or one of lm-eval, sgl-eval or vLLM.")
    ],
    candidate: Annotated[
        str, typer.Argument(help="The same questions, answered by the changed version.")
    ],
    output: RowOutput,
    answer_filter: Annotated[
        AnswerFilter, typer.Option("--filter", help="What counts as right.")
    ] = "strict-match",
) -> None:
    """Compare two runs, paired by question, by McNemar's exact test.

    Exit code 1 if answers were lost.
    """
    from hybrid_kv.check.ci import exit_code, published
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import append_rows

    require("scipy")
    from hybrid_kv.measure.accuracy.unpaired import compare_files

    csv = rows_file("accuracy.csv", output.results, output.record)
    check_outputs(output.out, output.junit_xml)
    with published("hybrid-kv accuracy compare", output.junit_xml) as keep:
        comparison = compare_files(baseline, candidate, answer_filter)
        keep(comparison.verdicts)
    rows = comparison.rows()  # raises for invalid files
    try:
        append_rows(csv, rows)
    finally:
        show(comparison.summary(), output.as_json, output.out, comparison.print)
    raise typer.Exit(exit_code(comparison.verdicts))


@dataclass(frozen=True, kw_only=True)
class RecordedRuns:
    """The rows that floors are computed from, and the file of floors."""

    rows: Annotated[str, typer.Option(help="CSV with the runs.")] = "results/accuracy.csv"
    model: Annotated[str, typer.Option(help="Name of the model in the rows.")] = "guard_model"
    task: Annotated[str, typer.Option(help="Name of the task in the rows.")] = "gsm8k_synth"
    limit: Annotated[int, typer.Option(min=1, help="Questions of each run.")] = 250
    file: Annotated[Path | None, typer.Option(help="File of floors; default: the package's.")] = (
        None
    )


@app.command("threshold", cls=Command)
@dataclass_options
def accuracy_threshold(
    recorded: RecordedRuns,
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
    as_json: AsJson = False,
    out: OutFile = None,
) -> None:
    """Compute the floors for --check-floor from ten or more runs and write them to a file.

    With --for, print the lines of an engine's own gate instead.
    """
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs

    require("scipy", "yaml")
    check_outputs(out)
    if (engine is None) != (not runs):
        raise ConfigError(
            "--for and files of runs go together: hybrid-kv accuracy threshold --for vllm RUN RUN …"
        )
    if engine is not None and runs:
        summary, lines = _engine_threshold(engine, runs, false_alarms)
    else:
        summary, lines = _floors(recorded)
    show(summary, as_json, out, print, "\n".join(lines))


def _engine_threshold(
    engine: str, runs: list[str], false_alarms: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the document and the lines of an engine's own gate."""
    from hybrid_kv.measure.accuracy.engine_threshold import ENGINES, threshold_from_files

    threshold = threshold_from_files(runs, false_alarms)
    lines = ENGINES[engine](threshold)
    return threshold.summary() | {"for": engine, "lines": lines}, lines


def _floors(recorded: RecordedRuns) -> tuple[dict[str, Any], list[str]]:
    """Write the floors; return the document and the lines about them."""
    from hybrid_kv.measure.accuracy import threshold
    from hybrid_kv.measure.results import read_rows

    file = recorded.file or threshold.FILE
    frame = read_rows(recorded.rows)
    key = recorded.model, recorded.task
    floors = [
        threshold.floor_from_rows(frame, *key, name, recorded.limit) for name in threshold.METRICS
    ]
    before = [threshold.write_floor(floor, file) for floor in floors]
    lines = []
    for floor, old in zip(floors, before, strict=True):
        was = "" if old is None else f" (was {old.floor:.2%})"
        spread = f"mean {floor.mean:.2%}, sd {floor.sd:.2%}, {floor.runs} runs"
        lines.append(f"{floor.filter}: floor {floor.floor:.2%}{was}, {spread}")
    return {"floors": [asdict(floor) for floor in floors]}, lines
