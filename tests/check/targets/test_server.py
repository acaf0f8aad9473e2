from __future__ import annotations

import inspect
import json
import os
import random
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from hybrid_kv.check.targets import ours, process, serve, server
from hybrid_kv.check.targets.dialects import Completions, Dialect, LlamaCpp, SGLang
from hybrid_kv.check.targets.kinds import kind_of
from hybrid_kv.check.targets.target import Ask, TargetError
from hybrid_kv.config import ConfigError
from tests.check.targets import hostile
from tests.fuzz import values

PROMPT = tuple((i * 7) % 90 + 1 for i in range(120))


GUARD = f"""
import ctypes, signal, subprocess, sys
{inspect.getsource(process.end_with_parent)}
waiting = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
server = subprocess.Popen(waiting, stdin=0, preexec_fn=end_with_parent)
print(server.pid, flush=True)
server.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_server_ends_with_a_guard_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GUARD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as guard:
        server = os.pidfd_open(int(guard.stdout.readline()))
        guard.kill()
        guard.wait()
        # This end of the pipe that it reads from is still open: nothing else ends it.
        assert select.select([server], [], [], 60)[0], "the server is still there"
        os.close(server)


@pytest.fixture(scope="module")
def served(folder: str) -> Iterator[serve.Served]:
    """It looks as if it could do little; what ours promises is used all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve.ServerTarget, "_found_out", lambda self, url: ["batch", "abort"])
        target = serve.Served(folder, {"prefix": "align"})
    yield target
    target.close()


def test_over_http_answers_are_those_of_the_engine(served: serve.Served, folder: str) -> None:
    target = ours.Ours(folder, {"prefix": "align"})
    requests = [
        Ask(PROMPT),
        Ask(PROMPT[:9], max_tokens=3, n=2),
        Ask(PROMPT[:50], temperature=1.0, seed=5),
    ]
    tokens = [(one.token_ids, one.others) for one in served.ask(requests)]
    greedy = [(one.token_ids, one.others) for one in target.ask(requests)]
    assert tokens[:2] == greedy[:2] and len(tokens[2][0]) == 12


def test_what_it_can_do_is_promised_or_found_out(served: serve.Served) -> None:
    attached = kind_of(served.url + "/v1").start("", {})
    assert (
        served.can == serve.PROMISED | {"batch", "abort"} == attached.can | {"seed in all settings"}
    )
    assert attached.longest == 2048
    assert attached.ask([Ask(PROMPT)])[0].token_ids == served.ask([Ask(PROMPT)])[0].token_ids


def test_aborts_preemptions_and_resets_reach_the_engine(served: serve.Served) -> None:
    served.reset()
    (whole,) = served.ask([Ask(PROMPT)])
    (cut,) = served.ask([Ask(PROMPT, abort_after=3)])
    assert cut.token_ids == whole.token_ids[:3]
    before = served.counters()
    (again,) = served.ask([Ask(PROMPT)], preempt_every=4)
    after = served.counters()
    assert again.token_ids == whole.token_ids
    assert after["preemptions"] > before["preemptions"] and after["hits"] > before["hits"]
    served.reset()
    assert served.ask([Ask(PROMPT)])[0].cached_tokens == 0


def test_a_request_that_is_refused_is_an_error_of_its_own(served: serve.Served) -> None:
    long, short = served.ask([Ask((1,) * 3000), Ask((1,))])
    assert long.error.startswith("HTTP 400") and len(short.token_ids) == 12


def test_an_error_in_the_middle_of_an_answer_is_one() -> None:
    events = (
        b'data: {"choices": [{"index": 0, "token_ids": [5, 6]}]}\n\ndata: {"error": '
        b'"it has stopped"}\n\n'
    )
    attached = kind_of(hostile.serve(hostile.Case({"stream": hostile.says(events)}))).start("", {})
    (answer,) = attached.ask([Ask(PROMPT, abort_after=9)])
    assert (
        answer.token_ids == (5, 6)
        and answer.error == 'an event without token ids: {"error": "it has stopped"}'
    )


def test_a_server_that_is_gone_is_a_finding(served: serve.Served) -> None:
    attached = kind_of(served.url).start("", {})
    attached.url = "http://127.0.0.1:9"
    for call in (lambda: attached.ask([Ask(PROMPT)]), attached.reset, attached.counters):
        with pytest.raises(TargetError, match="does not answer"):
            call()


# What other servers say, by their sources.
SGLANG = {
    "output_ids": [4, 5],
    "meta_info": {
        "cached_tokens": 3,
        "output_token_logprobs": [[-0.1, 4, None], [-0.2, 5, None]],
        "output_top_logprobs": [
            [[-0.1, 4, None], [-3.0, 9, None]],
            [[-0.2, 5, None], [-2.0, 8, None]],
        ],
    },
}
LLAMA = {
    "tokens": [4, 5],
    "timings": {"cache_n": 3},
    "completion_probabilities": [
        {
            "id": 4,
            "logprob": -0.1,
            "top_logprobs": [{"id": 4, "logprob": -0.1}, {"id": 9, "logprob": -3.0}],
        },
        {
            "id": 5,
            "logprob": -0.2,
            "top_logprobs": [{"id": 5, "logprob": -0.2}, {"id": 8, "logprob": -2.0}],
        },
    ],
}
VLLM = {
    "choices": [
        {
            "index": 0,
            "token_ids": [4, 5],
            "logprobs": {
                "token_logprobs": [-0.1, -0.2],
                "top_logprobs": [
                    {"token_id:4": -0.1, "token_id:9": -3.0},
                    {"token_id:5": -0.2, "token_id:8": -2.0},
                ],
            },
        }
    ],
    "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
}


DIALECTS = [
    (SGLang(), SGLANG, "output_ids"),
    (LlamaCpp(), LLAMA, "tokens"),
    (Completions(), VLLM, "token_ids"),
]


@pytest.mark.parametrize("dialect, reply, token_ids", DIALECTS)
def test_an_answer_in_each_dialect(dialect: Dialect, reply: dict[str, Any], token_ids: str) -> None:
    answer = dialect.answer(json.dumps(reply).encode())
    assert answer.token_ids == (4, 5) and answer.cached_tokens == 3
    assert answer.logprobs == ({4: -0.1, 9: -3.0}, {5: -0.2, 8: -2.0})


# The same prompt [7, 8, 9], scored.
SCORED_SGLANG = {
    "output_ids": [4],
    "meta_info": {
        "output_token_logprobs": [[-0.1, 4, None]],
        "output_top_logprobs": [[[-0.1, 4, None]]],
        "input_token_logprobs": [[None, 7, None], [-0.3, 8, None], [-0.4, 9, None]],
        "input_top_logprobs": [None, [[-0.2, 5, None]], [[-0.4, 9, None]]],
    },
}
SCORED_VLLM = {
    "choices": [
        {
            "index": 0,
            "token_ids": [4],
            "prompt_token_ids": [7, 8, 9],
            "logprobs": {
                "token_logprobs": [None, -0.3, -0.4, -0.1],
                "top_logprobs": [
                    None,
                    {"token_id:5": -0.2},
                    {"token_id:9": -0.4},
                    {"token_id:4": -0.1},
                ],
            },
        }
    ]
}


@pytest.mark.parametrize(
    "dialect, reply", [(SGLang(), SCORED_SGLANG), (Completions(), SCORED_VLLM)]
)
def test_a_scored_prompt_in_each_dialect(dialect: Dialect, reply: dict[str, Any]) -> None:
    answer = dialect.answer(json.dumps(reply).encode())
    assert answer.prompt_logprobs == ({5: -0.2, 8: -0.3}, {9: -0.4})
    assert answer.token_ids == (4,) and answer.logprobs == ({4: -0.1},)


def test_a_served_prompt_is_scored_as_in_this_process(served: serve.Served, folder: str) -> None:
    ask = Ask(PROMPT, max_tokens=1, score=True)
    (over_http,) = served.ask([ask])
    (here,) = ours.Ours(folder, {"prefix": "align"}).ask([ask])
    for token, row, expected in zip(
        PROMPT[1:], over_http.prompt_logprobs, here.prompt_logprobs, strict=True
    ):
        assert row[token] == pytest.approx(expected[token], abs=1e-4)


@pytest.mark.parametrize(
    "dialect, prompt", [(SGLang(), "input_ids"), (LlamaCpp(), "prompt"), (Completions(), "prompt")]
)
def test_a_request_in_each_dialect_has_everything_that_was_requested(
    dialect: Dialect, prompt: str
) -> None:
    body = json.dumps(
        dialect.body(
            Ask((1, 2), max_tokens=77, temperature=0.5, seed=99, logprobs=True), "m", stream=False
        )
    )
    assert json.loads(body)[prompt] == [1, 2]
    for value in ("77", "0.5", "99", "5"):
        assert value in body


@pytest.mark.parametrize(
    ("place", "broken", "error", "said"),
    [
        (
            "models",
            "closed",
            ConfigError,
            "no model is served there: the server closed the connection before its",
        ),
        ("models", "silent", ConfigError, "the server did not answer in 0.5 s"),
        ("models", "markup, 307 Temporary Redirect", ConfigError, r"HTTP 307: \[/red\] \[bold$"),
        ("answer", "[{}]", ConfigError, "it answers without token ids: no token ids: "),
        ("answer", "markup, 500 [/red]", ConfigError, r"HTTP 500: \[/red\] \[bold$"),
        ("answer", "endless body", TargetError, "the server's reply has more than 4,194,304 bytes"),
        ("metrics", "counters are nan", TargetError, "counter of preemptions is nan"),
    ],
)
def test_what_is_broken_is_said(
    place: str, broken: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SECONDS", 0.5 if broken == "silent" else 60.0)
    broken = hostile.BREAKS.get(broken, hostile.says(broken.encode()))
    with pytest.raises(error, match=said) as raised:
        kind_of(hostile.serve(hostile.Case({place: broken}))).start("", {})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dialect, reply, token_ids", DIALECTS)
def test_an_odd_answer_is_an_error_in_each_dialect(
    dialect: Dialect, reply: dict[str, Any], token_ids: str
) -> None:
    for odd in (-1, 2**31, 2**64, True, "4", 4.0, None):
        text = re.sub(rf'("{token_ids}": )\[4', rf"\1[{json.dumps(odd)}", json.dumps(reply))
        with pytest.raises(TargetError, match=f"{token_ids}.0: Input should be "):
            dialect.answer(text.encode())
    rng = random.Random(0)
    for _ in range(500):
        with suppress(TargetError):
            answer = dialect.answer(json.dumps(values.odd_json(rng, reply)).encode())
            assert all(
                token in row for token, row in zip(answer.token_ids, answer.logprobs, strict=False)
            )


def test_more_tokens_than_wanted_are_an_error() -> None:
    event = {"choices": [{"index": 0, "token_ids": [1] * 13}]}
    stream = hostile.says(b"data: " + json.dumps(event).encode() + b"\n\n")
    broken = {"answer": hostile.sets("token_ids", [1] * 13), "stream": stream}
    attached = kind_of(hostile.serve(hostile.Case(broken, num_good=9))).start("", {})
    hostile.CASES[-1].num_good = 0
    for ask in (Ask(PROMPT), Ask(PROMPT, abort_after=99)):
        assert attached.ask([ask])[0].error == "13 tokens for max_tokens=12"
