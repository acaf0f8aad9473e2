import json
import os
import select
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from hybrid_kv.config import ConfigError
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.targets import ours, serve
from hybrid_kv.targets.dialects import Completions, LlamaCpp, SGLang
from hybrid_kv.targets.kinds import kind_of
from hybrid_kv.targets.target import Ask, TargetError

PROMPT = tuple((i * 7) % 90 + 1 for i in range(120))


GUARD = """
import subprocess, sys
from hybrid_kv.targets.serve import _end_with_parent
waiting = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
server = subprocess.Popen(waiting, stdin=0, preexec_fn=_end_with_parent)
print(server.pid, flush=True)
server.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_server_ends_with_a_guard_that_is_killed():
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
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint("lfm2", folder)
    return str(folder)


@pytest.fixture(scope="module")
def served(folder):
    target = serve.start(folder, {"prefix": "align"})
    yield target
    target.close()


def test_over_http_answers_are_those_of_the_engine(served, folder):
    target = ours.start(folder, {"prefix": "align"})
    requests = [Ask(PROMPT), Ask(PROMPT[:9], max_tokens=3, n=2), Ask(PROMPT[:50], temperature=1.0, seed=5)]
    tokens = [(one.token_ids, one.others) for one in served.ask(requests)]
    greedy = [(one.token_ids, one.others) for one in target.ask(requests)]
    assert tokens[:2] == greedy[:2] and len(tokens[2][0]) == 12


def test_what_it_can_do_is_found_out(served):
    assert served.can >= {"batch", "abort", "reset", "preempt", "cached", "salt", "seed", "n"}
    assert served.longest == 2048


def test_aborts_preemptions_and_resets_reach_the_engine(served):
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


def test_what_ours_promises_is_used_even_if_it_looks_missing(folder, monkeypatch):
    monkeypatch.setattr(serve.Server, "_found_out", lambda self, url: ["batch", "abort"])
    target = serve.start(folder, {})
    target.close()
    assert target.can >= serve.PROMISED


def test_a_request_that_is_refused_is_an_error_of_its_own(served):
    long, short = served.ask([Ask((1,) * 3000), Ask((1,))])
    assert long.error.startswith("HTTP 400") and len(short.token_ids) == 12


def test_another_server_at_the_address_can_be_attached(served):
    attached = kind_of(served._url + "/v1").start("", {})
    assert attached.ask([Ask(PROMPT)])[0].token_ids == served.ask([Ask(PROMPT)])[0].token_ids


def test_no_server_at_the_address_is_said_in_one_line():
    with pytest.raises(ConfigError, match=r"^--target http://127.0.0.1:9: no model is served there: [^\n]*$"):
        kind_of("http://127.0.0.1:9").start("", {})


class DiesInTheMiddle(BaseHTTPRequestHandler):
    EVENTS = ({"choices": [{"index": 0, "token_ids": [5, 6]}]}, {"error": {"message": "the engine has stopped"}})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in self.EVENTS).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_an_error_in_the_middle_of_an_answer_is_one(served):
    server = HTTPServer(("127.0.0.1", 0), DiesInTheMiddle)
    Thread(target=server.serve_forever, daemon=True).start()
    attached = kind_of(served._url).start("", {})
    attached._url = f"http://127.0.0.1:{server.server_port}"
    (answer,) = attached.ask([Ask(PROMPT, abort_after=9)])
    server.shutdown()
    server.server_close()
    assert answer.token_ids == (5, 6)
    assert answer.error == 'an event without token ids: {"error": {"message": "the engine has stopped"}}'


def test_a_server_that_is_gone_is_a_finding(served):
    attached = kind_of(served._url).start("", {})
    attached._url = "http://127.0.0.1:9"
    with pytest.raises(TargetError, match="does not answer"):
        attached.ask([Ask(PROMPT)])
    with pytest.raises(TargetError, match="does not answer"):
        attached.reset()
    assert attached.counters() == {}


# What other servers say, by their sources.
SGLANG = {
    "output_ids": [4, 5],
    "meta_info": {
        "cached_tokens": 3,
        "output_token_logprobs": [[-0.1, 4, None], [-0.2, 5, None]],
        "output_top_logprobs": [[[-0.1, 4, None], [-3.0, 9, None]], [[-0.2, 5, None], [-2.0, 8, None]]],
    },
}
LLAMA = {
    "tokens": [4, 5],
    "timings": {"cache_n": 3},
    "completion_probabilities": [
        {"id": 4, "logprob": -0.1, "top_logprobs": [{"id": 4, "logprob": -0.1}, {"id": 9, "logprob": -3.0}]},
        {"id": 5, "logprob": -0.2, "top_logprobs": [{"id": 5, "logprob": -0.2}, {"id": 8, "logprob": -2.0}]},
    ],
}
VLLM = {
    "choices": [
        {
            "index": 0,
            "token_ids": [4, 5],
            "logprobs": {
                "token_logprobs": [-0.1, -0.2],
                "top_logprobs": [{"token_id:4": -0.1, "token_id:9": -3.0}, {"token_id:5": -0.2, "token_id:8": -2.0}],
            },
        }
    ],
    "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
}


@pytest.mark.parametrize("dialect, reply", [(SGLang(), SGLANG), (LlamaCpp(), LLAMA), (Completions(), VLLM)])
def test_an_answer_in_each_dialect(dialect, reply):
    answer = dialect.answer(json.loads(json.dumps(reply)))
    assert answer.token_ids == (4, 5) and answer.cached_tokens == 3
    assert answer.logprobs == ({4: -0.1, 9: -3.0}, {5: -0.2, 8: -2.0})


@pytest.mark.parametrize(
    "dialect, prompt", [(SGLang(), "input_ids"), (LlamaCpp(), "prompt"), (Completions(), "prompt")]
)
def test_a_request_in_each_dialect_has_everything_that_was_requested(dialect, prompt):
    body = json.dumps(dialect.body(Ask((1, 2), max_tokens=77, temperature=0.5, seed=99, logprobs=True), "m", False))
    assert json.loads(body)[prompt] == [1, 2]
    for value in ("77", "0.5", "99", "5"):
        assert value in body


class _WithoutIds(BaseHTTPRequestHandler):
    def _reply(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        model = {"data": [{"id": "m", "owned_by": "other"}]}
        reply = model if self.path == "/v1/models" else {"choices": [{"index": 0, "text": "hi"}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    do_GET = do_POST = _reply

    def log_message(self, *_):
        pass


def test_an_answer_without_token_ids_is_refused():
    with HTTPServer(("127.0.0.1", 0), _WithoutIds) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match="answers without token ids"):
            kind_of(f"http://127.0.0.1:{http.server_port}").start("", {})
        http.shutdown()
