"""What a router knows of an engine's cache from its events."""

from __future__ import annotations

import pytest

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.engine.events import CacheEvents, EventLog, Group, KnownCache
from hybrid_kv.models.exact import ExactModel

PROMPT = list(range(40))


def engine(**options: object) -> LLM:
    settings = {
        "block_size": 16,
        "num_blocks": 40,
        "mamba_cache_mode": "align",
        "max_model_len": 96,
    } | options
    return LLM(ExactModel(), device="cpu", **settings)


def send(llm: LLM, prompt: list[int], salt: str = "") -> int:
    (output,) = llm.generate(
        [prompt], SamplingParams(max_tokens=2, cache_salt=salt), progress=False
    )
    return output.cached_tokens


def test_a_router_predicts_what_the_engine_restores() -> None:
    llm = engine(mamba_cache_mode="all")
    send(llm, PROMPT)
    log = EventLog(llm)
    known = KnownCache(log.groups, log.hit_granularity)
    known.apply(log.take())
    assert {group.num_tail_blocks for group in log.groups} == {1, None}
    assert known.predict(PROMPT) == send(llm, PROMPT) == 32
    assert known.predict(PROMPT[:32]) == 16, "the last token is always computed"
    assert known.predict(PROMPT, "other") == known.predict([1, *PROMPT]) == 0
    longer = [*PROMPT, *range(30)]
    send(llm, longer)
    assert known.predict(longer) == 32
    known.apply(log.take())
    assert known.predict(longer) == send(llm, longer) == 64


def test_hits_inside_a_block_are_not_predicted() -> None:
    """The engine restores 36 of 40 tokens; its events are of whole blocks."""
    llm = engine(prefix_match_unit=4)
    log = EventLog(llm)
    known = KnownCache(log.groups, log.hit_granularity)
    known.apply(log.take())
    assert [send(llm, PROMPT), send(llm, PROMPT)] == [0, 36]
    known.apply(log.take())
    assert known.predict(PROMPT) == 32
    assert known.predict(PROMPT[:32]) == 0, "the state after 16 tokens was passed over"


def test_what_is_evicted_or_reset_is_unknown_again() -> None:
    llm = engine(num_blocks=16)
    log = EventLog(llm)
    known = KnownCache(log.groups, log.hit_granularity)
    send(llm, PROMPT)
    known.apply(log.take())
    assert known.predict(PROMPT) == 32
    for start in (1, 2, 3):
        send(llm, [*range(start, start + 60)])
    assert llm.manager.pool.num_evictions
    known.apply(log.take())
    assert known.keys == set(llm.manager.pool.published_keys())
    assert known.predict(PROMPT) == 0
    llm.reset_prefix_cache()
    known.apply(log.take())
    assert not known.keys


def test_a_state_is_found_at_its_end_and_attention_only_whole() -> None:
    known = KnownCache((Group(8), Group(16, 1)), 16)
    hashes = _chains(PROMPT, 8), _chains(PROMPT, 16)
    attention = {(0, block) for block in hashes[0][:4]}
    known.apply(CacheEvents(0, frozenset({*attention, (1, hashes[1][1])}), is_snapshot=True))
    assert known.predict(PROMPT) == 32
    known.apply(CacheEvents(1, frozenset({(1, hashes[1][0])}), frozenset({(0, hashes[0][2])})))
    assert known.predict(PROMPT) == 16
    known.apply(CacheEvents(2, frozenset(), frozenset({(1, hashes[1][0])})))
    assert known.predict(PROMPT) == 0


def test_a_router_that_missed_events_predicts_too_little_until_the_next_snapshot() -> None:
    llm = engine()
    log = EventLog(llm)
    known = KnownCache(log.groups, log.hit_granularity)
    send(llm, PROMPT)
    known.apply(log.take())
    other = [7, *PROMPT]
    send(llm, other)
    log.take()
    third = [8, *PROMPT]
    send(llm, third)
    known.apply(log.take())
    assert [known.predict(prompt) for prompt in (PROMPT, other, third)] == [0, 0, 32]
    known.apply(log.snapshot())
    assert [known.predict(prompt) for prompt in (PROMPT, other, third)] == [32, 32, 32]
    known.apply(log.take())
    assert known.predict(PROMPT) == 32


def test_events_that_come_late_say_nothing() -> None:
    """What they stored may have been removed by later ones."""
    known, key = KnownCache((Group(8),), 8), (0, _chains(PROMPT, 8)[0])
    known.apply(CacheEvents(0, frozenset(), is_snapshot=True))
    known.apply(CacheEvents(2, frozenset(), frozenset({key})))
    known.apply(CacheEvents(1, frozenset({key})))
    assert known.predict(PROMPT) == 0
    known.apply(CacheEvents(3, frozenset({key})))
    assert known.predict(PROMPT) == 8


@pytest.mark.parametrize("again", [0, 1, 2])
def test_events_that_come_twice_say_nothing_snapshots_too(again: int) -> None:
    llm = engine(num_blocks=16)
    log = EventLog(llm)
    known, heard = KnownCache(log.groups, log.hit_granularity), list[CacheEvents]()
    for prompt in (PROMPT, [7, *PROMPT], [8, *range(58)]):
        send(llm, prompt)
        heard.append(log.snapshot() if len(heard) == 1 else log.take())
        known.apply(heard[-1])
    before = set(known.keys)
    known.apply(heard[again])
    assert known.keys == before == set(llm.manager.pool.published_keys())
    third = [9, *PROMPT]
    send(llm, third)
    known.apply(log.take())
    assert known.keys == set(llm.manager.pool.published_keys())


def test_an_engine_that_starts_again_is_known_anew() -> None:
    first, second = engine(), engine()
    old, new = EventLog(first), EventLog(second)
    known = KnownCache(old.groups, old.hit_granularity)
    send(first, PROMPT)
    late = old.take()
    known.apply(late)
    known.apply(new.take())
    assert known.predict(PROMPT) == 0
    known.apply(late)
    known.apply(old.snapshot())
    assert known.predict(PROMPT) == 0
    send(second, [7, *PROMPT])
    known.apply(new.take())
    assert known.predict([7, *PROMPT]) == 32


def _chains(token_ids: list[int], block_size: int) -> list[bytes]:
    return BlockHashes().chain(block_size, token_ids, len(token_ids))
