"""Hashes of blocks: of all tokens up to a block's end, chained block by block.

A chain belongs to one block size. The hash of a block follows from its parent's and its own tokens,
so two requests have equal hashes exactly as far as their tokens (and salts) are equal, and
extending a request never rehashes its past.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

DIGEST_SIZE = 16


class BlockHashes:
    """The chains of one request.

    Args:
        salt: extra key; requests share nothing with requests of another salt (an adapter, a
            tenant).
    """

    def __init__(self, salt: str = "") -> None:
        self.root = blake2b(salt.encode(), digest_size=DIGEST_SIZE, person=b"salt").digest()
        self._chains: dict[int, list[bytes]] = {}

    def chain(self, block_size: int, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Return hashes of the full blocks among the first `num_tokens` tokens, at least.

        Those tokens must not change.
        """
        chain = self._chains.setdefault(block_size, [])
        begin = len(chain)
        end = num_tokens // block_size
        if end > begin:
            data = np.asarray(
                token_ids[begin * block_size : end * block_size], dtype=np.int64
            ).tobytes()
            parent = chain[-1] if chain else self.root
            width = 8 * block_size
            for start in range(0, len(data), width):
                parent = blake2b(
                    parent + data[start : start + width], digest_size=DIGEST_SIZE
                ).digest()
                chain.append(parent)
        return chain
