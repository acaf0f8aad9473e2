"""A whole run: records, files, rows, exit codes."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
from pathlib import Path

import pytest

from hybrid_kv.check.guard_model import FOLDER as GUARD_MODEL
from hybrid_kv.config import HybridKVError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.measure.accuracy import run, tasks
from hybrid_kv.measure.results import provenance, read_rows
from hybrid_kv.models.loader import load_tokenizer
from tests.cli import run as cli
from tests.measure.accuracy.lm import engine_model
from tests.support.answers import result_of
from tests.support.gsm8k import write_gsm8k

LIMIT = 6
ENGINE = {"max_num_seqs": 3, "max_model_len": 640, "device": "cpu"}
FIELDS = [
    "doc_id",
    "doc_hash",
    "prompt_hash",
    "target_hash",
    "correct",
    "correct_flexible",
    "invalid",
    "error",
]
FIELDS += [
    "n_tokens",
    "output_sha",
    "steps",
    "needs_latch",
    "question_sha",
    "n_verifications",
    "n_accepted",
]
FIELDS += ["params", "commit"]


@pytest.fixture(scope="module")
def result() -> run.AccuracyResult:
    return run.evaluate(limit=LIMIT, progress=False, **ENGINE)


def test_same_scores_as_simple_evaluate(result: run.AccuracyResult) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    lm = engine_model(GUARD_MODEL, progress=False, **ENGINE)
    manager = TaskManager(include_path=Path(tasks.__file__).parent, include_defaults=False)
    theirs = simple_evaluate(
        lm, tasks=["gsm8k_synth"], task_manager=manager, limit=LIMIT, bootstrap_iters=0
    )
    scores = theirs["results"]["gsm8k_synth"]
    assert scores["exact_match,strict-match"] == pytest.approx(result.accuracy)
    assert scores["exact_match,flexible-extract"] == pytest.approx(result.accuracy_flexible)
    strict = [
        sample for sample in theirs["samples"]["gsm8k_synth"] if sample["filter"] == "strict-match"
    ]
    for sample, record in zip(strict, result.records, strict=True):
        for name in ("doc_id", "doc_hash", "prompt_hash", "target_hash"):
            assert sample[name] == getattr(record, name)
        tokens = lm.outputs["gsm8k_synth", record.doc_id][0].token_ids
        assert record.n_tokens == len(tokens)
        assert record.output_sha == hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def test_records(result: run.AccuracyResult) -> None:
    assert [record.doc_id for record in result.records] == list(range(LIMIT))
    assert len({record.prompt_hash for record in result.records}) == LIMIT
    assert [record.needs_latch for record in result.records] == [True, False] * (LIMIT // 2)
    assert result.num_prompt_tokens > 0 and result.seconds > 0
    groups = result.groups()
    assert len(groups["latch"]) + len(groups["self-contained"]) == len(groups["all"]) == LIMIT
    assert sum(len(records) for name, records in groups.items() if "step" in name) == LIMIT
    assert result.params | ENGINE == result.params


def test_preemptions_change_no_answer(result: run.AccuracyResult) -> None:
    small = run.evaluate(limit=LIMIT, progress=False, **ENGINE, num_blocks=13)
    assert small.num_preemptions > 0
    assert small.records == result.records


def test_refused_questions_are_invalid_not_wrong(result: run.AccuracyResult) -> None:
    task, tokenizer = tasks.load_task("gsm8k_synth", limit=LIMIT), load_tokenizer(GUARD_MODEL)
    lengths = [len(tokenizer.encode(task.fewshot_context(doc, 5))) for doc in task.test_docs()]
    limit = sorted(lengths)[LIMIT // 2]
    partly = run.evaluate(limit=LIMIT, progress=False, **ENGINE | {"max_model_len": limit})
    refused = [record for record in partly.records if record.error is not None]
    assert [record.doc_id for record in refused] == [i for i, n in enumerate(lengths) if n >= limit]
    assert all(record.invalid and not record.correct and record.n_tokens == 0 for record in refused)
    assert partly.invalid_rate >= len(refused) / LIMIT
    with pytest.raises(HybridKVError, match=r"refused all 6 questions.*max_model_len is 16"):
        run.evaluate(limit=LIMIT, progress=False, **ENGINE | {"max_model_len": 16})


def test_averages_and_rows() -> None:
    made = result_of(["right", "flexible", "wrong", "wrong"])
    longer = dataclasses.replace(made.records[3], n_tokens=11)
    made = dataclasses.replace(made, records=(*made.records[:3], longer), seconds=2.0)
    assert (made.accuracy, made.accuracy_flexible, made.invalid_rate) == (0.25, 0.5, 0.25)
    assert (made.mean_tokens, made.tokens_per_second) == (8.0, 16.0)
    assert list(made.groups()) == ["all"]
    rows = {row.metric: row for row in run.rows(made)}
    assert {name: row.value for name, row in rows.items()} == {
        "exact_match_strict": 0.25,
        "exact_match_flexible": 0.5,
        "invalid_rate": 0.25,
        "mean_output_tokens": 8.0,
    }
    assert {row.n for row in rows.values()} == {4}
    assert rows["invalid_rate"].better == "lower" and rows["exact_match_strict"].better == "higher"
    assert (
        rows["exact_match_strict"].ci_low,
        rows["exact_match_strict"].ci_high,
    ) == run.wilson_interval(1, 4)


@pytest.mark.parametrize("cached", [0, 25])
@pytest.mark.parametrize("caches", [False, True])
def test_a_rate_of_zero_is_reported_and_none_is_not(
    caches: bool, cached: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cached *= caches
    own = {"num_cached_tokens": cached, "num_draft_tokens": 50, "caches_prefixes": caches}
    made = dataclasses.replace(result_of(["wrong"]), **own)
    rows = {row.metric: row.value for row in run.rows(made)}
    run.print_result(made)
    printed = capsys.readouterr().out
    assert made.hit_rate == rows.get("prefix_hit_rate") == (cached / 100 if caches else None)
    assert (
        f"{cached / 100:.1%} of the prompt tokens came from the prefix cache" in printed
    ) == caches
    assert made.summary()["draft_acceptance"] == rows["draft_acceptance"] == 0.0
    assert "0.0% of 50 draft tokens were accepted" in printed


def test_an_engine_says_whether_it_caches(result: run.AccuracyResult) -> None:
    assert result.hit_rate is None
    caching = run.evaluate(limit=2, progress=False, **ENGINE, mamba_cache_mode="all")
    assert caching.hit_rate is not None
    assert caching.records == result.records[:2]


def test_wilson_interval() -> None:
    low, high = run.wilson_interval(81, 263)  # Newcombe 1998, table I, method 3
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert run.wilson_interval(0, 20)[0] == 0 and math.isclose(
        run.wilson_interval(0, 20)[1], 0.1611, abs_tol=1e-4
    )
    assert run.wilson_interval(20, 20)[1] == 1
    # Where the ends are only nearly 0 and 1 in floating point, the interval would not hold its own
    # value.
    assert all(
        run.wilson_interval(0, n)[0] == 0 and run.wilson_interval(n, n)[1] == 1
        for n in range(1, 600)
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_samples_file(
    result: run.AccuracyResult, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dataclasses.replace(provenance(), commit="a" * 40, dirty=name == "a.jsonl")
    monkeypatch.setattr("hybrid_kv.measure.accuracy.run.provenance", lambda: source)
    run.write_samples(result, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert not name.endswith("gz") or data[4:8] == bytes(4)  # no time stamp
    run.write_samples(result, tmp_path / name)
    assert (tmp_path / name).read_bytes() == data  # replaced, byte for byte
    assert [file.name for file in tmp_path.iterdir()] == [name]
    lines = [
        json.loads(line)
        for line in (gzip.decompress(data) if name.endswith("gz") else data).splitlines()
    ]
    assert [list(line) for line in lines] == [FIELDS] * LIMIT
    for line, expected in zip(lines, result.records, strict=True):
        commit = "a" * 40 + "-dirty" * (name == "a.jsonl")
        assert line == {**dataclasses.asdict(expected), "params": result.params, "commit": commit}


def test_rows_do_not_say_where_a_folder_lies(tmp_path: Path) -> None:
    options = {**ENGINE, "mamba_cache_mode": "all", "kv_offload_folder": str(tmp_path / "cold")}
    offloading = run.evaluate(str(GUARD_MODEL), limit=1, progress=False, **options)
    assert (offloading.params["kv_offload_folder"], offloading.params["model"]) == (
        "cold",
        "guard_model",
    )
    assert offloading.params | ENGINE == offloading.params
    assert not any(str(tmp_path) in row.params_json for row in run.rows(offloading))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, samples, summary = (
        tmp_path / "r" / "accuracy.csv",
        tmp_path / "s" / "a.jsonl.gz",
        tmp_path / "a.json",
    )
    arguments = ["accuracy", "--limit", "2", "--max-num-seqs", "2", "--results", str(out.parent)]
    for _ in range(2):
        code, printed, _ = cli.run(
            capsys, *arguments, "--samples", samples, "--out", summary, "--device", "cpu"
        )
        assert code == 0
    assert "self-contained" in printed and "preemptions" in printed
    frame = read_rows(out)
    assert list(frame["metric"]) == [row for row in frame["metric"][:4]] * 2
    assert set(frame["n"]) == {2}
    assert json.loads(frame["params"][0])["max_num_seqs"] == 2
    assert json.loads(summary.read_text())["n"] == 2
    assert len(gzip.decompress(samples.read_bytes()).splitlines()) == 2


def test_gsm8k_runs_offline(tmp_path: Path) -> None:
    options = {
        "gsm8k_dir": write_gsm8k(tmp_path),
        "limit": 3,
        "progress": False,
        "max_num_seqs": 3,
        "device": "cpu",
    }
    result = run.evaluate(task="gsm8k", **options)
    assert result.n == 3
    assert all(
        record.error is None and record.n_tokens > 0 and record.steps is None
        for record in result.records
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all does not exist"),
        # found before a model is loaded
        (["--task", "gsm9k", "--model", "/nowhere"], "'gsm9k' is unknown"),
        (["--task", "gsm8k", "--gsm8k-dir", "/nowhere"], "/nowhere/train.jsonl: No such file"),
        (["--limit", "0"], "Invalid value for '--limit'"),
        (["--attention-backend", "NOPE"], "NOPE"),
        (["--results", "{file}/a"], "cannot be written"),
        (["--samples", "{file}/a.jsonl"], "cannot be written"),
        (["--out", "{folder}"], "is a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        LLM, "generate", lambda *_, **__: pytest.fail("work was done before the error was found")
    )
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    places = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    assert message in cli.refused(
        capsys, "accuracy", *(argument.format(**places) for argument in arguments)
    )
    assert not (tmp_path / "results" / "accuracy.csv").exists()
