"""What damage to a cache costs: transformers' own cache object is damaged once, between two pieces of a prefill.

The rest of the prompt and the reference answer are teacher-forced, on the damaged and on the clean cache.
"""

import copy
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from accuracy.runner import Cache, Runner
from accuracy.tokenizer import NEXT_QUESTION
from hybrid_kv.accuracy.guard_model import problems

BLOCK = 64  # tokens per cache block in the corruption table
SEED = 71_003
# Attributes of a layer's cache.
KV = ("keys", "values")
RECURRENT, CONV = "recurrent_states", "conv_states"

Damage = Callable[[Runner, Cache, "Case", int], None]


@dataclass
class Case:
    """One latch problem with its reference answer, and the prompt of another request."""

    prompt: list[int]
    whole: list[int]  # prompt, answer and the token that opens the next question
    other: list[int]
    places: dict[str, int]  # where the damage happens: number of tokens in the cache


def make_cases(runner: Runner, count: int) -> list[Case]:
    """Latch problems whose prompt has at least four whole blocks, so that all damages apply."""
    items = problems.eval_set(SEED, 2 * count, needs_latch=True)
    encoded = [(item, runner.encode(item.prompt)) for item in items]
    encoded = [(item, ids) for item, ids in encoded if len(ids) > 4 * BLOCK][:count]
    cases = []
    for i, (item, prompt) in enumerate(encoded):
        n = len(prompt)
        question = max(j for j, token in enumerate(prompt) if token == runner.stop)
        places = {
            "last boundary": (n - 1) // BLOCK * BLOCK,
            "question": question // BLOCK * BLOCK,
            "middle": n // 2 // BLOCK * BLOCK,
            "end": n - 1,
        }
        whole = runner.encode(f"{item.prompt} {item.answer}{NEXT_QUESTION}")
        # Another request: the next prompt that reaches this one's last boundary.
        others = (encoded[(i + k) % len(encoded)][1] for k in range(1, len(encoded)))
        other = next(ids for ids in others if len(ids) >= places["last boundary"])
        cases.append(Case(prompt, whole, other, places))
    return cases


def edit_states(*names: str, prefix: Callable[[Case, int], list[int]] | None = None, only: int | None = None) -> Damage:
    """Zero states of recurrent layers, or of the ``only`` one; or put those that another prefix would have left."""

    def damage(runner: Runner, cache: Cache, case: Case, at: int) -> None:
        source = None if prefix is None else runner.forward(prefix(case, at))[1]
        for i in runner.recurrent if only is None else [runner.recurrent[only]]:
            for name in names:
                state = getattr(cache.layers[i], name)[0]
                state.copy_(torch.zeros_like(state) if source is None else getattr(source.layers[i], name)[0])

    return damage


def edit_kv(edit: Callable[[Tensor, int], None], back: int = 1, names: tuple[str, ...] = KV) -> Damage:
    """Apply ``edit(tensor (b, kv heads, t, size), first token of the block)`` to K and V."""

    def damage(runner: Runner, cache: Cache, case: Case, at: int) -> None:
        start = at - BLOCK * back
        assert start >= BLOCK, "make_cases leaves room for the damage"
        for i in runner.attention:
            for name in names:
                edit(getattr(cache.layers[i], name), start)

    return damage


def _zero_block(t: Tensor, start: int) -> None:
    t[:, :, start : start + BLOCK] = 0


def _swap_blocks(t: Tensor, start: int) -> None:
    last = t[:, :, start : start + BLOCK].clone()
    t[:, :, start : start + BLOCK] = t[:, :, start - BLOCK : start]
    t[:, :, start - BLOCK : start] = last


def _shift_block(t: Tensor, start: int) -> None:
    t[:, :, start : start + BLOCK] = t[:, :, start : start + BLOCK].roll(1, 2)


def kv_of_other(runner: Runner, cache: Cache, case: Case, at: int) -> None:
    """The last block's K and V from another request."""
    foreign = runner.forward(case.other[:at])[1]
    span = slice(at - BLOCK, at)
    for i in runner.attention:
        for name in KV:
            source = getattr(foreign.layers[i], name)
            getattr(cache.layers[i], name)[:, :, span] = source[:, :, span]


def damages(recurrent_layers: int) -> list[tuple[str, tuple[str, ...], Damage]]:
    """Name, places and function of every damage in the table."""
    last, ends = ("last boundary",), ("last boundary", "end")
    everywhere = ("last boundary", "question", "middle", "end")
    table: list[tuple[str, tuple[str, ...], Damage]] = [
        ("state + conv zeroed", everywhere, edit_states(RECURRENT, CONV)),
        ("state zeroed", ends, edit_states(RECURRENT)),
        ("conv zeroed", ends, edit_states(CONV)),
    ]
    for k in range(recurrent_layers):
        table.append((f"recurrent layer {k} alone, state + conv zeroed", last, edit_states(RECURRENT, CONV, only=k)))
    one_old = edit_states(RECURRENT, CONV, prefix=lambda c, at: c.prompt[: at - BLOCK])
    others = edit_states(RECURRENT, CONV, prefix=lambda c, at: c.other[:at])
    behind = edit_states(RECURRENT, prefix=lambda c, at: c.prompt[: at - 1])
    return [
        *table,
        ("state + conv one block old", last, one_old),
        ("another request's state + conv", ("last boundary", "question"), others),
        ("state one token behind", ends, behind),
        ("KV block zeroed", ("last boundary", "question", "end"), edit_kv(_zero_block)),
        ("another request's KV block", last, kv_of_other),
        ("KV block two back zeroed", last, edit_kv(_zero_block, back=2)),
        ("KV block three back zeroed", last, edit_kv(_zero_block, back=3)),
        ("K of a block shifted by one token", last, edit_kv(_shift_block, names=("keys",))),
        ("K of two blocks swapped, V not", last, edit_kv(_swap_blocks, names=("keys",))),
        ("two KV blocks swapped, K and V (a no-op)", last, edit_kv(_swap_blocks)),
    ]


@dataclass
class DamageResult:
    exact: list[bool] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    change: list[float] = field(default_factory=list)

    def row(self, name: str, place: str) -> str:
        def share(flags: list[bool]) -> str:
            return f"{sum(flags) / len(flags):.1%}"

        return (
            f"| {name} | {place} | {share(self.exact)} | {share(self.same)} "
            f"| {statistics.median(self.change):.2g} | {min(self.change):.2g} |"
        )


def measure_corruption(runner: Runner, cases: list[Case]) -> tuple[DamageResult, dict[tuple[str, str], DamageResult]]:
    """Every damage on every case: the clean result and the damaged ones by (damage, place)."""
    clean, table = DamageResult(), defaultdict(DamageResult)
    for case in tqdm(cases, desc="corruption", mininterval=5):
        answer = torch.tensor(case.whole[len(case.prompt) :])
        kept: dict[int, tuple[Cache, Tensor]] = {}
        for at in set(case.places.values()):
            cache = runner.forward(case.whole[:at])[1]
            kept[at] = cache, _answer_logits(runner, case, copy.deepcopy(cache), at)
        reference = kept[case.places["last boundary"]][1]
        clean.exact.append(bool((reference.argmax(-1) == answer).all()))
        for name, places, damage in damages(len(runner.recurrent)):
            for place in places:
                at = case.places[place]
                cache, expected = copy.deepcopy(kept[at][0]), kept[at][1]
                damage(runner, cache, case, at)
                logits = _answer_logits(runner, case, cache, at)
                result = table[name, place]
                result.exact.append(bool((logits.argmax(-1) == answer).all()))
                result.same.append(bool((logits.argmax(-1) == expected.argmax(-1)).all()))
                result.change.append(float((logits - expected).abs().max()))
    return clean, dict(table)


def _answer_logits(runner: Runner, case: Case, cache: Cache, at: int) -> Tensor:
    """Logits that predict the answer tokens, (answer, vocab), going on from ``cache``."""
    logits, _ = runner.forward(case.whole[at:-1], cache)
    return logits[len(case.prompt) - 1 - at :]


def measure_noise(runner: Runner, cases: list[Case]) -> tuple[float, float, int, int]:
    """Prefill in blocks, and token by token, against one shot: largest change, tokens changed."""
    worst, changed, total = [0.0, 0.0], 0, 0
    for number, case in enumerate(cases):
        reference, _ = runner.forward(case.whole)
        # Token by token takes 50 times as long, so only a few cases get it.
        for kind, size in enumerate((BLOCK, 1) if number < 5 else (BLOCK,)):
            cache, pieces = None, []
            for start in range(0, len(case.whole), size):
                logits, cache = runner.forward(case.whole[start : start + size], cache)
                pieces.append(logits)
            logits = torch.cat(pieces)
            worst[kind] = max(worst[kind], float((logits - reference).abs().max()))
            changed += int((logits.argmax(-1) != reference.argmax(-1)).sum())
            total += len(logits)
    return worst[0], worst[1], changed, total
