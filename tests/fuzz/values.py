"""Values that people, broken downloads or other programs leave, and ways to plant them."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import random
from collections.abc import Iterator
from typing import Any

INTEGERS = [
    0,
    1,
    2,
    3,
    7,
    16,
    64,
    100,
    -1,
    -7,
    255,
    4096,
    10**6,
    10**9,
    2**31,
    2**63,
    2**64,
    10**30,
    -(2**63) - 1,
]
NUMBERS = [
    "0.5",
    "-0.0",
    "1e308",
    "1e-300",
    "nan",
    "inf",
    "-inf",
    "1_000",
    "0x10",
    "١",
    "1e9",
    " 1",
    "+1",
]
TEXTS = [
    "",
    " ",
    "x",
    "auto",
    "none",
    "a,b",
    "é",
    "2 × 3",
    "𝕏",
    "\udcff",
    "a\nb",
    "-",
    "--",
    "%s%n",
    "{0}",
    "~",
]
TEXTS += [
    "[bold]",
    "'\"",
    "=1+1",
    "../..",
    "<script>alert(1)</script>",
    "x" * 300,
    "9" * 5000,
    "2026-11-21",
    "fp8",
]
TEXTS += ["[/red]", "[link=x]", "\x1b[2J"]
TEXTS += [
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "float16",
    "cuda",
    "cpu",
    "FLASH_ATTN",
    "80GiB",
]
PLACES = [
    "new.json",
    "new/deep/er.json",
    ".",
    "taken.txt",
    "taken.txt/x",
    "results",
    "rows.csv",
    "/dev/full",
    "~",
    "/",
]
PLACES += [
    "/dev/null",
    "/dev/null/x",
    "/proc/x",
    "é.json",
    "\udcff.json",
    "a b.json",
    "-",
    "new.jsonl.gz",
    "",
]
PLACES += ["n" * 300]
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    3.5,
    1e308,
    10**9,
    10**18,
    2**63,
    2**64,
    -(2**31),
    0.0,
    "",
    "x",
]
ODD += [
    "1",
    "M",
    "*",
    "auto",
    "\ud800",
    "é",
    [],
    {},
    [[]],
    [None],
    [0],
    {"a": 1},
    {"": None},
    math.nan,
    math.inf,
]
ODD += [-(2**63) - 1, 10**30, 10**400, "[/red]", "\x1b[2J", "x" * 100_000]
ODD += ["float64", "bfloat16", "int8", ["x"] * 50, "M" * 300, [1, "a", None], list(range(100))]
FILES = [
    b"",
    b"\0",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b"\n",
]
RECEIPT = {"checked_before": True, "checked_after": True, "max_error": 0.0}
PARAMS = {
    "model": "nano",
    "K": 3,
    "mode": "all",
    "limit": "0",
    "seconds": 1.5,
    "was": 2,
    "receipt": RECEIPT,
}
FLOATS = ["0", "-1", "1e308", "-1e-320", "1e-300", "0.0", "1", "100"]
NAMES = (
    "suite",
    "benchmark",
    "metric",
    "unit",
    "better",
    "verdict",
    "commit",
    "device",
    "machine",
    "run_id",
    "triton",
)
WORDS = [
    "pass",
    "fail",
    "void",
    "guard",
    "answers",
    "compare",
    "accuracy",
    "kernels",
    "ns",
    "lower",
]
# By column of a row of results: rare cells of its type.
CELLS: dict[str, list[str]] = {
    **{name: FLOATS for name in ("value", "ci_low", "ci_high")},
    **{name: WORDS for name in NAMES},
    "time_utc": [
        f"{day}Z" for day in ("0001-01-01T00:00:00", "9999-12-31T23:59:59", "1969-12-31T23:59:59")
    ],
    "n": ["0", "-1", str(2**63), str(10**30)],
}


def argument(rng: random.Random) -> str:
    """Something that a shell can pass as an argument."""
    letters = "".join(
        chr(rng.choice((rng.randrange(32, 127), rng.randrange(1, 600))))
        for _ in range(rng.randrange(9))
    )
    return rng.choice((str(rng.choice(INTEGERS)), rng.choice(NUMBERS), rng.choice(TEXTS), letters))


def odd_json(rng: random.Random, document: Any) -> Any:
    """A copy with one to three values replaced, removed or added, anywhere."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        odd = copy.deepcopy(rng.choice(ODD))
        if not (places := list(_places(document))):
            return odd
        holder, key = rng.choice(places)
        change = rng.randrange(8)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            holder[rng.choice(TEXTS)] = odd
        elif change == 2:
            holder[key] = [holder[key]]
        elif change == 3 and isinstance(old := holder[key], int):
            holder[key] = rng.choice((-old, old + 1, old * 2, float(str(int(old))), str(old)))
        else:
            holder[key] = odd
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from _places(value[key])


def odd_bytes(rng: random.Random, data: bytes) -> bytes:
    """A file after a cut, a flipped bit or another program."""
    flipped = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20)) if flipped else 0):
        flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    whole = [
        b"\xef\xbb\xbf" + data,
        data.replace(b"\n", b"\r\n"),
        data + b"x",
        data + b"\0" * 100,
        data + data,
    ]
    return rng.choice(
        [data[: rng.randrange(len(data) + 1)], rng.choice(FILES), *whole, *[bytes(flipped)] * 5]
    )


def odd_file(rng: random.Random, document: Any) -> bytes:
    """A JSON file with odd values, or an odd file."""
    whole = json.dumps(odd_json(rng, document) if rng.randrange(5) else document).encode()
    return whole if rng.randrange(4) else odd_bytes(rng, whole)


def odd_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A checkpoint with an odd header, or odd weights."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    change = rng.randrange(8)
    if change == 0:
        sizes = (0, 1, size - 1, size + 1, len(data), 2**40, 2**63, 2**64 - 1)
        return rng.choice(sizes).to_bytes(8, "little") + data[8:]
    if change == 1:
        return odd_bytes(rng, data)
    if change == 2:
        start = rng.randrange(max(1, len(body) - 64))
        body = (
            body[:start]
            + rng.choice((b"\xff" * 64, b"\0" * 64, rng.randbytes(64)))
            + body[start + 64 :]
        )
    elif change == 3:
        header = odd_bytes(rng, header)
    else:
        tensors = json.loads(header)
        name = rng.choice([name for name in tensors if name != "__metadata__"])
        if change == 4:
            tensors[name]["dtype"] = rng.choice(
                ("F32", "BF16", "I8", "I64", "BOOL", "F8_E4M3", "F64", "X", None)
            )
        elif change == 5:
            tensors[rng.choice(("x", "", "é", name + ".weight", "mtp.x"))] = tensors.pop(name)
        else:
            tensors = odd_json(rng, tensors)
        header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + body


def odd_csv(rng: random.Random, rows: list[list[str]]) -> bytes:
    """Rows with odd cells, half of the time such as can be read; sometimes an odd file."""
    header, *rows = copy.deepcopy(rows)
    readable = rng.random() < 0.5
    for _ in range(rng.choice((1, 2, 5, 20))):
        row, cell = rng.choice(rows), argument(rng).replace("\n", " ")
        if readable:
            column = rng.choice(("params", *CELLS))
            params = json.dumps(odd_json(rng, PARAMS))
            row[header.index(column)] = params if column == "params" else rng.choice(CELLS[column])
        else:
            row[rng.randrange(len(row) + 1) :] = [cell] * rng.randrange(3)
    data = plain_csv([header, *rows])
    return odd_bytes(rng, data) if not readable and rng.random() < 0.3 else data


def plain_csv(rows: list[list[str]]) -> bytes:
    """The rows as they are."""
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode(errors="surrogateescape")
