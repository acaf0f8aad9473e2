"""Our kernels, plain torch and other projects' kernels on a GPU.

    python -m bench.gpu [--quick] --out CSV

A *contest* is one task and its rivals, the first of which is what the others are compared with.
Every result is checked before and after it is timed. Each round times every rival once, in a new
random order, a copy among them: its bandwidth is what the machine gives to anybody, now. A launch
is replayed from a CUDA graph between two events. Before it other buffers pass through the cache,
several times as large as it is; while they do, the host has time to enqueue what follows, so that
no event waits for Python. Plain torch, which reads sizes from the device, runs eagerly, and its row
says so: its time is that of the host as well.

Of our kernels of decode and verify steps a row has the time over what `hybrid_kv.measure.predict`
says of it; one outside of the interval of the prediction fails.

Bytes are what a call must move at least. What recomputes has two kinds of steps, and the mean
weighs them by how often `kernels.recompute.commit` flushes when each draft is accepted with
probability 0.75.
"""

from __future__ import annotations

import gc
import importlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench._reference import equal
from bench.harness.arguments import ArgumentParser
from bench.harness.cells import Case, WrongResultError
from bench.harness.contest import Contest, Rival
from bench.harness.measurement import interval_row
from bench.harness.registry import suites
from hybrid_kv.errors import CheckFailedError, HybridKVError, VoidError, run_command
from hybrid_kv.measure.predict.gpu import CONVOLUTION, GPU, GPUS, UPDATE, WIDTH_LAST
from hybrid_kv.measure.predict.step import Kernel, Priced, priced
from hybrid_kv.measure.results import Receipt, Row, append_rows, check_writable
from hybrid_kv.measure.timing.case import checked
from hybrid_kv.measure.timing.clock import EndToEnd, between_events, end_to_end, median, ratio

SUITE = "gpu"
ROUNDS, QUICK_ROUNDS = 51, 15
# Contests of decode and verify steps, and the family that a prediction knows them by.
PREDICTED = {
    "state_update": UPDATE,
    "delta_update": UPDATE,
    "conv_update": CONVOLUTION,
    "paged_attention": WIDTH_LAST,
}
OURS = ("slots", "recompute_step", "recompute_flush", "triton")
# the copy, in sizes of the L2 cache: what of it stays there is then an eighth of a time at most
CACHES = 8


def contests(quick: bool = False, device: str = "cuda") -> Iterator[Contest]:
    """Yield all contests; in a quick run one of each kind."""
    for suite in suites(defining="gpu_contests"):
        yield from importlib.import_module(f"bench.{suite}").gpu_contests(quick, device)


# ---- timing ----


class Cuda:
    """The current CUDA device; `gpu` is its data sheet, if predictions know it."""

    def __init__(self) -> None:
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.gpu, size = known_gpu(about.name), CACHES * about.L2_cache_size // 4
        self.ring = [torch.ones(size, dtype=torch.int32, device="cuda") for _ in range(3)]
        self.ring_sum = torch.zeros((), dtype=torch.int64, device="cuda")
        self.evict = self.capture(self._pass)

    def _pass(self) -> None:
        self.ring[1].copy_(self.ring[0])
        # Read last: what is left in the cache need not be written back while the next call runs.
        torch.sum(self.ring[2], dim=0, out=self.ring_sum)

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return `run` as a call that only launches: a CUDA graph, compiled and allocated."""
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
        """Return the rival that copies one large buffer to another, which no cache holds."""
        source, target = self.ring[0], self.ring[1]

        def check() -> float:
            target.zero_()
            target.copy_(source)
            return equal("copy", target.cpu(), source.cpu())

        return Rival(lambda: Case(lambda: target.copy_(source), check), 2 * source.nbytes)

    def time(
        self, calls: Sequence[tuple[Callable[[], object], Callable[[], object]]]
    ) -> list[float]:
        """Return the seconds of each call, which waits once for all.

        A call is given with what is to be done before it, untimed.
        """
        events = []
        for before, call in calls:
            before()
            self.evict()
            events.append(between_events(call))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in events]

    def whole(self, case: Case) -> EndToEnd:
        """Return the times of a case whose `reset` is the host's part of its task."""

        def both() -> None:
            case.reset()
            case.run()

        return end_to_end(both)


def known_gpu(name: str) -> GPU | None:
    """Return the data sheet of a device, as CUDA names it: NVIDIA H100 80GB HBM3."""
    words = {*name.lower().split()}
    return next((gpu for key, gpu in GPUS.items() if {*key.split("_")} <= words), None)


@dataclass(frozen=True)
class Result:
    """The times of one rival in each round, in seconds, the bytes that it moved, and its check.

    Attributes:
        seconds: of the device.
        whole: with the host's part, in a contest that is timed end to end; else empty.
    """

    name: str
    seconds: npt.NDArray[np.float64]
    num_bytes: float
    receipt: Receipt
    graph: bool
    whole: Sequence[EndToEnd] = ()

    @property
    def compared(self) -> npt.NDArray[np.float64]:
        """Return the times that rivals are compared by."""
        return np.array([one.wall for one in self.whole]) if self.whole else self.seconds


COPY = "copy"


def race(
    contest: Contest, device: Cuda, rounds: int, rng: random.Random
) -> tuple[list[Result], dict[str, str]]:
    """Race all rivals of a contest and the copy; return results, and why some are left out.

    Raises:
        WrongResultError: a result is wrong, before or after the timing; the contest has no times
            then.
    """
    cases: dict[str, Case] = {}
    missing: dict[str, str] = {}
    everybody = {**contest.rivals, COPY: device.copy()}
    for name, rival in everybody.items():
        try:
            cases[name] = rival.make()
        except ImportError as error:
            missing[name] = str(error)
    where = f"{contest.benchmark} {dict(contest.params)}"
    before = {name: checked(f"{where}, {name}", case) for name, case in cases.items()}
    calls = {
        name: device.capture(case.run) if everybody[name].graph else case.run
        for name, case in cases.items()
    }
    order, taken = list(cases), {name: np.empty(rounds) for name in cases}
    whole: dict[str, list[EndToEnd]] = {name: [] for name in cases}
    gc.collect()
    device.time([(cases[name].reset, calls[name]) for name in order])  # Everything has run once.
    for index in range(rounds):
        rng.shuffle(order)
        for name, seconds in zip(
            order, device.time([(cases[n].reset, calls[n]) for n in order]), strict=True
        ):
            taken[name][index] = seconds
        for name in order:
            if contest.end_to_end and name != COPY:
                whole[name].append(device.whole(cases[name]))
    after = {name: checked(f"{where}, {name}", case) for name, case in cases.items()}
    results = {}
    for name in cases:
        receipt = Receipt(
            checked_before=True, checked_after=True, max_error=max(before[name], after[name])
        )
        rival = everybody[name]
        results[name] = Result(
            name, taken[name], rival.num_bytes, receipt, rival.graph, whole[name]
        )
    for mean, weights in contest.means.items():
        parts = [(results[name], weight) for name, weight in weights.items()]
        results[mean] = Result(
            mean,
            sum((one.seconds * weight for one, weight in parts), np.zeros(rounds)),
            sum(one.num_bytes * weight for one, weight in parts),
            Receipt(
                checked_before=True,
                checked_after=True,
                max_error=max(one.receipt.max_error for one, _ in parts),
            ),
            all(one.graph for one, _ in parts),
        )
    return list(results.values()), missing


def predicted(contest: Contest, one: Result, gpu: GPU | None) -> Priced | None:
    """Return the predicted time of a launch of ours that finds nothing in the cache.

    None of what predictions do not know.
    """
    family = PREDICTED.get(contest.benchmark)
    if gpu is None or family is None or one.name not in OURS:
        return None
    tokens = 1 + int(contest.params.get("K", 0))
    return priced(Kernel(one.name, 1, one.num_bytes, family, tokens), gpu, math.inf)


def rows(contest: Contest, results: Sequence[Result], gpu: GPU | None = None) -> Iterator[Row]:
    """Yield the rows of a contest.

    They have the time, the bandwidth and its share of the copy's in the same rounds, and the time
    as a multiple of the first one's and of the predicted one; in a contest that is timed end to end
    the host's time and that of both, too.
    """
    copy = next(one for one in results if one.name == COPY)
    first = results[0]
    for one in results:
        common: dict[str, Any] = {
            "suite": SUITE,
            "benchmark": contest.benchmark,
            "params": {
                **contest.params,
                "subject": one.name,
                "launch": "graph" if one.graph else "eager",
            },
            "n": len(one.seconds),
            "receipt": one.receipt,
        }

        row, time = partial(interval_row, **common), median(one.seconds * 1e9)
        yield row(time, "gpu_time", "ns", "lower")
        if one.whole:
            yield row(
                median(np.array([1e9 * timed.host for timed in one.whole])),
                "host_time",
                "ns",
                "lower",
            )
            yield row(median(1e9 * one.compared), "end_to_end_time", "ns", "lower")
        if (price := predicted(contest, one, gpu)) is not None:
            verdict = "pass" if price.low <= time.value / 1e3 <= price.high else "fail"
            yield row(
                median(one.seconds * 1e6 / price.us),
                "ratio_to_predicted",
                "time ratio",
                "lower",
                verdict=verdict,
            )
        if one.num_bytes:
            rate = one.num_bytes / one.seconds / 1e9
            yield row(median(rate), "bandwidth", "GB/s", "higher")
            if one is not copy:
                yield row(
                    median(rate / (copy.num_bytes / copy.seconds / 1e9)),
                    "share_of_copy",
                    "time ratio",
                    "higher",
                )
        if one is not first and one is not copy:
            yield row(
                ratio(one.compared, first.compared), f"ratio_to_{first.name}", "time ratio", "lower"
            )


def print_contest(
    contest: Contest, results: Sequence[Result], missing: Mapping[str, str], gpu: GPU | None
) -> None:
    where = ", ".join(f"{name}={value}" for name, value in contest.params.items())
    print(f"{contest.benchmark}: {where}")
    for one in results:
        time = median(one.seconds * 1e6)
        rate = f"{one.num_bytes / time.value / 1e3:8.0f} GB/s" if one.num_bytes else ""
        said = "" if one.graph else "  (eager: the host's time too)"
        if (price := predicted(contest, one, gpu)) is not None:
            said = f"  predicted {price.us:.1f} us ({price.low:.1f} to {price.high:.1f})"
        if one.whole:
            said = f"  end to end {median(1e6 * one.compared).value:.1f} us"
        print(
            f"  {one.name:14}{time.value:10.1f} us  ±{(time.high - time.low) / 2:6.1f} {rate}{said}"
        )
    for name, reason in missing.items():
        print(f"  {name:14}left out: {reason}")


def main(
    arguments: Sequence[str] | None = None, machine: Callable[[], Cuda] = Cuda, **where: str
) -> None:
    """Race, print, append.

    Raises:
        CheckFailedError: a wrong result.
        HybridKVError: there is no GPU, or the rows cannot be written.
        VoidError: a kernel of ours did not run.
    """
    parser = ArgumentParser("python -m bench.gpu")
    parser.add_argument("--quick", action="store_true", help="one contest of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the order of launches")
    parser.add_argument(
        "--out", metavar="CSV", required=True, help="append one row per measurement"
    )
    options = parser.parse_args(arguments)
    if machine is Cuda and not torch.cuda.is_available():
        raise HybridKVError(
            "no CUDA device: this times kernels on one; `hybrid-kv kernels` needs none"
        )
    check_writable(options.out)
    device, rng = machine(), random.Random(options.seed)
    absent: list[str] = []
    for contest in contests(options.quick, **where):
        try:
            results, missing = race(contest, device, QUICK_ROUNDS if options.quick else ROUNDS, rng)
        except WrongResultError as error:
            raise CheckFailedError(f"error: {error}; it has no time") from None
        append_rows(options.out, list(rows(contest, results, device.gpu)))
        print_contest(contest, results, missing, device.gpu)
        absent += [f"{contest.benchmark} {name}" for name in missing if name in OURS]
    if absent:
        raise VoidError(f"kernels of ours did not run: {', '.join(absent)}")


if __name__ == "__main__":
    run_command(main)
