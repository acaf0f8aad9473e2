import random

from hybrid_kv.check.probes.checks.batches import rejected
from hybrid_kv.check.probes.registry import Traffic
from hybrid_kv.check.targets.target import Answer

UNIT = 16


def follows(token: int) -> int:
    """An engine whose every token depends on the one before alone."""
    return (3 * token + 1) % 4999


def test_the_last_draft_is_wrong_and_the_first_token_of_a_block() -> None:
    rounds = rejected(Traffic(random.Random(0), 5000, UNIT, 5 * UNIT, 512))
    lengths, (ask,) = [], next(rounds).requests
    while True:
        if ask.max_tokens > 1:
            first = follows(ask.prompt[-1])
            assert ask.prompt[:2] == (ask.prompt[-1], first)
            assert ask.prompt[2] != follows(first)
            lengths.append((len(ask.prompt), ask.max_tokens))
        try:
            (ask,) = rounds.send([Answer((follows(ask.prompt[-1]),))]).requests
        except StopIteration:
            break
    # With one token drawn, and one draft behind it, the draft is at a multiple of the block; a
    # token is left behind it.
    assert lengths == [(blocks * UNIT - off, 2 + off) for blocks in (1, 2, 3) for off in (1, 2)]
