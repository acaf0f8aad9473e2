"""Counts of what a step costs its host on a GPU: the guard model runs on the pretend device.

    python -m bench.device                        # all; fails if a target is missed
    python -m bench.device torch align slots 2    # kernels, mode, scheme, drafts: its waits

The first runs all modes and schemes on Triton, the second says where the host waits and uploads.

What runs before does not count: all of it on torch's kernels, for constants, and a request, for
what an engine makes at its first use. Of each kind of step the largest count of any such step is
given. With drafts a step of decodes verifies them. In a *hit* step a request starts after what is
cached, in a *resume* step it starts again after a preemption; *store* and *load* are between steps,
when blocks go to the offload tier or come back. A step of decodes, all of one length, is capturable
if the model launched the same, with the same arguments, as in the one before of that size. Launches
per layer are those of a later layer of the target model: what the first one prepares for all of
them, and what drafts cost, is in the step's launches alone. Tokens must be the CPU's.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import cycle, product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from bench.harness.cells import Cell, Count, Counts, WrongResultError, grid
from hybrid_kv.kernels.common.interpreter import start_interpreter

if TYPE_CHECKING:
    import torch

METRICS = {
    "launches": ("launch", "launches"),
    "waits": ("wait", "waits"),
    "uploads": ("upload", "copies"),
    "upload_bytes": ("upload_bytes", "B"),
    "allocations": ("allocation", "allocations"),
    "launches_per_mamba_layer": ("mamba", "launches"),
    "launches_per_attention_layer": ("attention", "launches"),
    "launches_of_tables": ("_block_tables", "launches"),
    "launches_of_sampling": ("sampling", "launches"),
}
# A step of decodes on Triton's kernels; the first two hold for every step.
TARGETS = {
    "waits": 1,
    "uploads": 1,
    "launches_per_mamba_layer": 5,
    "launches_per_attention_layer": 4,
}
TARGETS |= {"launches_of_tables": 1, "launches_of_sampling": 4}
UNITS = {name: unit for name, (_, unit) in METRICS.items()} | {"capturable": ""}
# Kinds of steps; some only where prefixes are cached.
STEPS, OFFLOAD = ("prefill", "mixed", "decode", "resume"), ("store", "load")
CACHED = ("hit", *OFFLOAD)
ENGINES = {
    "kernels": ("triton",),
    "mode": ("none", "align", "all"),
    "scheme": ("slots", "recompute"),
    "K": (0, 2),
}
QUICK = {
    "kernels": ("torch",),
    "mode": ("align",),
    "scheme": ("slots",),
    "K": (2,),
    "step": STEPS + CACHED,
}
SAMPLING = ("hybrid_kv/sampling.py", "spec_decode/verify.py")
# Tokens. A step has at most 40; where prefixes are cached the second prompt ends its first block
# while it decodes.
PROMPTS = {"none": (20, 37), "align": (20, 77), "all": (20, 93)}


class Step(NamedTuple):
    """One step: its kind, its counts, and of each wait and upload its kind, what it was, and where.

    `stale`: why a graph of the step before could not be replayed for it; None: there is none of the
    same size.
    """

    kind: str
    counts: dict[str, int]
    sites: Sequence[tuple[str, ...]]
    stale: str | None


def require_cpu_build() -> None:
    """Raise ImportError where the pretend device cannot be."""
    import torch

    if torch.version.cuda is not None:
        raise ImportError("the pretend device needs a build of torch for the CPU")


def _engine(
    device: str, kernels: str, mode: str, scheme: str, K: int, folder: Path | None = None
) -> Any:
    from hybrid_kv.check.guard_model import FOLDER
    from hybrid_kv.engine.llm import LLM

    how: dict[str, Any] = {"num_speculative_tokens": K, "speculative_method": "mtp"} if K else {}
    sizes: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_model_len": 128,
        "max_num_batched_tokens": 40,
        "num_blocks": 32,
    }
    how |= {
        "mamba_cache_mode": mode,
        "state_scheme": scheme,
        "enable_prefix_caching": mode != "none",
    }
    how |= {"kv_offload_bytes": 1 << 22} if mode != "none" else {}
    return LLM(
        folder or FOLDER, device=device, kernels=kernels, attention_backend="TORCH", **sizes, **how
    )


def _tokens(llm: Any, mode: str) -> list[list[int]]:
    """Return the token ids of all outputs."""
    from hybrid_kv.sampling import SamplingParams

    def preempt(llm: Any) -> None:
        if llm.num_steps == after:
            llm.scheduler.preempt_all()

    prompts = [
        [(7 * i * i + 3 * length) % 90 + 3 for i in range(length)] for length in PROMPTS[mode]
    ]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    longer, after = [*prompts[1], *outputs[1].token_ids], llm.num_steps + 3
    outputs += llm.generate([longer], params, progress=False, on_step=preempt)
    llm.reset_prefix_cache()
    if llm.manager.offload is not None:
        outputs += llm.generate([longer], params, progress=False)
        llm.reset_prefix_cache()
    return [output.token_ids for output in outputs]


def _kind(batch: Any) -> str:
    if starts := [
        item for item in batch if item.overwrite and (item.num_computed_tokens or item.attempt)
    ]:
        return "resume" if any(item.attempt for item in starts) else "hit"
    decodes = [item.is_decode for item in batch]
    return "decode" if all(decodes) else "mixed" if any(decodes) else "prefill"


class Notes:
    """Steps of an engine on the pretend device, noted as they run.

    Attributes:
        steps: in their order; store and load are steps of their own.
    """

    def __init__(self, gpu: Any, llm: Any) -> None:
        self.steps: list[Step] = []
        self._gpu, self._llm = gpu, llm
        self._execute, self._forward = llm.runner.execute, type(llm.runner.model).forward
        # By tokens of each request, the launches of the last such step, of which a graph would be.
        self._graphs: dict[tuple[int, ...], Any] = {}
        self._launches: Any = None  # of the model in this step
        self._layer_begin = 0  # the first event of this layer
        self._of_layers = Counter[str]()  # by kind of layer, the fewest launches of any such one

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Note the steps of the engine until the context ends."""
        from hybrid_kv.models.attention import PagedAttention
        from hybrid_kv.models.mixers.conv import RecurrentMixer

        def captured(model: Any, *arguments: Any) -> torch.Tensor:
            with self._gpu.captured() as self._launches:
                return self._forward(model, *arguments)

        def begin(*_: Any) -> None:
            self._layer_begin = len(self._gpu.events)

        def end(layer: torch.nn.Module, *_: Any) -> None:
            kind = "attention" if isinstance(layer, PagedAttention) else "mamba"
            count = self._gpu.counts(self._layer_begin)["launch"]
            self._of_layers[kind] = min(self._of_layers.get(kind, count), count)

        runner, offload = self._llm.runner, self._llm.manager.offload
        with ExitStack() as stack:
            for layer in runner.model.modules():
                if isinstance(layer, PagedAttention | RecurrentMixer):
                    stack.callback(layer.register_forward_pre_hook(begin).remove)
                    stack.callback(layer.register_forward_hook(end).remove)
            stack.enter_context(patch.object(type(runner.model), "forward", captured))
            stack.enter_context(patch.object(runner, "execute", self._run))
            for kind in OFFLOAD if offload is not None else ():
                stack.enter_context(patch.object(offload, kind, self._around(offload, kind)))
            yield

    def _run(self, scheduled: Any) -> Any:
        since = len(self._gpu.events)
        self._of_layers.clear()
        output = self._execute(scheduled)
        kind = _kind(output.batch)
        stale = self._why_stale(kind, tuple(item.num_tokens for item in output.batch))
        self._note(kind, since, stale, **self._launched(since) if kind == "decode" else {})
        return output

    def _why_stale(self, kind: str, size: tuple[int, ...]) -> str | None:
        """Return why a graph of the step of that size before cannot be replayed; see `Step`."""
        from hybrid_kv.measure.device import why_not_replayed

        before, self._graphs[size] = self._graphs.get(size), self._launches
        if before is None or kind != "decode" or len({*size}) != 1:
            return None
        return why_not_replayed(before, self._launches)

    def _launched(self, since: int) -> dict[str, int]:
        """Return the launches by kind of layer, of the tables and of sampling."""
        launched = [event for event in self._gpu.events[since:] if event.kind == "launch"]
        return {
            "_block_tables": sum(event.operation == "_block_tables" for event in launched),
            **self._of_layers,
            "sampling": sum(event.where.startswith(SAMPLING) for event in launched),
        }

    def _around(self, offload: Any, kind: str) -> Callable[..., None]:
        """Return the offload's function of that name, which notes a step if it does anything."""
        run = getattr(offload, kind)

        def noted(*arguments: Any) -> None:
            since = len(self._gpu.events)
            run(*arguments)
            if len(self._gpu.events) > since:
                self._note(kind, since)

        return noted

    def _note(self, kind: str, since: int, stale: str | None = None, **more: int) -> None:
        events = self._gpu.events[since:]
        sites = [event[:3] for event in events if event.kind in ("wait", "upload")]
        self.steps.append(Step(kind, self._gpu.counts(since) | more, sites, stale))


def play(kernels: str, mode: str, scheme: str, K: int) -> list[Step]:
    """Return the steps of an engine on the pretend device.

    Raises:
        WrongResultError: other tokens than the CPU's.
    """
    import torch

    from hybrid_kv.measure.device import pretend_gpu
    from hybrid_kv.sampling import SamplingParams

    torch.set_num_threads(1)
    right = _tokens(_engine("cpu", "torch", mode, scheme, K), mode)
    with pretend_gpu() as gpu:
        _tokens(_engine("cuda:0", "torch", mode, scheme, K), mode)
        llm = _engine("cuda:0", kernels, mode, scheme, K)
        llm.generate([[5] * 20], SamplingParams(max_tokens=4, cache_salt="before"), progress=False)
        notes = Notes(gpu, llm)
        with notes.taken():
            tokens = _tokens(llm, mode)
    if tokens != right:
        raise WrongResultError(f"tokens {tokens} instead of the CPU's {right}")
    return notes.steps


def check_family(name: str, mode: str) -> None:
    """Check the tokens of a tiny model of random weights on torch's kernels.

    Raises:
        WrongResultError: other tokens than the CPU's.
    """
    from hybrid_kv.measure.device import pretend_gpu
    from hybrid_kv.models.random_checkpoint import quiet, write_checkpoint
    from hybrid_kv.sampling import SamplingParams

    def tokens(device: str) -> list[list[int]]:
        llm = _engine(device, "torch", mode, "slots", 0, Path(folder))
        outputs = llm.generate(
            [[5, 9, 3, 40, 7, 7, 12], [11, 3, 70, 4] * 9], greedy, progress=False
        )
        return [output.token_ids for output in outputs]

    greedy = SamplingParams(max_tokens=4, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder, quiet():
        write_checkpoint(name, Path(folder), "tiny")
        wanted = tokens("cpu")
        with pretend_gpu():
            found = tokens("cuda:0")
    if found != wanted:
        raise WrongResultError(f"{name}, mode {mode}: tokens {found} instead of the CPU's {wanted}")


def _start() -> None:
    start_interpreter()
    logging.disable(logging.WARNING)  # of prompts that no hit can find: some are meant to be


@cache
def played(kernels: str, mode: str, scheme: str, K: int) -> list[Step]:
    """See `play`; Triton kernels in a process that interprets them."""
    if kernels == "torch":
        return play(kernels, mode, scheme, K)
    with ProcessPoolExecutor(1, get_context("spawn"), _start) as pool:
        return pool.submit(play, kernels, mode, scheme, K).result()


def steps(seed: int, kernels: str, mode: str, scheme: str, K: int, step: str) -> Counts:
    """Return the largest counts of any such step.

    Also return whether each step of decodes can be replayed from the one before it.

    Raises:
        WrongResultError: no two steps of decodes have one size.
    """
    own = [one for one in played(kernels, mode, scheme, K) if one.kind == step]
    counts = {name: Count(count, UNITS[name]) for name, count in _most(own).items()}
    if step == "decode":
        known = [one.stale == "" for one in own if one.stale is not None]
        if not known:
            raise WrongResultError("no two steps of decodes have one size")
        counts["capturable"] = Count(int(all(known)), "", "higher")
    return counts


def _most(steps: Sequence[Step]) -> dict[str, int]:
    """Return the largest count of any step, by metric."""
    known = {name: kind for name, (kind, _) in METRICS.items() if kind in steps[0].counts}
    return {name: max(one.counts[kind] for one in steps) for name, kind in known.items()}


def cells() -> list[Cell]:
    """Triton's kernels in every mode and scheme; one engine on torch's, which takes seconds.

    Raises:
        ImportError: torch is built for CUDA, which the pretend device does not work with.
    """
    require_cpu_build()
    cached = {**ENGINES, "mode": ("align", "all"), "step": CACHED}
    return [
        *grid("device", "steps", "count", steps, {**ENGINES, "step": STEPS}, units=UNITS),
        *grid("device", "cached", "count", steps, cached, units=UNITS),
        *grid("device", "on_torch", "count", steps, QUICK, [("torch",)], units=UNITS),
    ]


def missed(kind: str, steps: Sequence[Step]) -> list[str]:
    """Return the targets that steps of this kind do not meet."""
    names = TARGETS if kind == "decode" else ("waits", "uploads") if kind not in OFFLOAD else ()
    found, counts = sorted({step.stale for step in steps if step.stale}), _most(steps)
    return found + [
        f"{counts[name]} {name}, target {TARGETS[name]}"
        for name in names
        if counts[name] > TARGETS[name]
    ]


def _by_kind(steps: Sequence[Step]) -> dict[str, list[Step]]:
    return {
        kind: [step for step in steps if step.kind == kind]
        for kind in dict.fromkeys(step.kind for step in steps)
    }


def table() -> int:
    """Print what each kind of step costs on Triton's kernels; 1: a target is missed."""
    from hybrid_kv.check.guard.checks.families import known

    engines = list(product(*ENGINES.values()))
    short = [
        name.removeprefix("launches_").removeprefix("per_").removesuffix("_layer")
        for name in METRICS
    ]
    print(
        f"{'mode':6}{'scheme':10}{'K':>2} {'step':8}",
        *(f"{name:>12}" for name in short),
        "captured",
    )
    failed, families = False, known()
    with ProcessPoolExecutor(2, get_context("spawn"), _start) as pool:
        futures = [pool.submit(play, *engine) for engine in engines]
        checked = [
            pool.submit(check_family, *one)
            for one in zip(families, cycle(ENGINES["mode"]), strict=False)
        ]
        for (_, mode, scheme, K), future in zip(engines, futures, strict=True):
            for kind, own in _by_kind(future.result()).items():
                counts, known = _most(own), [step.stale for step in own if step.stale is not None]
                cells = (f"{counts.get(name, ''):>12}" for name in METRICS)
                captured = f"{known.count('')} of {len(known)}" if known else ""
                print(f"{mode:6}{scheme:10}{K:>2} {kind:8}", *cells, captured, flush=True)
                for line in missed(kind, own):
                    failed = True
                    print(f"    MISSED: {line}", flush=True)
        for one in checked:
            one.result()
    print(
        "tokens are the CPU's: in all of these, "
        f"and with torch's kernels in {len(families)} families"
    )
    return int(failed)


def main() -> int:
    """Print the table, or where the host of one engine waits and uploads."""
    if len(sys.argv) == 1:
        return table()
    kernels, mode, scheme, K = sys.argv[1:]
    for kind, found in _by_kind(played(kernels, mode, scheme, int(K))).items():
        print(f"{kind}: {len(found)} steps; of any of them at most")
        print("  " + ", ".join(f"{count} {name}" for name, count in _most(found).items()))
        for site, count in sorted(Counter(site for step in found for site in step.sites).items()):
            print(f"  {count:4} {' '.join(f'{part:10}' for part in site)}")
        for stale, count in sorted(Counter(step.stale for step in found if step.stale).items()):
            print(f"  {count:4} stale      {stale}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
