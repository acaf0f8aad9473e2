"""Random weights in engines of every kind, against each request alone, uncached and undrafted.

In float64 the two differ by rounding alone, 1e-13 on logits of about ten; a stale state, a wrong
slot or a position off by one moves a logit by more than 1e-3. `beside_transformers` adds
transformers: all cells may err alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.check.guard.play import rule_of
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import ScriptedProposer, SmallBlocksFirst, SmallKVFirst
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.engine.record import record_logits
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.interface import Model
from hybrid_kv.models.registry import head_of
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import ScheduledRequest
from hybrid_kv.sampling import SamplingParams

# In float64 the engine and a plain forward pass differ by 2e-13 on logits of up to 40, and the
# mildest damage of the guard model's card (an SSM state one token behind) moves a logit by 0.018:
# any limit in between will do.
FLOAT64_LIMIT = 1e-9
# In float32 both round, chunked and recurrent arithmetic differently: 3.4e-6 of the largest logit
# is usual. In some random delta nets it grows to 6e-5, here and in transformers alike, as float64
# shows of both: weights that are held to this limit are the same in every run.
FLOAT32_LIMIT = 2e-5
LARGEST = 1e300
NUM_NEW = 12  # tokens of each answer
K = 3

Drafts = dict[tuple[int, int], list[int]]  # by prompt and known tokens
Disturb = Callable[[LLM], None]  # before every step
# Engine options; `script` of drafts; `preempts`: the youngest request every so many steps;
# `in_chunks`: prefills are scanned as on a machine with more threads; `to_the_end`: the longest
# request reaches max_model_len.
Cell = dict[str, Any]
SLOTS_CELLS: tuple[Cell, ...] = (
    {"max_num_batched_tokens": 17, "preempts": 5, "async_scheduling": True},
    {
        "script": "mixed",
        "attention_backend": SmallKVFirst.name,
        "captured_batch_sizes": (3,),
        "preempts": 5,
    },
    {
        "mamba_cache_mode": "align",
        "max_num_batched_tokens": 41,
        "kv_offload_bytes": 1 << 24,
        "preempts": 5,
    },
    {
        "mamba_cache_mode": "align",
        "script": "rotate",
        "async_scheduling": True,
        "max_num_batched_tokens": 90,
    },
    {
        "mamba_cache_mode": "all",
        "script": "mixed",
        "attention_backend": SmallBlocksFirst.name,
        "preempts": 5,
    },
    {
        "mamba_cache_mode": "all",
        "max_num_batched_tokens": 29,
        "kv_offload_bytes": 1 << 24,
        "async_scheduling": True,
    },
)
RECOMPUTE_CELLS: tuple[Cell, ...] = (
    {
        "state_scheme": "recompute",
        "mamba_cache_mode": "align",
        "script": "mixed",
        "recompute_ring_len": 11,
        "preempts": 5,
    },
    {
        "state_scheme": "recompute",
        "mamba_cache_mode": "all",
        "script": "rotate",
        "async_scheduling": True,
    },
)
MTP_CELLS: tuple[Cell, ...] = (
    # Where the longest request ends its last drafts have no slot, while the other rows' have theirs
    # (vllm#58080).
    {
        "speculative_method": "mtp",
        "mamba_cache_mode": "none",
        "preempts": 6,
        "max_num_batched_tokens": 33,
        "to_the_end": True,
    },
    {"speculative_method": "mtp", "mamba_cache_mode": "align", "async_scheduling": True},
    {
        "speculative_method": "mtp",
        "mamba_cache_mode": "all",
        "max_num_batched_tokens": 57,
        "preempts": 5,
        "to_the_end": True,
    },
)


def engine_options(cell: Cell) -> dict[str, Any]:
    """Return the engine options of a cell."""
    not_options = ("script", "preempts", "in_chunks", "to_the_end", "logprobs")
    return {key: value for key, value in cell.items() if key not in not_options}


@dataclass
class Compared:
    """The logits of one cell, compared with those that are right.

    Attributes:
        worst: largest difference of a logit; `where`: the request and token that it belongs to.
        largest: logit.
        num_wrong: what has other tokens: requests, or tokens where each is compared by itself.
        error: what the engine itself failed with: its rule and its text.
        void: why the cell showed nothing, or empty.
        wrong_logprob: the first log-probability of an output that the plain pass does not have.
        wrong_hits: the first request of a second helping that did not find all that it could, in
            words.
        wrong_drafts: places where a head's drafts differ from those that the request gets alone, of
            `num_drafts`.
    """

    cell: Cell
    worst: float = 0.0
    largest: float = 0.0
    where: str = ""
    num_wrong: int = 0
    num_tokens: int = 0
    cached_tokens: int = 0
    accepted: int = 0
    verified: int = 0
    preemptions: int = 0
    error: tuple[str, str] = ("", "")
    void: str = ""
    wrong_logprob: str = ""
    wrong_hits: str = ""
    num_drafts: int = 0
    wrong_drafts: int = 0

    @property
    def limit(self) -> float:
        """Return the largest `worst` that rounding explains.

        The expected logits are computed in float64, whatever the cell's dtype.
        """
        return (
            FLOAT32_LIMIT * self.largest if self.cell.get("dtype") == "float32" else FLOAT64_LIMIT
        )

    @property
    def broken(self) -> tuple[str, str]:
        """Return the first rule that is broken, and how; two empty strings if none is."""
        drafts = (
            f"{self.wrong_drafts} of {self.num_drafts} times a request got other drafts than alone"
        )
        broken = {
            self.error[0]: self.error[1],
            "logits": f"a logit differs by {self.worst:.2g} at {self.where}"
            if self.worst > self.limit
            else "",
            "logprobs": self.wrong_logprob,
            "tokens": f"other tokens in {self.num_wrong} places" if self.num_wrong else "",
            "hits": self.wrong_hits,
            "drafts": drafts if self.wrong_drafts else "",
        }
        return next(((rule, how) for rule, how in broken.items() if how), ("", ""))

    @property
    def problem(self) -> str:
        """Return a line about what is wrong, or why the cell is void; empty if neither."""
        return self.broken[1] or self.void

    def compare(self, output: RequestOutput, logits: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare a request's logits with the expected ones.

        Args:
            logits: [num_computed, vocab_size], of the request's last tokens but one.
            expected: [num_tokens - 1, vocab_size], of all its tokens but the last.
        """
        self.largest = max(self.largest, float(expected.abs().max()))
        difference = logit_difference(logits, expected[-len(logits) :])
        if float(difference.max()) > self.worst:
            self.worst = float(difference.max())
            token = int(difference.argmax()) + len(expected) - len(logits)
            self.where = f"request {output.request_id}, token {token} of {len(expected)}"

    def count(self, output: RequestOutput, logits: torch.Tensor) -> None:
        """Add up what a request ran."""
        self.num_tokens += len(logits)
        self.cached_tokens += output.cached_tokens
        self.accepted += output.num_accepted_draft_tokens
        self.verified += output.num_draft_tokens
        self.preemptions += output.num_preemptions


class DraftRecorder(EngineObserver):
    """A recorder of the drafts that steps verify."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self.found: Drafts = {}

    def on_step(self, batch: Sequence[ScheduledRequest], input_ids: torch.Tensor, *_: Any) -> None:
        start = 0
        for item in batch:
            if item.num_drafts:
                known = item.num_computed_tokens + item.num_tokens - item.num_drafts
                drafts = input_ids[
                    start + item.num_tokens - item.num_drafts : start + item.num_tokens
                ].tolist()
                self.found[self._order[int(item.request.request_id)], known] = drafts
            start += item.num_tokens

    def compare(self, due: Drafts) -> tuple[int, int]:
        """Return how many recorded drafts differ from those due, and how many were compared."""
        pairs = [(drafts, due[key]) for key, drafts in self.found.items() if key in due]
        return sum(a[: len(b)] != b[: len(a)] for a, b in pairs), len(pairs)


class Alone:
    """Requests that run one at a time: no cache, no drafts, one chunk; answers and logits are kept.

    Args:
        folder: a checkpoint.
        seed: of the prompts, if none are given.
        again: indices of the prompts that are sent again after all others; None: every other one.
        max_tokens: of each answer.

    Attributes:
        given: the folder, or the model that was loaded from it, where an engine needs more than
            `model`.
        model: loaded once, in float64.
        known: output and logits of each prompt.
    """

    def __init__(
        self,
        folder: str | Path,
        seed: int = 0,
        prompts: Sequence[list[int]] = (),
        again: Sequence[int] | None = None,
        max_tokens: int = NUM_NEW,
    ) -> None:
        self.folder = folder
        self.given: str | Path | Model = folder
        self._loaded: Model | None = None
        self.params = SamplingParams(max_tokens=max_tokens)
        self._eos_token_ids: frozenset[int] = frozenset()
        self._llm = self.engine()
        self._eos_token_ids = self._llm.eos_token_ids
        self._loaded = self.model = self._llm.model
        unit = max(
            group.spec.block_size
            for group in self.engine(mamba_cache_mode="all").plan.config.groups
        )
        self.max_model_len = self._llm.config.scheduler.max_model_len
        self.vocab_size = self._llm.model.vocab_size
        longest = self.max_model_len - NUM_NEW
        self.prompts = [*prompts] or _prompts(random.Random(seed), unit, longest, self.vocab_size)
        self.again = tuple(range(0, len(self.prompts), 2) if again is None else again)
        self.block_size = unit
        self._drafts: dict[str, Drafts] = {}
        self.known = [
            next(iter(record_logits(self._llm, [prompt], self.params))) for prompt in self.prompts
        ]

    def cells(self) -> list[Cell]:
        """Return the cells that the model can run in."""
        mamba = [
            spec for spec in self._llm.model.layer_specs.values() if isinstance(spec, MambaSpec)
        ]
        recomputes = bool(mamba) and all(
            spec.inputs or all(state_part.role != "state" for state_part in spec.parts)
            for spec in mamba
        )
        file = ConfigFile.read(self.folder)
        head = head_of(file)
        has_head = head is not None and bool(head.shapes(file))
        return [
            *SLOTS_CELLS,
            *(RECOMPUTE_CELLS if recomputes else ()),
            *(MTP_CELLS if has_head else ()),
        ]

    def engine(self, **options: Any) -> LLM:
        """Build an engine of this checkpoint; `options` override the defaults.

        The checkpoint is loaded again where the options need that.
        """
        dtype = options.get("dtype", "float64")
        needs = {"dtype", "speculative_method", "kv_offload_folder"}
        given = self.given if self._loaded is None or needs & options.keys() else self._loaded
        defaults = {
            "dtype": dtype,
            "mamba_ssm_cache_dtype": dtype,
            "max_num_seqs": 4,
            "max_model_len": 512,
        }
        llm = LLM(given, device="cpu", **defaults | options)
        llm.eos_token_ids |= self._eos_token_ids  # a model without its folder has none
        return llm

    def check(self, cell: Cell) -> Compared:
        """Send all requests at once to an engine of this cell, then some of them again."""
        try:
            return self._check(cell)
        except Exception as error:
            return Compared(cell, error=(rule_of(error), f"{type(error).__name__}: {error}"))

    def _check(self, cell: Cell) -> Compared:
        options = engine_options(cell)
        sequences = [[*output.prompt_token_ids, *output.token_ids] for output, _ in self.known]
        order = [*range(len(self.prompts)), *self.again]
        if "script" in cell:
            lengths = [len(self.prompts[i]) for i in order]
            in_order = [sequences[i] for i in order]
            options["num_speculative_tokens"] = K
            options["proposer"] = ScriptedProposer(
                cell["script"], K, in_order, lengths, self.block_size, self.vocab_size
            )
        elif "speculative_method" in cell:
            options["num_speculative_tokens"] = K
        if cell.get("to_the_end"):
            options["max_model_len"] = max(map(len, sequences))
        llm = self.engine(**options)
        poison(llm)
        recorder = DraftRecorder(order)
        llm.observers.append(recorder)
        compared = Compared(cell)
        runs = self._run(llm, order, preempting(cell.get("preempts", 0)))
        for place, (i, output, logits) in enumerate(runs):
            alone, expected = self.known[i]
            has_all = llm.manager.enable_prefix_caching and not llm.manager.pool.num_evictions
            if place >= len(self.prompts) and has_all and not compared.wrong_hits:
                compared.wrong_hits = _wrong_hit(output, llm.manager.hit_granularity)
            if output.token_ids == alone.token_ids:
                compared.compare(output, logits, expected)
            else:
                compared.num_wrong += 1
            compared.count(output, logits)
        compared.num_drafts = len(recorder.found)
        compared.void = void_of(compared, llm)
        if cell.get("preempts") and not compared.preemptions:
            compared.void = compared.void or "void: no request was preempted"
        if "speculative_method" in cell:
            compared.wrong_drafts, count = recorder.compare(
                self.drafts_alone(cell.get("mamba_cache_mode", "none"))
            )
            compared.void = compared.void or "void: no drafts to compare" * (not count)
        return compared

    def drafts_alone(self, mode: str) -> Drafts:
        """Return the drafts that the head gives to each request alone.

        The mode decides which keys the head sees (`models.mtp`).
        """
        if mode not in self._drafts:
            llm = self.engine(
                mamba_cache_mode=mode, speculative_method="mtp", num_speculative_tokens=K
            )
            recorder = DraftRecorder(range(len(self.prompts)))
            llm.observers.append(recorder)
            for prompt in self.prompts:
                llm.generate([prompt], self.params, progress=False)
                llm.reset_prefix_cache()
            self._drafts[mode] = recorder.found
        return self._drafts[mode]

    def _run(
        self, llm: LLM, order: Sequence[int], disturb: Disturb | None
    ) -> Iterator[tuple[int, RequestOutput, torch.Tensor]]:
        """Yield index, output and logits of every prompt, then of the repeated ones.

        In between the device's cache is reset if the host has a copy.
        """
        first = len(self.prompts)
        for wave in (order[:first], order[first:]):
            outputs = record_logits(llm, [self.prompts[i] for i in wave], self.params, disturb)
            yield from ((i, *recorded) for i, recorded in zip(wave, outputs, strict=True))
            if llm.manager.offload is not None:
                llm.reset_prefix_cache()


def _wrong_hit(output: RequestOutput, unit: int) -> str:
    """Return what is wrong with the hit of a prompt that ran before; empty if nothing is.

    If no block was lost, all but the last token is cached, up to a boundary.
    """
    length = len(output.prompt_token_ids)
    cached = output.cached_tokens
    due = (length - 1) // unit * unit
    problem = (
        f"request {output.request_id} finds {cached} of its {length} tokens cached, {due} are due"
    )
    return problem if cached != due else ""


def logit_difference(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of each token's logits; NaN and infinity count as `LARGEST`."""
    return (logits - expected).abs().nan_to_num(nan=LARGEST, posinf=LARGEST).amax(-1)


def beside_transformers(
    reference: Any,
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    disturb: Disturb | None = None,
) -> Iterator[tuple[RequestOutput, torch.Tensor, torch.Tensor, float]]:
    """Yield each request of an engine with the logits of transformers for the same text as a whole.

    Returns:
        Per request: output, logits [num_computed, vocab_size], expected logits
        [num_tokens - 1, vocab_size], and the largest difference of a logit over the largest logit.
    """
    for output, logits in record_logits(llm, prompts, params, disturb):
        ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
        with torch.inference_mode():
            expected = reference(ids, use_cache=False).logits[0, :-1]
        difference = logit_difference(logits, expected[-len(logits) :]).max() / expected.abs().max()
        yield output, logits, expected, float(difference.nan_to_num(nan=LARGEST))


def _prompts(rng: random.Random, unit: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Return unrelated prompts, and some that begin alike, on block boundaries and next to them."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(count)]

    shared = tokens(2 * unit + 1)
    lengths = (2 * unit + 1, 2 * unit, unit + 3)
    prompts = [
        [*shared[:n], *tokens(extra)] for n, extra in zip(lengths, (5, unit, 2 * unit), strict=True)
    ]
    prompts += [tokens(1), tokens(unit), tokens(unit + unit // 2), shared[: 2 * unit]]
    return [prompt[:longest] for prompt in prompts]


def preempting(every: int) -> Disturb | None:
    """Return a hook that preempts the youngest of several running requests every so many steps.

    Without a number there is no hook.
    """

    def preempt(llm: LLM) -> None:
        if llm.num_steps % every == every - 1 and len(llm.scheduler.running) > 1:
            llm.scheduler.preempt(llm.scheduler.running[-1])

    return preempt if every else None


def void_of(compared: Compared, llm: LLM) -> str:
    """Return what an engine did not show of its cache and its drafts; empty if it showed all."""
    if llm.manager.offload is not None and not llm.manager.offload.stats.loaded_blocks:
        return "void: no block came from the host"
    if llm.manager.enable_prefix_caching and not compared.cached_tokens:
        return "void: no prompt token came from the cache"
    is_drafted = {"script", "num_speculative_tokens"} & compared.cell.keys()
    return "void: no draft was accepted" if is_drafted and not compared.accepted else ""


def describe(cell: Cell) -> str:
    """Describe a cell in a few words."""
    words: Sequence[str] = (
        cell.get("mamba_cache_mode", "none"),
        *([f"drafts {cell['script']}"] if "script" in cell else []),
        *([cell["speculative_method"]] if "speculative_method" in cell else []),
        *([cell["state_scheme"]] if "state_scheme" in cell else []),
        *(["offload"] if "kv_offload_bytes" in cell else []),
        *(["async"] if cell.get("async_scheduling") else []),
    )
    return ", ".join(words)
