"""What needs no SGLang of the process that plays requests in it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_kv.check.targets.workers.sglang_cpu import hicache, play, stand

Counters = dict[str, float]

IDLE = SimpleNamespace(is_fully_idle=lambda: True)


class BatchTokenIDOutput(SimpleNamespace):
    """An output as SGLang sends it, with what is read of it."""


def output_of(
    name: str, *tokens: int, reason: str | None = None, retracted: int = 0
) -> BatchTokenIDOutput:
    return BatchTokenIDOutput(
        rids=[name],
        output_ids=[list(tokens)],
        cached_tokens=[3],
        finished_reasons=[reason],
        retraction_counts=[retracted],
        spec_verify_ct=None,
        spec_num_correct_drafts=None,
    )


@pytest.fixture
def counters() -> Counters:
    return dict.fromkeys(("hits", "verifications", "accepted", "preemptions"), 0.0)


@pytest.fixture(autouse=True)
def _plain_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "message_of", lambda name, ask: ("ask", name))
    monkeypatch.setattr(play, "abort_of", lambda name: ("abort", name))
    monkeypatch.setattr(play, "preemption", lambda: ["pause"])


def test_requests_are_sent_before_their_step_and_after_others(counters: Counters) -> None:
    asks = [{"max_tokens": 2}, {"max_tokens": 2, "step": 3}, {"max_tokens": 2, "after": 1}]
    run = play.RequestPlay(asks, 0, first=7)
    sent = [run.step(IDLE) for _ in range(3)]
    assert sent == [[("ask", "00000007")], [], [("ask", "00000008")]]
    run.receive(output_of("00000007", 4, 5, reason="length"), counters)
    assert run.step(IDLE) == [("ask", "00000009")]
    assert run.answers[0] == {"token_ids": [4, 5], "cached_tokens": 3} and counters["hits"] == 3


def test_where_nothing_runs_the_next_request_is_sent() -> None:
    run = play.RequestPlay([{"max_tokens": 1, "step": 50}], 0, first=0)
    assert run.step(IDLE) == [("ask", "00000000")]


def test_an_aborted_answer_is_cut_at_its_length(counters: Counters) -> None:
    run = play.RequestPlay([{"max_tokens": 3, "abort_after": 2}], 0, first=0)
    run.step(IDLE)
    run.receive(output_of("00000000", 1, 2), counters)
    assert run.step(IDLE) == [("abort", "00000000")] and run.step(IDLE) == []
    run.receive(output_of("00000000", 3, 4, reason="abort"), counters)
    assert run.answers[0]["token_ids"] == [1, 2, 3]


def test_all_that_runs_is_preempted_after_so_many_tokens(counters: Counters) -> None:
    run = play.RequestPlay([{"max_tokens": 9}], 2, first=0)
    run.step(IDLE)
    run.receive(output_of("00000000", 1, 2), counters)
    assert run.step(IDLE) == ["pause"] and run.step(IDLE) == []
    run.receive(output_of("00000000", 3, reason="length", retracted=2), counters)
    assert counters["preemptions"] == 2


def test_a_play_ends_once_all_is_processed_and_idle(counters: Counters) -> None:
    run = play.RequestPlay([{"max_tokens": 1}], 0, first=0)
    run.step(IDLE)
    run.receive(output_of("00000000", 1, reason="length"), counters)
    busy = SimpleNamespace(is_fully_idle=lambda: False)
    for _ in range(play.IDLE_STEPS + 2):
        assert run.step(busy) == []
    with pytest.raises(play.EndOfPlay):
        run.step(IDLE)


def test_requests_that_bring_no_token_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "MOST_IDLE", 5)
    run = play.RequestPlay([{"max_tokens": 1}], 0, first=0)
    with pytest.raises(RuntimeError, match=r"1 requests run, and 5 steps bring no token"):
        for _ in range(8):
            run.step(IDLE)


def test_pages_go_to_the_host_and_back() -> None:
    layers = [torch.arange(24.0).view(12, 2) + 100 * i for i in range(3)]
    host = torch.zeros(5, 3, 4, 2)
    slots, places = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3]), torch.arange(4, 12)
    hicache.copy_all_layers(layers, [host], slots, places, 4)
    assert torch.equal(host[1, 2], layers[2][4:8]) and torch.equal(host[2, 0], layers[0][:4])
    back = torch.zeros(12, 2)
    hicache.copy_layer([host], [back], places, slots, 2, 4)
    assert torch.equal(back[:8], layers[2][:8]) and not back[8:].any()
    kept = torch.zeros(12, 2)
    hicache.copy_layers([layers[1]], [kept], torch.tensor([3, 1]), torch.tensor([0, 2]), 1)
    assert torch.equal(kept[[0, 2]], layers[1][[3, 1]])


def test_copies_of_a_stream_are_done_when_somebody_waits() -> None:
    pages = torch.tensor([0, 1])
    device, host = torch.arange(4.0), [torch.zeros(4) for _ in range(3)]
    cpu: Any = torch.cpu
    side = cpu.Stream()
    events = [hicache.LateEvent() for _ in host]
    with cpu.stream(side):
        for target, event in zip(host, events, strict=True):
            hicache.copy_layers([device], [target], pages, pages, 1)
            event.record()
    pages[1] = 3  # indices are read when a copy is submitted
    assert not any(target.any() for target in host) and not events[0].query()
    assert host[0].tolist() == [0, 1, 0, 0] and events[0].query() and not host[1].any()
    device[1] = 5  # what is copied is read when it is done
    events[1].wait()
    assert host[1].tolist() == [0, 5, 0, 0] and not host[2].any()
    hicache.finish_all()
    assert host[2].tolist() == [0, 5, 0, 0] and events[2].query()


def test_a_kernel_that_is_not_foreseen_raises() -> None:
    module = stand.MissingModule("sgl_kernel.mamba")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.mamba\.scan has no stand-in"):
        module.scan(1)
    with pytest.raises(AttributeError):
        module.__file__  # noqa: B018  (that it raises is what is tested)


def test_another_source_than_the_known_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "edited_here.py").write_text("is_there = tensor_is_cuda\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [stand.EditingFinder(), *sys.meta_path])
    monkeypatch.setitem(stand.CONDITIONS, "edited_here", ("device_is_cuda", "True"))
    with pytest.raises(ValueError, match="it is another SGLang"):
        __import__("edited_here")
    monkeypatch.setitem(stand.CONDITIONS, "edited_here", ("tensor_is_cuda", "True"))
    assert __import__("edited_here").is_there is True
