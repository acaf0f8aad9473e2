"""Equal hashes exactly as far as tokens and salt are equal."""

from __future__ import annotations

from hashlib import blake2b
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache.block_hash import DIGEST_SIZE, BlockHashes

tokens = st.lists(st.integers(0, 2), max_size=24)
salts = st.sampled_from(["", "a", "b", "ab", "a\0"])


@given(tokens, tokens, tokens, salts, salts, st.integers(1, 6))
def test_equal_exactly_as_far_as_tokens_and_salt_are(
    common: list[int], left: list[int], right: list[int], salt: str, other: str, block_size: int
) -> None:
    left, right = common + left, common + right
    chains = [
        BlockHashes(name).chain(block_size, text, len(text))
        for name, text in ((salt, left), (other, right))
    ]
    assert [len(chain) for chain in chains] == [len(left) // block_size, len(right) // block_size]
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))
    equal = [a == b for a, b in zip(*chains, strict=False)]
    assert equal == [
        salt == other and end <= same // block_size for end in range(1, len(equal) + 1)
    ]


@given(
    tokens,
    st.lists(st.integers(0, 24), max_size=6),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_growing_equals_from_scratch_in_every_block_size(
    text: list[int], steps: list[int], sizes: list[int]
) -> None:
    growing = BlockHashes("salt")
    known = 0
    for step in steps:
        known = min(len(text), max(known, step))
        for size in sizes:
            # What lies behind the known tokens may still change: it must not be hashed.
            garbage = text[:known] + [9] * (len(text) - known)
            assert growing.chain(size, garbage, known) == BlockHashes("salt").chain(
                size, text[:known], known
            )


def test_a_shorter_question_gets_the_whole_chain() -> None:
    hashes = BlockHashes()
    chain = list(hashes.chain(2, [1, 2, 3, 4, 5], 5))
    assert len(chain) == 2
    assert hashes.chain(2, (), 0) == chain
    assert hashes.chain(2, [1, 2], 2) == chain


def test_no_two_prefixes_or_block_sizes_share_a_hash() -> None:
    """Also where one token's bytes could run into the next one's."""
    texts = [
        [0] * 6,
        [1] + [0] * 5,
        [256] + [0] * 5,
        [0, 1] + [0] * 4,
        [2**32] + [0] * 5,
        [0] * 5 + [1],
    ]
    seen: dict[bytes, tuple[int, ...]] = {}
    for text in texts:
        for end in range(1, 7):
            # The same prefix in blocks of another size is another chain: its groups have other keys
            # anyway.
            digest = BlockHashes().chain(end, text, end)[0]
            assert seen.setdefault(digest, tuple(text[:end])) == tuple(text[:end])
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("text", ["", "a", "\0" * 24])
def test_a_salt_is_no_prefix_of_tokens(text: str) -> None:
    """A salt equal to a parent's bytes and tokens must not collide with them under the same key."""
    data = text.encode()
    assert BlockHashes(text).root != blake2b(data, digest_size=DIGEST_SIZE).digest()
    assert len(BlockHashes(text).root) == DIGEST_SIZE
