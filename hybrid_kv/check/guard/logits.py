"""Cells of the sections on logits as cases: an engine, its prompts, and the expected logits.

The section that finds a case and a replay call the same functions. It is reduced like a scenario:
as long as the same rule is the first to break.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch

from hybrid_kv.check.guard.exactness import (
    FLOAT32_LIMIT,
    NUM_NEW,
    Alone,
    Cell,
    Compared,
    K,
    beside_transformers,
    engine_options,
    preempting,
    void_of,
)
from hybrid_kv.check.guard.float64 import float64_pass
from hybrid_kv.check.guard.play import rule_of, unwarned, wrong_logprob
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.replay import as_text, check_size, parts_of, tuples
from hybrid_kv.check.guard_model import FOLDERS
from hybrid_kv.check.minimize import Shrinker
from hybrid_kv.config import engine_config
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.engine.record import record_logits
from hybrid_kv.kernels.ssd.host import in_chunks
from hybrid_kv.sampling import SamplingParams

EMBEDDED = {folder.name: folder for folder in FOLDERS.values()}
FORMAT = "hybrid-kv logits"
# With fewer rows fewer requests fill a step, and shorter prompts are cut with smaller chunks.
FEWER = {"max_num_seqs": (1, 2, 3), "max_num_batched_tokens": (4, 8, 16)}
STOP = ("Question:",)  # what an embedded model says behind its answer


@dataclass(frozen=True)
class LogitCase:
    """The requests that are sent to an engine, and the oracle of their logits.

    Attributes:
        against: `plain`: an embedded model's plain forward pass in float64; `alone`: each request
            by itself, see `exactness.Alone`; `transformers`: its forward pass in float32.
        model: an embedded one, or a family, whose random weights are the same each time.
        cell: engine options, and see `exactness.Cell`.
        prompts: token ids.
        again: indices of the prompts that are sent again after all others, if `against` is `alone`.
        max_tokens: of each answer.
    """

    against: Literal["plain", "alone", "transformers"]
    model: str
    cell: Cell
    prompts: list[list[int]]
    again: tuple[int, ...] = ()
    max_tokens: int = NUM_NEW

    @property
    def num_requests(self) -> int:
        return len(self.prompts) + len(self.again)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all prompts that are sent."""
        return sum(map(len, self.prompts)) + sum(len(self.prompts[i]) for i in self.again)


@dataclass
class Found(Compared):
    """The logits of one engine compared with the plain pass."""

    case: LogitCase = field(kw_only=True)

    def add(self, output: RequestOutput, logits: torch.Tensor, whole: torch.Tensor) -> None:
        """Compare a request's logits with the plain pass's, for all its tokens but the last."""
        self.compare(output, logits, whole)
        chosen = whole[len(output.prompt_token_ids) - 1 :].argmax(-1)
        self.num_wrong += int((chosen != torch.tensor(output.token_ids)).sum())
        self.count(output, logits)
        num_top = self.cell.get("logprobs", 0)
        due = whole.log_softmax(-1)
        # A log-probability is a difference of two logits, or of one and a mean of them.
        problem = wrong_logprob(output, due, num_top, 2 * self.limit)
        if problem and not self.wrong_logprob:
            self.wrong_logprob = f"request {output.request_id}{problem}"


def beside_plain(case: LogitCase) -> Found:
    """Run every prompt in one engine, and compare it with the plain pass.

    The plain pass runs on the CPU, whatever the engine's device.
    """
    folder = EMBEDDED[case.model]
    compared = Found(case.cell, case=case)
    plain = _plain(folder)
    options = {"max_model_len": 512, "max_num_seqs": 8, "mamba_ssm_cache_dtype": case.cell["dtype"]}
    scans = in_chunks() if case.cell.get("in_chunks") else nullcontext()
    disturb = preempting(case.cell.get("preempts", 0))
    try:
        llm = LLM(folder, **{**options, **engine_options(case.cell)})
        poison(llm)
        with scans, torch.inference_mode():
            for output, logits in record_logits(llm, case.prompts, _params(case), disturb):
                ids = torch.tensor([output.prompt_token_ids + output.token_ids])
                compared.add(output, logits.cpu(), plain(ids)[0, :-1])
        compared.void = void_of(compared, llm)
    except Exception as error:
        compared.error = rule_of(error), f"{type(error).__name__}: {error}"
    return compared


def _params(case: LogitCase) -> list[SamplingParams]:
    """Return the parameters of each prompt.

    Every third asks for log-probabilities of the prompt: such a request takes nothing from the
    cache.
    """
    params = SamplingParams(max_tokens=case.max_tokens, stop=STOP)
    num_top = case.cell.get("logprobs")
    return [
        replace(params, logprobs=num_top, prompt_logprobs=num_top if number % 3 == 0 else None)
        for number in range(len(case.prompts))
    ]


@cache
def _plain(folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    return float64_pass(folder)


def from_transformers(reference: Any, folder: str | Path, case: LogitCase) -> tuple[float, int]:
    """Return the largest difference from transformers, and how many tokens were computed.

    The difference is relative to the largest logit.
    """
    options = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_model_len": 512,
        **case.cell,
    }
    llm = LLM(folder, **options)
    poison(llm)
    params = SamplingParams(max_tokens=case.max_tokens)
    compared = list(beside_transformers(reference, llm, case.prompts, params))
    return max(far for *_, far in compared), sum(len(logits) for _, logits, *_ in compared)


@cache
def _random(model: str) -> tuple[tempfile.TemporaryDirectory[str], Any]:
    """Write a checkpoint with random weights; return it with the same model in transformers.

    It lives as long as this process.
    """
    from hybrid_kv.models.random_checkpoint import write_checkpoint

    made = tempfile.TemporaryDirectory()
    return made, write_checkpoint(model, Path(made.name), "tiny")


@unwarned()
def play_logits(case: LogitCase) -> tuple[str, str]:
    """Play a case; return the first rule that it breaks, and how; empty if none.

    The rule is `logits`, `tokens`, `drafts`, or the kind of an error and the function that raised
    it.
    """
    from hybrid_kv.models.random_checkpoint import quiet

    if case.against == "plain":
        return beside_plain(case).broken
    try:
        if case.against == "alone":
            folder = EMBEDDED.get(case.model) or _random(case.model)[0].name
            alone = Alone(
                folder, prompts=case.prompts, again=case.again, max_tokens=case.max_tokens
            )
            return alone.check(case.cell).broken
        made, reference = _random(case.model)
        with quiet():
            far, _ = from_transformers(reference, made.name, case)
    except Exception as error:
        return rule_of(error), f"{type(error).__name__}: {error}"
    return ("logits", f"{far:.2g} of the largest logit away") if far > FLOAT32_LIMIT else ("", "")


def tell(case: LogitCase) -> tuple[str, list[str]]:
    """Play a case; return the first rule that it breaks, empty if none, and its outcome."""
    rule, report = play_logits(case)
    sent = [
        f"prompt {i}{' and again' * (i in case.again)}: {p}"
        for i, p in enumerate(case.prompts)
        if len(p) <= 64
    ]
    first = f"{case.model} against {case.against}: {case.cell}, {case.max_tokens} tokens each"
    return rule, [first, *sent, *([report] if rule else [])]


# ---- smaller ----


class LogitShrinker(Shrinker[LogitCase]):
    """A search for the smallest case that breaks the same rule first; `seconds` are of one core."""

    def __init__(self, case: LogitCase, rule: str, seconds: float) -> None:
        super().__init__(case, seconds)
        self.rule = rule

    def play(self, case: LogitCase) -> LogitCase | None:
        return case if play_logits(case)[0] == self.rule else None

    def passes(self) -> Sequence[Callable[[], object]]:
        return self._requests, self._answers, self._options, self._tokens

    def _requests(self) -> None:
        case = self.case
        self.leave_out(case.again, lambda kept: replace(case, again=tuple(kept)))
        case = self.case

        def keep(kept: Sequence[int]) -> LogitCase | None:
            if not kept:
                return None
            places = {old: new for new, old in enumerate(kept)}
            again = tuple(places[i] for i in case.again if i in places)
            return replace(case, prompts=[case.prompts[i] for i in kept], again=again)

        self.leave_out(range(len(case.prompts)), keep)

    def _options(self) -> None:
        for keys in [
            ("speculative_method", "num_speculative_tokens"),
            *((key,) for key in self.case.cell),
        ]:
            cell = {key: value for key, value in self.case.cell.items() if key not in keys}
            if "dtype" not in keys and "device" not in keys:
                self.fails(replace(self.case, cell=cell))
        for key, values in FEWER.items():
            for value in values:
                cell = {**self.case.cell, key: value}
                if key == "max_num_batched_tokens":  # A step has room for a token of each request.
                    cell["max_num_seqs"] = min(value, cell.get("max_num_seqs", value))
                if value < self.case.cell.get(key, sys.maxsize) and self.fails(
                    replace(self.case, cell=cell)
                ):
                    break

    def _answers(self) -> None:
        case = self.case

        def keep(kept: Sequence[int]) -> LogitCase | None:
            return replace(case, max_tokens=len(kept)) if kept else None

        self.leave_out(range(case.max_tokens), keep)

    def _tokens(self) -> None:
        """Drop the same places of all prompts, preserving shared prefixes; then of each one."""
        everyone = range(len(self.case.prompts))
        for some in (everyone, *([i] for i in everyone if len(everyone) > 1)):
            case = self.case

            def keep(
                kept: Sequence[int], case: LogitCase = case, some: Sequence[int] = some
            ) -> LogitCase | None:
                places = set(kept)
                prompts = [*case.prompts]
                for i in some:
                    prompts[i] = [token for j, token in enumerate(case.prompts[i]) if j in places]
                return replace(case, prompts=prompts) if all(prompts) else None

            self.leave_out(range(max(len(case.prompts[i]) for i in some)), keep)


# ---- as text ----


def to_json(case: LogitCase, rule: str = "") -> str:
    """Return the text of a case's file; `rule` is the one that it breaks."""
    return as_text(FORMAT, rule, asdict(case), "prompts", case.prompts)


def from_document(document: Mapping[str, Any]) -> LogitCase:
    """Return the case of a file's JSON.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none, or has a value that none can
            have.
    """
    import hybrid_kv.models.families  # noqa: F401  (registers them)
    from hybrid_kv.models.registry import sized

    parts = parts_of(document, {field.name for field in fields(LogitCase)})
    cell = tuples(parts["cell"])
    case = LogitCase(**{**parts, "cell": cell, "again": tuple(parts["again"])})
    kinds = get_args(get_type_hints(LogitCase)["against"])
    if case.against not in kinds:
        raise ValueError(f"against {case.against!r}, not {' or '.join(kinds)}")
    known = {
        **(EMBEDDED if case.against != "transformers" else {}),
        **(sized() if case.against != "plain" else {}),
    }
    if case.model not in known:
        raise ValueError(f"model {case.model!r} is none of {', '.join(known)}")
    numbers = [
        case.max_tokens,
        *case.again,
        *(token for prompt in case.prompts for token in prompt),
    ]
    wrong = [number for number in numbers if type(number) is not int or number < 0]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no integer from 0")
    if not case.prompts or not all(case.prompts) or max(case.again, default=0) >= len(case.prompts):
        raise ValueError("a prompt is empty, or again names none")
    drafts = {"num_speculative_tokens": K} if {"speculative_method", "script"} & cell.keys() else {}
    # As the engines of all kinds have them.
    engine_config({"max_num_seqs": 4, "max_model_len": 512, **drafts, **engine_options(cell)})
    check_size(case.num_tokens + case.num_requests * case.max_tokens, cell)
    if case.against == "plain" and "dtype" not in cell:
        raise ValueError("cell has no dtype")
    return case
