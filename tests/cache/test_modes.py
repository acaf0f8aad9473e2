"""The rules of each cache mode, and a mode that nobody here has heard of."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.cache.modes import MODES, All, Mode
from hybrid_kv.config import CacheConfig, ConfigError
from hybrid_kv.guard.scenario import ScriptedProposer, answer_book
from hybrid_kv.models.exact import ExactConfig, ExactModel


@pytest.mark.parametrize(
    "name, columns, anchors, held, needed, first_published, chunk_end, blocks",
    [
        # 10 tokens in blocks of 4; a chunk of tokens 1 … 9 of 10, hits in units of 8; three new columns.
        ("none", 1, [0, 0, 0], 1, 0, 1, 9, 3),
        ("align", 3, [0, 0, 2], 2, 2, 2, 8, 1),
        ("all", 3, [0, 0, 2], 3, 0, 1, 9, 3),
    ],
)
def test_each_mode_has_its_own_columns(
    name: str,
    columns: int,
    anchors: list[int],
    held: int,
    needed: int,
    first_published: int,
    chunk_end: int,
    blocks: int,
) -> None:
    mode = MODES[name]
    assert mode.num_columns(10, 4) == columns
    assert mode.anchor(np.array([0, 3, 8]), 4).tolist() == anchors
    assert mode.held_at_most(columns, 1) == held
    assert mode.first_needed(9, 4) == needed
    assert mode.first_published(1, 2, 10, 4, is_decode=False) == first_published
    assert mode.chunk_end(1, 9, 10, 4, 8) == chunk_end
    assert mode.num_blocks(3, is_decode=False) == blocks
    assert mode.num_blocks(3, is_decode=True) == 3


def test_an_aligned_chunk_on_a_boundary_publishes_that_one_alone() -> None:
    assert MODES["align"].first_published(0, 3, 12, 4, is_decode=False) == 2
    assert MODES["align"].first_published(0, 3, 12, 4, is_decode=True) == 0


def test_an_unknown_mode_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="mamba_cache_mode='sparse'; use one of none, align, all"):
        CacheConfig(mamba_cache_mode="sparse")


class PromptsOnly(All):
    """Publishes what prefills leave, and nothing of a decode."""

    name = "prompts only"

    def first_published(self, first: int, end: int, num_tokens: int, block_size: int, is_decode: bool) -> int:
        return end if is_decode else first


@pytest.mark.parametrize("scheme", ["slots", "replay"])
def test_a_fourth_mode_decides_what_is_found_again(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setitem(MODES, PromptsOnly.name, PromptsOnly())
    K, layers = 2, "M*M"
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, size=length).tolist() for length in (26, 31, 45)]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    book = answer_book(layers)
    answers = [book.answer(prompt, params, 80) for prompt in prompts]
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    llm = LLM(
        ExactModel(ExactConfig(pattern=layers), K),
        proposer=ScriptedProposer("mixed", K, sequences * 2, [len(p) for p in prompts] * 2, 8, 97),
        num_speculative_tokens=K,
        mamba_cache_mode=PromptsOnly.name,
        state_scheme=scheme,
        block_size=8,
        num_blocks=100,
        max_num_seqs=2,
        max_num_batched_tokens=20,
        max_model_len=80,
        device="cpu",
        sanitize=True,
    )
    first = llm.generate(prompts, params, progress=False)
    again = llm.generate([sequence[:-1] for sequence in sequences], SamplingParams(max_tokens=1), progress=False)
    assert [output.token_ids for output in first] == answers
    assert [output.token_ids for output in again] == [answer[-1:] for answer in answers]
    # Mode `all` would find 32, 40 and 56 tokens.
    assert [output.cached_tokens for output in again] == [24, 24, 40]


def test_a_mode_has_a_name_of_its_own() -> None:
    assert all(name == mode.name for name, mode in MODES.items())
    assert all(isinstance(mode, Mode) for mode in MODES.values())
