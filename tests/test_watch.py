"""Watchers hear of everything, in order, and an engine without any is not slowed down by them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel
from hybrid_kv.sampling import SamplingParams
from hybrid_kv.watch import Watcher

EVENTS = [name for name in dir(Watcher) if name.startswith("on_")]


class Recorder(Watcher):
    """Every event with its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *arguments, **options: self.calls.append((name, (*arguments, *options.values())))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def engine(**options: Any) -> LLM:
    options = {"mamba_cache_mode": "align", "enable_prefix_caching": True, "num_blocks": 60} | options
    return LLM(
        ExactModel(ExactConfig(pattern="M*")), attention_backend="TORCH", block_size=8, max_num_seqs=2,
        max_num_batched_tokens=32, max_model_len=64, device="cpu", **options,
    )  # fmt: skip


def test_a_request_is_reported_from_its_first_block_to_its_last() -> None:
    llm, recorder = engine(), Recorder()
    llm.watchers.append(recorder)
    llm.generate([list(range(9))], SamplingParams(max_tokens=2), progress=False)
    step = ["on_schedule", "on_prepare", "on_step", "on_commit"]
    # Eight tokens, up to the boundary that a hit could use, which both groups publish; the ninth one, in a block of K/V
    # and a state of its own; the first answered one, before which the state at the boundary is given back.
    assert recorder.names() == [
        "on_allocate", *step, "on_publish", "on_publish", "on_allocate", *step, "on_free", *step, "on_free"
    ]  # fmt: skip
    request_id, blocks, ended = recorder.calls[-1][1]
    assert request_id == "0" and len(blocks) == 3 and ended


def test_a_second_request_is_a_hit_and_a_reset_forgets_it() -> None:
    llm, recorder = engine(), Recorder()
    llm.generate([list(range(9))], SamplingParams(max_tokens=1), progress=False)
    llm.watchers.append(recorder)
    llm.generate([list(range(9))], SamplingParams(max_tokens=1), progress=False)
    llm.reset_prefix_cache()
    assert recorder.names()[:2] == ["on_hit", "on_allocate"] and recorder.names()[-1] == "on_reset"
    name, columns = recorder.calls[0][1]
    assert name == "1" and [(column > 0).tolist() for column in columns] == [[True], [True]]


def test_a_load_is_reported_with_its_keys() -> None:
    llm, recorder = engine(kv_offload_bytes=2**20), Recorder()
    llm.generate([list(range(9))], SamplingParams(max_tokens=1), progress=False)
    llm.reset_prefix_cache()
    llm.watchers.append(recorder)
    llm.generate([list(range(9))], SamplingParams(max_tokens=1), progress=False)
    (load,) = [arguments for name, arguments in recorder.calls if name == "on_load" and len(arguments[2])]
    assert [group for (group, _), _ in load[1]] == [0, 1] and len(load[2]) == 2


class Failing(Watcher):
    """Raises in the second step."""

    def __init__(self) -> None:
        self.steps, self.failures = 0, 0

    def on_commit(self, tokens: Any) -> None:
        self.steps += 1
        if self.steps == 2:
            raise AssertionError("no more")

    def on_failure(self) -> None:
        self.failures += 1


def test_a_watcher_that_raises_ends_the_run_and_the_engine_goes_on() -> None:
    llm, failing = engine(), Failing()
    llm.watchers.append(failing)
    with pytest.raises(AssertionError, match="no more"):
        llm.generate([list(range(9))], SamplingParams(max_tokens=4), progress=False)
    assert failing.failures == 1
    llm.scheduler.check_integrity()
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=3), progress=False)[0].error is None
    assert failing.failures == 1


def test_each_watcher_is_told_in_the_order_of_the_list() -> None:
    told: list[str] = []

    class Named(Watcher):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_schedule(self, scheduled: Any) -> None:
            told.append(self.name)

    llm = engine()
    llm.watchers += [Named("first"), Named("second")]
    llm.generate([[1, 2]], SamplingParams(max_tokens=2), progress=False)
    assert told == ["first", "second"] * 2


def test_the_example_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    document = Path(__file__).resolve().parents[1] / "docs" / "debugging.md"
    exec(document.read_text().split("```python\n")[1].split("```")[0], {})
    assert "request 0 publishes [" in capsys.readouterr().out


def test_by_default_nothing_happens() -> None:
    watcher = Watcher()
    for name in EVENTS:
        method = getattr(watcher, name)
        assert method(*[None] * len(inspect.signature(method).parameters)) is None
