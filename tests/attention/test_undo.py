"""Undo schemes: what each takes of the cache, the host's count of written states, and a scheme that nobody here has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.attention.undo import SCHEMES, ReplaySpec
from hybrid_kv.cache.spec import MambaSpec, UndoSpec
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.guard.scenario import ScriptedProposer, answer_book
from hybrid_kv.kernels.replay import ReplayCursors, commit_reference
from hybrid_kv.models.exact import ExactConfig, ExactModel


def test_a_layer_of_windows_alone_keeps_no_inputs() -> None:
    undo = ReplaySpec(3, ring_len=13)
    assert undo.allocate((), 4, torch.device("cpu")) is None
    assert undo.bytes_per_row(()) == 0


@pytest.mark.parametrize("block_size", [None, 8])
def test_the_host_counts_written_states_as_the_device_does(block_size: int | None) -> None:
    """One request, random accepted drafts: `num_flushed` is `ReplayCursors.base_pos`, without reading that back."""
    rng = np.random.default_rng(0)
    undo = ReplaySpec(3, ring_len=13)
    cursors = ReplayCursors.allocate(1, undo.ring_len, undo.max_query_len, torch.device("cpu"))
    computed = flushed = 5
    cursors.restart(torch.tensor([0]), torch.tensor([computed]))
    gained, seen = 0, set()
    table = torch.arange(100, dtype=torch.int32)[None]
    for _ in range(200):
        length = int(rng.integers(1, 5))
        cu_seqlens = torch.tensor([0, length])
        commit_reference(cursors, torch.tensor([0]), torch.tensor([gained]), cu_seqlens, table, block_size)
        gained = int(rng.integers(1, length + 1))
        start, computed = computed, computed + gained
        before, flushed = flushed, undo.num_flushed(flushed, start, length, computed, block_size)
        assert flushed == int(cursors.base_pos[0])
        seen.add((flushed > before, flushed == start))
    assert {(False, False), (True, True)} <= seen
    assert ((True, False) in seen) == (block_size is not None), "only a boundary leaves a history behind it"


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="state_scheme='undo'; use slots or replay"):
        LLM(ExactModel(), num_blocks=50, device="cpu", state_scheme="undo")


@dataclass
class Memory:
    """Of a layer: for each row of the engine the states after every token of its last step."""

    rows: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=dict)


class ScratchSpec(UndoSpec):
    """No block for drafts."""

    scheme: ClassVar[str] = "scratch"

    @property
    def num_blocks(self) -> int:
        return 0

    def allocate(self, inputs: Any, num_rows: int, device: torch.device) -> Memory:
        return Memory()


@dataclass(frozen=True)
class ScratchStep:
    rows: np.ndarray[Any, Any]
    is_kept: np.ndarray[Any, Any]  # the state is in the memory, not in the block
    index: np.ndarray[Any, Any]
    reads_states: ClassVar[bool] = True
    is_constant: ClassVar[bool] = False
    cu_seqlens: ClassVar[None] = None
    history: ClassVar[None] = None

    def advance(self, layer: Any, tokens: Any, states: Any, state: Any, memory: Memory, metadata: Any) -> Any:
        for i in np.flatnonzero(self.is_kept):
            for before, kept in zip(states, memory.rows[self.rows[i]], strict=True):
                before[i] = kept[self.index[i]]
        y, after = layer.scan(tokens, states)
        for i, row in enumerate(self.rows):
            memory.rows[row] = [part[i].copy() for part in after]
        return y

    def launch(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def fold(self, *arguments: Any, **options: Any) -> None:
        pass


class Scratch:
    """Keeps the states of a verify step beside the pool; the next step picks one. For mode `none`."""

    copies_states: ClassVar[bool] = False
    spec_type: ClassVar[type[UndoSpec]] = ScratchSpec

    def __init__(self, spec: MambaSpec, max_num_seqs: int, device: torch.device, launches: bool) -> None:
        self.is_kept = np.zeros(max_num_seqs + 1, dtype=bool)  # the last one is padding's

    @staticmethod
    def memory(cache: CacheConfig, num_speculative_tokens: int, is_async: bool, specs: Sequence[Any]) -> UndoSpec:
        return ScratchSpec(num_speculative_tokens)

    def source_columns(self, anchors: torch.Tensor, window_rows: torch.Tensor) -> torch.Tensor:
        return anchors

    def prepare(self, rows: Any, new: Sequence[int], num_gained: Any, common: Any, table: torch.Tensor) -> ScratchStep:
        split = common.num_decodes
        self.is_kept[rows[list(new)]] = False
        self.is_kept[-1] = False
        step = ScratchStep(rows[:split].copy(), self.is_kept[rows[:split]], num_gained[:split] - 1)
        self.is_kept[rows[:split]] = True
        self.is_kept[rows[split:]] = False
        return step

    def fold(self, rows: Any, num_gained: Any, table: torch.Tensor) -> ScratchStep:
        raise AssertionError("mode none publishes nothing")


@pytest.mark.parametrize("layers", ["M*M", "T*V"])
def test_a_third_scheme_is_one_class(monkeypatch: pytest.MonkeyPatch, layers: str) -> None:
    monkeypatch.setitem(SCHEMES, ScratchSpec.scheme, Scratch)
    K, rng = 3, np.random.default_rng(1)
    prompts = [rng.integers(0, 97, size=length).tolist() for length in (9, 26, 17, 31)]
    params = SamplingParams(max_tokens=14, temperature=0.0)
    book = answer_book(layers)
    answers = [book.answer(prompt, params, 80) for prompt in prompts]
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]

    def preempt(llm: LLM) -> None:
        if llm.num_steps == 6 and llm.scheduler.running:
            llm.scheduler.preempt(llm.scheduler.running[-1])

    llm = LLM(
        ExactModel(ExactConfig(pattern=layers), K),
        proposer=ScriptedProposer("mixed", K, sequences, [len(prompt) for prompt in prompts], 8, 97),
        num_speculative_tokens=K,
        state_scheme=ScratchSpec.scheme,
        block_size=8,
        num_blocks=100,
        max_num_seqs=3,
        max_num_batched_tokens=20,
        max_model_len=80,
        device="cpu",
    )
    outputs = llm.generate(prompts, params, progress=False, on_step=preempt)
    assert [output.token_ids for output in outputs] == answers
    assert sum(output.num_accepted_draft_tokens for output in outputs) > 10
    assert sum(output.num_draft_tokens - output.num_accepted_draft_tokens for output in outputs) > 10
    assert any(output.num_preemptions for output in outputs)
    specs = [group.spec for group in llm.plan.config.groups if isinstance(group.spec, MambaSpec)]
    assert {spec.num_speculative_blocks for spec in specs} == {0}
