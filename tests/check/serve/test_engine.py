"""The engine's thread: leaving aborts, too many are refused, and all hear of a failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.check.serve.engine import BusyError, Engine, Piece, StoppedError, Submission
from hybrid_kv.config import CheckFailedError
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import Request, ScheduledRequest
from tests.check.serve.conftest import OPTIONS, QUESTION, Served, served
from tests.support.metrics import counters

LONG = {"prompt": QUESTION, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
LONGER = LONG | {"prompt": QUESTION * 5, "max_tokens": 30, "return_token_ids": True}


class Gate(EngineObserver):
    """Lets steps through one by one; `entered` is set while one waits."""

    def __init__(self) -> None:
        self.steps, self.entered = threading.Semaphore(0), threading.Event()

    def on_schedule(self, scheduled: Sequence[ScheduledRequest]) -> None:
        self.entered.set()
        assert self.steps.acquire(timeout=60)
        self.entered.clear()

    def open(self) -> None:
        self.steps.release(10**6)


@pytest.fixture
def gate(server: Served) -> Iterator[Gate]:
    gate = Gate()
    server.llm.observers.append(gate)
    yield gate
    gate.open()
    # no step is in it any more
    server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    server.llm.observers.remove(gate)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_aborted_and_its_blocks_return(
    server: Served, gate: Gate, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    before = counters(server)
    aborted, abort = threading.Event(), server.engine.abort

    def notified(submission: Submission) -> None:
        abort(submission)
        aborted.set()

    monkeypatch.setattr(server.engine, "abort", notified)
    gate.steps.release(3)
    client = httpx2.Client(base_url=server.url)
    with ThreadPoolExecutor(1) as pool:
        if stream:
            with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as events:
                assert next(events.iter_lines()).startswith("data: ")
        else:
            pending = pool.submit(client.post, "/v1/completions", json=LONG, timeout=0.5)
            assert gate.entered.wait(60)
            assert isinstance(pending.exception(60), httpx2.ReadTimeout)
        client.close()
        assert aborted.wait(60)
    gate.open()
    assert (
        server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code
        == 200
    )
    after = counters(server)
    assert after["request_success_total abort"] == before.get("request_success_total abort", 0) + 1
    assert after["kv_cache_usage_perc"] == 0
    server.llm.scheduler.check_integrity()


def test_who_leaves_while_its_sequences_are_opened_is_aborted(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counters(server).get("request_success_total abort", 0)
    begun, go_on, add = threading.Event(), threading.Event(), server.llm.add_request

    def slow(*given: Any) -> Request:
        begun.set()
        assert go_on.wait(60)
        return add(*given)

    monkeypatch.setattr(server.llm, "add_request", slow)

    async def leave() -> None:
        submission = Submission([([5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True))])
        opening = asyncio.create_task(server.engine.submit(submission))
        await asyncio.to_thread(begun.wait, 60)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(leave())
    go_on.set()
    monkeypatch.setattr(server.llm, "add_request", add)
    assert (
        server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code
        == 200
    )
    assert counters(server)["request_success_total abort"] == before + 1


def test_sequences_beyond_the_limit_are_sent_away(
    server: Served, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine, "max_open", 3)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            server.http.post, "/v1/completions", json=LONG | {"max_tokens": 40, "n": 2}
        )
        assert gate.entered.wait(60)
        second = pool.submit(
            server.http.post, "/v1/completions", json=LONG | {"max_tokens": 1, "n": 2}
        )
        while not second.done():  # commands run between steps
            gate.steps.release()
        refused = second.result()
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert (
            refused.json()["error"]["message"]
            == "2 of 3 sequences are open, 2 more do not fit; try again later"
        )
        assert not first.done()
        gate.open()
        assert first.result().status_code == 200
    never = server.http.post("/v1/completions", json=LONG | {"n": 4})
    assert (
        never.status_code == 400
        and "4 sequences in one request, 3 may be open" in never.json()["error"]["message"]
    )


def sent_beside(
    server: Served, gate: Gate, pool: ThreadPoolExecutor, path: str
) -> Future[httpx2.Response]:
    """A long answer with another request in the middle of it."""
    pending = pool.submit(server.http.post, "/v1/completions", json=LONGER)
    assert gate.entered.wait(60)
    going = pool.submit(server.http.post, path)
    while not going.done():
        gate.steps.release()
    assert going.result().status_code == 200 and not pending.done()
    gate.open()
    return pending


def tokens_of(pending: Future[httpx2.Response]) -> list[int]:
    (choice,) = pending.result().json()["choices"]
    return list(choice["token_ids"])


def test_a_reset_preempts_what_runs_and_changes_no_token(
    server: Served, gate: Gate, alone: LLM
) -> None:
    (expected,) = alone.generate(
        [QUESTION * 5], SamplingParams(30, ignore_eos=True), progress=False
    )
    before = counters(server)
    with ThreadPoolExecutor(2) as pool:
        pending = sent_beside(server, gate, pool, "/reset_prefix_cache?reset_running_requests=true")
        assert tokens_of(pending) == expected.token_ids
    assert counters(server)["num_preemptions_total"] == before["num_preemptions_total"] + 1


def test_a_request_outlives_sleep(server: Served, gate: Gate, alone: LLM) -> None:
    (expected,) = alone.generate(
        [QUESTION * 5], SamplingParams(30, ignore_eos=True), progress=False
    )
    with ThreadPoolExecutor(2) as pool:
        pending = sent_beside(server, gate, pool, "/sleep")
        assert server.http.post("/sleep").status_code == 200
        assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
        later = pool.submit(server.http.post, "/v1/completions", json=LONGER)
        assert not server.llm.has_work and not pending.done() and not later.done()
        assert server.http.post("/wake_up").status_code == 200
        assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert [tokens_of(pending), tokens_of(later)] == [expected.token_ids] * 2


def test_all_prompts_of_a_request_run_or_none(server: Served) -> None:
    before = counters(server)
    answer = server.http.post("/v1/completions", json={"prompt": ["a", "b", ""], "max_tokens": 2})
    assert answer.status_code == 400
    assert not server.llm.scheduler.has_requests
    assert counters(server) == before
    server.llm.scheduler.check_integrity()


class Broken(EngineObserver):
    """A check that fails in the fifth step."""

    num_steps = 0

    def on_schedule(self, scheduled: Sequence[ScheduledRequest]) -> None:
        self.num_steps += 1
        if self.num_steps == 5:
            raise CheckFailedError("a block\nholds what it should not")


def test_a_step_that_fails_ends_the_server_and_everybody_hears_of_it() -> None:
    llm = LLM(str(FOLDER), **OPTIONS)
    llm.observers.append(Broken())
    failures: list[BaseException] = []
    with served(llm, failures=failures) as one, ThreadPoolExecutor(3) as pool:
        sent = [
            pool.submit(one.http.post, "/v1/completions", json=LONG | {"stream": i == 2})
            for i in range(3)
        ]
        answers = [future.result(60) for future in sent]
    said = "the engine has failed, the server's log says how: CheckFailedError"
    for answer in answers[:2]:
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, said)
    assert (
        answers[2].status_code in (200, 503)
        and said in answers[2].text
        and "[DONE]" not in answers[2].text
    )
    assert [str(failure) for failure in failures] == ["a block\nholds what it should not"]


@pytest.mark.parametrize("end", [Engine.abort_all, Engine.stop])
def test_what_waits_for_an_engine_that_sleeps_is_ended_with_it(
    end: Callable[[Engine], None],
) -> None:
    engine = Engine(LLM(str(FOLDER), **OPTIONS), 0, lambda *_: None, lambda _: None, lambda: None)
    engine.start()

    async def send() -> Piece | StoppedError:
        submission = Submission([(QUESTION, SamplingParams(400, ignore_eos=True))])
        await engine.call(engine.llm.sleep)
        await engine.submit(submission)
        await asyncio.get_running_loop().run_in_executor(None, end, engine)
        return await asyncio.wait_for(submission.pieces.get(), 60)

    try:
        piece = asyncio.run(send())
        assert (
            isinstance(piece, Piece)
            and piece.output is not None
            and piece.output.finish_reason == "abort"
        )
    finally:
        engine.stop()
    assert not engine.is_alive and not engine.llm.scheduler.has_requests


def test_an_engine_that_has_stopped_takes_nothing_more() -> None:
    llm = LLM(str(FOLDER), **OPTIONS)
    engine = Engine(llm, 0, lambda *_: None, lambda _: None, lambda: None)
    engine.start()

    async def send() -> list[Any]:
        submission = Submission([(QUESTION, SamplingParams(400, ignore_eos=True))])
        await engine.submit(submission)
        with pytest.raises(BusyError):
            await engine.submit(Submission([(QUESTION, SamplingParams())] * 4))
        await asyncio.get_running_loop().run_in_executor(None, engine.stop)
        with pytest.raises(StoppedError, match="the server is shutting down"):
            await engine.submit(Submission([(QUESTION, SamplingParams())]))
        return [await submission.pieces.get()]

    (piece,) = asyncio.run(send())
    assert piece.output.finish_reason == "abort" and len(piece.output.token_ids) < 400
    assert not engine.is_alive and not llm.scheduler.has_requests
    llm.scheduler.check_integrity()
