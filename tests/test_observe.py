"""Observers hear of everything, in order, and an engine without any is not slowed down by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel
from hybrid_kv.observe import EngineObserver
from hybrid_kv.sampling import SamplingParams


class Recorder(EngineObserver):
    """Every event with its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *arguments, **options: self.calls.append(
            (name, (*arguments, *options.values()))
        )

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def engine(**options: Any) -> LLM:
    options = {
        "mamba_cache_mode": "align",
        "enable_prefix_caching": True,
        "num_blocks": 60,
    } | options
    return LLM(
        ExactModel(ExactConfig(pattern="M*")),
        attention_backend="TORCH",
        block_size=8,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=64,
        device="cpu",
        **options,
    )


def test_a_request_is_reported_from_its_first_block_to_its_last() -> None:
    llm, recorder = engine(), Recorder()
    llm.observers += [recorder, EngineObserver()]  # one that does nothing by default
    llm.generate([list(range(9))], SamplingParams(max_tokens=2), progress=False)
    step = ["on_schedule", "on_prepare", "on_step", "on_hidden", "on_commit"]
    # Eight tokens, up to the boundary that a hit could use, which both groups publish; the ninth
    # one, in a block of K/V and a state of its own; the first answered one, before which the state
    # at the boundary is freed.
    assert recorder.names() == [
        "on_allocate",
        *step,
        "on_publish",
        "on_publish",
        "on_allocate",
        *step,
        "on_free",
        *step,
        "on_free",
    ]
    request_id, blocks, ended = recorder.calls[-1][1]
    assert request_id == "0" and len(blocks) == 3 and ended


def test_a_second_request_is_a_hit_and_a_reset_forgets_it() -> None:
    llm, recorder = engine(), Recorder()
    llm.generate([list(range(9))], SamplingParams(max_tokens=1), progress=False)
    llm.observers += [recorder, EngineObserver()]  # one that does nothing by default
    llm.generate([list(range(9))], SamplingParams(max_tokens=1), progress=False)
    llm.reset_prefix_cache()
    assert recorder.names()[:2] == ["on_hit", "on_allocate"] and recorder.names()[-1] == "on_reset"
    name, logical_blocks = recorder.calls[0][1]
    assert name == "1" and [(block_idx > 0).tolist() for block_idx in logical_blocks] == [
        [True],
        [True],
    ]


def test_a_load_is_reported_with_its_keys() -> None:
    llm, recorder = engine(kv_offload_bytes=2**20), Recorder()
    llm.generate([list(range(9))], SamplingParams(max_tokens=1), progress=False)
    llm.reset_prefix_cache()
    llm.observers += [recorder, EngineObserver()]  # one that does nothing by default
    llm.generate([list(range(9))], SamplingParams(max_tokens=1), progress=False)
    (load,) = [
        arguments for name, arguments in recorder.calls if name == "on_load" and len(arguments[2])
    ]
    assert [group for (group, _), _ in load[1]] == [0, 1] and len(load[2]) == 2


class Failing(EngineObserver):
    """Raises in the second step."""

    def __init__(self) -> None:
        self.steps, self.failures = 0, 0

    def on_commit(self, tokens: Any) -> None:
        self.steps += 1
        if self.steps == 2:
            raise AssertionError("no more")

    def on_failure(self) -> None:
        self.failures += 1


def test_a_observer_that_raises_ends_the_run_and_the_engine_goes_on() -> None:
    llm, failing = engine(), Failing()
    llm.observers.append(failing)
    with pytest.raises(AssertionError, match="no more"):
        llm.generate([list(range(9))], SamplingParams(max_tokens=4), progress=False)
    assert failing.failures == 1
    llm.scheduler.check_integrity()
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=3), progress=False)[0].error is None
    assert failing.failures == 1


def test_each_observer_is_notified_in_the_order_of_the_list() -> None:
    notified: list[str] = []

    class Named(EngineObserver):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_schedule(self, scheduled: Any) -> None:
            notified.append(self.name)

    llm = engine()
    llm.observers += [Named("first"), Named("second")]
    llm.generate([[1, 2]], SamplingParams(max_tokens=2), progress=False)
    assert notified == ["first", "second"] * 2


def test_the_example_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    document = Path(__file__).resolve().parents[1] / "docs" / "debugging.md"
    exec(document.read_text().split("```python\n")[1].split("```")[0], {})
    assert "request 0 publishes [" in capsys.readouterr().out
