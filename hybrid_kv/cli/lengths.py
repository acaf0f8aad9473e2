"""Prompt and output lengths of requests, from a file or a distribution."""

from __future__ import annotations

import csv
import io
import json
import re
from math import log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_kv.errors import ConfigError
from hybrid_kv.files import read_text

Ints = npt.NDArray[np.int64]

NUM_DRAWN = 10_000
_COLUMNS = ("prompt_tokens", "output_tokens")
_LOGNORMAL = re.compile(r"lognormal:prompt=(\d{1,9})/(\d{1,9}),output=(\d{1,9})/(\d{1,9})")
_MOST = 2**31 - 1  # tokens; no model's positions come near


def read_lengths(text: str) -> tuple[Ints, Ints]:
    """Return the prompt and output tokens of each request, [N] and [N].

    `lognormal:prompt=MEAN/P99,output=MEAN/P99` stands for 10,000 requests whose lengths are the
    quantiles of two lognormal distributions, each shuffled with a fixed seed. All else is a .csv
    with the columns prompt_tokens and output_tokens, or a .jsonl with these keys on each line.

    Raises:
        ConfigError: neither, or an invalid length.
        OSError: the file cannot be read.
    """
    if text.startswith("lognormal:"):
        return _drawn_lengths(text)
    file = Path(text)
    if file.suffix not in (".csv", ".jsonl"):
        raise ConfigError(
            f"--requests {text[:80]!r} is neither a .csv or .jsonl file nor lognormal:…; name one"
        )
    lines = io.StringIO(read_text(file).removeprefix("\ufeff"), newline="")
    try:
        rows = csv.DictReader(lines) if file.suffix == ".csv" else map(_json_row, lines)
        pairs = [
            [_length(file, i, row, name) for name in _COLUMNS]
            for i, row in enumerate(rows, 1)
            if row
        ]
    except csv.Error as error:
        raise ConfigError(
            f"--requests {text[:80]!r} cannot be read ({error}); write it as a CSV"
        ) from None
    if not pairs:
        raise ConfigError(f"{file} has no requests; write at least one")
    prompts, outputs = np.array(pairs, dtype=np.int64).T
    return prompts, outputs


def _drawn_lengths(text: str) -> tuple[Ints, Ints]:
    """Return the lengths that `lognormal:…` stands for."""
    match = _LOGNORMAL.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--requests {text[:80]!r} can't be read; write "
            "lognormal:prompt=MEAN/P99,output=MEAN/P99 in whole tokens, as in "
            "lognormal:prompt=1000/8000,output=200/1000"
        )
    mean, p99, output_mean, output_p99 = map(int, match.groups())
    shuffle = np.random.default_rng(0).permutation
    prompts = shuffle(_quantiles("prompt", mean, p99))
    return prompts, shuffle(_quantiles("output", output_mean, output_p99))


def _quantiles(name: str, mean: int, p99: int) -> Ints:
    """Return the lengths at equally spaced quantiles of a lognormal distribution.

    Its mean is `exp(m + s^2 / 2)` and its 99th percentile `exp(m + z s)`, which gives s:
    `s^2 / 2 - z s + ln(p99 / mean) = 0`.
    """
    z = NormalDist().inv_cdf(0.99)
    square = z * z - 2 * log(p99 / mean) if 0 < mean <= p99 else -1.0
    if square < 0:
        raise ConfigError(
            f"--requests: {name}={mean}/{p99} is not a lognormal distribution: a 99th percentile "
            "is 1 to 14.9 times the mean; correct them, or give the lengths in a file"
        )
    sigma = z - sqrt(square)
    places = [NormalDist().inv_cdf((i + 0.5) / NUM_DRAWN) for i in range(NUM_DRAWN)]
    return np.maximum(
        1, np.rint(mean * np.exp(sigma * np.array(places) - sigma * sigma / 2))
    ).astype(np.int64)


def _json_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line) if line.strip() else {}
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ConfigError(
            f"--requests: {line[:40]!r} is not a JSON object with {' and '.join(_COLUMNS)}"
        )
    return row


def _length(file: Path, number: int, row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not re.fullmatch(r"\s*\d{1,10}\s*", text) or not 1 <= int(text) <= _MOST:
        raise ConfigError(
            f"{file}, request {number}: {name}={str(value)[:40]!r} must be an integer "
            f"from 1 to {_MOST}"
        )
    return int(text)
