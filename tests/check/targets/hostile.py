"""A server of the toy engine with broken replies: the other side of `check URL`."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, cycle, repeat
from threading import Lock, Thread
from typing import Any

from hybrid_kv.check.targets.target import Answer, Ask
from tests.check.probes.toy import Toy
from tests.fuzz import values

Parts = Iterable[bytes | None]
Break = Callable[[bytes], Parts]  # of a body, what is sent
PLACES = {
    "models": "models",
    "version": "version",
    "props": "version",
    "metrics": "metrics",
    "cache": "reset",
    "true": "preempt",
}
OWNERS = ("other", "sglang", "llamacpp")
# Keys in a reply of each place, token ids first.
KEYS = [
    ("answer", key)
    for key in ("token_ids", "choices", "index", "token_logprobs", "top_logprobs", "cached_tokens")
]
KEYS += [("models", key) for key in ("data", "id", "owned_by", "max_model_len")] + [
    ("version", "version")
]


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return (
        "\r\n".join(
            (f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "\r\n")
        ).encode()
        + body
    )


def says(body: bytes, *headers: str, status: str = "200 OK") -> Break:
    return lambda _: [http(body, *headers, status=status)]


def sends(first: bytes, more: bytes | None) -> Break:
    """`more`: what follows, again and again; None: silence."""
    return lambda _: chain([first], [None] if more is None else repeat(more) if more else ())


def sets(key: str, odd: Any) -> Break:
    """Another value wherever this key is; `...`: none."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        return {k: odd if k == key else v for k, v in found.items() if k != key or odd is not ...}

    return lambda body: [http(json.dumps(json.loads(body, object_hook=change)).encode())]


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
STATUSES = (
    "200 OK",
    "204 No Content",
    "302 Found",
    "307 Temporary Redirect",
    "404 Not Found",
    "500 [/red]",
)
BODIES = {
    "half a surrogate": b'{"data": "\\ud800", "choices": "\\ud800"}',
    "deep lists": b"[" * 10**5,
    "deep objects": b'{"data":' * 10**5,
    "a long number": b'{"data": %b}' % (b"9" * 5000),
    "many of a wrong type": b'{"choices":[{"index":0,"token_ids":["",%b""]}]}' % (b'"",' * 10**6),
    **{
        f"{body!r}": body
        for body in (b"", b"null", b"[]", b"[{}]", b"{", b"NaN", b"<html>", b'{"data": "\xff\xfe"}')
    },
    **{
        f"counters are {odd:.5}": b'vllm:num_preemptions_total{a="b"} %b\n' % odd.encode()
        for odd in ("nan", "-1", "1e999", "9" * 5000, "x")
    },
}
RAW: dict[str, tuple[bytes, bytes | None]] = {
    "closed": (b"", b""),
    "closed in the headers": (HEAD, b""),
    "closed in a chunk": (CHUNKED + b"ff\r\n{", b""),
    "silent": (b"", None),
    "silent in the body": (HEAD + b"content-length: 9\r\n\r\n{", None),
    "endless body": (HEAD + b"\r\n", b"[" * 2**16),
    "endless events": (HEAD + b"\r\n", b'data: {"choices": [], "output_ids": []}\n\n' * 999),
    "endless lines": (HEAD + b"\r\n", b"\n" * 2**16),
    "endless chunks": (CHUNKED, b"1\r\n \r\n" * 999),
    "endless headers": (HEAD, b"a: b\r\n" * 999),
    "endless header": (HEAD, b"a" * 2**16),
    "endless continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99),
    "negative length": (HEAD + b"content-length: -1\r\n\r\n{}", b""),
    "bad chunk": (CHUNKED + b"x\r\n{}", b""),
    "no http": (b"\0\xff\r\n\r\n", b""),
    "status of five digits": (b"HTTP/1.1 20000 OK\r\n\r\n", b""),
    "another protocol": (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"",
    ),
}
BREAKS: dict[str, Break] = {
    **{name: sends(*parts) for name, parts in RAW.items()},
    **{name: says(body) for name, body in BODIES.items()},
    **{f"markup, {one}": says(b"[/red] [bold", "location: ?", status=one) for one in STATUSES},
    "orders to a terminal": says(
        b"\x1b[2J\r\x07\n\xff\0\nTraceback\xe2\x80\xae", status="400 \x1b[2J"
    ),
    "a large error": says(b"x" * 2**23, status="500 No"),
    "a bomb": lambda _: [http(gzip.compress(bytes(2**26)), "content-encoding: gzip")],
    "two lengths": says(b"{}", "content-length: 3"),
    "unknown charset": lambda body: [http(body, "content-type: image/png; charset=x")],
    "closed in the body": lambda body: [http(body)[:-3]],
    "utf-16": lambda body: [http(body.decode().encode("utf-16"))],
    "twice": lambda body: [http(body + body)],
}
ODD = [
    *values.ODD,
    ...,
    -1,
    50,
    10**400,
    "[/red]",
    "\x1b[2J\n",
    [1] * 999,
    [10**5],
    [-1],
    [True],
    [2**64],
    [{"x": 1}],
]


@dataclass
class Case:
    """How a client is served: the breaks by place, and how many replies of each place are sound."""

    broken: dict[str, Break]
    owner: str = "other"
    num_good: int = 0
    toy: Toy = field(default_factory=Toy)
    num_replies: dict[str, int] = field(default_factory=dict)
    most_bytes: int = 0  # of a reply, that the client and the buffers before it took

    def reply(self, path: str, sent: dict[str, Any]) -> Parts:
        known = (PLACES[end] for end in PLACES if path.endswith(end))
        place = next(known, "stream" if sent.get("stream") else "answer")
        self.num_replies[place] = self.num_replies.get(place, 0) + 1
        body = self._body(place, sent)
        is_good = place not in self.broken or self.num_replies[place] <= self.num_good
        return [http(body)] if is_good else self.broken[place](body)

    def _body(self, place: str, sent: dict[str, Any]) -> bytes:
        match place:
            case "models":
                card = {"id": "m", "owned_by": self.owner, "max_model_len": 512}
                return json.dumps({"data": [card]}).encode()
            case "metrics":
                return b'vllm:num_preemptions_total{a="b"} %d\n' % self.toy.counts["preemptions"]
            case "preempt":
                self.toy.counts["preemptions"] += 1
            case "reset":
                self.toy.reset()
            case "answer":
                return json.dumps(self._written(self._answer(sent))).encode()
            case "stream":
                events = [self._written(Answer((token,))) for token in self._answer(sent).token_ids]
                return (
                    "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
                    + b"data: [DONE]\n\n"
                )
        return b'{"version": "1"}'

    def _answer(self, sent: dict[str, Any]) -> Answer:
        options = sent.get("sampling_params", sent)
        new = next(
            options[name]
            for name in ("max_tokens", "max_new_tokens", "n_predict")
            if name in options
        )
        seed = options.get("seed", options.get("sampling_seed"))
        prompt, n = tuple(sent.get("prompt") or sent["input_ids"]), options.get("n", 1)
        return self.toy.ask(
            [
                Ask(
                    prompt,
                    new,
                    options["temperature"],
                    seed,
                    n,
                    logprobs=True,
                    salt=sent.get("cache_salt", ""),
                )
            ]
        )[0]

    def _written(self, answer: Answer) -> Any:
        if self.owner == "sglang":
            return {
                "output_ids": answer.token_ids,
                "meta_info": {"cached_tokens": answer.cached_tokens},
            }
        if self.owner == "llamacpp":
            return {"tokens": answer.token_ids, "timings": {"cache_n": answer.cached_tokens}}
        own = [row[token] for token, row in zip(answer.token_ids, answer.logprobs, strict=False)]
        tops = [
            {f"token_id:{token}": value for token, value in row.items()} for row in answer.logprobs
        ]
        first = {
            "index": 0,
            "token_ids": answer.token_ids,
            "logprobs": {"token_logprobs": own, "top_logprobs": tops},
        }
        others = [{"index": 1 + i, "token_ids": other} for i, other in enumerate(answer.others)]
        usage = {"prompt_tokens_details": {"cached_tokens": answer.cached_tokens}}
        return {"choices": [first, *others], "usage": usage}


CASES: list[Case] = []
LOCK = Lock()


class Handler(BaseHTTPRequestHandler):
    """The first part of a path is the number of the case."""

    def do_GET(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, number, path = self.path.split("/", 2)
        case, num_bytes = CASES[int(number)], 0
        with LOCK:
            parts = case.reply(path, json.loads(sent or b"{}"))
        with suppress(OSError):  # the client has left
            for part in parts:
                if part is None:
                    self.rfile.read(1)  # until the client leaves
                    break
                self.wfile.write(part)
                num_bytes += len(part)
                case.most_bytes = max(case.most_bytes, num_bytes)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@cache
def address() -> str:
    ThreadingHTTPServer.request_queue_size = 64
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def serve(case: Case) -> str:
    """The URL at which a case is served, as long as the process lives."""
    CASES.append(case)
    return f"{address()}/{len(CASES) - 1}"


def every() -> Iterator[tuple[str, str, Break]]:
    """Yield a name, a place and a break: each break in one place, each odd value at two keys."""
    places = cycle(
        ("answer", "models", "answer", "version", "metrics", "answer", "stream", "reset", "preempt")
    )
    for (name, broken), place in zip(BREAKS.items(), places, strict=False):
        yield f"{place}, {name}", place, broken
    keys = cycle(KEYS[1:])
    for odd in ODD:
        for place, key in (KEYS[0], next(keys)):
            yield f"{place}, {key} is {odd!r:.20}", place, sets(key, odd)


def draw(rng: random.Random) -> Case:
    """Any of these breaks, odd values or odd bytes in one to three places, from some reply on."""

    def odd(body: bytes) -> Parts:
        mine = random.Random(seed)
        if body[:1] == b"{" and mine.random() < 0.6:
            return [http(json.dumps(values.odd_json(mine, json.loads(body))).encode())]
        return [values.odd_bytes(mine, http(body))]

    seed = rng.random()
    breaks = (*BREAKS.values(), *[odd] * len(BREAKS))
    places = rng.sample((*PLACES.values(), "answer", "stream"), rng.choice((1, 1, 2, 3)))
    return Case(
        {place: rng.choice(breaks) for place in places},
        rng.choice(OWNERS),
        rng.choice((0, 0, 1, 5, 20, 40)),
    )
