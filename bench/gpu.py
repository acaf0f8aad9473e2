"""`python -m bench.gpu [--quick] --out CSV`: our kernels, plain torch and other projects' kernels on a GPU.

A *contest* is one task and its rivals, the first of which is what the others are compared with. Every result is checked
before and after it is timed. Each round times every rival once, in a new random order, a copy among them: its bandwidth
is what the machine gives to anybody, now. A launch is replayed from a CUDA graph between two events. Before it other
buffers pass through the cache, several times as large as it is; while they do, the host has time to enqueue what
follows, so that no event waits for Python. Plain torch, which asks the device for sizes, runs eagerly, and its row says
so: its time is that of the host as well.

Bytes are what a call must move at least. What replays has two kinds of steps, and the mean weighs them by how often
`kernels.replay.commit` flushes when each draft is accepted with probability 0.75.
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from bench import block_tables, causal_conv1d, gated_norm, kernel_blocks, paged_attention, ssd, state_update
from bench._reference import equal
from bench._shapes import SHAPES
from hybrid_kv.arguments import ArgumentParser
from hybrid_kv.config import HybridKVError
from hybrid_kv.errors import run_command
from hybrid_kv.kernels.causal_conv1d import (
    causal_conv1d_prefill,
    causal_conv1d_prefill_reference,
    causal_conv1d_update,
    causal_conv1d_update_reference,
)
from hybrid_kv.kernels.gated_norm import gated_rms_norm, gated_rms_norm_reference
from hybrid_kv.kernels.kernel_blocks import expand_torch, expand_triton
from hybrid_kv.kernels.replay import state_bytes
from hybrid_kv.kernels.ssd import (
    chunk_scan_prefill,
    chunk_scan_prefill_reference,
    selective_state_update_slots,
    selective_state_update_slots_reference,
)
from hybrid_kv.results import Receipt, Row, append_rows, check_writable, timing_row
from hybrid_kv.static.counts import mean_traffic
from hybrid_kv.timing.cases import Case, Scalar, WrongResultError, nothing, seed
from hybrid_kv.timing.clock import between_events, median, ratio

SUITE = "gpu"
ROUNDS, QUICK_ROUNDS = 51, 15
CACHES = 8  # the copy, in sizes of the L2 cache: what of it stays there is then an eighth of a time at most
VLLM = "vllm.model_executor.layers.mamba.ops"


@dataclass(frozen=True)
class Rival:
    """One way to do a task.

    Attributes:
        make: its case; raises ImportError where its package is missing.
        num_bytes: that a call must move at least; 0 if nobody would call it bound by memory.
        graph: it can be captured: it launches, and never waits for the device.
    """

    make: Callable[[], Case]
    num_bytes: int
    graph: bool = True


@dataclass(frozen=True)
class Contest:
    """A task and its rivals by name; `means` are rivals that take turns, by name the weight of each."""

    benchmark: str
    params: Mapping[str, Scalar]
    rivals: Mapping[str, Rival]
    means: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


# ---- other projects' kernels ----


class Peer:
    """A function of another project behind the arguments of ours.

    `prepare(*arguments)` gives the launch and a function that reads its result. It may copy: it runs in checks alone.
    """

    def __init__(self, prepare: Callable[..., tuple[Callable[[], Any], Callable[[], torch.Tensor]]]) -> None:
        self._prepare = prepare
        self._launch: Callable[[], Any] = nothing

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self._launch, result = self._prepare(*arguments)
        self._launch()
        return result()

    def case(self, build: Callable[[Any], Case]) -> Case:
        """The case that `build` makes of an implementation, timed without what `prepare` does."""
        built = build(self)
        return Case(lambda: self._launch(), built.check)


def _per_head(values: torch.Tensor, *shape: int) -> torch.Tensor:
    return values.view(-1, *[1] * len(shape)).expand(-1, *shape)


def vllm_state_update() -> Peer:
    """`selective_state_update` with a destination per token."""
    function = importlib.import_module(f"{VLLM}.mamba_ssm").selective_state_update

    def prepare(state, x, dt, dt_bias, A_log, B, C, D, cu_seqlens, sources, targets):  # type: ignore[no-untyped-def]
        head_dim, size = state.shape[2:]
        y = torch.empty_like(x)
        launch = partial(
            function,
            state,
            x,
            dt.unsqueeze(-1).expand(-1, -1, head_dim),
            _per_head(-A_log.exp(), head_dim, size),
            B,
            C,
            _per_head(D, head_dim),
            _per_head(dt_bias, head_dim),
            dt_softplus=True,
            state_batch_indices=sources[:, None].expand(-1, targets.shape[1]).int().contiguous(),
            dst_state_batch_indices=targets.int(),
            null_block_id=0,
            out=y,
            num_accepted_tokens=torch.ones_like(sources, dtype=torch.int32),
            cu_seqlens=cu_seqlens.int(),
        )
        return launch, lambda: y

    return Peer(prepare)


def mamba_ssm_state_update() -> Peer:
    """One token, in place: in the block that ours only writes."""
    function = importlib.import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update

    def prepare(state, x, dt, dt_bias, A_log, B, C, D, cu_seqlens, sources, targets):  # type: ignore[no-untyped-def]
        head_dim, size = state.shape[2:]
        state[targets[:, 0]] = state[sources]
        outputs: list[torch.Tensor] = []
        arguments = (
            state,
            x,
            dt.unsqueeze(-1).expand(-1, -1, head_dim),
            _per_head(-A_log.exp(), head_dim, size),
            B,
            C,
            _per_head(D, head_dim),
        )
        options = {"dt_bias": _per_head(dt_bias, head_dim), "dt_softplus": True}
        options["state_batch_indices"] = targets[:, 0].int().contiguous()
        return lambda: outputs.append(function(*arguments, **options)), lambda: outputs.pop()

    return Peer(prepare)


def vllm_conv_update() -> Peer:
    """`causal_conv1d_update`, in place: in the block that ours only writes. It overwrites its input with its output."""
    function = importlib.import_module(f"{VLLM}.causal_conv1d").causal_conv1d_update

    def prepare(state, x, weight, bias, cu_seqlens, sources, window_rows, targets):  # type: ignore[no-untyped-def]
        inputs = x.clone()
        state[targets[:, 0]] = state[sources]
        launch = partial(
            function,
            inputs,
            state.transpose(1, 2),
            weight.contiguous(),
            bias,
            activation="silu",
            conv_state_indices=targets[:, 0].int().contiguous(),
            num_accepted_tokens=window_rows.int() + 1,
            query_start_loc=cu_seqlens.int(),
            max_query_len=targets.shape[1],
            null_block_id=0,
        )
        return launch, lambda: inputs

    return Peer(prepare)


# ---- contests ----


def _contest(
    benchmark: str,
    params: Mapping[str, Scalar],
    means: Mapping[str, Mapping[str, float]] | None = None,
    **rivals: Rival,
) -> Contest:
    return Contest(benchmark, params, rivals, means or {})


@cache
def flush_rate(K: int) -> float:
    """Share of the steps that flush, by the rule itself."""
    return mean_traffic(SHAPES["nemotron-3-nano"].state, torch.float32, K).flush_rate


def state_updates(device: str, model: str, num_reqs: int, K: int) -> Contest:
    """One layer's step of 1 + K tokens a request: states of all of them, or one state and a ring."""
    shape, tokens = SHAPES[model], 1 + K
    sizes, bf16 = shape.state, torch.bfloat16
    params = {"model": model, "num_reqs": num_reqs, "K": K}
    number = seed("state_update", params)

    def slots(implementation: Any) -> Case:
        return state_update.slots(number, model, num_reqs, K, implementation, device, bf16)

    def replayed(flush: bool) -> Rival:
        moved = state_bytes.step_bytes(sizes, torch.float32, tokens, state_update.HISTORY, flush)
        make = partial(
            state_update.replay, number, model, num_reqs, K, flush, "replay_update", device=device, dtype=bf16
        )
        return Rival(make, num_reqs * sum(moved.values()))

    moved = num_reqs * sum(state_bytes.slots_bytes(sizes, torch.float32, tokens).values())
    rivals = {
        "slots": Rival(lambda: slots(selective_state_update_slots), moved),
        "replay_step": replayed(False),
        "replay_flush": replayed(True),
        "vllm": Rival(lambda: vllm_state_update().case(slots), moved),
        "torch": Rival(lambda: slots(selective_state_update_slots_reference), moved, graph=False),
    }
    if not K:
        rivals["mamba_ssm"] = Rival(lambda: mamba_ssm_state_update().case(slots), moved)
    rate = flush_rate(K)
    return _contest("state_update", params, {"replay": {"replay_step": 1 - rate, "replay_flush": rate}}, **rivals)


def conv_updates(device: str, model: str, num_reqs: int, K: int, dtype: torch.dtype = torch.bfloat16) -> Contest:
    """One layer's convolution of such a step."""
    shape, tokens = SHAPES[model], 1 + K
    params = {"model": model, "num_reqs": num_reqs, "K": K}
    number = seed("conv_update", params)
    # The window and the tokens in, the tokens and their inputs out.
    moved = num_reqs * shape.channels * 2 * (shape.kernel - 1 + 2 * tokens + shape.kernel - 2 + tokens)

    def build(implementation: Any) -> Case:
        return causal_conv1d.update(number, model, num_reqs, K, implementation, device, dtype)

    return _contest(
        "conv_update",
        params,
        triton=Rival(lambda: build(causal_conv1d_update), moved),
        vllm=Rival(lambda: vllm_conv_update().case(build), moved),
        torch=Rival(lambda: build(causal_conv1d_update_reference), moved, graph=False),
    )


def conv_prefills(device: str, model: str, num_tokens: int, num_reqs: int) -> Contest:
    """One layer's convolution of a prefill."""
    params = {"model": model, "num_tokens": num_tokens, "num_reqs": num_reqs}
    number = seed("conv_prefill", params)
    moved = 2 * num_tokens * SHAPES[model].channels * 2

    def build(implementation: Any) -> Case:
        return causal_conv1d.prompts(number, model, num_tokens, num_reqs, implementation, device)

    return _contest(
        "conv_prefill",
        params,
        triton=Rival(lambda: build(causal_conv1d_prefill), moved),
        torch=Rival(lambda: build(causal_conv1d_prefill_reference), moved, graph=False),
    )


def chunk_scans(device: str, model: str, num_tokens: int, num_reqs: int) -> Contest:
    """One layer's scan of a prefill."""
    params = {"model": model, "num_tokens": num_tokens, "num_reqs": num_reqs}
    shape, number = SHAPES[model], seed("chunk_scan", params)

    def build(implementation: Any) -> Case:
        return ssd.prompts(number, model, num_tokens, num_reqs, implementation, device)

    inner, state = shape.heads * shape.head_dim, shape.heads * shape.head_dim * shape.state_size
    moved = num_tokens * 2 * (2 * inner + 2 * shape.groups * shape.state_size + shape.heads) + num_reqs * 2 * 4 * state
    return _contest(
        "chunk_scan",
        params,
        triton=Rival(lambda: build(chunk_scan_prefill), moved),
        torch=Rival(lambda: build(chunk_scan_prefill_reference), moved, graph=False),
    )


def table_updates(device: str, model: str, step: str) -> Contest:
    """All groups' block tables of a step in one launch: a few bytes, so only its time says anything."""
    params = {"model": model, "step": step}
    make = partial(block_tables.update_kernel, seed("block_tables", params), model, step, device)
    return _contest("block_tables", params, triton=Rival(make, 0))


def expansions(device: str, num_rows: int, width: int, bpk: int) -> Contest:
    """The expansion alone, as other engines do it each step for whole tables."""
    params = {"num_rows": num_rows, "width": width, "blocks_per_kv_block": bpk}
    number = seed("expansion", params)
    moved = 4 * num_rows * width * (1 + bpk)

    def build(implementation: Any) -> Case:
        return kernel_blocks.table_expansion(number, num_rows, width, bpk, implementation, device)

    return _contest(
        "expansion",
        params,
        triton=Rival(lambda: build(lambda ids, _: expand_triton(ids, bpk)), moved),
        torch=Rival(lambda: build(expand_torch), moved),
    )


def attentions(device: str, model: str, num_reqs: int, length: int, context: int) -> Contest:
    """Paged attention of a decode or of a chunk behind a context."""
    params = {"model": model, "num_reqs": num_reqs, "length": length, "context": context}
    shape, number = SHAPES[model], seed("attention", params)

    def build(implementation: Any) -> Case:
        return paged_attention.pages(number, model, num_reqs, length, context, implementation, device)

    per_token = shape.head_size * 2
    moved = num_reqs * per_token * 2 * (context * shape.kv_heads + length * shape.query_heads)
    return _contest(
        "paged_attention",
        params,
        triton=Rival(lambda: build(paged_attention.by_kernel), moved),
        torch=Rival(lambda: build(paged_attention.by_torch), moved, graph=False),
    )


def norms(device: str, model: str, num_tokens: int) -> Contest:
    """The output norm of a layer, `weight * norm(x * silu(gate))`."""
    params = {"model": model, "num_tokens": num_tokens}
    shape, number = SHAPES[model], seed("gated_norm", params)
    moved = 3 * num_tokens * shape.heads * shape.head_dim * 2

    def build(implementation: Any) -> Case:
        return gated_norm.norm(number, model, num_tokens, implementation, device, torch.bfloat16)

    return _contest(
        "gated_norm",
        params,
        triton=Rival(lambda: build(gated_rms_norm), moved),
        torch=Rival(lambda: build(gated_rms_norm_reference), moved),
    )


def contests(quick: bool = False, device: str = "cuda") -> Iterator[Contest]:
    """All of them; in a quick run one of each kind."""
    models = ("nemotron-3-nano",) if quick else ("nemotron-3-nano", "granite-4-h-small")
    for model in models:
        # The reference of a large batch of the larger model would take 40 GB.
        batches = (128,) if quick else (1, 16, 128) if model == models[0] else (16,)
        for num_reqs, K in product(batches, (0, 3) if quick else (0, 1, 3, 5, 7)):
            yield state_updates(device, model, num_reqs, K)
            yield conv_updates(device, model, num_reqs, K)
    for model, num_tokens in product(models, (2048,) if quick else (2048, 8192)):
        yield conv_prefills(device, model, num_tokens, 4)
        yield chunk_scans(device, model, num_tokens, 4)
        yield norms(device, model, num_tokens)
    for model, step in product(models, block_tables.STEPS):
        yield table_updates(device, model, step)
    for bpk in (34,) if quick else (2, 8, 34):
        yield expansions(device, 256, 241, bpk)
    decodes = ((128, 1, 2048), (128, 4, 2048), (1, 2048, 4096))
    for model, (num_reqs, length, context) in product(models, decodes[:1] if quick else decodes):
        yield attentions(device, model, num_reqs, length, context)


# ---- timing ----


class Device(Protocol):
    """What a contest needs of a machine."""

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """`run` as one call that only launches."""

    def copy(self) -> Rival:
        """A copy that no cache holds."""

    def time(self, calls: Sequence[tuple[Callable[[], object], Callable[[], object]]]) -> list[float]:
        """Seconds of each call, given as what is to be done before it, untimed, and the call."""


class Cuda:
    """The current CUDA device."""

    def __init__(self) -> None:
        size = CACHES * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size // 4
        self._ring = [torch.ones(size, dtype=torch.int32, device="cuda") for _ in range(3)]
        self._sum = torch.zeros((), dtype=torch.int64, device="cuda")
        self._evict = self.capture(self._pass)

    def _pass(self) -> None:
        self._ring[1].copy_(self._ring[0])
        # Read last: what is left in the cache need not be written back while the next call runs.
        torch.sum(self._ring[2], dim=0, out=self._sum)

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """A CUDA graph of `run`, compiled and allocated before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def copy(self) -> Rival:
        """From one large buffer to another."""
        source, target = self._ring[0], self._ring[1]

        def check() -> float:
            target.zero_()
            target.copy_(source)
            return equal("copy", target.cpu(), source.cpu())

        return Rival(lambda: Case(lambda: target.copy_(source), check), 2 * source.nbytes)

    def time(self, calls: Sequence[tuple[Callable[[], object], Callable[[], object]]]) -> list[float]:
        """One wait for all of them."""
        events = []
        for before, call in calls:
            before()
            self._evict()
            events.append(between_events(call))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in events]


@dataclass(frozen=True)
class Result:
    """What one rival took in each round, in seconds, what it moved, and that it was right."""

    name: str
    seconds: npt.NDArray[np.float64]
    num_bytes: float
    receipt: Receipt
    graph: bool


COPY = "copy"


def _checked(contest: Contest, name: str, case: Case) -> float:
    try:
        error = case.check()
    except WrongResultError as wrong:
        raise WrongResultError(f"{contest.benchmark} {dict(contest.params)}, {name}: {wrong}") from None
    if not 0 <= error < float("inf"):
        raise WrongResultError(f"{contest.benchmark} {dict(contest.params)}, {name}: an error of {error}")
    return error


def race(contest: Contest, device: Device, rounds: int, rng: random.Random) -> tuple[list[Result], dict[str, str]]:
    """All rivals of a contest and the copy, and why some are left out.

    Raises:
        WrongResultError: a result is wrong, before or after the timing; the contest has no times then.
    """
    cases: dict[str, Case] = {}
    missing: dict[str, str] = {}
    everybody = {**contest.rivals, COPY: device.copy()}
    for name, rival in everybody.items():
        try:
            cases[name] = rival.make()
        except ImportError as error:
            missing[name] = str(error)
    before = {name: _checked(contest, name, case) for name, case in cases.items()}
    calls = {name: device.capture(case.run) if everybody[name].graph else case.run for name, case in cases.items()}
    order, taken = list(cases), {name: np.empty(rounds) for name in cases}
    gc.collect()
    device.time([(cases[name].reset, calls[name]) for name in order])  # Everything has run once.
    for index in range(rounds):
        rng.shuffle(order)
        for name, seconds in zip(order, device.time([(cases[n].reset, calls[n]) for n in order]), strict=True):
            taken[name][index] = seconds
    after = {name: _checked(contest, name, case) for name, case in cases.items()}
    results = {}
    for name in cases:
        receipt = Receipt(True, True, max(before[name], after[name]))
        results[name] = Result(name, taken[name], everybody[name].num_bytes, receipt, everybody[name].graph)
    for mean, weights in contest.means.items():
        parts = [(results[name], weight) for name, weight in weights.items()]
        results[mean] = Result(
            mean,
            sum((one.seconds * weight for one, weight in parts), np.zeros(rounds)),
            sum(one.num_bytes * weight for one, weight in parts),
            Receipt(True, True, max(one.receipt.max_error for one, _ in parts)),
            all(one.graph for one, _ in parts),
        )
    return list(results.values()), missing


def rows(contest: Contest, results: Sequence[Result]) -> Iterator[Row]:
    """Time, bandwidth and its share of the copy's in the same rounds, and the time as a multiple of the first one's."""
    copy = next(one for one in results if one.name == COPY)
    first = results[0]
    for one in results:
        common: dict[str, Any] = {
            "suite": SUITE,
            "benchmark": contest.benchmark,
            "params": {**contest.params, "subject": one.name, "launch": "graph" if one.graph else "eager"},
            "n": len(one.seconds),
            "receipt": one.receipt,
        }

        def row(metric: str, unit: str, better: str, found: Any, common: dict[str, Any] = common) -> Row:
            value, low, high = sorted((found.low, found.value, found.high))[1], found.low, found.high
            return timing_row(metric=metric, unit=unit, better=better, value=value, ci_low=low, ci_high=high, **common)

        yield row("gpu_time", "ns", "lower", median(one.seconds * 1e9))
        if one.num_bytes:
            rate = one.num_bytes / one.seconds / 1e9
            yield row("bandwidth", "GB/s", "higher", median(rate))
            if one is not copy:
                yield row("share_of_copy", "time ratio", "higher", median(rate / (copy.num_bytes / copy.seconds / 1e9)))
        if one is not first and one is not copy:
            yield row(f"ratio_to_{first.name}", "time ratio", "lower", ratio(one.seconds, first.seconds))


def _print(contest: Contest, results: Sequence[Result], missing: Mapping[str, str]) -> None:
    where = ", ".join(f"{name}={value}" for name, value in contest.params.items())
    print(f"{contest.benchmark}: {where}")
    for one in results:
        time = median(one.seconds * 1e6)
        rate = f"{one.num_bytes / time.value / 1e3:8.0f} GB/s" if one.num_bytes else ""
        eager = "" if one.graph else "  (eager: the host's time too)"
        print(f"  {one.name:14}{time.value:10.1f} us  ±{(time.high - time.low) / 2:6.1f} {rate}{eager}")
    for name, reason in missing.items():
        print(f"  {name:14}left out: {reason}")


def main(arguments: Sequence[str] | None = None, machine: Callable[[], Device] = Cuda, **where: str) -> int:
    """Race, print, append. Returns 0, 1 (a wrong result) or 2 (could not run)."""
    parser = ArgumentParser("python -m bench.gpu")
    parser.add_argument("--quick", action="store_true", help="one contest of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the order of launches")
    parser.add_argument("--out", metavar="CSV", required=True, help="append one row per measurement")
    options = parser.parse_args(arguments)
    try:
        if machine is Cuda and not torch.cuda.is_available():
            raise HybridKVError("no CUDA device: this times kernels on one; `hybrid-kv kernels` needs none")
        check_writable(options.out)
        device, rng = machine(), random.Random(options.seed)
        for contest in contests(options.quick, **where):
            results, missing = race(contest, device, QUICK_ROUNDS if options.quick else ROUNDS, rng)
            append_rows(options.out, list(rows(contest, results)))
            _print(contest, results, missing)
    except HybridKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except WrongResultError as error:
        print(f"error: {error}; it has no time", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
