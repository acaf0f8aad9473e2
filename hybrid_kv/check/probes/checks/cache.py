"""Requests one at a time: what the prefix cache gives back, and what it must not."""

from __future__ import annotations

from hybrid_kv.check.probes.registry import BOTH, Round, Rounds, Traffic, probe

LONG = 4096  # tokens; what is longer takes a CPU a minute


@probe("alone", place=0)
def alone(traffic: Traffic) -> Rounds:
    """Send each prompt by itself and cold, to compare the oracle.

    The shortest, which may end an engine, come last.
    """
    for prompt in reversed(traffic.mixed(6 + 2 * traffic.amount)):
        yield Round((traffic.ask(prompt),))


@probe("repeat", place=10, moves="cached", when="prefix", not_in=BOTH)
def repeat(traffic: Traffic) -> Rounds:
    """Send a prompt again and again."""
    for prompt in traffic.mixed(6 + 2 * traffic.amount):
        for _ in range(3):
            yield Round((traffic.ask(prompt),))


@probe("ends at a cached entry", place=11, moves="cached", when="prefix", not_in=BOTH)
def cached_end(traffic: Traffic) -> Rounds:
    """Send prompts that end where what is cached ends, a token before and a token after."""
    for _ in range(traffic.amount):
        whole = traffic.prompt(3 * traffic.unit + 5)
        yield Round((traffic.ask(whole),))
        for end in (len(whole), 3 * traffic.unit, 2 * traffic.unit, traffic.unit):
            for length in (end - 1, end, end + 1):
                yield Round((traffic.ask((*whole, *traffic.prompt(1))[: max(1, length)]),))


@probe("extended and branched", place=12, moves="cached", when="prefix", not_in="exact random")
def conversations(traffic: Traffic) -> Rounds:
    """Send turn after turn on the answers given, and other continuations of each turn."""
    for _ in range(traffic.amount):
        text = traffic.prompt(traffic.unit + 3)
        for _ in range(3):
            # A state that is a little off turns few tokens, and every log-probability.
            (answer,) = yield Round((traffic.ask(text, logprobs=True),))
            other = (*text, *traffic.prompt(traffic.unit // 2 + 1))
            yield Round((traffic.ask(other),))
            text = (*text, *answer.token_ids, *traffic.prompt(traffic.unit // 2))
            yield Round((traffic.ask((*text[: traffic.unit], *traffic.prompt(3))),))
            if len(text) + traffic.unit + traffic.num_new > traffic.longest:
                break


@probe("another token near the end", place=13, moves="cached", when="prefix", not_in=BOTH)
def another_token(traffic: Traffic) -> Rounds:
    """Send a prompt that grew by a token, then a long text with another one, then a branch of it.

    Some engines keep a state a few tokens before each prompt's end. Of the state that has seen the
    other token nothing may be left. How far from the end it is kept is not known: prompts end one
    to eight tokens behind the token.
    """
    for _ in range(traffic.amount):
        for length in (0, traffic.unit // 2, 2 * traffic.unit + 1):
            for behind in range(1, 9):
                stem, tail = (
                    traffic.prompt(length)[:length],
                    traffic.prompt(traffic.longest)[: 4 * traffic.unit],
                )
                one, other = traffic.rng.sample(range(1, traffic.vocab_size), 2)
                yield Round((traffic.ask((*stem, *traffic.prompt(behind)), max_tokens=1),))
                yield Round((traffic.ask((*stem, one, *traffic.prompt(behind)), max_tokens=1),))
                yield Round((traffic.ask((*stem, other, *tail), max_tokens=1),))
                yield Round(
                    (
                        traffic.ask(
                            (*stem, other, *tail[:2], *traffic.prompt(1)),
                            max_tokens=4,
                            logprobs=True,
                        ),
                    )
                )


@probe("block boundaries", place=18, moves="cached", when="prefix")
def boundaries(traffic: Traffic) -> Rounds:
    """Send prompts of every multiple of the block, and up to three tokens off it, twice.

    There may be as many drafts. The prompts of one multiple come together: one by one they took
    twice as long as any other probe. One token off two multiples is what a run sends that has
    another model, too.
    """
    reach, multiples = (3, 3) if traffic.thorough else (1, 2)
    most = min(multiples, (traffic.longest - traffic.num_new) // traffic.unit)
    for blocks in range(1, most + 1):
        prompts = [
            traffic.prompt(blocks * traffic.unit + offset) for offset in range(-reach, reach + 1)
        ]
        for _ in range(2):
            yield Round(tuple(traffic.ask(prompt) for prompt in prompts))


@probe("answers across a boundary", place=14, moves="cached", when="prefix", not_in=BOTH)
def answers_across(traffic: Traffic) -> Rounds:
    """Let the answer fill a block, last with its last token; then go on from what it left."""
    unit = traffic.unit
    new = traffic.num_new
    across = [(unit - off, 2 * new) for off in range(1, 5)]
    for length, max_tokens in (*across, (2 * unit - min(new, unit), min(new, unit))):
        prompt = traffic.prompt(length)
        (answer,) = yield Round((traffic.ask(prompt, max_tokens=max_tokens),))
        text = (*prompt, *answer.token_ids)
        for cut in (0, 1, 2):
            yield Round((traffic.ask((*text[: len(text) - cut], *traffic.prompt(2))),))


@probe("up to the limit", place=17, not_in=BOTH)
def to_the_limit(traffic: Traffic) -> Rounds:
    """End requests at the last position, where drafts would go beyond it; and again."""
    length = traffic.limit - traffic.num_new
    if traffic.limit <= LONG:
        prompt = tuple(traffic.rng.randrange(1, traffic.vocab_size) for _ in range(length))
        yield Round((traffic.ask(prompt), traffic.ask(traffic.prompt(traffic.unit))))
        yield Round((traffic.ask(prompt),))


@probe("salts isolate", place=8, needs="salt cached", moves="cached", when="prefix", not_in=BOTH)
def salts(traffic: Traffic) -> Rounds:
    """Check that a salt finds nothing of another's, and all of its own.

    No probe may find more than was sent, see `session.Seen`.
    """
    for _ in range(traffic.amount):
        prompt = traffic.prompt(3 * traffic.unit + 1)
        yield Round((traffic.ask(prompt, salt="a"),))
        yield Round((traffic.ask(prompt, salt="b"),))
        yield Round((traffic.ask(prompt),))
        yield Round((traffic.ask(prompt, salt="a"),))


@probe("abort, then the same prompt", place=16, needs="abort", not_in=BOTH)
def aborted(traffic: Traffic) -> Rounds:
    """Cut off a request after a few tokens, send it again at once, extend it."""
    for tokens in (1, 2, 5):
        prompt = traffic.prompt(2 * traffic.unit + tokens)
        yield Round(
            (traffic.ask(prompt, abort_after=tokens), traffic.ask(traffic.prompt(traffic.unit)))
        )
        yield Round((traffic.ask(prompt),))
        yield Round((traffic.ask((*prompt, *traffic.prompt(3))),))
