"""Lengths of requests are read as written, or rejected in one line with the place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybrid_kv.cli.lengths import read_lengths
from hybrid_kv.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt_tokens,output_tokens\n100,20\n7, 3 \n"),
        ("b.csv", "when,output_tokens,prompt_tokens\nx,20,100\ny,3,7\n"),
        (
            "c.jsonl",
            (
                '{"prompt_tokens": 100, "output_tokens": 20}\n\n{"output_tokens": 3, '
                '"prompt_tokens": 7, "x": 1}\n'
            ),
        ),
    ],
)
def test_a_file_has_a_request_in_each_row(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    prompts, outputs = read_lengths(str(tmp_path / name))
    assert (prompts.tolist(), outputs.tolist()) == ([100, 7], [20, 3])


def test_a_lognormal_distribution_has_the_mean_and_the_given_percentile() -> None:
    prompts, outputs = read_lengths("lognormal:prompt=1000/8000,output=200/1000")
    for lengths, mean, p99 in ((prompts, 1000, 8000), (outputs, 200, 1000)):
        assert len(lengths) == 10_000
        assert lengths.min() >= 1
        assert lengths.mean() == pytest.approx(mean, rel=0.01)
        assert np.quantile(lengths, 0.99) == pytest.approx(p99, rel=0.01)
    # Neither is sorted, and one says nothing of the other.
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.03
    assert abs(np.corrcoef(prompts, np.arange(10_000))[0, 1]) < 0.03


def test_equal_mean_and_percentile_are_one_length() -> None:
    prompts, outputs = read_lengths("lognormal:prompt=500/500,output=1/1")
    assert set(prompts.tolist()) == {500}
    assert set(outputs.tolist()) == {1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lognormal:prompt=1000,output=200",
            r"write lognormal:prompt=MEAN/P99,output=MEAN/P99 in whole tokens",
        ),
        (
            "lognormal:prompt=1000/900,output=200/300",
            "prompt=1000/900 is not a lognormal distribution",
        ),
        ("lognormal:prompt=10/20,output=10/150", "output=10/150 is not a lognormal distribution"),
        ("lognormal:prompt=0/0,output=1/1", "prompt=0/0 is not a lognormal distribution"),
    ],
)
def test_neither_a_distribution_nor_a_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_lengths(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,output\n1,2\n", "a.csv, request 1: prompt_tokens='None' must be"),
        ("a.csv", "", "a.csv has no requests"),
        (
            "a.csv",
            "prompt_tokens,output_tokens\n5,6\n7,0\n",
            "request 2: output_tokens='0' must be an integer from 1",
        ),
        (
            "a.csv",
            "prompt_tokens,output_tokens\n1e3,6\n",
            "a.csv, request 1: prompt_tokens='1e3' must be",
        ),
        (
            "a.jsonl",
            '{"prompt_tokens": 5, "output_tokens": true}',
            "request 1: output_tokens='True' must be",
        ),
        ("a.jsonl", '{"prompt_tokens": 5, "output_tokens": 6}\n[1]\n', "is not a JSON object"),
        ("a.jsonl", '{"prompt_tokens": 5,', "is not a JSON object with"),
        (
            "a.jsonl",
            '{"prompt_tokens": 9999999999, "output_tokens": 6}',
            "request 1: prompt_tokens='9999999999'",
        ),
        ("a.csv", b"\xff\xfe\x00", "write it as UTF-8 text"),
    ],
)
def test_a_file_that_is_wrong_says_where(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        read_lengths(str(tmp_path / name))
