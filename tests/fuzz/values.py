"""Values that a person, a broken download or another program may leave, and ways to put them where ours belong."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

INTEGERS = [0, 1, 2, 3, 7, 16, 64, 100, -1, -7, 255, 4096, 10**6, 10**9, 2**31, 2**63, 2**64, 10**30]
NUMBERS = ["0.5", "-0.0", "1e308", "1e-300", "nan", "inf", "-inf", "1_000", "0x10", "١", "1e9", " 1", "+1"]
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
    "True",
]
TEXTS += ["[bold]", "'\"", "=1+1", "../..", "<script>alert(1)</script>", "x" * 300, "9" * 5000]
TEXTS += [
    "2026-11-21",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "fp8",
    "float16",
    "int8",
    "cuda",
    "cpu",
]
TEXTS += ["FLASH_ATTN", "80GiB", "1KB", "sm_90"]
ODD: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 3.5, 1e308, 10**9, 10**18, 2**63, 2**64, -(2**31), 0.0, "", "x"]
ODD += ["1", "M", "*", "auto", "\ud800", "é", [], {}, [[]], [None], [0], {"a": 1}, {"": None}, math.nan, math.inf]
ODD += ["float64", "bfloat16", "int8", ["x"] * 50, "M" * 300, [1, "a", None], list(range(100))]


def argument(rng: random.Random) -> str:
    """Something that a shell can hand over as an argument."""
    kind = rng.randrange(4)
    if kind == 0:
        return str(rng.choice(INTEGERS))
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(TEXTS)
    return "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(1, 0x250)))) for _ in range(rng.randrange(12)))


def odd_json(rng: random.Random, document: Any) -> Any:
    """A copy with one to three values replaced, removed or added, anywhere."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            return _odd(rng)
        holder, key = rng.choice(places)
        change = rng.randrange(8)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            holder[rng.choice(TEXTS)] = _odd(rng)
        elif change == 2:
            holder[key] = [holder[key]]
        elif change == 3 and isinstance(holder[key], int):
            holder[key] = rng.choice(
                (-holder[key], holder[key] + 1, holder[key] * 2, float(holder[key]), str(holder[key]))
            )
        else:
            holder[key] = _odd(rng)
    return document


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD))


def _places(value: Any) -> Any:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def odd_bytes(rng: random.Random, data: bytes) -> bytes:
    """What a cut, a flipped bit or another program makes of a file."""
    change = rng.randrange(10)
    if change == 0:
        return data[: rng.randrange(len(data) + 1)]
    if change == 1:
        return rng.choice(
            (b"", b"\0", b"null", b"[]", b"{}", b'""', b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"\n")
        )
    if change == 2:
        return b"\xef\xbb\xbf" + data
    if change == 3:
        return data.replace(b"\n", b"\r\n")
    if change == 4:
        return data + rng.choice((b"x", b"\0" * 100, b"\n\n", data))
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20)) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def odd_file(rng: random.Random, document: Any) -> bytes:
    """A JSON file with odd values, or an odd file."""
    whole = json.dumps(odd_json(rng, document) if rng.random() < 0.8 else document).encode()
    return odd_bytes(rng, whole) if rng.random() < 0.25 else whole


def odd_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A checkpoint whose header, or whose weights, are not what they should be."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    change = rng.randrange(8)
    if change == 0:
        return (
            rng.choice((0, 1, size - 1, size + 1, len(data), 2**40, 2**63, 2**64 - 1)).to_bytes(8, "little") + data[8:]
        )
    if change == 1:
        return odd_bytes(rng, data)
    if change == 2:
        start = rng.randrange(max(1, len(body) - 64))
        body = body[:start] + rng.choice((b"\xff" * 64, b"\0" * 64, rng.randbytes(64))) + body[start + 64 :]
    elif change == 3:
        header = odd_bytes(rng, header)
    else:
        tensors = json.loads(header)
        name = rng.choice([name for name in tensors if name != "__metadata__"])
        if change == 4:
            tensors[name]["dtype"] = rng.choice(
                ("F32", "F16", "BF16", "I8", "U8", "I64", "BOOL", "F8_E4M3", "F64", "X", 1, None)
            )
        elif change == 5:
            tensors[rng.choice(("x", "", "é", name + ".weight", "mtp.x"))] = tensors.pop(name)
        else:
            tensors = odd_json(rng, tensors)
        header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + body


def odd_csv(rng: random.Random, rows: list[list[str]]) -> bytes:
    """Cells with odd texts, in half of the cases such as can be read; sometimes an odd file."""
    rows = copy.deepcopy(rows)
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 5, 20))):
            column, cell = _readable(rng)
            rng.choice(rows[1:])[rows[0].index(column)] = cell
        return plain_csv(rows)
    for _ in range(rng.choice((1, 1, 2, 5))):
        row = rng.choice(rows if rng.random() < 0.1 else rows[1:])
        change = rng.randrange(12)
        if change == 0:
            row.pop()
        elif change == 1:
            row.append("x")
        else:
            cell = rng.randrange(len(row)) if row else 0
            row[cell : cell + 1] = [_cell(rng)]
    text = "".join(",".join(_quoted(cell) for cell in row) + "\n" for row in rows)
    data = text.encode(errors="surrogateescape")
    return odd_bytes(rng, data) if rng.random() < 0.15 else data


def _readable(rng: random.Random) -> tuple[str, str]:
    """A column and a cell of its type that nobody expects."""
    kind = rng.randrange(4)
    if kind == 0:
        numbers = ("0", "-1", "1e308", "-1e-320", "1e-300", "0.0", "1", "100")
        return rng.choice(("value", "ci_low", "ci_high")), rng.choice(numbers)
    if kind == 1:
        params = {"model": "nano", "K": 3, "mode": "all", "limit": "0", "seconds": 1.5, "subject": "engine", "was": 2}
        receipt = {"checked_before": True, "checked_after": True, "max_error": 0.0}
        return "params", json.dumps(
            odd_json(rng, rng.choice((params, {**params, "receipt": receipt}, {"hit_rate": 0.5})))
        )
    if kind == 2:
        times = ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-01-01T00:00:00Z", "1969-12-31T23:59:59Z")
        return rng.choice((("time_utc", rng.choice(times)), ("n", rng.choice(("0", "-1", str(2**63), str(10**30))))))
    names = ("suite", "benchmark", "metric", "unit", "better", "verdict", "baseline_commit", "commit", "device")
    words = ("pass", "fail", "void", "guard", "answers", "compare", "accuracy", "kernels", "ns", "time ratio", "lower")
    cell = rng.choice((*words, argument(rng).replace("\n", " ").encode(errors="replace").decode()))
    return rng.choice((*names, "machine", "run_id", "triton")), cell


def _cell(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return json.dumps(
            odd_json(rng, {"receipt": {"checked_before": True, "checked_after": True, "max_error": 0.0}, "K": 3})
        )
    return argument(rng).replace("\n", " ")


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if set(cell) & set(',"\r') else cell


def plain_csv(rows: list[list[str]]) -> bytes:
    """The rows as they are."""
    return "".join(",".join(_quoted(cell) for cell in row) + "\n" for row in rows).encode()
