"""Answer the questions of a task with the engine, through lm-eval, and keep every answer.

The averages are for people; a comparison of two runs is paired per question, so the per-question
file is the real result (two averages of 250 questions see a drop of 9.6 points, pairs of a
deterministic run one of 2.9).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.check.guard_model import FOLDERS, embedded
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.files import write_whole
from hybrid_kv.measure.accuracy.acceptance import DraftCounts
from hybrid_kv.measure.accuracy.chat import PLAIN, ChatMode, template_of
from hybrid_kv.measure.accuracy.tasks import NO_ANSWER, check_task, load_task, quiet_lm_eval
from hybrid_kv.measure.results import Row, provenance
from hybrid_kv.threads import one_thread

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hybrid_kv.engine.llm import LLM
    from hybrid_kv.measure.accuracy.lm_eval_model import HybridKVLM
    from hybrid_kv.measure.accuracy.target_model import TargetLM

STRICT = "strict-match"
FLEXIBLE = "flexible-extract"


@dataclass(frozen=True)
class QuestionRecord:
    """A question of a run: correct, wrong (neither flag) or invalid.

    `correct_flexible` is a second opinion.

    `invalid`: the strict filter found no answer, or the engine rejected the request, and then
    `error` says why. The three hashes are lm-eval's: two runs are only comparable where they agree.
    `output_sha` is over the token ids.
    """

    doc_id: int
    doc_hash: str
    prompt_hash: str
    target_hash: str
    correct: bool
    correct_flexible: bool
    invalid: bool
    error: str | None
    n_tokens: int
    output_sha: str
    steps: int | None  # of gsm8k_synth only
    needs_latch: bool | None
    question_sha: str = ""  # of the question's own text, see `question_digest`
    n_verifications: int = 0  # steps that verified drafts, and …
    n_accepted: int = 0  # … drafts that were right; 0 where the engine tells totals alone


@dataclass(frozen=True)
class AccuracyResult:
    """A run: its settings (`params`), every question, and the engine's counters.

    `seconds` is time in the engine; `token_ids` of each record's answer are for who runs it.
    """

    task: str
    params: dict[str, Any]
    records: tuple[QuestionRecord, ...]
    num_prompt_tokens: int
    num_preemptions: int
    seconds: float
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_verifications: int = 0
    caches_prefixes: bool = False
    token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def n(self) -> int:
        return len(self.records)

    @property
    def accuracy(self) -> float:
        """Share of questions right under the strict filter, the one to gate on."""
        return _share(record.correct for record in self.records)

    @property
    def accuracy_flexible(self) -> float:
        return _share(record.correct_flexible for record in self.records)

    @property
    def invalid_rate(self) -> float:
        return _share(record.invalid for record in self.records)

    @property
    def num_output_tokens(self) -> int:
        return sum(record.n_tokens for record in self.records)

    @property
    def mean_tokens(self) -> float:
        return self.num_output_tokens / self.n

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second in the engine, prefill included in the time."""
        return self.num_output_tokens / self.seconds

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that came from the prefix cache; None without one."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.caches_prefixes else None

    @property
    def acceptance(self) -> float | None:
        """Share of the verified drafts that were right; None without drafts."""
        return (
            self.num_accepted_draft_tokens / self.num_draft_tokens
            if self.num_draft_tokens
            else None
        )

    @property
    def drafts(self) -> DraftCounts:
        """DraftCounts of all questions."""
        return DraftCounts(self.num_verifications, self.num_accepted_draft_tokens)

    def groups(self) -> dict[str, list[QuestionRecord]]:
        """Return all questions, and those by latch and by number of steps where these are known."""
        groups = {"all": list(self.records)}
        for name, is_latch in (("latch", True), ("self-contained", False)):
            groups[name] = [record for record in self.records if record.needs_latch is is_latch]
        for steps in sorted({record.steps for record in self.records if record.steps is not None}):
            groups[f"{steps} step{'s' * (steps > 1)}"] = [
                record for record in self.records if record.steps == steps
            ]
        return {name: records for name, records in groups.items() if records}

    def summary(self) -> dict[str, Any]:
        """Return everything but the questions, ready for JSON."""
        return {
            "task": self.task,
            "params": self.params,
            "n": self.n,
            "accuracy": self.accuracy,
            "accuracy_ci": wilson_interval(sum(record.correct for record in self.records), self.n),
            "accuracy_flexible": self.accuracy_flexible,
            "invalid_rate": self.invalid_rate,
            "groups": {
                name: {"n": len(records), "correct": sum(record.correct for record in records)}
                for name, records in self.groups().items()
            },
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "mean_tokens": self.mean_tokens,
            "num_preemptions": self.num_preemptions,
            "prefix_hit_rate": self.hit_rate,
            "draft_acceptance": self.acceptance,
            "acceptance_length": self.drafts.acceptance_length,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a proportion.

    Unlike the textbook's it is right near 0 and 1.
    """
    from scipy.stats import binomtest

    low, high = binomtest(successes, n).proportion_ci(method="wilson")
    return float(low), float(high)


def evaluate(
    model: str | Path | LLM | None = None,
    task: str = "gsm8k_synth",
    *,
    target: str | None = None,
    limit: int | None = 250,
    questions: Sequence[int] | None = None,
    seed: int = 0,
    gsm8k_dir: str | Path | None = None,
    progress: bool = True,
    mode: ChatMode = PLAIN,
    **engine_options: Any,
) -> AccuracyResult:
    """Run a task.

    Args:
        model: a checkpoint folder, an embedded guard model by name, or a ready engine; None: the
            first guard model.
        task: gsm8k_synth or gsm8k.
        target: another engine or a server's address, as for `hybrid-kv guard`, instead of ours;
            `model` is what it has loaded.
        limit: the number of questions; None takes all.
        questions: these by number, of the first `limit`, and no others.
        seed: of the documents (gsm8k_synth) or of the choice of shots (gsm8k; 0 gives lm-eval's own
            prompts).
        gsm8k_dir: train.jsonl and test.jsonl for task gsm8k; None takes the hub's.
        progress: show bars.
        mode: whether questions are a conversation, and answers begin with reasoning.
        engine_options: as for `LLM`.

    Raises:
        ConfigError: the task, the model or an option cannot be used.
        HybridKVError: the engine refused every question, or died.
    """
    check_task(task, gsm8k_dir, limit)
    import lm_eval
    from lm_eval.evaluator import evaluate as lm_eval_evaluate

    folder = embedded(model) if model is None or isinstance(model, str | Path) else None
    # The model first: an unusable one is found in seconds, a task from the hub may take minutes.
    lm = _lm(model, folder, target, progress, mode, engine_options)
    try:
        if mode.apply_chat_template:
            template_of(
                lm.tokenizer, lm.model_name if folder is None else Path(folder).name
            )  # or there is none
        loaded = load_task(task, seed, limit, gsm8k_dir)
        if mode.max_gen_toks is not None:
            loaded.config.generation_kwargs["max_gen_toks"] = mode.max_gen_toks
        with (
            one_thread() if folder in FOLDERS.values() else nullcontext(),
            quiet_lm_eval(),
            _bars(progress),
        ):
            # Not simple_evaluate: that adds 10 s (an index of tasks, a report on the machine) and
            # seeds global RNGs.
            which: dict[str, Any] = (
                {"limit": limit} if questions is None else {"samples": {task: sorted(questions)}}
            )
            which["apply_chat_template"] = mode.apply_chat_template
            results = lm_eval_evaluate(lm, {"tasks": {task: loaded}}, bootstrap_iters=0, **which)
    finally:
        lm.close()
    outputs = [output for repeats in lm.outputs.values() for output in repeats]
    if all(output.error is not None for output in outputs):
        raise HybridKVError(
            f"the engine refused all {len(outputs)} questions; the first: {outputs[0].error}"
        )
    params = {
        "model": lm.model_name if folder is None else Path(folder).name,
        "task": task,
        "seed": seed,
        **({"limit": limit} if questions is None else {"questions": sorted(questions)}),
        "num_fewshot": loaded.config.num_fewshot,
        "lm_eval": lm_eval.__version__,
        **mode.params,
        **({} if target is None else {"target": lm.model_name}),
        **{name: _without_folder(value) for name, value in engine_options.items()},
    }
    records = _records(results["samples"][task], lm, task, questions)
    return AccuracyResult(
        task=task,
        params=params,
        records=records,
        # Of the questions that ran: no token of a refused one could have come from the cache.
        num_prompt_tokens=sum(
            len(output.prompt_token_ids) for output in outputs if output.error is None
        ),
        num_preemptions=sum(output.num_preemptions for output in outputs),
        seconds=lm.seconds,
        num_cached_tokens=sum(output.cached_tokens for output in outputs),
        **lm.drafted(),
        caches_prefixes=lm.caches_prefixes,
        token_ids=tuple(
            tuple(_output_of(lm, task, record.doc_id, questions).token_ids) for record in records
        ),
    )


def _lm(
    model: str | Path | LLM | None,
    folder: str | Path | None,
    target: str | None,
    progress: bool,
    mode: ChatMode,
    engine_options: dict[str, Any],
) -> HybridKVLM | TargetLM:
    """Return the model in lm-eval's terms."""
    if target is None:
        from hybrid_kv.measure.accuracy.lm_eval_model import HybridKVLM

        llm = None if isinstance(model, str | Path) else model
        return HybridKVLM(
            folder,
            llm=llm,
            progress=progress,
            think_end_token=mode.think_end_token,
            **engine_options,
        )
    if folder is None or engine_options:
        option = next(iter(engine_options), "a ready engine")
        raise ConfigError(f"target {target}: {option} is for this engine alone; leave it out")
    from hybrid_kv.measure.accuracy.target_model import TargetLM

    return TargetLM(target, folder, mode)


def _without_folder(option: Any) -> Any:
    """Return a path's last part.

    Rows are published, and a path of this machine is private.
    """
    is_path = isinstance(option, Path) or (isinstance(option, str) and os.sep in option)
    return Path(option).name if is_path else option


def _bars(shown: bool) -> AbstractContextManager[Any]:
    # lm-eval draws a bar of its own which cannot be switched off.
    return nullcontext() if shown else redirect_stderr(io.StringIO())


def _records(
    samples: Sequence[dict[str, Any]],
    lm: HybridKVLM | TargetLM,
    task: str,
    questions: Sequence[int] | None,
) -> tuple[QuestionRecord, ...]:
    """Join lm-eval's samples, one per question and filter, with the engine's outputs."""
    by_filter: dict[str, dict[int, dict[str, Any]]] = {STRICT: {}, FLEXIBLE: {}}
    for sample in samples:
        by_filter[sample["filter"]][sample["doc_id"]] = sample
    records = []
    for doc_id, strict in sorted(by_filter[STRICT].items()):
        output = _output_of(lm, task, doc_id, questions)
        records.append(
            QuestionRecord(
                **{
                    name: strict[name]
                    for name in ("doc_id", "doc_hash", "prompt_hash", "target_hash")
                },
                correct=bool(strict["exact_match"]),
                correct_flexible=bool(by_filter[FLEXIBLE][doc_id]["exact_match"]),
                invalid=output.error is not None or strict["filtered_resps"][0] == NO_ANSWER,
                error=output.error,
                n_tokens=len(output.token_ids),
                output_sha=hashlib.sha256(json.dumps(output.token_ids).encode()).hexdigest(),
                **{name: strict["doc"].get(name) for name in ("steps", "needs_latch")},
                question_sha=question_digest(strict["doc"]["question"]),
                n_verifications=output.num_verifications,
                n_accepted=output.num_accepted_draft_tokens,
            )
        )
    return tuple(records)


def _output_of(
    lm: HybridKVLM | TargetLM, task: str, doc_id: int, questions: Sequence[int] | None
) -> Any:
    """Return the engine's output of a question.

    Where questions were chosen lm-eval's requests count them from 0, its samples have their own
    numbers.
    """
    place = doc_id if questions is None else sorted(questions).index(doc_id)
    return lm.outputs[task, place][0]


def question_digest(question: str) -> str:
    """Return a digest that a question has in every program that puts it."""
    return hashlib.sha256(question.strip().encode()).hexdigest()[:16]


def rows(result: AccuracyResult) -> list[Row]:
    """Return the run as rows of the results file.

    Without speed: `bench` measures that properly.
    """
    row = partial(Row, "accuracy", result.task, params=result.params, n=result.n)
    correct = (
        sum(r.correct for r in result.records),
        sum(r.correct_flexible for r in result.records),
    )
    shares = {
        "exact_match_strict": (correct[0], "higher"),
        "exact_match_flexible": (correct[1], "higher"),
        "invalid_rate": (sum(r.invalid for r in result.records), "lower"),
    }
    made = []
    for metric, (count, better) in shares.items():
        low, high = wilson_interval(count, result.n)
        made.append(row(metric, count / result.n, ci_low=low, ci_high=high, better=better))
    made.append(row("mean_output_tokens", result.mean_tokens, "tokens"))
    for metric, share in (
        ("prefix_hit_rate", result.hit_rate),
        ("draft_acceptance", result.acceptance),
    ):
        if share is not None:  # 0.0 is a finding
            made.append(row(metric, share, better="higher"))
    length = result.drafts.acceptance_length
    if length is not None:
        # Neither way is better: see `acceptance`.
        made.append(row("acceptance_length", length, "tokens", n=result.num_verifications))
    return made


def sample_lines(result: AccuracyResult) -> str:
    """Return a JSON object per question and line, with the run's `params` and `commit`."""
    source = provenance()
    run = {"params": result.params, "commit": source.commit + "-dirty" * source.dirty}
    return "".join(json.dumps({**asdict(record), **run}) + "\n" for record in result.records)


def write_samples(result: AccuracyResult, file: str | Path) -> None:
    """Write `sample_lines`; a name in .gz is compressed."""
    data = sample_lines(result).encode()
    # No time stamp inside: the same answers give the same bytes.
    write_whole(file, gzip.compress(data, mtime=0) if str(file).endswith(".gz") else data)


def table_of(title: str, *columns: str) -> tuple[Console, Table]:
    """Return a console and a table: texts in its first column, then numbers."""
    from rich.console import Console
    from rich.table import Column, Table

    right = (Column(name, justify="right") for name in columns)
    return Console(highlight=False, markup=False), Table(title, *right, box=None, pad_edge=False)


def print_result(result: AccuracyResult) -> None:
    """Print the table for people."""
    console, table = table_of(
        result.task, "questions", "strict", "95 % interval", "flexible", "invalid"
    )
    for name, records in result.groups().items():
        low, high = wilson_interval(sum(record.correct for record in records), len(records))
        table.add_row(
            name,
            str(len(records)),
            f"{_share(record.correct for record in records):.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{_share(record.correct_flexible for record in records):.1%}",
            f"{_share(record.invalid for record in records):.1%}",
        )
    console.print(table)
    console.print(
        f"{result.num_prompt_tokens:,} prompt and {result.num_output_tokens:,} answer tokens "
        f"({result.mean_tokens:.1f} per question), {result.num_preemptions} preemptions, "
        f"{result.seconds:.1f} s in the engine, {result.tokens_per_second:.1f} tokens/s",
        soft_wrap=True,
    )
    if result.hit_rate is not None:
        console.print(f"{result.hit_rate:.1%} of the prompt tokens came from the prefix cache")
    if result.acceptance is not None:
        console.print(
            f"{result.acceptance:.1%} of {result.num_draft_tokens:,} draft tokens were accepted"
        )
    length = result.drafts.acceptance_length
    if length is not None:
        console.print(f"acceptance length {length:.3f}: tokens per step with drafts")
    refused = [record for record in result.records if record.error is not None]
    if refused:
        console.print(
            f"{len(refused)} questions refused; the first: {refused[0].error}", soft_wrap=True
        )
