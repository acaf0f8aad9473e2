"""The engine next to vLLM and transformers: a checkpoint of each family, greedy, on one core.

It runs in float32 or another dtype.

Each family's is the one that `hybrid-kv checkpoint FAMILY FOLDER` writes; `guard` is the guard
model. Nothing is cached or drafted, prompts have one length. All three get the same token ids, and
every run's tokens are compared with those that transformers gives for each prompt alone. Where they
differ, transformers in float64 says by how much the better token is the better one, and whether
that is rounding: no more than twice what the dtype costs transformers itself there (two logits are
each off by that). A side whose tokens differ has no time.

The time of one new token is the prefill's; that of all, less that, is the decode's. A ratio is how
many times as long a rival takes as the engine: tokens per second of the engine over those of the
rival. vLLM runs in a process of its own (`bench.peers.vllm_process`), and what its other threads do
is not counted.

Where rounding turns which experts a token goes to, logits leave each other by a third, and to
differ by rounding says little. `--all-experts` sends every token to all of them.

`make bench-peers` makes the environment with vLLM and runs `python -m bench.families`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from bench._reference import equal
from bench.generate import NoText, continued, load_transformers
from bench.harness.arguments import ArgumentParser
from bench.harness.cells import Cell, WrongResultError, nothing
from bench.harness.measurement import Measurement
from bench.peers.vllm_process import VLLMProcess, check_installed
from hybrid_kv.check.guard_model import FOLDER as GUARD_MODEL
from hybrid_kv.engine.llm import LLM
from hybrid_kv.errors import CheckFailedError, HybridKVError, VoidError, run_command
from hybrid_kv.measure.results import Receipt, Row, append_rows, check_writable
from hybrid_kv.measure.timing.case import ENGINE
from hybrid_kv.measure.timing.clock import clock, median, ratio
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.models.registry import sized
from hybrid_kv.sampling import SamplingParams

SUITE = "families"
RIVALS = ("transformers", "vllm")
BATCHES = (1, 8)
PROMPT, NEW_TOKENS = 256, 32
ROUNDS = 7
# By dtype, the families whose small checkpoint vLLM 0.32.0 for CPUs rejects; one more is void.
REJECTED_BY_VLLM = {
    "float32": (
        *("bailing_hybrid", "bamba", "dory", "falcon_mamba", "inkling_text", "jamba"),
        *("kimi_linear", "lara_mini"),
        *("lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    ),
    "bfloat16": (
        *("bailing_hybrid", "bamba", "dory", "falcon_mamba", "inkling_text", "jamba"),
        *("kimi_linear", "lara_mini"),
        *("lfm3", "nemotron_h", "olmo_hybrid"),
    ),
}
Tokens = list[list[int]]
Side = Callable[
    [Tokens, int], tuple[Tokens, float]
]  # (prompts, new tokens of each) to those, and seconds


@dataclass
class Family:
    """What one family's checkpoint showed.

    Attributes:
        refusals: by subject, why it does not run the checkpoint.
        equal: by batch and subject, how many of the requests got transformers' tokens.
        rounded: by batch and subject, how many of the others first differ by rounding.
        differences: in words, the first of each batch and subject.
        measured: the times of those whose tokens are equal.
    """

    name: str
    dtype: str = "float32"
    refusals: dict[str, str] = field(default_factory=dict)
    equal: dict[tuple[int, str], int] = field(default_factory=dict)
    rounded: dict[tuple[int, str], int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    measured: list[Measurement] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """Yield the rows for `hybrid_kv.measure.results`."""
        common = {"family": self.name, "dtype": self.dtype}
        for subject, reason in self.refusals.items():
            yield Row(
                SUITE, "runs", "runs", 0, "", {**common, "subject": subject, "reason": reason}
            )
        for (batch, subject), requests in self.equal.items():
            params = {**common, "batch": batch, "subject": subject}
            yield Row(
                SUITE,
                "tokens",
                "equal_requests",
                requests / batch,
                "share",
                params,
                n=batch,
                better="higher",
            )
            if others := batch - requests:
                rounded = self.rounded.get((batch, subject), 0) / others
                yield Row(
                    SUITE,
                    "tokens",
                    "rounded_of_unequal",
                    rounded,
                    "share",
                    params,
                    n=others,
                    better="higher",
                )
        for one in self.measured:
            yield from one.rows()


def _engine(folder: Path, dtype: str) -> Side:
    llm = LLM(
        folder,
        tokenizer=NoText(),
        device="cpu",
        dtype=dtype,
        max_num_seqs=max(BATCHES),
        max_model_len=512,
    )

    def generate(prompts: Tokens, max_tokens: int) -> tuple[Tokens, float]:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        start = clock()
        outputs = llm.generate(prompts, params, progress=False)
        return [output.token_ids for output in outputs], clock() - start

    return generate


def _transformers(folder: Path, dtype: str) -> tuple[Any, Side]:
    model = load_transformers(folder, getattr(torch, dtype))

    def generate(prompts: Tokens, max_tokens: int) -> tuple[Tokens, float]:
        start = clock()
        return continued(model, torch.tensor(prompts), max_tokens), clock() - start

    return model, generate


def send_to_all_experts(folder: Path) -> None:
    """Rewrite config.json, if its model chooses among experts."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if "num_experts_per_tok" in config:
        file.write_text(json.dumps({**config, "num_experts_per_tok": config["num_experts"]}))


def compare(
    name: str,
    rivals: Sequence[str],
    size: str,
    rounds: int = ROUNDS,
    dtype: str = "float32",
    all_experts: bool = False,
) -> Family:
    """One family: who loads its checkpoint, whose tokens are whose, and how long each takes."""
    found = Family(name, dtype)
    with ExitStack() as stack:
        folder = GUARD_MODEL
        if name != "guard":
            folder = Path(stack.enter_context(TemporaryDirectory()))
            write_checkpoint(name, folder, size)
            if all_experts:
                send_to_all_experts(folder)
        model, reference = _transformers(folder, dtype)
        # "eager": its default for experts has no float64.
        exact = (
            type(model)
            .from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
            .eval()
        )
        sides: dict[str, Side] = {ENGINE: _engine(folder, dtype)}
        if "transformers" in rivals:
            sides[f"transformers {version('transformers')}"] = reference
        if "vllm" in rivals:
            try:
                process = stack.enter_context(VLLMProcess(folder, max(BATCHES), 512, dtype))
                sides[f"vllm {process.version}"] = process.generate
            except HybridKVError as error:
                found.refusals["vllm"] = str(error)
        for batch in BATCHES:
            g = torch.Generator().manual_seed(batch)
            prompts = torch.randint(
                1, model.config.vocab_size, (batch, PROMPT), generator=g
            ).tolist()
            wanted = [reference([prompt], NEW_TOKENS)[0][0] for prompt in prompts]
            right = {}
            for subject, side in sides.items():
                tokens, _ = side(prompts, NEW_TOKENS)
                found.equal[batch, subject] = sum(map(list.__eq__, tokens, wanted))
                if tokens == wanted:
                    right[subject] = side
                    continue
                each = [
                    difference(model, exact, *texts)
                    for texts in zip(prompts, wanted, tokens, strict=True)
                    if texts[1] != texts[2]
                ]
                found.rounded[batch, subject] = sum(one.is_rounding for one in each)
                worst = max(each, key=lambda one: abs(one.margin) / one.cost)
                found.differences.append(f"{name}, {batch}, {subject}: {len(each)} differ, {worst}")
            found.measured += measure(name, right, prompts, wanted, rounds, dtype)
    return found


def measure(
    name: str,
    sides: Mapping[str, Side],
    prompts: Tokens,
    wanted: Tokens,
    rounds: int,
    dtype: str = "float32",
) -> list[Measurement]:
    """Measure prefill and decode of the sides that are right, in turns.

    Raises:
        WrongResultError: a side's tokens have changed.
    """
    seconds: dict[str, list[tuple[float, float]]] = {subject: [] for subject in sides}
    order, rng = list(sides), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for subject in order:
            first, prefill = sides[subject](prompts, 1)
            tokens, whole = sides[subject](prompts, NEW_TOKENS)
            equal(f"tokens of {subject}", tokens, wanted)
            equal(f"first tokens of {subject}", first, [row[:1] for row in wanted])
            seconds[subject].append((prefill, whole - prefill))
    found = []
    for phase, label in enumerate(("prefill", "decode")):
        times = {
            subject: np.array([one[phase] for one in each]) for subject, each in seconds.items()
        }
        for subject, own in times.items():
            params = {
                "family": name,
                "dtype": dtype,
                "batch": len(prompts),
                "prompt": PROMPT,
                "new": NEW_TOKENS,
            }
            params["subject"] = subject
            times_engine = (
                ratio(own, times[ENGINE]) if subject != ENGINE and ENGINE in times else None
            )
            cell = Cell(SUITE, label, params, "cpu", nothing)
            found.append(
                Measurement(
                    cell,
                    median(own),
                    times_engine,
                    rounds,
                    Receipt(checked_before=True, checked_after=True, max_error=0.0),
                )
            )
    return found


@dataclass(frozen=True)
class Difference:
    """The first token of a request that is not transformers'.

    Attributes:
        place: of the token in the answer.
        own, other: what the subject has there, and transformers.
        margin: of `other` above `own` in float64, over the largest logit.
        cost: by how much a logit of transformers differs between the dtype and float64 at most,
            over the same.
    """

    place: int
    own: int
    other: int
    margin: float
    cost: float

    @property
    def is_rounding(self) -> bool:
        return abs(self.margin) <= 2 * self.cost

    def __str__(self) -> str:
        return (
            f"token {self.place} is {self.own}, transformers has {self.other}; in float64 "
            f"{self.other} is {self.margin:+.1e} of the largest logit above {self.own}, "
            f"rounding costs {self.cost:.1e}: "
            f"{'rounding' if self.is_rounding else 'more than rounding'}"
        )


def difference(
    model: Any, exact: Any, prompt: list[int], wanted: list[int], tokens: list[int]
) -> Difference:
    """Return the first place where `tokens` leave `wanted`.

    transformers sees it in its dtype (`model`) and in float64 (`exact`).
    """
    place = next(
        i for i, (own, other) in enumerate(zip(tokens, wanted, strict=True)) if own != other
    )
    own, other = tokens[place], wanted[place]
    text = torch.tensor([prompt + wanted[:place]])
    with torch.inference_mode():
        logits, rounded = (
            one(text, use_cache=False).logits[0, -1].double() for one in (exact, model)
        )
    largest = logits.abs().max()
    cost = float((rounded - logits).abs().max() / largest)
    return Difference(place, own, other, float((logits[other] - logits[own]) / largest), cost)


def lines(found: Family) -> Iterator[list[str]]:
    """Yield the table's lines of one family, one for each rival."""
    cells = [
        (one.cell.params["subject"], one.cell.params["batch"], one.cell.benchmark)
        for one in found.measured
    ]
    measured = dict(zip(cells, found.measured, strict=True))
    for subject in dict.fromkeys(subject for _, subject in found.equal):
        shown = [
            found.name,
            subject,
            " ".join(f"{found.equal[batch, subject]}/{batch}" for batch in BATCHES),
        ]
        for phase, tokens in (("prefill", PROMPT), ("decode", NEW_TOKENS - 1)):
            for batch in BATCHES:
                one = measured.get((subject, batch, phase))
                speed = "" if one is None else f"{batch * tokens / one.time.value:,.0f}"
                shown.append(f"{speed} ({one.ratio.value:.2f})" if one and one.ratio else speed)
        yield shown
    for subject, reason in found.refusals.items():
        yield [found.name, subject, reason]


HEAD = [
    "family",
    "side",
    "equal",
    *(f"{phase}, {batch}" for phase in ("prefill", "decode") for batch in BATCHES),
]
WIDTHS = (17, 20, 8, 16, 16, 16, 16)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 1 if tokens of the engine differ, else 0.

    Raises:
        VoidError: a rival rejected a checkpoint that it is known to run.
        CheckFailedError: tokens changed while they were timed.
        HybridKVError: it cannot run or write.
    """
    names = ("guard", *sized())
    parser = ArgumentParser("python -m bench.families")
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        choices=names,
        help="only this one; may be repeated",
    )
    parser.add_argument(
        "--rival",
        action="append",
        default=[],
        choices=RIVALS,
        help="only this one; may be repeated",
    )
    parser.add_argument("--size", default="small", help="of the checkpoints (default: small)")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="default: float32"
    )
    parser.add_argument(
        "--all-experts", action="store_true", help="every token goes to all of them"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"that are timed (default: {ROUNDS})"
    )
    parser.add_argument("--out", metavar="CSV", help="append one row per measurement")
    options = parser.parse_args(arguments)
    rivals = options.rival or RIVALS
    torch.set_num_threads(1)
    if options.out:
        check_writable(options.out)
    if "vllm" in rivals:
        check_installed()
    stopped: list[str] = []
    print("tokens/s of each, in brackets those of the engine over it\n" + _line(HEAD))
    wrong = False
    for name in options.family or names:
        try:
            found = compare(
                name, rivals, options.size, options.rounds, options.dtype, options.all_experts
            )
        except WrongResultError as error:
            raise CheckFailedError(f"error: {error}") from None
        if options.out:
            append_rows(options.out, [*found.rows()])
        print("\n".join([*map(_line, lines(found)), *found.differences]), flush=True)
        wrong |= any(
            found.equal[at] + found.rounded.get(at, 0) < at[0]
            for at in found.equal
            if at[1] == ENGINE
        )
        if found.refusals and name not in REJECTED_BY_VLLM[options.dtype]:
            stopped.append(name)
    if stopped and not wrong:
        raise VoidError(f"a rival did not run where it should: {', '.join(stopped)}")
    return int(wrong)


def _line(cells: Sequence[str]) -> str:
    return "".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False)).rstrip()


if __name__ == "__main__":
    run_command(main)
