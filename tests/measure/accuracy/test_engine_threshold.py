"""Thresholds in the words of other engines: from real files, with the rate that they claim."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy.stats import norm

from accuracy import backtest
from hybrid_kv.measure.accuracy.engine_threshold import threshold_from_files
from hybrid_kv.measure.accuracy.noise import (
    Noise,
    noise_of,
    tensorrt_llm_theta,
    tensorrt_llm_threshold,
)
from tests.cli.run import refused
from tests.support.answers import call, record, write
from tests.support.foreign_answers import sgl_metrics, vllm_result

RIGHT = [1246, 1240, 1251, 1243, 1238, 1249, 1245, 1235, 1244, 1250, 1241, 1247]


def vllm_files(folder: Path, right: list[int] = RIGHT) -> list[Path]:
    return [
        vllm_result(folder / f"{place}.json", count, model="org/Model")
        for place, count in enumerate(right)
    ]


def test_the_limit_is_missed_as_often_as_claimed() -> None:
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(2000):
        scores = rng.normal(0.9, 0.01, 60)
        missed += int((scores[10:] < noise_of(scores[:10].tolist(), 10**6).limit(0.01)).sum())
    assert missed / 100_000 == pytest.approx(0.01, abs=0.001)


def test_a_threshold_lies_between_two_scores() -> None:
    noise = Noise(10, 0.9, 0.01, 200)
    assert noise.right_answers() == math.floor(200 * noise.limit()) == 174
    assert noise.threshold() == 173.5 / 200
    assert noise.loss() == pytest.approx(0.9 - 173.5 / 200 + norm.ppf(0.8) * 0.01)


def test_tensorrt_llms_own_numbers() -> None:
    # Their script prints, for sigma 50, alpha 0.05 and beta 0.2: 1,024 samples, theta 5.494,
    # threshold - 3.634.
    assert 100 * tensorrt_llm_theta(1024) == pytest.approx(5.494, abs=1e-3)
    assert 100 * tensorrt_llm_threshold(0, 1024) == pytest.approx(-3.634, abs=1e-3)


def test_vllms_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = call(capsys, "threshold", "--for", "vllm", *vllm_files(tmp_path))
    config = yaml.safe_load(printed)
    assert code == 0 and config == {
        "accuracy_threshold": 0.9432,
        "tolerance": 0.0111,
        "num_questions": 1319,
        "num_fewshot": 5,
    }
    # What passes there: `measured >= accuracy_threshold - tolerance`.
    limit = config["accuracy_threshold"] - config["tolerance"]
    assert all(count / 1319 >= limit for count in RIGHT) and 1230 / 1319 >= limit > 1229 / 1319
    assert "# gsm8k, 12 runs of 1,319 questions: mean 0.9432, sd 0.0037." in printed
    assert "at most 0.01 of runs; a loss of 1.4 points is seen with a chance of 80%" in printed


def test_sglangs_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for place, score in enumerate([0.96, 0.955, 0.97, 0.965, 0.96, 0.95, 0.965, 0.96, 0.97, 0.955]):
        (tmp_path / str(place)).mkdir()
        files.append(tmp_path / str(place) / "metrics.json")
        files[-1].write_text(json.dumps(sgl_metrics(200, score, timestamp=f"{place}")))
    code, printed, _ = call(capsys, "threshold", "--for", "sglang", *files)
    assert code == 0 and printed.splitlines()[2:] == [
        "gsm8k_score_threshold = 0.9375",
        "gsm8k_num_examples = 200",
    ]


def test_tensorrt_llms_lines_give_the_same_threshold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, _ = call(
        capsys, "threshold", "--for", "trtllm", *vllm_files(tmp_path), "--false-alarms", "0.02"
    )
    (entry,) = yaml.safe_load(printed)["Model"]
    assert code == 0 and (entry["accuracy"], entry["num_samples"], entry["alpha"]) == (
        94.32,
        1319,
        0.02,
    )
    theirs = tensorrt_llm_threshold(entry["accuracy"] / 100, 1319, entry["alpha"], entry["sigma"])
    assert theirs == pytest.approx(
        threshold_from_files([str(f) for f in vllm_files(tmp_path)], 0.02).threshold, abs=1e-4
    )
    assert (
        "# Of the defaults alpha 0.05, beta 0.2, sigma 50: threshold 91.12, theta 4.84." in printed
    )


def test_a_retry_is_no_second_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = vllm_files(tmp_path, RIGHT[:9])
    error = refused(capsys, "accuracy", "threshold", "--for", "vllm", *files, files[0])
    assert "9 different runs (1 of 10 files are copies or retries of another) are too few" in error
    code, printed, _ = call(
        capsys, "threshold", "--for", "vllm", *vllm_files(tmp_path), files[0], "--json"
    )
    made = json.loads(printed)
    assert (
        code == 0
        and (made["runs"], made["repeated"]) == (12, 1)
        and "1 more were copies" in made["lines"][0]
    )


def test_the_acceptance_length_goes_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for place in range(10):
        outcomes = ["right"] * (15 + place % 3) + ["wrong"] * (5 - place % 3)
        lines = [
            record(i, outcome, n_verifications=100, n_accepted=180 + place % 4)
            for i, outcome in enumerate(outcomes)
        ]
        files.append(
            write(
                tmp_path / f"{place}.jsonl", [{**line, "commit": f"{place:040x}"} for line in lines]
            )
        )
    code, printed, _ = call(capsys, "threshold", "--for", "sglang", *files)
    (line,) = [line for line in printed.splitlines() if "accept_length" in line]
    lengths = [2.80 + 0.01 * (place % 4) for place in range(10)]
    assert code == 0 and float(line.split(" = ")[1]) == pytest.approx(
        noise_of(lengths, 1).limit(), abs=1e-3
    )


def test_unequal_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = vllm_files(tmp_path)
    other = vllm_result(tmp_path / "other.json", 190, questions=200)
    given = ["accuracy", "threshold", "--for", "vllm", *files]
    assert "other.json 200 of gsm8k; a threshold is of equal runs" in refused(capsys, *given, other)
    chat = vllm_result(tmp_path / "chat.json", 1247, endpoint="chat", reasoning_effort="low")
    plain = [
        vllm_result(tmp_path / f"c{i}.json", count, model=None) for i, count in enumerate(RIGHT)
    ]
    assert "the prompts differ" in refused(capsys, *given[:4], *plain, chat)
    same = [vllm_result(tmp_path / f"s{i}.json", 1246, latency=i) for i in range(10)]
    assert "all 10 runs have the same score, so nothing tells" in refused(capsys, *given[:4], *same)
    assert "--for and files of runs go together" in refused(capsys, *given[:4])
    assert "--for and files of runs go together" in refused(
        capsys, "accuracy", "threshold", files[0]
    )


def test_every_published_series_has_the_claimed_rate_in_its_interval() -> None:
    results = backtest.backtest(backtest.read_series())
    assert (
        len(results) >= 15 and sum(one.series.runs for one in results if not one.series.like) > 650
    )
    assert [one.series.name for one in results if not one.holds] == []
    for one in results:
        if one.series.scores:
            assert len(one.series.every_score) == one.series.runs
            failed = sum(score <= (one.series.failed_at or 0) for score in one.series.every_score)
            # what the thread says of the threshold that was in use
            assert failed == one.series.failed


def test_a_rate_that_is_not_in_the_interval_is_seen() -> None:
    (series,) = [one for one in backtest.read_series() if "jax#1333" in one.source]
    (result,) = backtest.backtest([series])
    narrow = backtest.judge_series(series, Noise(61, 0.8602, 0.004, 200))
    assert result.holds and not narrow.holds and narrow.alarms == (5, 5)


def test_ten_of_the_published_runs_give_thresholds_that_hold() -> None:
    (series,) = [one for one in backtest.read_series() if "jax#1333" in one.source]
    assert backtest.rate_of_ten(series, draws=200) <= 0.01


def test_the_table_in_the_docs_is_the_commands() -> None:
    text = backtest.PAGE.read_text(encoding="utf-8")
    made = backtest.page_with(text, backtest.backtest(backtest.read_series()))
    assert made == text, "run: python -m accuracy.backtest"
    assert "TRT-LLM" in text
