"""Requests together: a batch, many at once, a pool too small, and the same prompts again."""

from __future__ import annotations

from hybrid_kv.check.probes.registry import BOTH, Round, Rounds, Traffic, probe


@probe("batch", place=5, needs="batch", not_in="exact")
def batch(traffic: Traffic) -> Rounds:
    """Send mixed lengths together, with answers of unequal length: requests leave one by one."""
    for _ in range(traffic.amount):
        prompts = traffic.mixed(8)
        yield Round(
            tuple(traffic.ask(prompt, max_tokens=2 + 3 * i) for i, prompt in enumerate(prompts))
        )


@probe(
    "boundaries behind a batch", place=21, needs="batch", moves="cached", when="prefix", not_in=BOTH
)
def behind_a_batch(traffic: Traffic) -> Rounds:
    """Send long prompts that share steps, then each of their boundaries with another end.

    Their chunks end anywhere.
    """
    for _ in range(traffic.amount):
        long = [traffic.prompt(4 * traffic.unit - 9 * i) for i in range(4)]
        short = [traffic.prompt(traffic.unit // 2 + i) for i in range(2)]
        others = (short[0], *long[:2], short[1], *long[2:])
        yield Round(tuple(traffic.ask(prompt, max_tokens=4) for prompt in others))
        cuts = [
            prompt[:end]
            for prompt in long
            for end in range(traffic.unit, len(prompt), traffic.unit)
        ]
        # A state that is a little off turns few tokens, and every log-probability.
        yield Round(
            tuple(
                traffic.ask((*cut, *traffic.prompt(3)), max_tokens=4, logprobs=True) for cut in cuts
            )
        )


@probe("joining and leaving", place=21, needs="batch", not_in=BOTH)
def joining(traffic: Traffic) -> Rounds:
    """Send requests that arrive as others end, into the rows that these leave."""
    for _ in range(traffic.amount):
        requests = [
            traffic.ask(prompt, max_tokens=3 + i % 5 * 4, after=max(0, i - 3))
            for i, prompt in enumerate(traffic.mixed(12))
        ]
        yield Round(tuple(requests))


@probe("identical at once", place=6, needs="batch", moves="cached", when="prefix", not_in=BOTH)
def identical(traffic: Traffic) -> Rounds:
    """Send one prompt six times in one batch, and once more after them."""
    for length in (1, traffic.unit, 2 * traffic.unit + 3):
        prompt = traffic.prompt(length)
        yield Round(tuple(traffic.ask(prompt) for _ in range(6)))
        yield Round((traffic.ask(prompt),))


@probe("shared beginnings", place=7, needs="batch", moves="cached", when="prefix", not_in="exact")
def shared(traffic: Traffic) -> Rounds:
    """Send prompts with one beginning, together and again in another order."""
    for _ in range(traffic.amount):
        begin = traffic.prompt(2 * traffic.unit + 1)
        prompts = [(*begin[: len(begin) - i], *traffic.prompt(1 + 5 * i)) for i in range(6)]
        yield Round(tuple(traffic.ask(prompt) for prompt in prompts))
        traffic.rng.shuffle(prompts)
        yield Round(tuple(traffic.ask(prompt) for prompt in prompts))


@probe(
    "together across a boundary", place=9, needs="batch", moves="cached", when="prefix", not_in=BOTH
)
def together_across(traffic: Traffic) -> Rounds:
    """Fill blocks by answers, and go on from what they left.

    Each answer fills its block at another token of a step with drafts.
    """
    for _ in range(2 * traffic.amount):
        prompts = [traffic.prompt(traffic.unit - i) for i in range(1, 9)]
        answers = yield Round(
            tuple(traffic.ask(prompt, max_tokens=2 * traffic.num_new) for prompt in prompts)
        )
        texts = [
            (*prompt, *answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        yield Round(tuple(traffic.ask((*text, *traffic.prompt(2))) for text in texts))


@probe("long among short", place=24, needs="batch", not_in=BOTH)
def long_lived(traffic: Traffic) -> Rounds:
    """Send short requests that come and go while a long answer runs."""
    long = traffic.ask(traffic.prompt(traffic.unit + 1), max_tokens=6 * traffic.num_new)
    short = [
        traffic.ask(prompt, max_tokens=4, after=max(0, i - 2))
        for i, prompt in enumerate(traffic.mixed(10))
    ]
    yield Round((long, *short))


@probe("many are cut off", place=25, needs="abort batch", not_in=BOTH)
def many_cut_off(traffic: Traffic) -> Rounds:
    """End more requests early than run at once, some while they wait; then let as many end."""
    prompts = traffic.mixed(12)
    yield Round(
        tuple(traffic.ask(prompt, abort_after=1 + i % 4) for i, prompt in enumerate(prompts))
    )
    yield Round(tuple(traffic.ask(prompt, max_tokens=4) for prompt in prompts))


@probe("drafts", place=30, moves="drafts", when="spec", elsewhere=False, not_in="random")
def drafts(traffic: Traffic) -> Rounds:
    """Send texts that repeat themselves, alone and together: some drafts are right and some not.

    Answers are long, as n-grams are found in them only once they repeat themselves.
    """
    prompts = [traffic.repetitive(length) for length in (20, traffic.unit + 2, 2 * traffic.unit)]
    for prompt in prompts:
        yield Round((traffic.ask(prompt, max_tokens=6 * traffic.num_new),))
    requests = tuple(traffic.ask(prompt, max_tokens=6 * traffic.num_new) for prompt in prompts)
    for _ in range(traffic.amount):
        yield Round(requests)


@probe(
    "short answers with drafts",
    place=32,
    needs="batch",
    moves="drafts",
    when="spec",
    elsewhere=False,
    not_in=BOTH,
)
def short_answers(traffic: Traffic) -> Rounds:
    """Answers end at unequal lengths, often within drafts; the next texts begin so and go on."""
    rng, texts = traffic.rng, [traffic.repetitive(9 + i) for i in range(4)]
    for _ in range(6 * traffic.amount):
        requests = []
        for i in range(8):
            text = rng.choice(texts)
            length = rng.randint(1, len(text)) if i % 2 else len(text)
            prompt = (*text[:length], *traffic.prompt(1))
            requests.append(traffic.ask(prompt, max_tokens=rng.randint(1, 7), after=max(0, i - 3)))
        answers = yield Round(tuple(requests))
        pairs = zip(requests, answers, strict=True)
        grown = [(*ask.prompt, *answer.token_ids) for ask, answer in pairs]
        most = 4 * traffic.unit
        texts = [text if len(text) < most else traffic.repetitive(9) for text in grown]


@probe(
    "rejected at a boundary",
    place=31,
    moves="drafts",
    when="spec",
    elsewhere=False,
    not_in="random",
)
def rejected(traffic: Traffic) -> Rounds:
    """Send prompts whose last draft is wrong, and the first token of a block.

    The token after it has no drafts. The prompt begins with its own last token, the answer's first,
    and one that does not follow: what a lookup of n-grams finds. The first token is generated again
    until the new beginning does not change it.
    """
    for blocks in (1, 2, 3):
        for off in (1, 2):
            text = traffic.prompt(blocks * traffic.unit - off)
            for _ in range(3):
                (answer,) = yield Round((traffic.ask(text, max_tokens=1),))
                text = (text[-1], *answer.token_ids[:1], *traffic.prompt(1), *text[3:])
            yield Round((traffic.ask(text, max_tokens=2 + off, logprobs=True),))


@probe("preempted", place=40, needs="preempt batch", moves="preemptions", not_in="random")
def preempted(traffic: Traffic) -> Rounds:
    """Preempt all that runs every few tokens, and resume it."""
    for every in (3, 7, 20):
        prompts = [*traffic.mixed(5), traffic.repetitive(traffic.unit + 4)]
        yield Round(
            tuple(traffic.ask(prompt, max_tokens=2 * traffic.num_new) for prompt in prompts),
            preempt_every=every,
        )


@probe(
    "a pool too small",
    place=41,
    needs="batch",
    moves="preemptions",
    when="blocks",
    elsewhere=False,
    not_in=BOTH,
)
def pressure(traffic: Traffic) -> Rounds:
    """Send more long requests than the pool holds; then the same again."""
    length = traffic.longest // 2
    for _ in range(traffic.amount):
        prompts = [traffic.prompt(length - i) for i in range(6)]
        for _ in range(2):
            yield Round(
                tuple(traffic.ask(prompt, max_tokens=4 * traffic.num_new) for prompt in prompts)
            )


@probe("asleep", place=42, needs="sleep", moves="cached", when="prefix")
def asleep(traffic: Traffic) -> Rounds:
    """Send prompts again after the target has slept: what was cached is gone."""
    asks = tuple(traffic.ask(prompt) for prompt in traffic.mixed(6))
    yield Round(asks)
    yield Round(asks)
    yield Round(asks, after_sleep=True)


@probe(
    "seeds", place=50, needs="seed batch", when="chunk spec async", elsewhere=False, not_in="exact"
)
def seeds(traffic: Traffic) -> Rounds:
    """Ask for sampled answers with a seed: alone, and among others."""
    requests = [
        traffic.ask(prompt, temperature=1.0, seed=1000 + i)
        for i, prompt in enumerate(traffic.mixed(6))
    ]
    for ask in requests:
        yield Round((ask,))
    yield Round(tuple(requests))


@probe(
    "several answers",
    place=51,
    needs="n batch",
    when="chunk spec async",
    elsewhere=False,
    not_in="exact",
)
def several(traffic: Traffic) -> Rounds:
    """Ask for n greedy answers to one prompt, among others."""
    prompts = traffic.mixed(6)
    yield Round(tuple(traffic.ask(prompt, n=1 + i % 3) for i, prompt in enumerate(prompts)))
    yield Round(tuple(traffic.ask(prompt, n=3) for prompt in prompts[2:4]))


@probe(
    "logprobs among others",
    place=52,
    needs="logprobs batch",
    when="chunk spec async",
    elsewhere=False,
)
def logprobs(traffic: Traffic) -> Rounds:
    """Ask for log-probabilities in one request, and not in its neighbours."""
    for which in range(3):
        requests = [
            traffic.ask(prompt, logprobs=i == which) for i, prompt in enumerate(traffic.mixed(6))
        ]
        yield Round(tuple(requests))
        yield Round(tuple(requests))


@probe("again after many", place=90, needs="batch", not_in=BOTH)
def churned(traffic: Traffic) -> Rounds:
    """Send prompts, many others, and the first ones again, one by one.

    There are 100 others for each amount, each tenth long.
    """
    prompts = traffic.mixed(6)
    for prompt in prompts:
        yield Round((traffic.ask(prompt),))
    for _ in range(10 * traffic.amount):
        others = [
            traffic.prompt(traffic.rng.randrange(1, 2 * traffic.unit if i == 5 else 32))
            for i in range(10)
        ]
        yield Round(
            tuple(
                traffic.ask(prompt, max_tokens=3, after=max(0, i - 6))
                for i, prompt in enumerate(others)
            )
        )
    for prompt in prompts:
        yield Round((traffic.ask(prompt),))


@probe("a tree of texts", place=91, needs="batch", moves="cached", when="prefix", not_in=BOTH)
def tree(traffic: Traffic) -> Rounds:
    """Send prompts of every length that begin as an earlier text does, whole or cut.

    Long hits run together.
    """
    texts = [traffic.prompt(traffic.longest)]
    rng = traffic.rng
    for _ in range(4 * traffic.amount):
        requests = []
        for i in range(8):
            fresh = traffic.prompt(rng.randint(1, traffic.longest))
            known = rng.choice(texts)
            most = min(len(fresh) - 1, len(known))
            cut = rng.choice((most, rng.randint(0, most)))  # some caches serve whole texts alone
            new = rng.randint(1, traffic.num_new)
            requests.append(
                traffic.ask((*known[:cut], *fresh[cut:]), max_tokens=new, after=max(0, i - 5))
            )
        answers = yield Round(tuple(requests))
        texts_of_round = [
            (*ask.prompt, *answer.token_ids) for ask, answer in zip(requests, answers, strict=True)
        ]
        texts = [*texts, *texts_of_round][-16:]
