"""Seeded grade-school word problems in GSM8K format, some of which need a remembered value.

Every problem is a question, a chain of thought with one ``a<op>b=c`` per line, and ``#### N``. The
*latch* is the sentence "Each box now holds 6 items.": it sets how many items a box holds, for its
own problem and for every later one, until it is stated again. A latch problem counts boxes without
saying the size, so its answer needs a number stated several problems (hundreds of tokens) ago.

Training and evaluation never share numbers. What a problem's answer depends on (every number of its
question, and the box size where that is left out) is hashed into ten classes; class 0 is generated
for evaluation only, the others for training only. About 3 % of the ``a+b`` and ``a-b`` pairs are
kept out of training as well. Hashes are CRC-32, so they are the same everywhere.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]

NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ivy", "Jack")
ITEMS = ("apples", "pears", "coins", "cards", "books", "pens", "shells", "stamps")
LATCH = "Each box now holds {size} items."

# The verb alone tells the direction: with "{b} gives {a}" next to "{a} gives {b}", 21 of 24 errors
# looked at after 5,000 steps were a wrong direction of giving, at 88 % exact match.
ADD = (
    "{a} buys {y} more {i}.",
    "{a} finds {y} more {i}.",
    "{a} gets {y} {i} from {b}.",
)
SUBTRACT = (
    "{a} loses {y} {i}.",
    "{a} sells {y} {i}.",
    "{a} gives {b} {y} {i}.",
)
MULTIPLY = {2: "Then {a} doubles the number of {i}.", 3: "Then {a} triples the number of {i}."}
ADD_BOXES = ("{a} buys {y} boxes of {i}.", "{a} gets {y} boxes of {i} from {b}.")
SUBTRACT_BOXES = ("{a} sells {y} boxes of {i}.",)
OPEN_BOXES = "{a} has {y} boxes of {i}."
# The number below which a draw chooses it, the largest y, what is computed, and the words.
COMPARED = (
    (0.4, 20, "+", "{a} has {y} more {i} than {b}."),
    (0.7, 20, "-", "{a} has {y} fewer {i} than {b}."),
    (1.0, 4, "*", "{a} has {y} times as many {i} as {b}."),
)

MAX_VALUE = 99  # two digits: a longer number would need more training, not a longer memory
STEP_CHOICES = (1, 2, 2, 3, 3, 4)  # two and three steps twice as often as one and four
P_OMIT_SIZE = 0.8  # chance that a box problem leaves out a size that is already known
P_DISTRACTOR = 0.15
P_BARE_LATCH = 0.12  # chance that a problem without boxes sets the latch for later ones


@dataclass(frozen=True)
class Problem:
    """One problem with its worked answer."""

    question: str
    answer: str
    final: int
    steps: int
    needs_latch: bool
    numbers: tuple[int, ...]  # what the answer depends on; the held-out split is made on this
    latch_after: int | None  # the box size in force after this problem

    def document(self) -> str:
        """Return the problem as a solved example of a few-shot prompt."""
        return f"Question: {self.question}\nAnswer: {self.answer}"


@dataclass(frozen=True)
class EvalItem:
    """A few-shot prompt that ends in ``Answer:`` and what has to follow it."""

    prompt: str
    answer: str
    final: int
    steps: int
    needs_latch: bool


@dataclass(frozen=True)
class FixedShotDataset:
    """Documents that all follow the same solved examples."""

    shots: list[dict[str, str]]
    docs: list[dict[str, str | int | bool]]


def is_held_out(numbers: tuple[int, ...]) -> bool:
    """Return whether problems with these numbers belong to evaluation (one class in ten)."""
    return zlib.crc32(",".join(map(str, numbers)).encode()) % 10 == 0


def is_held_out_pair(a: int, op: str, b: int) -> bool:
    """Return whether ``a+b`` or ``a-b`` never occurs in a training answer (about 3 %)."""
    return op in "+-" and zlib.crc32(f"{a}{op}{b}".encode()) % 33 == 0


class _RejectedError(Exception):
    """A draft that broke a rule (a value out of range, a missing box); draw another one."""


class _Draft:
    """A problem while it is being written: sentences, solution lines and the running value."""

    def __init__(self, rng: random.Random, latch: int | None) -> None:
        self.rng = rng
        self.latch = latch
        self.sentences: list[str] = []
        self.lines: list[tuple[int, str, int, int]] = []
        self.numbers: list[int] = []
        self.used_boxes = False
        self.needs_latch = False
        self.value = 0

    def number(self, low: int, high: int) -> int:
        """Draw a number for the next sentence and note it."""
        drawn = self.rng.randint(low, high)
        self.numbers.append(drawn)
        return drawn

    def compute(self, a: int, op: str, b: int) -> int:
        """Add the line ``a<op>b=c`` to the answer and return c."""
        result = {"+": a + b, "-": a - b, "*": a * b}[op]
        if not 0 < result <= MAX_VALUE:
            raise _RejectedError
        self.lines.append((a, op, b, result))
        return result

    def box_size(self, say: bool | None) -> int:
        """Return the size of a box: left out where it is known, else said here.

        ``say``: True says it, False leaves it out, None decides at random.
        """
        self.used_boxes = True
        if say is None:
            say = self.latch is None or self.rng.random() >= P_OMIT_SIZE
        if say:
            self.set_latch(len(self.sentences))
        elif self.latch is None:
            raise _RejectedError
        else:
            self.needs_latch = True
            self.numbers.append(self.latch)
        assert self.latch is not None
        return self.latch

    def set_latch(self, where: int) -> None:
        self.latch = self.number(2, 9)
        self.sentences.insert(where, LATCH.format(size=self.latch))


def _opening(d: _Draft, a: str, b: str, item: str, steps: int, say: bool | None) -> int | None:
    """Write how much ``a`` has at first; returns what ``b`` has where that was said."""
    kind = d.rng.random()
    if (say is not True and kind < 0.15) or (steps == 1 and say is False):
        size = d.box_size(say)
        count = d.number(2, 9)
        d.sentences.append(OPEN_BOXES.format(a=a, y=count, i=item))
        d.value = d.compute(count, "*", size)
        return None
    if kind < 0.65:
        d.value = d.number(3, 60)
        d.sentences.append(f"{a} has {d.value} {item}.")
        return None
    other = d.number(3, 40)
    d.sentences.append(f"{b} has {other} {item}.")
    kind = d.rng.random()
    most, op, template = next(
        (most, op, template) for below, most, op, template in COMPARED if kind < below
    )
    y = d.number(2, most)
    d.sentences.append(template.format(a=a, b=b, y=y, i=item))
    d.value = d.compute(other, op, y)
    return other


def _box_event(d: _Draft, a: str, b: str, item: str, say: bool | None) -> None:
    size = d.box_size(say)
    count = d.number(2, 9)
    product = d.compute(count, "*", size)
    take = product < d.value and d.rng.random() < 0.35
    template = d.rng.choice(SUBTRACT_BOXES if take else ADD_BOXES)
    d.sentences.append(template.format(a=a, b=b, y=count, i=item))
    d.value = d.compute(d.value, "-" if take else "+", product)


def _plain_event(d: _Draft, a: str, b: str, item: str) -> None:
    kind = d.rng.random()
    if kind < 0.1:
        times = d.rng.choice((2, 3))
        d.numbers.append(times)
        d.sentences.append(MULTIPLY[times].format(a=a, i=item))
        d.value = d.compute(d.value, "*", times)
        return
    y = d.number(2, 20)
    op = "+" if kind < 0.55 else "-"
    template = d.rng.choice(ADD if op == "+" else SUBTRACT)
    d.sentences.append(template.format(a=a, b=b, y=y, i=item))
    d.value = d.compute(d.value, op, y)


def _write(
    rng: random.Random, latch: int | None, steps: int, needs_latch: bool | None
) -> tuple[_Draft, str]:
    """Write one draft with ``steps`` solution lines.

    Raises:
        _RejectedError: it breaks a rule.
    """
    d = _Draft(rng, latch)
    a, b, c = rng.sample(NAMES, 3)
    item, other_item = rng.sample(ITEMS, 2)
    # A latch problem must leave the size out, a self-contained one must say it where it matters.
    say = None if needs_latch is None else not needs_latch
    b_has = _opening(d, a, b, item, steps, say)
    if rng.random() < P_DISTRACTOR:
        d.sentences.insert(0, f"{c} has {d.number(3, 60)} {other_item}.")
    partner = b if b_has is None else c  # the person who gives or takes must not change b's count
    ask_total = b_has is not None and steps > len(d.lines) and rng.random() < 0.4
    while len(d.lines) < steps - ask_total:
        room = steps - ask_total - len(d.lines)
        if room >= 2 and not d.used_boxes and (needs_latch or rng.random() < 0.6):
            _box_event(d, a, partner, item, say)
        else:
            _plain_event(d, a, partner, item)
    if ask_total:
        assert b_has is not None
        d.value = d.compute(d.value, "+", b_has)
        question = f"How many {item} do {a} and {b} have in total?"
    else:
        question = f"How many {item} does {a} have now?"
    if len(d.lines) != steps or (needs_latch is not None and d.needs_latch != needs_latch):
        raise _RejectedError
    if not d.used_boxes and rng.random() < P_BARE_LATCH:
        d.set_latch(rng.randint(0, len(d.sentences)))
    return d, question


def sample_problem(
    rng: random.Random,
    latch: int | None,
    split: Split = "train",
    needs_latch: bool | None = None,
    may_set_latch: bool = True,
) -> Problem:
    """Draw one problem.

    Args:
        latch: the box size in force so far, None before the first.
        split: which side of the held-out numbers to draw from.
        needs_latch: True or False to force a latch or a self-contained problem, None for the mix.
        may_set_latch: whether the problem may state a box size itself.
    """
    if needs_latch and latch is None:
        raise ValueError("a latch problem needs a box size stated earlier")
    while True:
        try:
            d, question = _write(rng, latch, rng.choice(STEP_CHOICES), needs_latch)
        except _RejectedError:
            continue
        numbers = tuple(d.numbers)
        if is_held_out(numbers) != (split == "held_out"):
            continue
        if split == "train" and any(is_held_out_pair(*line[:3]) for line in d.lines):
            continue
        if not may_set_latch and d.latch != latch:
            continue
        lines = [f"{a}{op}{b}={result}" for a, op, b, result in d.lines]
        return Problem(
            question=" ".join([*d.sentences, question]),
            answer="\n".join([*lines, f"#### {d.value}"]),
            final=d.value,
            steps=len(lines),
            needs_latch=d.needs_latch,
            numbers=numbers,
            latch_after=d.latch,
        )


def problem_stream(rng: random.Random, split: Split = "train") -> Iterator[Problem]:
    """Problems of one world, without end: the box size stated in one holds in the later ones."""
    latch: int | None = None
    while True:
        problem = sample_problem(rng, latch, split)
        latch = problem.latch_after
        yield problem


def eval_set(seed: int, n: int, shots: int = 5, needs_latch: bool | None = None) -> list[EvalItem]:
    """``n`` few-shot prompts, each in a world of its own, all with held-out numbers.

    The prompt is lm-eval's gsm8k format: solved examples and the open question, separated by
    blank lines. For ``needs_latch=True`` the examples are redrawn until one states a box size.
    """
    rng = random.Random(seed)
    items: list[EvalItem] = []
    while len(items) < n:
        stream = problem_stream(rng, "held_out")
        solved = [next(stream) for _ in range(shots)]
        latch = solved[-1].latch_after if solved else None
        if needs_latch and latch is None:
            continue
        target = sample_problem(rng, latch, "held_out", needs_latch=needs_latch)
        prompt = "\n\n".join(
            [*(p.document() for p in solved), f"Question: {target.question}\nAnswer:"]
        )
        items.append(
            EvalItem(prompt, target.answer, target.final, target.steps, target.needs_latch)
        )
    return items


def dataset(seed: int, n: int, shots: int = 5, needs_latch: bool | None = None) -> FixedShotDataset:
    """GSM8K-like documents for an lm-eval task with fixed few-shot examples (``first_n``).

    The first example states the box size and no other one changes it, so every document's answer
    is defined, whichever document it is. ``needs_latch=None`` alternates latch problems and
    self-contained ones.
    """
    rng = random.Random(seed)
    first = sample_problem(rng, None, "held_out")
    while first.latch_after is None:
        first = sample_problem(rng, None, "held_out")
    size = first.latch_after
    solved = [first]
    while len(solved) < shots:
        solved.append(sample_problem(rng, size, "held_out", may_set_latch=False))
    docs: list[dict[str, str | int | bool]] = []
    for index in range(n):
        has_latch = index % 2 == 0 if needs_latch is None else needs_latch
        target = sample_problem(rng, size, "held_out", needs_latch=has_latch)
        docs.append(
            {
                "question": target.question,
                "answer": target.answer,
                "steps": target.steps,
                "needs_latch": target.needs_latch,
            }
        )
    return FixedShotDataset([{"question": p.question, "answer": p.answer} for p in solved], docs)
