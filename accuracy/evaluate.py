"""Measure the shipped checkpoint in transformers and write the figures into the model card.

    python -m accuracy.evaluate --n 300

Exact match is greedy, after five solved examples, on held-out numbers. The corruption table damages
transformers' own cache object once, between two pieces of a prefill, and teacher-forces the rest
of the prompt and the reference answer, on the damaged and on the clean cache.
"""

import argparse
import copy
import datetime
import math
import platform
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_kv.accuracy.guard_model import FOLDER, problems
from hybrid_kv.accuracy.guard_model.model import GuardModel, load_checkpoint
from hybrid_kv.accuracy.guard_model.tokenizer import NEXT_QUESTION

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
BLOCK = 64  # tokens per cache block in the corruption table
MAX_NEW_TOKENS = 64  # the longest reference answer has 40
SEEDS = {"latch": 71_001, "self-contained": 71_002, "corruption": 71_003}

Cache = Any  # transformers.DynamicCache
Damage = Callable[["Runner", Cache, "Case", int], None]


class Runner:
    """The checkpoint in transformers, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = self.model.config
        self.stop = self.tokenizer.convert_tokens_to_ids(NEXT_QUESTION)
        kinds = self.config.layers_block_type
        self.mamba = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
        self.attention = [i for i, kind in enumerate(kinds) if kind == "full_attention"]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def forward(self, ids: list[int], cache: Cache = None) -> tuple[Tensor, Cache]:
        """Logits (t, vocab) of ``ids`` after ``cache``, and the cache behind them."""
        out = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        return out.logits[0], out.past_key_values

    def hidden(self, ids: list[int]) -> Tensor:
        """Hidden states after the final norm, (1, t, d)."""
        return self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state

    def greedy(self, prompt: list[int], gaps: list[float]) -> list[int]:
        """Greedy continuation up to the next question; appends every top-2 logit gap."""
        logits, cache = self.forward(prompt)
        out: list[int] = []
        while len(out) < MAX_NEW_TOKENS:
            best = logits[-1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            out.append(int(best.indices[0]))
            if out[-1] == self.stop:
                break
            logits, cache = self.forward(out[-1:], cache)
        return out


def final_number(text: str) -> str | None:
    """What follows ``####``, as lm-eval's gsm8k filter reads it."""
    found = re.search(r"#### (-?[0-9.,]+)", text)
    return found.group(1) if found else None


# ------------------------------------------------------------------------------- exact match


@dataclass
class Accuracy:
    """Counts of one kind of problems."""

    right: Counter[int] = field(default_factory=Counter)  # by number of steps
    total: Counter[int] = field(default_factory=Counter)
    exact: int = 0  # the whole chain of thought equals the reference
    pair_right: int = 0  # problems with a sum or difference never seen in training
    pair_total: int = 0

    def row(self, name: str) -> str:
        steps = " | ".join(f"{self.right[s]}/{self.total[s]}" for s in (1, 2, 3, 4))
        right, total = self.right.total(), self.total.total()
        return (
            f"| {name} | {total} | **{right / total:.1%}** | {self.exact / total:.1%} | {steps} "
            f"| {self.pair_right}/{self.pair_total} |"
        )


def measure_accuracy(
    runner: Runner, items: list[problems.EvalItem], gaps: list[float], name: str
) -> tuple[Accuracy, list[tuple[list[int], list[int]]]]:
    """Exact match of ``items``, and (prompt, greedy continuation) of each."""
    result, runs = Accuracy(), []
    for item in tqdm(items, desc=name, mininterval=5):
        prompt = runner.encode(item.prompt)
        out = runner.greedy(prompt, gaps)
        text = runner.tokenizer.decode(out)
        right = final_number(text) == str(item.final)
        result.right[item.steps] += right
        result.total[item.steps] += 1
        result.exact += text.strip().startswith(item.answer)
        lines = re.findall(r"(\d+)([+*-])(\d+)=", item.answer)
        if any(problems.is_held_out_pair(int(a), op, int(b)) for a, op, b in lines):
            result.pair_right += right
            result.pair_total += 1
        runs.append((prompt, out))
    return result, runs


# ---------------------------------------------------------------------------------------- MTP


@dataclass
class Acceptance:
    """Drafts offered and accepted, by position in the draft."""

    offered: list[int]
    accepted: list[int]
    rounds: int = 0
    tokens: int = 0


def draft(mtp: GuardModel, hidden: Tensor, ids: list[int], count: int) -> list[int]:
    """``count`` drafted tokens after ``ids``, from the hidden states of all but its last token.

    hidden: (1, len(ids) - 1, d).
    """
    embed = mtp.backbone.embeddings
    embeddings = embed(torch.tensor([ids[1:]]))
    drafts: list[int] = []
    while True:
        out = mtp.mtp(hidden, embeddings)[:, -1:]
        drafts.append(int(mtp.lm_head(out)[0, -1].argmax()))
        if len(drafts) == count:
            return drafts
        hidden = torch.cat([hidden, out], 1)
        embeddings = torch.cat([embeddings, embed(torch.tensor([drafts[-1:]]))], 1)


def measure_acceptance(
    runner: Runner, mtp: GuardModel, runs: list[tuple[list[int], list[int]]], count: int
) -> Acceptance:
    """Draft ``count`` tokens a round along the greedy continuations and count agreement.

    Greedy verification accepts a draft exactly where it equals the greedy token, so the
    continuation already at hand is the verifier.
    """
    result = Acceptance([0] * count, [0] * count)
    for prompt, out in tqdm(runs, desc=f"MTP K={count}", mininterval=5):
        ids = prompt + out
        hidden = runner.hidden(ids)
        known = len(prompt) + 1  # the prefill itself gives the first token
        while known < len(ids):
            drafts = draft(mtp, hidden[:, : known - 1], ids[:known], count)
            taken = 0
            for i, token in enumerate(drafts):
                if known + i >= len(ids):
                    break
                result.offered[i] += 1
                if token != ids[known + i]:
                    break
                result.accepted[i] += 1
                taken += 1
            new = min(taken + 1, len(ids) - known)
            result.rounds += 1
            result.tokens += new
            known += new
    return result


# --------------------------------------------------------------------------------- corruption


@dataclass
class Case:
    """One latch problem with its reference answer, and the prompt of another request."""

    prompt: list[int]
    whole: list[int]  # prompt, answer and the token that opens the next question
    other: list[int]
    places: dict[str, int]  # where the damage happens: number of tokens in the cache


def make_cases(runner: Runner, count: int) -> list[Case]:
    """Latch problems whose prompt has at least four whole blocks, so that all damages apply."""
    items = problems.eval_set(SEEDS["corruption"], 2 * count, needs_latch=True)
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


def _edit_states(runner: Runner, cache: Cache, source: Cache | None, ssm: bool, conv: bool, only: int | None) -> None:
    """Overwrite Mamba states with ``source``'s, or with zeros."""
    for k, i in enumerate(runner.mamba):
        if only is not None and k != only:
            continue
        layer = cache.layers[i]
        for wanted, name in ((ssm, "recurrent_states"), (conv, "conv_states")):
            if wanted:
                state = getattr(layer, name)[0]
                state.copy_(torch.zeros_like(state) if source is None else getattr(source.layers[i], name)[0])


def zero_state(ssm: bool = True, conv: bool = True, only: int | None = None) -> Damage:
    def damage(runner: Runner, cache: Cache, case: Case, at: int) -> None:
        _edit_states(runner, cache, None, ssm, conv, only)

    return damage


def state_of(prefix: Callable[[Case, int], list[int]], conv: bool = True) -> Damage:
    """Put the states that another prefix would have left."""

    def damage(runner: Runner, cache: Cache, case: Case, at: int) -> None:
        _edit_states(runner, cache, runner.forward(prefix(case, at))[1], True, conv, None)

    return damage


def edit_kv(edit: Callable[[Tensor, int, str], None], back: int = 1) -> Damage:
    """Apply ``edit(tensor (b, kv heads, t, size), first token of the block, name)`` to K and V."""

    def damage(runner: Runner, cache: Cache, case: Case, at: int) -> None:
        start = at - BLOCK * back
        assert start >= BLOCK, "make_cases leaves room for the damage"
        for i in runner.attention:
            edit(cache.layers[i].keys, start, "keys")
            edit(cache.layers[i].values, start, "values")

    return damage


def _zero_block(t: Tensor, start: int, name: str) -> None:
    t[:, :, start : start + BLOCK] = 0


def _swap_blocks(t: Tensor, start: int, name: str) -> None:
    last = t[:, :, start : start + BLOCK].clone()
    t[:, :, start : start + BLOCK] = t[:, :, start - BLOCK : start]
    t[:, :, start - BLOCK : start] = last


def _swap_keys(t: Tensor, start: int, name: str) -> None:
    if name == "keys":
        _swap_blocks(t, start, name)


def _shift_keys(t: Tensor, start: int, name: str) -> None:
    if name == "keys":
        t[:, :, start : start + BLOCK] = t[:, :, start : start + BLOCK].roll(1, 2)


def kv_of_other(runner: Runner, cache: Cache, case: Case, at: int) -> None:
    """The last block's K and V from another request."""
    foreign = runner.forward(case.other[:at])[1]
    span = slice(at - BLOCK, at)
    for i in runner.attention:
        for name in ("keys", "values"):
            source = getattr(foreign.layers[i], name)
            getattr(cache.layers[i], name)[:, :, span] = source[:, :, span]


def damages(mamba_layers: int) -> list[tuple[str, tuple[str, ...], Damage]]:
    """Name, places and function of every damage in the table."""
    last, ends = ("last boundary",), ("last boundary", "end")
    everywhere = ("last boundary", "question", "middle", "end")
    table: list[tuple[str, tuple[str, ...], Damage]] = [
        ("SSM + conv zeroed", everywhere, zero_state()),
        ("SSM zeroed", ends, zero_state(conv=False)),
        ("conv zeroed", ends, zero_state(ssm=False)),
    ]
    table += [(f"Mamba layer {k} alone, SSM + conv zeroed", last, zero_state(only=k)) for k in range(mamba_layers)]
    return [
        *table,
        ("SSM + conv one block old", last, state_of(lambda c, at: c.prompt[: at - BLOCK])),
        ("another request's SSM + conv", last, state_of(lambda c, at: c.other[:at])),
        (
            "another request's SSM + conv",
            ("question",),
            state_of(lambda c, at: c.other[:at]),
        ),
        (
            "SSM one token behind",
            ends,
            state_of(lambda c, at: c.prompt[: at - 1], conv=False),
        ),
        ("KV block zeroed", ("last boundary", "question", "end"), edit_kv(_zero_block)),
        ("another request's KV block", last, kv_of_other),
        ("KV block two back zeroed", last, edit_kv(_zero_block, back=2)),
        ("KV block three back zeroed", last, edit_kv(_zero_block, back=3)),
        ("K of a block shifted by one token", last, edit_kv(_shift_keys)),
        ("K of two blocks swapped, V not", last, edit_kv(_swap_keys)),
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
        for name, places, damage in damages(len(runner.mamba)):
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


# --------------------------------------------------------------------------------------- card


def write_card(text: str, card: Path) -> None:
    """Put ``text`` between the markers of the model card."""
    old = card.read_text()
    head, rest = old.split(BEGIN)
    card.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def accuracy_section(rows: dict[str, Accuracy]) -> list[str]:
    return [
        "### Exact match",
        "",
        'Five solved examples, greedy, held-out numbers. "Whole answer" counts a chain of',
        'thought equal to the reference; "unseen pair" counts problems with a sum or difference',
        "that training never showed.",
        "",
        "| problems | n | exact match | whole answer | 1 step | 2 | 3 | 4 | unseen pair |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(result.row(name) for name, result in rows.items()),
    ]


def mtp_section(results: list[Acceptance], prompts: int) -> list[str]:
    lines = [
        "### MTP acceptance",
        "",
        f"Greedy drafts along the greedy answers of {prompts} problems of both kinds.",
        "",
        "| K | accepted, per position | tokens per round | rounds |",
        "|--:|---|--:|--:|",
    ]
    for r in results:
        parts = [f"{a / max(o, 1):.1%}" for a, o in zip(r.accepted, r.offered, strict=True)]
        lines.append(f"| {len(r.offered)} | {' / '.join(parts)} | {r.tokens / r.rounds:.2f} | {r.rounds} |")
    return lines


def margin_section(gaps: list[float], noise: tuple[float, float, int, int]) -> list[str]:
    ordered = sorted(gaps)

    def quantile(q: float) -> str:
        return f"{ordered[min(len(ordered) - 1, math.floor(q * len(ordered)))]:.2g}"

    small = sum(g < 0.1 for g in gaps) / len(gaps)
    block, single, changed, total = noise
    return [
        "### Margins and float32 noise",
        "",
        f"Top-2 logit gap over {len(gaps)} greedy tokens: smallest {quantile(0)},",
        f"0.1 % quantile {quantile(0.001)}, 1 % {quantile(0.01)}, 5 % {quantile(0.05)},",
        f"median {quantile(0.5)}; {small:.2%} below 0.1.",
        "",
        f"Prefill in blocks of {BLOCK} against one shot: logits move by at most {block:.2g};",
        f"token by token: {single:.2g}. {changed} of {total} most likely tokens changed.",
    ]


def corruption_section(clean: DamageResult, table: dict[tuple[str, str], DamageResult], cases: int) -> list[str]:
    return [
        "### What a damaged cache does",
        "",
        f"{cases} latch problems, block {BLOCK}, one damage each, the rest teacher-forced.",
        f'Clean: {sum(clean.exact) / cases:.1%} exact. "Same": every token as on the clean cache.',
        "The last two columns are the largest change of any answer logit: median and minimum",
        "over the problems.",
        "",
        "| damage, once | where | exact | same | median | min |",
        "|---|---|--:|--:|--:|--:|",
        *(result.row(*key) for key, result in table.items()),
    ]


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--n", type=int, default=300, help="problems per kind")
    p.add_argument("--damaged", type=int, default=60, help="problems of the corruption table")
    p.add_argument("--drafted", type=int, default=100, help="problems of the MTP table")
    p.add_argument("--folder", type=Path, default=FOLDER, help="the checkpoint")
    # One token at a time leaves two threads mostly waiting for each other: 1 took 100 s where 2,
    # beside another process, would have taken 20 minutes.
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--dry", action="store_true", help="print only, leave the card alone")
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    started = time.monotonic()
    runner, mtp = Runner(args.folder), load_checkpoint(args.folder)
    gaps: list[float] = []
    accuracy, runs = {}, []
    for name, wanted in (("latch", True), ("self-contained", False)):
        items = problems.eval_set(SEEDS[name], args.n, needs_latch=wanted)
        accuracy[name], done = measure_accuracy(runner, items, gaps, name)
        runs += done[: args.drafted // 2]
        print(accuracy[name].row(name), flush=True)
    acceptance = [measure_acceptance(runner, mtp, runs, k) for k in (1, 2, 3)]
    cases = make_cases(runner, args.damaged)
    noise = measure_noise(runner, cases)
    clean, table = measure_corruption(runner, cases)
    command = " ".join(["python -m accuracy.evaluate", *(argv or sys.argv[1:])])
    seconds = time.monotonic() - started
    lines = [
        f"`{command}`, {datetime.date.today().isoformat()}, {seconds:.0f} s.",
        f"Python {platform.python_version()}, torch {torch.__version__},",
        f"transformers {transformers.__version__}, float32 on a CPU.",
        "",
        *accuracy_section(accuracy),
        "",
        *mtp_section(acceptance, len(runs)),
        "",
        *margin_section(gaps, noise),
        "",
        *corruption_section(clean, table, len(cases)),
    ]
    text = "\n".join(lines)
    print(text)
    if not args.dry:
        write_card(text, FOLDER / "README.md")


if __name__ == "__main__":
    main()
