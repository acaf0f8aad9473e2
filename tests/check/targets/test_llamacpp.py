"""llama.cpp: its dialect, its slot files, a program that keeps sequences, and a real build."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hybrid_kv.check.targets.dialects import LlamaCpp
from hybrid_kv.check.targets.kinds import kind_of
from hybrid_kv.check.targets.llamacpp import FilesBatch, at
from hybrid_kv.check.targets.server import ServerTarget
from hybrid_kv.check.targets.target import Ask, Kind
from hybrid_kv.check.targets.workers.llamacpp import (
    NUM_SEQUENCES,
    ContinuedSequences,
    CopiedSequences,
    EmptySequences,
    LlamaEngine,
)
from hybrid_kv.config import ConfigError
from hybrid_kv.models.random_checkpoint import write_checkpoint
from tests.check.targets.models import PROMPTS, Hybrid, check_logprobs, continued

StandInServer = tuple[ServerTarget, list[tuple[str, dict[str, Any]]]]
Token = tuple[int, int, int, bool]

# A build to test with, such as that of `make peers-llamacpp`.
SERVER = os.environ.get("LLAMA_SERVER", "")


def row(token: int, *likeliest: int) -> dict[str, Any]:
    top = [{"id": one, "logprob": -0.1} for one in likeliest]
    return {"id": token, "logprob": -0.1 if top else 0.0, "top_logprobs": top}


def test_a_draft_without_alternatives_has_no_log_probability() -> None:
    reply = {"tokens": [4, 5, 6], "completion_probabilities": [row(4, 4), row(5), row(6, 6)]}
    assert LlamaCpp().answer(json.dumps(reply).encode()).logprobs == ({4: -0.1},)


def test_several_answers_to_a_prompt_come_by_their_index() -> None:
    reply = [{"index": 1, "tokens": [7]}, {"index": 0, "tokens": [8], "timings": {"cache_n": 2}}]
    answer = LlamaCpp().answer(json.dumps(reply).encode())
    assert (answer.token_ids, answer.others, answer.cached_tokens) == ((8,), ((7,),), 2)
    assert LlamaCpp().body(Ask((1,), n=2), "", stream=False)["n_cmpl"] == 2
    assert "n_cmpl" not in LlamaCpp().body(Ask((1,)), "", stream=False)


class StandIn(BaseHTTPRequestHandler):
    """What llama-server's paths give, without a model; it notes what was posted."""

    posted: list[tuple[str, dict]]

    def do_GET(self) -> None:
        pages = {
            "/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx": 800}}]}
        }
        pages["/props"] = {"build_info": "b7-abc", "total_slots": 4}
        self._say(pages.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        self.posted.append((self.path, body))
        reply = {"tokens": [5] * body.get("n_predict", 0), "timings": {"cache_n": 0}}
        self._say([reply] * body["n_cmpl"] if "n_cmpl" in body else reply)

    def _say(self, reply: object) -> None:
        raw = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[StandInServer]:
    handler = type("Handler", (StandIn,), {"posted": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever).start()
        target = ServerTarget(f"http://127.0.0.1:{server.server_port}", {})
        handler.posted.clear()
        yield target, handler.posted
        server.shutdown()


def test_slots_may_share_the_tokens_that_each_has(stand_in: StandInServer) -> None:
    target, _ = stand_in
    assert (target.version, target.longest) == ("b7-abc", 200)
    assert "n" in target.can


def test_a_slot_gets_the_file_that_shares_most_with_the_prompt(stand_in: StandInServer) -> None:
    target, posted = stand_in
    files = {}
    target.batch_class = lambda *given: FilesBatch(*given, slots=1, files=files)
    for prompt in ((1, 2, 3), (1, 2, 9), (1, 2, 9, 4), (8,)):
        (answer,) = target.ask([Ask(prompt, max_tokens=1)])
        assert answer.token_ids == (5,) and not answer.error
    seen = [
        (path.partition("=")[2], body.get("filename"), body.get("id_slot")) for path, body in posted
    ]
    completion = ("", None, 0)
    assert seen == [
        *(completion, ("save", "0.bin", None)),
        *(("restore", "0.bin", None), completion, ("save", "1.bin", None)),
        *(("restore", "1.bin", None), completion, ("save", "2.bin", None)),
        *(completion, ("save", "3.bin", None)),
    ]


class ToyMemory:
    """Sequences whose next token depends on all before; `snapshots` tokens can be cut once."""

    num_words = 7

    def __init__(self, snapshots: int) -> None:
        self.held = {i: [] for i in range(NUM_SEQUENCES)}
        self.snapshots, self.num_decoded = snapshots, 0

    def decode(self, tokens: list[Token]) -> list[list[float]]:
        rows = []
        for token, position, sequence, wanted in tokens:
            assert position == len(self.held[sequence])
            self.held[sequence].append(token)
            self.num_decoded += 1
            best = hashlib.sha256(repr(self.held[sequence]).encode()).digest()[0] % self.num_words
            rows += [[float(i == best) for i in range(self.num_words)]] if wanted else []
        return rows

    def cut(self, sequence: int, length: int) -> bool:
        if len(self.held[sequence]) - length > self.snapshots:
            return False
        del self.held[sequence][length:]
        return True

    def clear(self, sequence: int) -> None:
        self.held[sequence] = []

    def copy(self, source: int, target: int) -> None:
        self.held[target] = [*self.held[source]]

    def keep(self, sequence: int) -> None:
        self.held = {one: text if one == sequence else [] for one, text in self.held.items()}

    def clear_all(self) -> None:
        self.held = {one: [] for one in self.held}

    def state(self, sequence: int) -> list[int]:
        return [*self.held[sequence]]

    def set_state(self, sequence: int, data: list[int]) -> None:
        self.held[sequence] = data


def program(kind: type[EmptySequences], has_drafts: bool) -> LlamaEngine:
    engine = LlamaEngine()
    engine.use(ToyMemory(3 * has_drafts), kind, has_drafts)
    return engine


def plain(prompt: Sequence[int], **more: object) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "max_tokens": 9,
        "after": 0,
        "step": 0,
        "abort_after": None,
        "logprobs": True,
    } | more


@pytest.mark.parametrize("kind", [ContinuedSequences, CopiedSequences])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_kept_sequences_and_drafts_change_no_answer(
    kind: type[EmptySequences], has_drafts: bool
) -> None:
    rng, alone = random.Random(1), program(EmptySequences, has_drafts=False)
    engine = program(kind, has_drafts)
    texts = [[1, 2, 3]]
    for number in range(40):
        prompts = [[*rng.choice(texts), rng.randrange(7)] for _ in range(rng.randrange(1, 12))]
        requests = [
            plain(one, max_tokens=rng.randrange(1, 9), after=min(i, 2))
            for i, one in enumerate(prompts)
        ]
        answers = engine.ask(requests, preempt_every=5 * (number % 2))
        expected = [alone.ask([one], 0)[0]["token_ids"] for one in requests]
        assert [one["token_ids"] for one in answers] == expected
        texts = [
            [*one["prompt"], *answer["token_ids"]][:20]
            for one, answer in zip(requests, answers, strict=True)
        ]
    counts = engine.counters()
    assert counts["hits"] > 20 and counts["preemptions"] > 20
    assert (0 < counts["accepted"] < counts["drafts"]) == has_drafts


def test_an_aborted_request_gives_its_sequence_back() -> None:
    engine = program(ContinuedSequences, has_drafts=False)
    (answer,) = engine.ask([plain((1, 2), abort_after=3)], 0)
    assert len(answer["token_ids"]) == 3
    assert engine.ask([plain((1, 2, *answer["token_ids"], 1))], 0)[0]["cached_tokens"] >= 4


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing", "there is no such program"), ("bin/other", "is no llama-server")],
)
def test_what_is_no_build_is_one_line(tmp_path: Path, name: str, said: str) -> None:
    program = tmp_path / "bin" / "other"
    program.parent.mkdir()
    program.touch(mode=0o755)
    with pytest.raises(ConfigError, match=said):
        at(str(tmp_path / name))


def test_a_build_without_its_source_needs_a_converted_model(tmp_path: Path) -> None:
    program, model = tmp_path / "llama-server", tmp_path / "model"
    program.touch(mode=0o755)
    model.mkdir()
    with pytest.raises(
        ConfigError, match=r"has no GGUF file, and no folder above .*llama-server has a converter"
    ):
        at(str(program)).start(str(model), {})


real = pytest.mark.skipif(not SERVER, reason="LLAMA_SERVER names no llama-server")


@pytest.fixture(scope="module")
def build() -> Kind:
    return kind_of("llamacpp", SERVER)


@real
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix": "on", "slots": "unified"},
        {"prefix": "files", "slots": "split", "chunk": "17"},
        {"spec": "draft"},
        {"api": "sequences", "prefix": "slots", "spec": "draft"},
        {"api": "sequences", "prefix": "files", "slots": "unified"},
    ],
)
def test_a_real_build_answers_as_transformers_does(
    hybrid: Hybrid, build: Kind, settings: dict[str, str]
) -> None:
    folder, model = hybrid
    target = build.start(folder, settings)
    try:
        known = {prompt: continued(model, prompt) for prompt in PROMPTS}
        second = [(*prompt, *answer, 5, 6, 7) for prompt, answer in known.items()]
        for prompts in (PROMPTS, second):
            answers = target.ask([Ask(prompt) for prompt in prompts])
            assert [one.token_ids for one in answers] == [
                continued(model, prompt) for prompt in prompts
            ]
        has_cache = settings.get("prefix", "off") != "off"
        assert any(one.cached_tokens for one in answers) == has_cache
        target.reset()
        (answer,) = target.ask([Ask(PROMPTS[0], logprobs="spec" not in settings)])
        assert answer.cached_tokens == 0
        if answer.logprobs:
            check_logprobs(model, answer)
        assert target.counters().get("drafts", 0) > 0 or "spec" not in settings
    finally:
        target.close()


@real
@pytest.mark.parametrize("slots", ["one", "unified", "split"])
def test_a_slot_is_no_longer_than_the_model_was_trained_for(
    build: Kind, tmp_path: Path, slots: str
) -> None:
    write_checkpoint("bamba", tmp_path, "tiny")  # of 512 tokens
    target = build.start(str(tmp_path), {"slots": slots})
    try:
        assert target.longest == 496
    finally:
        target.close()


@real
def test_what_a_real_build_refuses_is_one_line(folder: str, build: Kind, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not start; it said: .*MTP"):
        build.start(folder, {"spec": "mtp3"})
    Path(tmp_path / "config.json").write_text(
        '{"model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"]}'
    )
    with pytest.raises(ConfigError, match=r"converter refuses .*Zamba2ForCausalLM"):
        build.start(str(tmp_path), {})
