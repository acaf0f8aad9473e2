"""Finding the longest cached prefix of a prompt, and hashing it."""

from __future__ import annotations

from bench._reference import equal
from bench._requests import BLOCK_SIZE, manager, prompts
from bench.harness.cells import Case, Cell, WrongResultError, grid
from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.spec import StateProgress


def hit(seed: int, mode: str, num_tokens: int, shared: str) -> Case:
    """Build the lookup of a prompt whose first tokens ran before; `shared` is how much of it.

    Its hashes are known, as when it waits.
    """
    (earlier,) = prompts(seed, 1, num_tokens)
    num_shared = {"all": num_tokens, "half": num_tokens // 2, "none": 0}[shared]
    tokens = [*earlier[:num_shared], *(token + 1 for token in earlier[num_shared:]), 5]
    subject = manager(mode, 0, 1 + 5 * (num_tokens // BLOCK_SIZE + 1))
    if subject.allocate_slots("earlier", 0, num_tokens, is_decode=False) is None:
        raise WrongResultError("the pool is too small")
    progress = StateProgress(num_tokens, num_tokens)
    subject.cache_blocks("earlier", BlockHashes(), earlier, progress, is_decode=False)
    subject.free("earlier")
    hashes = BlockHashes()
    # Mode align keeps the state at the end alone.
    expected = num_shared if mode != "align" or num_shared == num_tokens else 0

    def run() -> int:
        return subject.find_longest_cache_hit(hashes, tokens, use_offload=True).num_tokens

    return Case(run, lambda: equal("tokens of the hit", run(), expected))


def hash_blocks(seed: int, num_tokens: int) -> Case:
    """Build the hashing of a whole prompt's chain."""
    (tokens,) = prompts(seed, 1, num_tokens)

    def run() -> list[bytes]:
        return BlockHashes().chain(BLOCK_SIZE, tokens, num_tokens)

    def check() -> float:
        chain = list(run())
        equal("blocks", len(set(chain)), num_tokens // BLOCK_SIZE)
        changed = [*tokens]
        changed[num_tokens // 2] += 1
        other = BlockHashes().chain(BLOCK_SIZE, changed, num_tokens)
        first = next((i for i, (a, b) in enumerate(zip(chain, other, strict=True)) if a != b), -1)
        equal("the first hash that a token changes", first, num_tokens // 2 // BLOCK_SIZE)
        return equal(
            "hashes behind it that are the same",
            sum(a == b for a, b in zip(chain, other, strict=True)),
            first,
        )

    return Case(run, check)


def cells() -> list[Cell]:
    """Return cells of hits of all lengths, and of the hash."""
    values = {
        "mode": ("attention", "align", "all"),
        "num_tokens": (1024, 8192),
        "shared": ("all", "half", "none"),
    }
    return [
        *grid(
            "prefix_lookup",
            "hit",
            "cpu",
            hit,
            values,
            [("all", 8192, "all"), ("all", 1024, "half")],
        ),
        *grid("prefix_lookup", "hash", "cpu", hash_blocks, {"num_tokens": (1024, 8192)}, [(1024,)]),
    ]
