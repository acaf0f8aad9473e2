"""Blocks leave and come back byte for byte, of every layer or not at all, and no file can harm (vllm!38554)."""

from __future__ import annotations

import builtins
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache import folder_tier
from hybrid_kv.cache.block_pool import BlockKey
from hybrid_kv.cache.layout import allocate_raw_buffers
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    window_and_states,
)
from hybrid_kv.config import ConfigError

BLOCK = 4  # tokens of a block
PAGE = 128  # bytes: FullAttentionSpec(4, 1, 8, float16)
DEAD_PID = 2**22 + 1  # above the largest that Linux gives out


def attention(num_kv_heads: int = 1, block_size: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, num_kv_heads, 8, torch.float16)


def mamba(mode: str = "align", page: int = PAGE, block_size: int = BLOCK) -> MambaSpec:
    parts = window_and_states(((3, 4), torch.float16), ((2, 5), torch.float32))
    return MambaSpec(block_size, parts, page, mamba_cache_mode=mode)


def hybrid(num_blocks: int = 6, state: KVCacheSpec | None = None) -> KVCacheConfig:
    """An attention group of two layers, a Mamba group of two and a short one: 2, 2 and 1 pages a block."""
    state = state or mamba()
    names = [("a0", "a1"), ("m0", "m1"), ("m2",)]
    return KVCacheConfig(num_blocks, tuple(map(KVCacheGroupSpec, names, (attention(), state, state))))


def uniform(num_blocks: int = 5) -> KVCacheConfig:
    """One group whose three layers have pages of 1, 3 and 2 times `PAGE` bytes, listed in another order."""
    specs = (("c", attention(2)), ("a", attention(1)), ("b", attention(3)))
    return KVCacheConfig(num_blocks, (KVCacheGroupSpec(("a", "b", "c"), UniformTypeKVCacheSpecs(BLOCK, specs)),))


def page_sizes(config: KVCacheConfig) -> list[int]:
    return [PAGE, 3 * PAGE, 2 * PAGE] if len(config.groups) == 1 else [PAGE, PAGE]


def buffers_of(config: KVCacheConfig, seed: int = 0, kernel_blocks: int = 1) -> list[torch.Tensor]:
    """Random bytes in tensors that, like a layer's, count kernel blocks first: `[num_blocks * kernel_blocks, …]`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (config.num_blocks * kernel_blocks, size // kernel_blocks), generator=generator).to(
            torch.uint8
        )
        for size in page_sizes(config)
    ]


def block_bytes(config: KVCacheConfig, buffers: list[torch.Tensor], group: int, block: int) -> list[bytes]:
    """The page of each layer of the group, read without the code under test."""
    raw = [bytes(buffer.flatten().tolist()) for buffer in buffers[: len(config.groups[group].layer_names)]]
    return [data[block * size : (block + 1) * size] for data, size in zip(raw, page_sizes(config), strict=False)]


def key(number: int, group: int = 0) -> BlockKey:
    return group, number.to_bytes(16, "big")


def make(
    config: KVCacheConfig | None = None, buffers: list[torch.Tensor] | None = None, **options: Any
) -> tuple[KVOffload, list[torch.Tensor]]:
    config = config or hybrid()
    buffers = buffers or buffers_of(config)
    return KVOffload(config, buffers, BLOCK, **({"host_bytes": 1 << 20} | options)), buffers


def on_files(folder: Path, **options: Any) -> tuple[KVOffload, list[torch.Tensor]]:
    """A store whose host tier holds nothing, so that every fetch reads files."""
    return make(host_bytes=0, folder=folder, **options)


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(path for path in folder.rglob(pattern) if path.is_file())


def content(config: KVCacheConfig, buffers: list[torch.Tensor], group: int, block: int) -> bytes:
    return b"".join(block_bytes(config, buffers, group, block))


def fetched(store: KVOffload, *keys: BlockKey) -> list[bytes] | None:
    pages = store.fetch(keys)
    return None if pages is None else [bytes(page.data.tolist()) for page in pages]


# Round trips


@pytest.mark.parametrize("config", [hybrid(), uniform()], ids=["hybrid", "uniform"])
@pytest.mark.parametrize("kernel_blocks", [1, 2, 4])
@pytest.mark.parametrize("tier", ["host", "folder"])
def test_vllm_38554_every_page_of_a_block_and_nothing_else_comes_back(
    config: KVCacheConfig, kernel_blocks: int, tier: str, tmp_path: Path
) -> None:
    options = {"host_bytes": 0, "folder": tmp_path} if tier == "folder" else {}
    buffers = buffers_of(config, kernel_blocks=kernel_blocks)
    store, _ = make(config, buffers, **options)
    groups, last = range(len(config.groups)), config.num_blocks - 1
    # The last block is where a count of kernel blocks or another layer's page size leads astray.
    source = {group: (last, 1, 2)[group] for group in groups}
    target = {group: (2, 3, last)[group] for group in groups}
    expected = {group: block_bytes(config, buffers, group, source[group]) for group in groups}
    before = [buffer.clone() for buffer in buffers]
    store.store([(key(7, group), block) for group, block in source.items()])
    keys = [key(7, group) for group in reversed(groups)]
    pages = store.fetch(keys)
    assert pages is not None
    assert [page.key for page in pages] == keys
    store.load(pages, [target[group] for group in reversed(groups)])
    store.synchronize()
    for group in groups:
        assert block_bytes(config, buffers, group, target[group]) == expected[group]
    for block in set(range(config.num_blocks)) - set(target.values()):
        assert content(config, buffers, 0, block) == content(config, before, 0, block)
    total = sum(store.block_bytes)
    stats = store.stats
    assert (
        (stats.stored_blocks, stats.stored_bytes) == (stats.loaded_blocks, stats.loaded_bytes) == (len(groups), total)
    )


def test_a_short_group_leaves_the_buffers_of_its_missing_layers_alone() -> None:
    config = hybrid()
    store, buffers = make(config)
    store.store([(key(1, 2), 3)])
    before = buffers[1].clone()
    pages = store.fetch([key(1, 2)])
    assert pages is not None
    store.load(pages, [5])
    assert torch.equal(buffers[1], before)
    assert torch.equal(buffers[0][5], buffers[0][3])


def test_vllm_50443_a_block_costs_the_sum_of_its_layers_pages_once() -> None:
    assert make(hybrid())[0].block_bytes == (2 * PAGE, 2 * PAGE, PAGE)
    assert make(uniform())[0].block_bytes == (6 * PAGE,)
    store, _ = make(uniform(), host_bytes=2 * 6 * PAGE)
    store.store([(key(number), number) for number in (1, 2)])
    assert store.stats.host_evictions == 0
    assert store.host_used == 2 * 6 * PAGE


@given(
    shuffled=st.permutations(range(1, 6)),
    groups=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    targets=st.permutations(range(1, 6)),
    calls=st.integers(1, 5),
)
def test_any_order_of_blocks_comes_back_in_any_other(
    shuffled: list[int], groups: list[int], targets: list[int], calls: int
) -> None:
    config = hybrid()
    store, buffers = make(config)
    stored = [(key(block, group), block) for block, group in zip(shuffled, groups, strict=True)]
    for start in range(calls):
        store.store(stored[start::calls])
    expected = [block_bytes(config, buffers, key_[0], block) for key_, block in stored]
    pages = store.fetch([key_ for key_, _ in stored])
    assert pages is not None
    for buffer in buffers:
        buffer.zero_()
    store.load(pages, targets)
    assert [block_bytes(config, buffers, page.key[0], at) for page, at in zip(pages, targets, strict=True)] == expected


def test_vllm_38554_allocated_buffers_of_unequal_pages_hold_every_block() -> None:
    config = uniform()
    raw = allocate_raw_buffers(config, torch.device("cpu"))
    assert [buffer.nbytes for buffer in raw] == [5 * size for size in page_sizes(config)]
    assert config.total_bytes == sum(buffer.nbytes for buffer in raw)
    for buffer, random in zip(raw, buffers_of(config), strict=True):
        buffer.copy_(random.flatten().view(torch.int8))
    store, _ = make(config, raw)
    store.store([(key(number), number) for number in (1, 4)])
    expected = [content(config, buffers_of(config), 0, number) for number in (1, 4)]
    assert fetched(store, key(1), key(4)) == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_raw_buffers_may_have_any_dtype_and_room_to_spare(dtype: torch.dtype) -> None:
    config = hybrid()
    raw = [torch.arange(4096).to(torch.uint8).view(dtype) for _ in range(2)]
    store, _ = make(config, raw)
    store.store([(key(1), 5)])
    assert fetched(store, key(1)) == [content(config, [buffer.view(torch.uint8) for buffer in raw], 0, 5)]


@pytest.mark.gpu
def test_on_a_gpu_a_block_may_be_reused_as_soon_as_store_returns() -> None:
    config = hybrid(num_blocks=64)
    buffers = [buffer.cuda() for buffer in buffers_of(config)]
    store, _ = make(config, buffers)
    expected = [buffer.clone() for buffer in buffers]
    keys = [key(block) for block in range(1, 64)]
    store.store([(key_, block) for block, key_ in enumerate(keys, start=1)])
    for buffer in buffers:
        buffer.zero_()
    pages = store.fetch(keys)
    assert pages is not None
    assert all(page.data.is_pinned() for page in pages)
    store.load(pages, range(1, 64))
    assert all(torch.equal(got[1:], want[1:]) for got, want in zip(buffers, expected, strict=True))


# Refusals


def test_blocks_that_no_hash_can_name_are_refused_with_both_numbers_and_the_flag() -> None:
    config = hybrid(state=mamba(block_size=6))
    with pytest.raises(
        ConfigError, match=r"block_size=6 of group 1 .* hash_block_size=4; .*mamba_cache_mode=\"align\""
    ):
        make(config)
    KVOffload(hybrid(), buffers_of(hybrid()), 2, host_bytes=0)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_states_that_nobody_may_reuse_are_refused(mode: str, wrapped: bool) -> None:
    state: KVCacheSpec = mamba(mode, block_size=4096)
    if wrapped:
        state = UniformTypeKVCacheSpecs(4096, tuple((name, state) for name in ("m0", "m1", "m2")))
    if mode != "none":
        make(hybrid(state=state))
        return
    with pytest.raises(ConfigError, match=r'group 1 .* mamba_cache_mode="none"') as caught:
        make(hybrid(state=state))
    assert "\n" not in str(caught.value)


def test_buffers_that_do_not_hold_the_pages_are_refused() -> None:
    config = uniform()
    good = buffers_of(config)
    with pytest.raises(ConfigError, match=r"raw buffer 1 .*num_blocks=5 pages of 384 B"):
        make(config, [good[0], good[2], good[2]])
    with pytest.raises(ConfigError, match="contiguous"):
        make(config, [good[0], good[1].t(), good[2]])
    with pytest.raises(ConfigError, match="group of 3 layers"):
        make(config, good[:2])
    with pytest.raises(ConfigError, match="one page size"):
        make(hybrid(state=mamba(page=2 * PAGE)), [torch.zeros(4096, dtype=torch.int8)] * 2)
    missing = KVCacheConfig(5, (KVCacheGroupSpec(("a", "d"), config.groups[0].spec),))
    with pytest.raises(ConfigError, match="layers d have no spec"):
        make(missing, good)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        make(folder=tmp_path / "file")


@pytest.mark.parametrize("block", [-1, 0, 6])
def test_a_block_id_that_no_request_can_hold_is_an_error_and_changes_nothing(block: int) -> None:
    store, buffers = make()
    before = [buffer.clone() for buffer in buffers]
    with pytest.raises(ValueError, match=f"block {block} "):
        store.store([(key(1), 1), (key(2), block)])
    assert not store.contains(key(1))
    store.store([(key(1), 1)])
    pages = store.fetch([key(1)])
    assert pages is not None
    with pytest.raises(ValueError, match=f"block {block} "):
        store.load(pages, [block])
    for wrong in ([], [1, 2]):
        with pytest.raises(ValueError, match="distinct"):
            store.load(pages, wrong)
    with pytest.raises(ValueError, match="distinct"):
        store.load(pages * 2, [1, 1])
    assert all(map(torch.equal, buffers, before))


@pytest.mark.parametrize("wrong", [(3, bytes(16)), (-1, bytes(16)), (0, bytes(15))])
def test_a_key_of_no_group_or_another_digest_is_an_error(wrong: BlockKey) -> None:
    store, _ = make()
    with pytest.raises(ValueError, match="key"):
        store.store([(wrong, 1)])
    with pytest.raises(ValueError, match="key"):
        store.fetch([wrong])


# The host tier


@given(
    room=st.integers(0, 1500),
    operations=st.lists(
        st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=4)),
        max_size=25,
    ),
)
def test_the_host_tier_is_the_least_recently_used_list_within_its_bytes(
    room: int, operations: list[tuple[bool, list[tuple[int, int]]]]
) -> None:
    config = hybrid()
    store, buffers = make(config, host_bytes=room)
    model: OrderedDict[BlockKey, int] = OrderedDict()  # key -> bytes, oldest first
    evicted = 0
    for is_store, names in operations:
        keys = [key(number, group) for number, group in names]
        if is_store:
            store.store([(key_, 1 + number % 5) for key_, (number, _) in zip(keys, names, strict=True)])
            used = [key_ for key_ in dict.fromkeys(keys) if store.block_bytes[key_[0]] <= room]
        else:
            pages = store.fetch(keys)
            assert (pages is None) == any(key_ not in model for key_ in keys)
            used = keys if pages else []
            for page, (number, group) in zip(pages or [], names, strict=False):
                assert bytes(page.data.tolist()) == content(config, buffers, group, 1 + number % 5)
        for key_ in used:
            model[key_] = store.block_bytes[key_[0]]
            model.move_to_end(key_)
        while sum(model.values()) > room:
            model.popitem(last=False)
            evicted += 1
        assert {key(n, g) for n in range(6) for g in range(3) if store.contains(key(n, g))} == set(model)
        assert store.host_used == sum(model.values())
        assert store.stats.host_evictions == evicted
        store.check_integrity()


def test_a_fetched_or_stored_block_outlives_the_others() -> None:
    store, _ = make(host_bytes=3 * 2 * PAGE)
    store.store([(key(number), number) for number in (1, 2, 3)])
    assert store.fetch([key(1)])
    store.store([(key(2), 2)])
    assert store.stats.stored_blocks == 3
    store.store([(key(4), 4)])
    assert [store.contains(key(number)) for number in (1, 2, 3, 4)] == [True, True, False, True]


def test_fetched_pages_survive_the_eviction_of_their_block() -> None:
    config = hybrid()
    store, buffers = make(config, host_bytes=2 * PAGE)
    store.store([(key(1), 1)])
    expected = content(config, buffers, 0, 1)
    pages = store.fetch([key(1)])
    assert pages is not None
    store.store([(key(2), 2)])
    assert not store.contains(key(1))
    buffers[0].zero_()
    store.load(pages, [4])
    assert content(config, buffers, 0, 4) == expected


def test_evicting_a_block_gives_back_its_memory() -> None:
    store, _ = make()
    store.store([(key(number), number) for number in (1, 2, 3)])
    pages = store.fetch([key(1), key(2), key(3)])
    assert pages is not None
    assert [page.data.untyped_storage().nbytes() for page in pages] == [2 * PAGE] * 3


def test_a_host_tier_without_room_for_a_block_holds_nothing_and_copies_nothing() -> None:
    store, _ = make(host_bytes=2 * PAGE - 1)
    store.store([(key(1), 1)])
    assert not store.contains(key(1))
    assert store.stats.stored_blocks == 0
    store.store([(key(1, group=2), 1)])
    assert store.contains(key(1, group=2))


def test_lmc_2845_attention_and_state_come_back_together_or_not_at_all(tmp_path: Path) -> None:
    store, _ = make(folder=tmp_path / "a")
    store.store([(key(1, 0), 1), (key(2, 1), 2)])
    assert store.fetch([key(1, 0), key(1, 1), key(2, 1), key(3, 2)]) is None
    assert (store.stats.misses, store.stats.host_hits, store.stats.folder_hits) == (2, 0, 0)
    assert store.fetch([key(1, 0), key(2, 1)])
    assert (store.stats.misses, store.stats.host_hits) == (2, 2)


# The folder


def test_a_restart_finds_the_blocks_whatever_the_size_of_its_pool(tmp_path: Path) -> None:
    config = hybrid()
    store, buffers = on_files(tmp_path)
    store.store([(key(1, 0), 1), (key(1, 1), 2)])
    assert store.stats.stored_blocks == 2
    again, _ = make(hybrid(num_blocks=3), folder=tmp_path)
    expected = [content(config, buffers, 0, 1), content(config, buffers, 1, 2)]
    assert fetched(again, key(1, 0), key(1, 1)) == expected
    assert again.stats.folder_hits == 2
    assert fetched(again, key(1, 0), key(1, 1)) == expected
    assert again.stats.host_hits == 2


def test_another_model_or_layout_does_not_see_the_blocks(tmp_path: Path) -> None:
    store, _ = on_files(tmp_path, namespace="a")
    store.store([(key(1), 1)])
    wider = mamba(page=PAGE)
    parts = window_and_states(((3, 4), torch.float16), ((10,), torch.float32))
    wider = MambaSpec(BLOCK, parts, PAGE, mamba_cache_mode="align")
    others = [
        on_files(tmp_path, namespace="b")[0],
        on_files(tmp_path, namespace="a", config=hybrid(state=wider))[0],
        KVOffload(hybrid(), buffers_of(hybrid()), 2, host_bytes=0, folder=tmp_path, namespace="a"),
    ]
    assert not any(other.contains(key(1)) for other in others)
    assert on_files(tmp_path, namespace="a")[0].contains(key(1))
    assert len(files(tmp_path)) == 1


def test_blocks_that_left_the_host_tier_are_found_in_the_folder(tmp_path: Path) -> None:
    store, buffers = make(folder=tmp_path, host_bytes=2 * PAGE)
    store.store([(key(1), 1), (key(2), 2)])
    expected = [content(hybrid(), buffers, 0, number) for number in (1, 2)]
    assert fetched(store, key(1), key(2)) == expected
    assert (store.stats.host_hits, store.stats.folder_hits) == (1, 1)


def damage(path: Path, how: str) -> None:
    """Spoil the file as a crash, a disk or a stranger would."""
    data = bytearray(path.read_bytes())
    if how == "empty":
        data.clear()
    elif how == "header cut":
        del data[20:]
    elif how == "checksum cut":
        del data[folder_tier.HEADER.size + 3 :]
    elif how == "payload cut":
        data.pop()
    elif how == "longer":
        data.append(0)
    elif how == "version":
        data[len(folder_tier.MAGIC)] ^= 2
    elif how == "model":
        data[len(folder_tier.MAGIC) + 4] ^= 1
    elif how == "not ours":
        data = bytearray(b"#!/bin/sh\n" * 100)
    elif how == "wrong key":
        other = path.with_name(path.name.replace("01.kv", "02.kv"))
        data = bytearray(other.read_bytes())
    elif how == "zeros":
        data[100:] = bytes(len(data) - 100)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "counted"),
    [
        ("empty", "truncated"),
        ("header cut", "truncated"),
        ("checksum cut", "truncated"),
        ("payload cut", "truncated"),
        ("version", "foreign"),
        ("model", "foreign"),
        ("not ours", "foreign"),
        ("longer", "corrupt"),
        ("wrong key", "corrupt"),
        ("zeros", "corrupt"),
    ],
)
def test_a_bad_file_is_a_miss_with_one_warning_and_is_replaced(
    how: str, counted: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, buffers = on_files(tmp_path)
    store.store([(key(1), 1), (key(2), 2), (key(1, 1), 3)])
    (path,) = files(tmp_path, "0-*01.kv")
    damage(path, how)
    assert store.contains(key(1))
    for _ in range(3):
        assert store.fetch([key(2), key(1), key(1, 1)]) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    stats = store.stats
    counts = {name: getattr(stats, f"{name}_files") for name in ("truncated", "foreign", "corrupt")}
    assert counts == dict.fromkeys(counts, 0) | {counted: 1}
    assert stats.misses == 3
    assert not path.exists()
    store.store([(key(1), 1)])
    expected = [content(hybrid(), buffers, 0, number) for number in (2, 1)]
    assert fetched(store, key(2), key(1)) == expected


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(position: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flip")
    store, _ = on_files(folder)
    store.store([(key(1), 1)])
    (path,) = files(folder)
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << bit
    path.write_bytes(data)
    assert store.fetch([key(1)]) is None
    store.store([(key(1), 1)])
    assert store.fetch([key(1)])


def test_a_bad_file_that_cannot_be_deleted_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = on_files(tmp_path)
    store.store([(key(1), 1)])
    damage(*files(tmp_path), "payload cut")
    monkeypatch.setattr(Path, "unlink", raising(OSError(errno.EROFS, "read-only")))
    for _ in range(3):
        assert store.fetch([key(1)]) is None
    assert not store.contains(key(1))
    assert len(caplog.records) == 1
    monkeypatch.undo()
    store.store([(key(1), 1)])
    assert store.fetch([key(1)])


def test_a_file_may_vanish_between_contains_and_fetch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = on_files(tmp_path)
    store.store([(key(1), 1)])
    path = store._folder.path(key(1))  # type: ignore[union-attr]
    held = store._filed

    def vanishing(key_: BlockKey) -> bool:
        there = held(key_)
        path.unlink(missing_ok=True)
        return there

    monkeypatch.setattr(store, "_filed", vanishing)
    assert store.fetch([key(1)]) is None
    assert store.stats.misses == 1
    assert not caplog.records


def test_a_file_that_cannot_be_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = on_files(tmp_path)
    store.store([(key(1), 1)])
    monkeypatch.setattr(folder_tier, "open", raising(OSError(errno.EIO, "input/output error")), raising=False)
    assert store.fetch([key(1)]) is None
    assert store.fetch([key(1)]) is None
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert store.fetch([key(1)])


# Full and read-only folders


def raising(error: OSError) -> Any:
    def function(*_: Any, **__: Any) -> None:
        raise error

    return function


class FullDisk:
    """`open` whose new files take `room` bytes and no more."""

    def __init__(self, room: int, error: int = errno.ENOSPC) -> None:
        self.room, self.error = room, error

    def __call__(self, path: Path, mode: str, **options: Any) -> Any:
        file = builtins.open(path, mode, **options)  # noqa: SIM115
        if "x" in mode:
            return FullFile(file, self.room, self.error)
        return file


class FullFile:
    def __init__(self, file: Any, room: int = 0, error: int = errno.ENOSPC) -> None:
        self.file, self.room, self.error = file, room, error

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: Any) -> None:
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise OSError(self.error, os.strerror(self.error))
        self.file.write(data)


@pytest.mark.parametrize("room", [0, 100])
def test_a_full_disk_ends_offload_to_the_folder_with_one_warning(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, buffers = make(folder=tmp_path)
    store.store([(key(1), 1)])
    monkeypatch.setattr(folder_tier, "open", FullDisk(room), raising=False)
    for number in (2, 3):
        store.store([(key(number), number), (key(number, 1), number)])
    assert len(caplog.records) == 1
    assert store.stats.write_failures == 2
    assert files(tmp_path) == [store._folder.path(key(1))]  # type: ignore[union-attr]
    expected = [content(hybrid(), buffers, 0, number) for number in (1, 2, 3)]
    assert fetched(store, key(1), key(2), key(3)) == expected
    monkeypatch.undo()  # somebody made room
    store.store([(key(number), number) for number in (2, 3)])
    assert len(files(tmp_path)) == 3
    assert store.stats.stored_blocks == 5
    assert len(caplog.records) == 1


@pytest.mark.parametrize("where", ["mkdir", "replace"])
def test_any_failing_system_call_only_ends_offload_to_the_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner: Any = {"mkdir": Path, "replace": os}[where]
    monkeypatch.setattr(owner, where, raising(PermissionError(errno.EACCES, "permission denied")))
    store, _ = make(folder=tmp_path)
    store.store([(key(1), 1)])
    assert not files(tmp_path)
    assert len(caplog.records) == 1
    assert store.fetch([key(1)])


def test_a_read_only_folder_still_serves_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = on_files(tmp_path)
    store.store([(key(1), 1)])
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):  # the superuser may write there all the same
        monkeypatch.setattr(folder_tier, "open", FullDisk(0, errno.EROFS), raising=False)
    reader, _ = on_files(tmp_path)
    reader.store([(key(2), 2)])
    reader.store([(key(3), 3)])
    assert len(caplog.records) == 1
    assert reader.fetch([key(1)])
    assert not reader.contains(key(2))
    folder.chmod(0o755)


FILE = folder_tier.HEADER.size + 16 + 2 * PAGE  # bytes of a file of group 0


def test_the_folder_budget_evicts_the_least_recently_used_files(tmp_path: Path) -> None:
    store, _ = on_files(tmp_path, folder_bytes=3 * FILE)
    for number in (1, 2, 3):
        store.store([(key(number), number)])
        os.utime(store._folder.path(key(number)), (number, number))  # type: ignore[union-attr]
    assert store.fetch([key(1)])
    store.store([(key(4), 4), (key(5), 5)])
    assert [store.contains(key(number)) for number in range(1, 6)] == [True, False, False, True, True]
    assert store.stats.folder_evictions == 2
    store.store([(key(number), number % 5 + 1) for number in range(10, 20)])
    assert [store.contains(key(number)) for number in range(10, 20)] == [False] * 7 + [True] * 3
    assert sum(path.stat().st_size for path in files(tmp_path)) == 3 * FILE


def test_the_folder_budget_counts_every_model_but_touches_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "music").mkdir()
    stranger = tmp_path / "music" / "song.kv"
    stranger.write_bytes(bytes(10 * FILE))
    os.utime(stranger, (1, 1))
    old, _ = on_files(tmp_path, namespace="old")
    old.store([(key(1), 1), (key(2), 2)])
    for path in files(tmp_path, "0-*"):
        os.utime(path, (2, 2))
    new, _ = on_files(tmp_path, namespace="new", folder_bytes=2 * FILE + FILE // 2)
    new.store([(key(1), 1)])
    assert [old.contains(key(1)), old.contains(key(2)), new.contains(key(1))] == [False, True, True]
    assert stranger.exists()


def test_the_folder_is_scanned_now_and_then_and_not_at_every_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[folder_tier.FolderTier] = []
    scan = folder_tier.FolderTier._scan

    def counted(tier: folder_tier.FolderTier) -> None:
        scans.append(tier)
        scan(tier)

    monkeypatch.setattr(folder_tier.FolderTier, "_scan", counted)
    store, _ = on_files(tmp_path, folder_bytes=4 * FILE)
    for number in range(40):
        store.store([(key(number), number % 5 + 1)])
        assert len(files(tmp_path)) == min(number + 1, 4)
    assert len(scans) == 1
    other, _ = on_files(tmp_path)
    other.store([(key(number), number % 5 + 1) for number in range(40, 43)])
    os.utime(store._folder.path(key(36)), (2**31, 2**31))  # type: ignore[union-attr]  # another process has read it
    store.store([(key(50), 1)])
    # Over the limit by what others have written, and no more; the oldest file is not the least recently used one.
    assert len(files(tmp_path)) == 4 + 3
    assert [store.contains(key(number)) for number in (36, 37, 38, 39, 50)] == [True, False, True, True, True]
    store._folder._scan_at = 0.0  # type: ignore[union-attr]  # half a minute later
    store.store([(key(51), 1)])
    assert len(files(tmp_path)) == 4
    assert len(scans) == 2
    assert store.contains(key(36)) and store.contains(key(51))


@pytest.mark.parametrize("emptied", [False, True])
def test_the_bytes_in_the_folder_are_counted_without_files_that_others_delete(emptied: bool, tmp_path: Path) -> None:
    store, _ = on_files(tmp_path, folder_bytes=4 * FILE)
    store.store([(key(number), number + 1) for number in range(4)])
    for path in files(tmp_path)[: 4 if emptied else 1]:
        path.unlink()
    for number in range(4, 8):
        store.store([(key(number), 1)])
    assert len(files(tmp_path)) == 4
    assert [store.contains(key(number)) for number in range(4, 8)] == [True] * 4
    assert store.stats.folder_evictions == (0 if emptied else 3)


def test_a_failed_write_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = on_files(tmp_path, folder_bytes=3 * FILE)
    monkeypatch.setattr(folder_tier, "open", FullDisk(100), raising=False)
    for number in range(10):
        store.store([(key(number), 1)])
        assert not store.contains(key(number))
    monkeypatch.undo()
    store.store([(key(number), number + 1) for number in range(3)])
    assert len(files(tmp_path)) == 3
    assert store.stats.folder_evictions == 0


def test_a_miss_asks_nothing_of_the_file_system_and_others_blocks_are_found_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, buffers = on_files(tmp_path)
    other, _ = on_files(tmp_path)
    other.store([(key(1), 1)])
    store._folder._refresh_at = float("inf")  # type: ignore[union-attr]  # less than a second, however slow this is
    with monkeypatch.context() as patch:
        for name in ("stat", "scandir", "listdir"):
            patch.setattr(os, name, raising(OSError(errno.EIO, "asked")))
        patch.setattr(os.path, "exists", raising(OSError(errno.EIO, "asked")))
        assert not any(store.contains(key(number)) for number in range(100))
    # The file decides when it comes to fetching, and to storing it once more.
    assert fetched(store, key(1)) == [content(hybrid(), buffers, 0, 1)]
    other.store([(key(2), 2), (key(3), 3)])
    store.store([(key(2), 2)])
    assert store.stats.stored_blocks == 0
    assert [store.contains(key(number)) for number in (1, 2, 3)] == [True, True, False]
    store._folder._refresh_at = 0.0  # type: ignore[union-attr]  # a second later
    assert store.contains(key(3))
    other._folder.path(key(3)).unlink()  # type: ignore[union-attr]
    assert not store.contains(key(3))
    assert store.fetch([key(3)]) is None


def test_strange_names_in_the_folder_are_no_blocks(tmp_path: Path) -> None:
    store, _ = on_files(tmp_path)
    store.store([(key(1), 1)])
    (folder,) = tmp_path.iterdir()
    for name in ("song.kv", "0-xyz.kv", "0.kv", "-.kv", "x-" + bytes(16).hex() + ".kv", "0-00.tmp"):
        (folder / name).touch()
    again, _ = on_files(tmp_path)
    assert again.contains(key(1))
    assert not again.contains(key(0))


def test_a_link_to_a_folder_of_blocks_is_never_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither by reading nor by writing, nor to make room, nor to tidy up."""
    there, here = tmp_path / "there", tmp_path / "here"
    owner, _ = on_files(there)
    owner.store([(key(1), 1), (key(2), 2)])
    (folder,) = there.iterdir()
    (folder / f"{socket.gethostname()}.{DEAD_PID}.ab.tmp").touch()
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    here.mkdir()
    (here / folder.name).symlink_to(folder, target_is_directory=True)
    stranger, _ = on_files(here, folder_bytes=2 * FILE)
    assert not stranger.contains(key(1))
    assert stranger.fetch([key(1)]) is None
    stranger.store([(key(3), 3), (key(4), 4)])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert stranger.stats.write_failures == 1
    (record,) = caplog.records
    assert "is a link" in record.getMessage()
    other, _ = on_files(here, folder_bytes=FILE, namespace="other")  # of another model, in want of room
    other.store([(key(5), 5)])
    assert other.contains(key(5))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_what_has_a_blocks_name_and_is_no_regular_file_is_left_alone(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = on_files(tmp_path / "blocks", folder_bytes=2 * FILE)
    store.store([(key(1), 1), (key(2), 2)])
    path = store._folder.path(key(1))  # type: ignore[union-attr]
    target = tmp_path / "target"
    path.unlink() if kind == "dangling" else path.rename(target)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    before = path.lstat()
    os.utime(path, (1, 1), follow_symlinks=False) if kind != "pipe" else None
    for reader in (store, on_files(tmp_path / "blocks", folder_bytes=2 * FILE)[0]):
        assert not reader.contains(key(1))
        assert reader.fetch([key(1)]) is None
        reader.store([(key(1), 1)])
        reader.store([(key(3), 3), (key(4), 4)])
        assert reader.contains(key(4))
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert target.exists() == (kind != "dangling")
    assert not files(tmp_path / "blocks", "*.tmp")
    assert all("no regular file" in record.getMessage() for record in caplog.records)


def test_a_strangers_file_in_a_folder_of_blocks_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    store, _ = on_files(tmp_path, folder_bytes=2 * FILE)
    store.store([(key(1), 1)])
    (folder,) = tmp_path.iterdir()
    names = ("song.kv", f"0-{'ab' * 15}.kv", f"{'cd' * 16}.kv", "notes.tmp")
    for name in names:
        (folder / name).write_bytes(bytes(FILE))
        os.utime(folder / name, (1, 1))
    again, _ = on_files(tmp_path, folder_bytes=2 * FILE)
    again.store([(key(2), 2)])
    assert again.contains(key(1))
    again.store([(key(3), 3), (key(4), 4)])
    assert all((folder / name).exists() for name in names)


def test_a_budget_below_one_block_takes_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = on_files(tmp_path, folder_bytes=FILE - 1)
    store.store([(key(1), 1)])
    store.store([(key(2), 2)])
    assert not files(tmp_path)
    (record,) = caplog.records
    assert f"a block of {FILE} B exceeds folder_bytes={FILE - 1}" in record.getMessage()


# Several writers, some of them killed


@contextmanager
def child(code: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs `code` with this module at hand and may `tell(...)` us lines; killed when we leave."""
    preamble = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; import os, signal\n"
        "from test_offload import *\n"
        "folder = Path(sys.argv[2])\n"
        "def tell(*line): print(*line, flush=True)\n"
    )
    command = [sys.executable, "-c", preamble + code, str(Path(__file__).parent), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


STOPS = {
    "before the first byte": "folder_tier._checksum = lambda *_: stop()",
    "in the payload": """
class Half(FullFile):
    def write(self, data):
        if memoryview(data).nbytes > 100:
            self.file.write(memoryview(data)[:50])
            self.file.flush()
            stop()
        self.file.write(data)
folder_tier.open = lambda path, mode: Half(builtins.open(path, mode))
""",
    "before the rename": "os.replace = lambda *_: stop()",
}


@pytest.mark.parametrize("where", STOPS)
def test_a_writer_killed_in_the_middle_leaves_a_folder_that_the_next_start_uses(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = f"""
store, _ = on_files(folder)
store.store([(key(1), 1)])
def stop():
    tell("writing")
    signal.pause()
{STOPS[where]}
store.store([(key(2), 2)])
"""
    with child(code, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        during, _ = on_files(tmp_path)  # it lives, so its file is left alone
        unfinished = files(tmp_path, "*.tmp")
        assert len(unfinished) == 1
        assert during.fetch([key(2)]) is None
    assert process.returncode == -signal.SIGKILL
    assert files(tmp_path, "*.tmp") == unfinished
    store, buffers = on_files(tmp_path)
    assert not files(tmp_path, "*.tmp")
    assert store.fetch([key(2)]) is None
    assert fetched(store, key(1)) == [content(hybrid(), buffers, 0, 1)]
    store.store([(key(2), 2)])
    assert fetched(store, key(2)) == [content(hybrid(), buffers, 0, 2)]
    assert not caplog.records


def test_temporary_files_go_when_their_writer_is_dead_or_they_are_old(tmp_path: Path) -> None:
    store, _ = on_files(tmp_path)
    store.store([(key(1), 1)])
    (folder,) = tmp_path.iterdir()
    host = socket.gethostname()
    kept = [f"{host}.{os.getpid()}.ab.tmp", f"other.example.{DEAD_PID}.ab.tmp", "x.tmp"]
    gone = [f"{host}.{DEAD_PID}.ab.tmp", f"{host}.{10**30}.ab.tmp"]
    gone += [f"{host}.{os.getpid()}.cd.tmp", "other.example.1.ab.tmp"]
    for name in kept + gone:
        (folder / name).touch()
    for name in gone[2:]:
        os.utime(folder / name, (1, 1))
    on_files(tmp_path)
    assert sorted(path.name for path in files(tmp_path, "*.tmp")) == sorted(kept)


def test_two_stores_in_one_folder_never_see_half_a_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stores = [on_files(tmp_path, folder_bytes=6 * FILE)[0] for _ in range(2)]
    expected = {number: content(hybrid(), buffers_of(hybrid()), 0, 1 + number % 5) for number in range(20)}
    wrong: list[int] = []

    def work(store: KVOffload, step: int) -> None:
        for i in range(150):
            number = i * step % 20
            store.store([(key(number), 1 + number % 5)])
            other = (i - 1) * step % 20
            if fetched(store, key(other)) not in (None, [expected[other]]):
                wrong.append(other)

    threads = [threading.Thread(target=work, args=(store, step)) for store, step in zip(stores, (1, 3), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not caplog.records
    assert not files(tmp_path, "*.tmp")
    assert sum(store.stats.folder_hits for store in stores)
    # However the threads share the work: one of them writes more than the six of twenty that fit.
    assert sum(store.stats.folder_evictions for store in stores)
    faults = [(s.stats.corrupt_files, s.stats.truncated_files, s.stats.write_failures) for s in stores]
    assert faults == [(0, 0, 0)] * 2


def test_a_file_that_goes_while_it_is_looked_at_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process may evict it after any look at it, the last one before the new file takes its place included."""
    store, _ = on_files(tmp_path)
    store.store([(key(7), 1)])
    (path,) = files(tmp_path, "*.kv")
    aside, looks, look = tmp_path / "aside", [0], os.lstat
    for gone_after in (1, 2, 3):
        looks[0] = 0

        def lstat(name: Any, *, after: int = gone_after) -> os.stat_result:
            status = look(name)
            looks[0] += Path(name) == path
            if Path(name) == path and looks[0] == after:
                path.rename(aside)
            return status

        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", lstat)
            tier = store._folder
            assert tier is not None
            tier.write([(key(7), torch.zeros(store.block_bytes[0], dtype=torch.uint8))])
        assert path.exists() and looks[0]
    assert store.stats.write_failures == 0
    assert not caplog.records


def test_two_processes_share_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = """
store, _ = on_files(folder, folder_bytes=6 * FILE)
tell("ready")
sys.stdin.readline()
for i in range(200):
    number = i * 3 % 10
    store.store([(key(number), 1 + number % 5)])
tell(store.stats.write_failures)
"""
    store, buffers = on_files(tmp_path, folder_bytes=6 * FILE)
    with child(code, tmp_path) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        hits = 0
        for i in range(200):
            number, other = i % 10, (i - 1) % 10
            store.store([(key(number), 1 + number % 5)])
            if (pages := fetched(store, key(other))) is not None:
                hits += 1
                assert pages == [content(hybrid(), buffers, 0, 1 + other % 5)]
        assert process.stdout.readline() == "0\n"
    assert hits
    assert not caplog.records
    assert not files(tmp_path, "*.tmp")
