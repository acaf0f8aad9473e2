"""Texts that want to be more: HTML, scripts, links, templates, Markdown, names of objects."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from hybrid_kv.measure.dashboard.data import Results, prepare
from hybrid_kv.measure.results import COLUMNS
from tests.measure.dashboard.kinds import everything, swarms
from tests.measure.dashboard.rows import history

EVIL = "https://evil.example/"
PAYLOADS = (
    "<script>pwned=1</script>",
    "</script><script>pwned=1</script>",
    "<img src=x onerror=pwned=1>",
    '"><img src=x onerror=pwned=1>',
    "'><svg onload=pwned=1>",
    f'<a href="{EVIL}">x</a>',
    f"&lt;a href='{EVIL}'&gt;x&lt;/a&gt;",
    f'<base href="{EVIL}">',
    '" onmouseover="pwned=1',
    "' autofocus onfocus='pwned=1",
    "<!-- x",
    "--><img src=x onerror=pwned=1>",
    "</textarea></title></head>",
    EVIL,
    "www.evil.example",
    f"[x]({EVIL})",
    "@everyone",
    "evil/repository#1 GH-1 #1",
    f"a | {EVIL} | @everyone",
    "a \\| b \\",
    "`x` ``y",
    "a\n\n# b",
    "__proto__",
    "\u202eevil",
    "w" * 300,
    "\x00\x07\x1b[31m\x7f\x85",
    "漢字🙂e\u0301\u200b\u2028",
)

# Those of a group may be hostile at once: only their texts are shown, none decides what is drawn.
GROUPS = [["machine", "device"], ["unit"], ["metric"], ["benchmark"], ["suite"], ["params"]]
GROUPS += [["commit", "baseline_commit", "run_id", "python", "torch", "triton"]]


def hostile_rows(*columns: str) -> list[dict[str, Any]]:
    """Return rows of every kind with a payload in these columns, and a step for each payload."""
    rows = [*everything(), *swarms()]
    for index, one in enumerate(rows):
        payload = PAYLOADS[index % len(PAYLOADS)]
        for name in columns:
            one[name] = (
                with_payload(one["params"], payload) if name == "params" else one[name] + payload
            )
    for index, payload in enumerate(PAYLOADS):
        texts = {
            name: with_payload("{}", payload) if name == "params" else payload for name in columns
        }
        same = {
            "suite": "guard",
            "benchmark": f"series {index}",
            "verdict": "fail",
            "unit": "blocks",
            "metric": "held",
        }
        rows += [{**one, **texts} for one in history([1.0, 2.0], **same)]
    return rows


def with_payload(params: str, payload: str) -> str:
    """Params with the payload in each of their texts, and as a name and a value of their own."""
    found = json.loads(params)
    texts = {name: value + payload for name, value in found.items() if isinstance(value, str)}
    return json.dumps({**found, **texts, "limit": payload, payload: payload})


def results_of(rows: list[dict[str, Any]]) -> Results:
    """Rows as the page gets them, past the reader of files: the page trusts no reader."""
    return Results(
        prepare(pd.DataFrame(rows, columns=list(COLUMNS)).fillna({"verdict": ""})),
        ["made.csv"],
        [],
        len(rows),
    )
