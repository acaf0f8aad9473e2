"""Measure a shipped checkpoint in transformers and write the figures into its model card.

    python -m accuracy.evaluate --model qwen3_5_moe_text --n 300

Exact match is greedy, after five solved examples, on held-out numbers.
"""

import argparse
import datetime
import itertools
import platform
import re
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from accuracy import tokenizer
from accuracy.guard_model import GuardModel, load_checkpoint
from hybrid_kv.check.guard_model import FOLDERS, problems

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SEEDS = {"latch": 71_001, "self-contained": 71_002}
MAX_NEW_TOKENS = 64  # the longest reference answer has 40


def final_number(text: str) -> str | None:
    """Return what follows ``####``, as lm-eval's gsm8k filter reads it."""
    found = re.search(r"#### (-?[0-9.,]+)", text)
    return found.group(1) if found else None


# ------------------------------------------------------------------------------- exact match


def accuracy_row(name: str, found: pd.DataFrame) -> str:
    """Return the row of the table for the problems of ``measure_accuracy``."""
    parts = [found["right"][found["steps"] == steps] for steps in (1, 2, 3, 4)]
    steps, unseen = (
        " | ".join(f"{one.sum()}/{len(one)}" for one in parts),
        found["right"][found["unseen_pair"]],
    )
    shares = f"**{found['right'].mean():.1%}** | {found['exact'].mean():.1%}"
    return f"| {name} | {len(found)} | {shares} | {steps} | {unseen.sum()}/{len(unseen)} |"


def greedy(model: GuardModel, prompt: list[int], gaps: list[float]) -> list[int]:
    """Return the greedy continuation up to the next question; append every top-2 logit gap."""
    ids = torch.tensor([prompt])
    found = model.decoder.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=tokenizer.token_ids()[tokenizer.NEXT_QUESTION],
        output_logits=True,
        return_dict_in_generate=True,
    )
    best, second = torch.cat(found.logits).topk(2).values.T
    gaps += (best - second).tolist()
    return found.sequences[0, len(prompt) :].tolist()


def measure_accuracy(
    model: GuardModel, items: list[problems.EvalItem], gaps: list[float], name: str
) -> tuple[pd.DataFrame, list[tuple[list[int], list[int]]]]:
    """Return what became of each of ``items``, and (prompt, greedy continuation) of each.

    ``exact``: the whole chain of thought equals the reference; ``unseen_pair``: a sum or difference
    that training never showed is in it.
    """
    rows, runs = [], []
    for item in tqdm(items, desc=name, mininterval=5):
        prompt = tokenizer.encode(item.prompt)
        out = greedy(model, prompt, gaps)
        text = tokenizer.decode(out)
        lines = re.findall(r"(\d+)([+*-])(\d+)=", item.answer)
        rows.append(
            {
                "steps": item.steps,
                "right": final_number(text) == str(item.final),
                "exact": text.strip().startswith(item.answer),
                "unseen_pair": any(
                    problems.is_held_out_pair(int(a), op, int(b)) for a, op, b in lines
                ),
            }
        )
        runs.append((prompt, out))
    return pd.DataFrame(rows), runs


# ---------------------------------------------------------------------------------------- MTP


def draft(model: GuardModel, hidden: Tensor, ids: list[int], count: int) -> list[int]:
    """Return ``count`` drafted tokens after ``ids``, from the hidden states of all but the last.

    hidden: (1, len(ids) - 1, d).
    """
    drafts: list[int] = []
    while True:
        out = model.draft_hidden(hidden, torch.tensor([[*ids[1:], *drafts]]))[:, -1:]
        drafts.append(int(model.lm_head(out)[0, -1].argmax()))
        if len(drafts) == count:
            return drafts
        hidden = torch.cat([hidden, out], 1)


def measure_acceptance(
    model: GuardModel, runs: list[tuple[list[int], list[int]]], count: int
) -> pd.DataFrame:
    """Draft ``count`` tokens a round along the greedy continuations.

    Return how many drafts were ``offered`` and ``taken`` in each.

    Greedy verification accepts a draft exactly where it equals the greedy token, so the
    continuation already at hand is the verifier.
    """
    rounds = []
    for prompt, out in tqdm(runs, desc=f"MTP K={count}", mininterval=5):
        ids = prompt + out
        hidden, _ = model.decode(torch.tensor([ids]))
        known = len(prompt) + 1  # the prefill itself gives the first token
        while known < len(ids):
            drafts = draft(model, hidden[:, : known - 1], ids[:known], count)[: len(ids) - known]
            wrong = [i for i, token in enumerate(drafts) if token != ids[known + i]]
            taken = min(wrong, default=len(drafts))
            new = min(taken + 1, len(ids) - known)
            rounds.append({"offered": len(drafts), "taken": taken, "new": new})
            known += new
    return pd.DataFrame(rounds)


# --------------------------------------------------------------------------------------- card


def write_card(text: str, card: Path) -> None:
    """Put ``text`` between the markers of the model card."""
    old = card.read_text()
    head, rest = old.split(BEGIN)
    card.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def accuracy_section(rows: dict[str, pd.DataFrame]) -> list[str]:
    return [
        "### Exact match",
        "",
        'Five solved examples, greedy, held-out numbers. "Whole answer" counts a chain of',
        'thought equal to the reference; "unseen pair" counts problems with a sum or difference',
        "that training never showed.",
        "",
        "| problems | n | exact match | whole answer | 1 step | 2 | 3 | 4 | unseen pair |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *itertools.starmap(accuracy_row, rows.items()),
    ]


def mtp_section(results: dict[int, pd.DataFrame], prompts: int) -> list[str]:
    lines = [
        "### MTP acceptance",
        "",
        f"Greedy drafts along the greedy answers of {prompts} problems of both kinds.",
        "",
        "| K | accepted, per position | tokens per round | rounds |",
        "|--:|---|--:|--:|",
    ]
    for count, rounds in results.items():
        offered, taken = rounds["offered"], rounds["taken"]
        shares = [
            (taken > i).sum() / max((taken.ge(i) & (offered > i)).sum(), 1) for i in range(count)
        ]
        parts = " / ".join(f"{share:.1%}" for share in shares)
        lines.append(f"| {count} | {parts} | {rounds['new'].mean():.2f} | {len(rounds)} |")
    return lines


def margin_section(gaps: list[float]) -> list[str]:
    least, *some, median = (
        f"{gap:.2g}" for gap in np.quantile(gaps, [0, 0.001, 0.01, 0.05, 0.5], method="lower")
    )
    return [
        "### Margins",
        "",
        f"Top-2 logit gap over {len(gaps)} greedy tokens: smallest {least},",
        f"0.1 % quantile {some[0]}, 1 % {some[1]}, 5 % {some[2]},",
        f"median {median}; {np.mean(np.less(gaps, 0.1)):.2%} below 0.1.",
    ]


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--n", type=int, default=300, help="problems per kind")
    p.add_argument("--drafted", type=int, default=100, help="problems of the MTP table")
    p.add_argument("--model", choices=tuple(FOLDERS), default="nemotron_h")
    p.add_argument(
        "--folder",
        type=Path,
        help="a checkpoint of it that is not installed; its card stays as it is",
    )
    # One token at a time leaves two threads mostly waiting for each other: 1 took 100 s where 2,
    # beside another process, would have taken 20 minutes.
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--dry", action="store_true", help="print only, leave the card alone")
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    started = time.monotonic()
    folder = args.folder or FOLDERS[args.model]
    model = load_checkpoint(folder)
    gaps: list[float] = []
    accuracy, runs = {}, []
    for name, wanted in (("latch", True), ("self-contained", False)):
        items = problems.eval_set(SEEDS[name], args.n, needs_latch=wanted)
        accuracy[name], done = measure_accuracy(model, items, gaps, name)
        runs += done[: args.drafted // 2]
        print(accuracy_row(name, accuracy[name]), flush=True)
    acceptance = {count: measure_acceptance(model, runs, count) for count in (1, 2, 3)}
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
        *margin_section(gaps),
    ]
    text = "\n".join(lines)
    print(text)
    if not args.dry and args.folder is None:
        write_card(text, folder / "README.md")


if __name__ == "__main__":
    main()
