"""A cell of the sections on logits as a case: an engine, its prompts, and what its logits are held against.

The section that meets it and who plays it again ask the same functions. It is made small like a scenario: what can go
without another rule being the first to break, goes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch

from hybrid_kv.accuracy.guard_model import FOLDERS
from hybrid_kv.config import engine_config
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.engine.record import record_logits
from hybrid_kv.guard.exactness import (
    FLOAT32_LIMIT,
    FLOAT64_LIMIT,
    NUM_NEW,
    Alone,
    Cell,
    K,
    beside_transformers,
    engine_options,
    logit_difference,
    preempting,
)
from hybrid_kv.guard.play import rule_of, unwarned
from hybrid_kv.guard.poison import poison
from hybrid_kv.kernels.ssd.host import in_chunks
from hybrid_kv.minimize import minimize
from hybrid_kv.sampling import SamplingParams

EMBEDDED = {folder.name: folder for folder in FOLDERS.values()}
FORMAT, VERSION = "hybrid-kv logits", 1
# With fewer rows fewer requests fill a step, and shorter prompts are cut with smaller chunks.
FEWER = {"max_num_seqs": (1, 2, 3), "max_num_batched_tokens": (4, 8, 16)}
STOP = ("Question:",)  # what an embedded model says behind its answer

SCRIPT = '''\
"""{rule}, exit code 1 while the bug lives. Written by `hybrid-kv guard`."""

from hybrid_kv.guard.logits import LogitCase, replay

case = LogitCase(
    {against!r},
    {model!r},
    {cell!r},
    [
        {prompts},
    ],
    again={again!r},
    max_tokens={max_tokens},
)

if __name__ == "__main__":
    raise SystemExit(replay(case))
'''


@dataclass(frozen=True)
class LogitCase:
    """What an engine is asked, and what is right.

    Attributes:
        against: `plain`: an embedded model's plain forward pass in float64; `alone`: each request by itself, see
            `exactness.Alone`; `transformers`: its forward pass in float32.
        model: an embedded one, or a family, whose random weights are the same each time.
        cell: engine options, and see `exactness.Cell`.
        prompts: token ids.
        again: which of them are asked again behind all others; of `alone`.
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
        """Of all prompts that are sent."""
        return sum(map(len, self.prompts)) + sum(len(self.prompts[i]) for i in self.again)


@dataclass
class Found:
    """What one engine gave beside the plain pass.

    Attributes:
        largest: logit; `worst`: largest difference of one, `where`: its request and token.
        told_wrong: the first log-probability that a request was told and that the plain pass does not have.
        num_wrong: tokens that the plain pass would not choose.
        error: what the engine itself failed with: its rule and its text.
    """

    case: LogitCase
    caches: bool = False
    worst: float = 0.0
    largest: float = 0.0
    where: str = ""
    told_wrong: str = ""
    num_tokens: int = 0
    num_wrong: int = 0
    cached: int = 0
    accepted: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    error: tuple[str, str] = ("", "")

    @property
    def limit(self) -> float:
        return FLOAT64_LIMIT if self.case.cell["dtype"] == "float64" else FLOAT32_LIMIT * self.largest

    @property
    def broken(self) -> tuple[str, str]:
        """The first rule that it breaks, and how; empty if none."""
        if self.error[0]:
            return self.error
        if self.worst > self.limit:
            return "logits", self.where
        if self.told_wrong:
            return "logprobs", self.told_wrong
        return ("tokens", f"{self.num_wrong} tokens differ") if self.num_wrong else ("", "")

    def add(self, output: RequestOutput, logits: torch.Tensor, whole: torch.Tensor) -> None:
        """One request's logits, and those of the plain pass for all its tokens but the last."""
        expected = whole[-len(logits) :]
        difference = logit_difference(logits, expected)
        self.largest = max(self.largest, float(expected.abs().max()))
        if float(difference.max()) > self.worst:
            self.worst = float(difference.max())
            token = int(difference.argmax()) + len(whole) - len(logits)
            self.where = f"{self.case.cell}, request {output.request_id}, token {token} of {len(whole)}"
        chosen = whole[len(output.prompt_token_ids) - 1 :].argmax(-1)
        self.num_wrong += int((chosen != torch.tensor(output.token_ids)).sum())
        self.num_tokens += len(logits)
        self.cached += output.cached_tokens
        self.accepted += output.num_accepted_draft_tokens
        self.preemptions += output.num_preemptions
        self.told_wrong = self.told_wrong or self._wrong_logprob(output, whole.log_softmax(-1))

    def _wrong_logprob(self, output: RequestOutput, due: torch.Tensor) -> str:
        """The first token whose log-probability is not `due`, or the best ones beside it; nothing that was not asked.

        Args:
            due: [num_tokens - 1, vocab_size], of the tokens behind the first.
        """
        prompt, answer = output.prompt_token_ids, output.token_ids
        told, begin = output.logprobs, len(prompt) - 1
        if told is None:
            return ""
        if output.prompt_logprobs is not None:
            told, begin = [*output.prompt_logprobs, *told], 0
        where = f"{self.case.cell}, request {output.request_id}"
        if len(told) != len(due) - begin:
            return f"{where}: {len(told)} log-probabilities, not {len(due) - begin}"
        num_top = self.case.cell["logprobs"]
        for place, (one, row, token) in enumerate(zip(told, due[begin:], (prompt + answer)[begin + 1 :], strict=True)):
            ids, values = [token, *(best for best, _ in one.top)], [one.logprob, *(value for _, value in one.top)]
            found = torch.tensor([*values, *values[1:]], dtype=row.dtype)
            expected = torch.cat([row[ids], row.topk(num_top).values])
            # A log-probability is a difference of two logits, or of one and a mean of them.
            if found.shape != expected.shape or float((found - expected).abs().max()) > 2 * self.limit:
                due_values = expected[: 1 + num_top].tolist()
                return f"{where}, token {begin + 1 + place}: log-probabilities {values}, not {due_values}"
        return ""


def beside_plain(case: LogitCase, folder: Path) -> Found:
    """Every prompt in one engine; the plain pass runs on the CPU, whatever the engine's device."""
    begin, found, plain = time.perf_counter(), Found(case), _plain(folder)
    options = {"max_model_len": 512, "max_num_seqs": 8, "mamba_ssm_cache_dtype": case.cell["dtype"]}
    scans = in_chunks() if case.cell.get("in_chunks") else nullcontext()
    disturb = preempting(case.cell.get("preempts", 0))
    try:
        llm = LLM(folder, **{**options, **engine_options(case.cell)})
        poison(llm)
        found.caches = llm.manager.enable_prefix_caching
        with scans, torch.inference_mode():
            for output, logits in record_logits(llm, case.prompts, _params(case), disturb):
                ids = torch.tensor([output.prompt_token_ids + output.token_ids])
                found.add(output, logits.cpu(), plain(ids)[0, :-1])
    except Exception as error:
        found.error = rule_of(error), f"{case.cell}: {type(error).__name__}: {error}"
    found.seconds = time.perf_counter() - begin
    return found


def _params(case: LogitCase) -> list[SamplingParams]:
    """Of each prompt. Every third asks for the prompt's log-probabilities: such a one takes nothing from the cache."""
    params, num_top = SamplingParams(max_tokens=case.max_tokens, stop=STOP), case.cell.get("logprobs")
    return [
        replace(params, logprobs=num_top, prompt_logprobs=num_top if number % 3 == 0 else None)
        for number in range(len(case.prompts))
    ]


@cache
def _plain(folder: Path) -> Any:
    from hybrid_kv.accuracy.guard_model.checkpoint import load_checkpoint

    return load_checkpoint(folder).double()


def from_transformers(reference: Any, folder: str | Path, case: LogitCase) -> tuple[float, int]:
    """How far an engine's logits are, of the largest one, and how many tokens were computed."""
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 512, **case.cell}
    llm = LLM(folder, **options)
    poison(llm)
    found = list(beside_transformers(reference, llm, case.prompts, SamplingParams(max_tokens=case.max_tokens)))
    return max(far for *_, far in found), sum(len(logits) for _, logits, *_ in found)


@cache
def _random(model: str) -> tuple[tempfile.TemporaryDirectory[str], Any]:
    """A checkpoint that lives as long as this process, and the same model in transformers."""
    from hybrid_kv.models.random_checkpoint import write_checkpoint

    made = tempfile.TemporaryDirectory()
    return made, write_checkpoint(model, Path(made.name), "tiny")


@unwarned()
def play_logits(case: LogitCase) -> tuple[str, str]:
    """The first rule that is broken, and how; empty if none.

    The rule is `logits`, `tokens`, `drafts`, or the kind of an error and the function that raised it.
    """
    from hybrid_kv.models.random_checkpoint import quiet

    if case.against == "plain":
        return beside_plain(case, EMBEDDED[case.model]).broken
    try:
        if case.against == "alone":
            folder = EMBEDDED.get(case.model) or _random(case.model)[0].name
            one = Alone(folder, prompts=case.prompts, again=case.again, max_tokens=case.max_tokens).check(case.cell)
            return one.rule, one.problem if one.rule else ""
        made, reference = _random(case.model)
        with quiet():
            far, _ = from_transformers(reference, made.name, case)
    except Exception as error:
        return rule_of(error), f"{type(error).__name__}: {error}"
    return ("logits", f"{far:.2g} of the largest logit away") if far > FLOAT32_LIMIT else ("", "")


def replay(case: LogitCase) -> int:
    """Play a case and say what broke; the exit code is 1 while it breaks a rule, else 0."""
    rule, report = play_logits(case)
    print(tell(case, rule, report))
    return int(bool(rule))


def tell(case: LogitCase, rule: str, report: str) -> str:
    """A case and what became of it, in words."""
    asked = [f"prompt {i}{' and again' * (i in case.again)}: {p}" for i, p in enumerate(case.prompts) if len(p) <= 64]
    lines = [f"{case.model} against {case.against}: {case.cell}, {case.max_tokens} tokens each", *asked]
    return "\n".join([*lines, *([report, f"broken rule: {rule}"] if rule else ["no rule is broken"])])


# ---- smaller ----


class _TimeUpError(Exception):
    pass


@dataclass
class Shrinker:
    """Finds the smallest case that breaks the same rule first.

    Attributes:
        seconds: of one core.
        is_minimal: nothing more could go; else the time was up.
    """

    case: LogitCase
    rule: str
    num_plays: int = 0
    seconds: float = 0.0
    is_minimal: bool = True
    _tried: set[str] = field(default_factory=set)
    _deadline: float = 0.0

    def fails(self, case: LogitCase) -> bool:
        """Whether this one breaks the rule; then it is the best so far."""
        if (key := repr(case)) in self._tried:
            return False
        if time.process_time() > self._deadline:
            raise _TimeUpError
        self._tried.add(key)
        self.num_plays += 1
        if play_logits(case)[0] != self.rule:
            return False
        self.case = case
        return True

    def shrink(self, seconds: float) -> None:
        """All passes until none helps, or the time is up."""
        begin = time.process_time()
        self._deadline = begin + seconds
        before = None
        try:
            while before is not self.case:
                before = self.case
                for one_pass in (self._requests, self._answers, self._options, self._tokens):
                    one_pass()
        except _TimeUpError:
            self.is_minimal = False
        self.seconds = time.process_time() - begin

    def _requests(self) -> None:
        minimize(self.case.again, lambda kept, case=self.case: self.fails(replace(case, again=tuple(kept))))  # type: ignore[misc]
        case = self.case

        def keep(kept: Sequence[int]) -> bool:
            places = {old: new for new, old in enumerate(kept)}
            again = tuple(places[i] for i in case.again if i in places)
            return bool(kept) and self.fails(replace(case, prompts=[case.prompts[i] for i in kept], again=again))

        minimize(range(len(case.prompts)), keep)

    def _options(self) -> None:
        for keys in [("speculative_method", "num_speculative_tokens"), *((key,) for key in self.case.cell)]:
            cell = {key: value for key, value in self.case.cell.items() if key not in keys}
            if "dtype" not in keys and "device" not in keys:
                self.fails(replace(self.case, cell=cell))
        for key, values in FEWER.items():
            for value in values:
                cell = {**self.case.cell, key: value}
                if key == "max_num_batched_tokens":  # A step has room for a token of each request.
                    cell["max_num_seqs"] = min(value, cell.get("max_num_seqs", value))
                if value < self.case.cell.get(key, sys.maxsize) and self.fails(replace(self.case, cell=cell)):
                    break

    def _answers(self) -> None:
        case = self.case
        minimize(range(case.max_tokens), lambda kept: bool(kept) and self.fails(replace(case, max_tokens=len(kept))))

    def _tokens(self) -> None:
        """The same places of all prompts, so that what they share they share still; then of each one."""
        for some in self._places():
            case = self.case

            def keep(kept: Sequence[int], case: LogitCase = case, some: Sequence[int] = some) -> bool:
                places = set(kept)
                prompts = [*case.prompts]
                for i in some:
                    prompts[i] = [token for j, token in enumerate(case.prompts[i]) if j in places]
                return all(prompts) and self.fails(replace(case, prompts=prompts))

            minimize(range(max(len(case.prompts[i]) for i in some)), keep)

    def _places(self) -> Iterator[Sequence[int]]:
        everybody = range(len(self.case.prompts))
        yield everybody
        if len(everybody) > 1:
            yield from ([i] for i in everybody)


# ---- as text ----


def to_json(case: LogitCase, rule: str = "") -> str:
    """The text of a case's file; `rule` is the one that it breaks."""
    parts = {"format": FORMAT, "version": VERSION, "rule": rule, **asdict(case)}
    lines = {key: json.dumps(value) for key, value in parts.items()}
    lines["prompts"] = "[\n  " + ",\n  ".join(map(json.dumps, case.prompts)) + "\n ]"
    return "{\n" + ",\n".join(f' "{key}": {text}' for key, text in lines.items()) + "\n}\n"


def from_document(parts: dict[str, Any]) -> LogitCase:
    """The case of a file's JSON.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none, or has a value that none can have.
    """
    import hybrid_kv.models.families  # noqa: F401  (registers them)
    from hybrid_kv.models.registry import sized

    parts = {key: value for key, value in parts.items() if key not in ("format", "rule")}
    if (version := parts.pop("version")) != VERSION:
        raise ValueError(f"version {version!r}, not {VERSION}")
    if strange := sorted(parts.keys() ^ {one.name for one in fields(LogitCase)}):
        raise ValueError(f"{strange[0]!r} is unknown or missing")
    cell = {key: tuple(value) if isinstance(value, list) else value for key, value in parts["cell"].items()}
    case = LogitCase(**{**parts, "cell": cell, "again": tuple(parts["again"])})
    kinds = get_args(get_type_hints(LogitCase)["against"])
    if case.against not in kinds:
        raise ValueError(f"against {case.against!r}, not {' or '.join(kinds)}")
    known = {**(EMBEDDED if case.against != "transformers" else {}), **(sized() if case.against != "plain" else {})}
    if case.model not in known:
        raise ValueError(f"model {case.model!r} is none of {', '.join(known)}")
    numbers = [case.max_tokens, *case.again, *(token for prompt in case.prompts for token in prompt)]
    if wrong := [number for number in numbers if type(number) is not int or number < 0]:
        raise ValueError(f"{wrong[0]!r} is no integer from 0")
    if not case.prompts or not all(case.prompts) or max(case.again, default=0) >= len(case.prompts):
        raise ValueError("a prompt is empty, or again names none")
    drafts = {"num_speculative_tokens": K} if {"speculative_method", "script"} & cell.keys() else {}
    # As the engines of all kinds have them.
    engine_config({"max_num_seqs": 4, "max_model_len": 512, **drafts, **engine_options(cell)})
    if case.against == "plain" and "dtype" not in cell:
        raise ValueError("cell has no dtype")
    return case


def to_script(case: LogitCase, rule: str) -> str:
    """A program of at most 30 lines that plays the case; it needs nothing but this package."""
    prompts = (",\n        " if len(case.prompts) <= 3 else ", ").join(map(str, case.prompts))
    return SCRIPT.format(**{**asdict(case), "rule": rule, "prompts": prompts})
