"""Random traffic of an exact model: all at once, since each wrong token shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hybrid_kv.check.probes.registry import Round, Rounds, Traffic, probe
from hybrid_kv.check.targets.target import Ask


@probe("as long as a verify step", place=2, needs="batch", when="spec", elsewhere=False, exact=True)
def verify_lengths(traffic: Traffic) -> Rounds:
    """Send short prompts of one length, alone and in pairs: a step with drafts has this shape."""
    for length in range(2, 7):
        asks = [traffic.ask(traffic.prompt(length), logprobs=False) for _ in range(3)]
        yield Round((asks[0],))
        yield Round((*asks[1:],))


@probe(
    "many at once, all with drafts",
    place=2,
    needs="batch",
    moves="accepted",
    when="spec",
    elsewhere=False,
    exact=True,
)
def all_drafting(traffic: Traffic) -> Rounds:
    """Send prompts that hold what has always followed a token in earlier answers, together.

    A lookup of n-grams proposes it, and is often right. Where the pool has no room for all drafts,
    requests sit a step out, some of them right after accepted drafts. The answers end one by one:
    each time blocks become free.
    """
    new = traffic.num_new
    num_requests = traffic.batch // 2
    asks = [traffic.ask(traffic.prompt(9 + i), max_tokens=3 * new) for i in range(num_requests)]
    answers = yield Round(tuple(replace(ask, logprobs=False) for ask in asks))
    pairs = _always_followed([answer.token_ids for answer in answers])
    asks = [
        traffic.ask((*pairs, *traffic.prompt(1 + i)), max_tokens=2 * new + 5 * (7 * i % 11))
        for i in range(num_requests)
    ]
    yield Round(tuple(replace(ask, logprobs=False) for ask in asks))


def _always_followed(texts: Sequence[tuple[int, ...]]) -> list[int]:
    """Return pairs in a row: a token that occurs twice or more, and its only follower."""
    followed: dict[int, list[int]] = defaultdict(list)
    for text in texts:
        for token, follower in pairwise(text):
            followed[token].append(follower)
    return [
        token
        for first, followers in followed.items()
        if len(followers) > 1 and len(set(followers)) == 1
        for token in (first, followers[0])
    ]


@probe(
    "a third with the same beginning",
    place=2,
    moves="cached",
    when="prefix",
    elsewhere=False,
    exact=True,
)
def thirds(traffic: Traffic) -> Rounds:
    """Send prompts that share a beginning one after another: the second shows where they part.

    That is two blocks before their ends, which are kept as well.
    """
    for length in (traffic.unit, 2 * traffic.unit + 1):
        stem = traffic.prompt(length)
        for _ in range(3):
            prompt = (*stem, *traffic.prompt(2 * traffic.unit + 2))
            yield Round((traffic.ask(prompt, max_tokens=2, logprobs=False),))
        yield Round((traffic.ask(prompt, max_tokens=2, logprobs=False),))


# Logits of exact weights are multiples of it, so that the likeliest of two tokens has 73 % or more.
MARGIN = 256.0


@probe("one token is left", place=2, needs="top hot", exact=True)
def one_token_left(traffic: Traffic) -> Rounds:
    """Draw from two tokens of which top-p leaves one: each draw is the likeliest."""
    prompts = traffic.mixed(6)
    yield Round(
        tuple(
            traffic.ask(prompt, temperature=MARGIN, top_k=2, top_p=0.7, seed=i, logprobs=False)
            for i, prompt in enumerate(prompts)
        )
    )


@probe(
    "greedy among draws",
    place=2,
    needs="top batch",
    when="async",
    elsewhere=False,
    exact=True,
)
def among_draws(traffic: Traffic) -> Rounds:
    """Send greedy requests with others that draw, from one token.

    They end one by one, so that each sampling parameter has to move with its request.
    """
    asks = [traffic.ask(prompt, logprobs=False) for prompt in traffic.mixed(8)]
    asks = [replace(ask, max_tokens=2 + 2 * (5 * i % 8)) for i, ask in enumerate(asks)]
    asks[::2] = [replace(ask, temperature=2.0, top_k=1) for ask in asks[::2]]
    yield Round(tuple(asks))


@probe("traffic", place=1, exact=True)
def traffic(traffic: Traffic) -> Rounds:
    """Send prompts with shared beginnings a few steps apart.

    Some are repeated, extended, short or ended early. Every other round has two salts; every third
    one preempts all that runs, again and again, and all its texts go on. Later rounds have longer
    prompts.
    """
    rng = traffic.rng
    unit = traffic.unit
    known = list[tuple[int, ...]]()
    for number in range(4 * traffic.amount):
        # A text grows by up to six blocks. The first rounds take few seconds.
        longest = max(1, traffic.limit - 6 * unit)
        if number < 4:
            longest = min(longest, 7 * unit + 8)
        long = replace(traffic, longest=traffic.limit)
        stems = [long.prompt(longest) for _ in range(3)]
        requests: list[Ask] = []
        for i in range(traffic.batch):
            stem = rng.choice(stems)[: rng.randrange(longest)] if rng.random() < 0.6 else ()
            prompt = (*stem, *traffic.prompt(rng.choice((1, rng.randrange(1, 2 * unit)))))
            kind = rng.random()
            if kind < 0.15 and requests:
                prompt = rng.choice(requests).prompt
            elif kind < 0.3 and known:
                prompt = (*rng.choice(known), *traffic.prompt(rng.randrange(1, 4)))
            elif kind < 0.4:
                prompt = prompt[: traffic.shortest]
            elif kind < 0.5:  # ends on a block's boundary, or a token next to it
                end = len(prompt) // unit * unit + rng.randrange(-1, 2)
                prompt = prompt[: max(traffic.shortest, end)]
            salt = rng.choice(("a", "b")) if number % 2 else ""
            abort = rng.randrange(1, 20) if rng.random() < 0.1 else None
            step = i // 4 * rng.randrange(2, 5)
            new = rng.randrange(1, 2 * unit + 8)
            requests.append(
                traffic.ask(
                    prompt, max_tokens=new, salt=salt, abort_after=abort, step=step, logprobs=False
                )
            )
        answers = yield Round(tuple(requests), preempt_every=(0, 0, 40)[number % 3])
        known = [
            (*ask.prompt, *answer.token_ids) for ask, answer in zip(requests, answers, strict=True)
        ]
        if number % 3 == 2:
            # A text that was computed again may have left another state than its blocks say.
            more = [
                replace(ask, prompt=(*text, 1), max_tokens=2)
                for ask, text in zip(requests, known, strict=True)
            ]
            yield Round(tuple(more))
        known = [text for text in known if len(text) < longest + 3 * unit // 2]


@probe("tiles", place=1, exact=True)
def tiles(traffic: Traffic) -> Rounds:
    """Send prompts of whole blocks, out of four and in any order.

    Only the blocks before it tell equal ones apart.
    """
    rng = traffic.rng
    kinds = [traffic.prompt(traffic.unit) for _ in range(4)]
    for _ in range(traffic.amount):
        requests = []
        for i in range(traffic.batch):
            tiles = [rng.choice(kinds) for _ in range(rng.randrange(1, 6))]
            prompt = (*(token for tile in tiles for token in tile), *traffic.prompt(3))
            requests.append(
                traffic.ask(
                    prompt, max_tokens=rng.randrange(1, 30), step=i // 4 * 3, logprobs=False
                )
            )
        yield Round(tuple(requests))


@probe("one token beside others", place=1, needs="batch", exact=True)
def one_token(traffic: Traffic) -> Rounds:
    """Send prompts of one token that come while others run."""
    rng = traffic.rng
    for _ in range(traffic.amount):
        prompts = [traffic.prompt(1 if i % 3 else 20) for i in range(traffic.batch)]
        yield Round(
            tuple(
                traffic.ask(
                    prompt, max_tokens=rng.randrange(10, 40), step=i // 3 * 4, logprobs=False
                )
                for i, prompt in enumerate(prompts)
            )
        )


@probe(
    "one token behind a hit",
    place=1,
    needs="batch",
    moves="cached",
    when="prefix",
    elsewhere=False,
    exact=True,
)
def one_token_behind_a_hit(traffic: Traffic) -> Rounds:
    """Send prompts of which a hit leaves one token, and that come while others run."""
    for _ in range(traffic.amount):
        cached = [traffic.prompt(traffic.unit * (1 + i % 3)) for i in range(traffic.batch // 2)]
        # Text after a prompt, so that the prompt's last block is complete and kept.
        longer = [(*prompt, *traffic.prompt(2)) for prompt in cached]
        yield Round(tuple(traffic.ask(prompt, max_tokens=2, logprobs=False) for prompt in longer))
        # The last ones first: a tight pool has lost the others.
        again = [
            traffic.ask((*prompt, *traffic.prompt(1)), max_tokens=8 + i, step=2 * i, logprobs=False)
            for i, prompt in enumerate(reversed(cached))
        ]
        yield Round((traffic.ask(traffic.prompt(20), max_tokens=30, logprobs=False), *again))
