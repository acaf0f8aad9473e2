"""What a step costs its host on a GPU, by count: the engine runs the guard model on the pretend device.

    python -m bench.device torch align slots 2    # kernels, mode, scheme, drafts: where the host waits and uploads

Two requests run twice, and their second run counts: constants and memory are there by then. Of each kind of step the
largest count of any such step is given. With drafts a step of decodes verifies them. A step of decodes is capturable if
the model launched the same, with the same arguments, as in the one before of as many requests and tokens. Tokens must
be the CPU's.
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.harness.cells import Cell, Count, Counts, WrongResultError, grid

METRICS = {
    "launches": ("launch", "launches"),
    "waits": ("wait", "waits"),
    "uploads": ("upload", "copies"),
    "upload_bytes": ("upload_bytes", "B"),
    "downloads": ("download", "copies"),
    "allocations": ("allocation", "allocations"),
}
UNITS = {name: unit for name, (_, unit) in METRICS.items()}
VALUES = {
    "kernels": ("torch", "triton"),
    "mode": ("none", "align", "all"),
    "scheme": ("slots", "recompute"),
    "K": (0, 2),
    "step": ("prefill", "mixed", "decode"),
}
PROMPTS = (20, 77)  # tokens, the second ends its first block while it decodes; a step has at most 32


class Step(NamedTuple):
    """One step: its kind, what was counted, and of each wait and upload its kind, what it was, and where.

    `stale`: why a graph of the step before could not be replayed for it; None: there is none of the same size.
    """

    kind: str
    counts: dict[str, int]
    sites: list[tuple[str, ...]]
    stale: str | None


def _engine(device: str, kernels: str, mode: str, scheme: str, K: int) -> Any:
    from hybrid_kv.accuracy.guard_model import FOLDER
    from hybrid_kv.engine.llm import LLM

    drafts = {"num_speculative_tokens": K, "speculative_method": "mtp"} if K else {}
    sizes = {"max_num_seqs": 2, "max_model_len": 128, "max_num_batched_tokens": 32, "num_blocks": 32}
    how = {"mamba_cache_mode": mode, "state_scheme": scheme, "enable_prefix_caching": mode != "none"}
    return LLM(FOLDER, device=device, kernels=kernels, attention_backend="TORCH", **sizes, **how, **drafts)


def _tokens(llm: Any) -> list[list[int]]:
    from hybrid_kv.sampling import SamplingParams

    prompts = [[(7 * i * i + 3 * length) % 90 + 3 for i in range(length)] for length in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True), progress=False)
    llm.reset_prefix_cache()
    return [output.token_ids for output in outputs]


def _kind(batch: Any) -> str:
    decodes = [item.is_decode for item in batch]
    return "decode" if all(decodes) else "mixed" if any(decodes) else "prefill"


def play(kernels: str, mode: str, scheme: str, K: int) -> list[Step]:
    """The steps of the second run.

    Raises:
        WrongResultError: other tokens than the CPU's.
    """
    import torch

    from hybrid_kv.device import pretend_gpu, why_not_replayed

    torch.set_num_threads(1)
    wanted, steps = _tokens(_engine("cpu", "torch", mode, scheme, K)), list[Step]()
    with pretend_gpu() as gpu:
        llm = _engine("cuda:0", kernels, mode, scheme, K)
        _tokens(llm)
        execute, forward, graphs = llm.runner.execute, type(llm.runner.model).forward, dict[Any, Any]()

        def captured(model: Any, input_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
            with gpu.captured() as launches:
                hidden = forward(model, input_ids, *arguments)
            graphs[None] = launches
            return hidden

        def counted(scheduled: Any) -> Any:
            since = len(gpu.events)
            output = execute(scheduled)
            sites = [event[:3] for event in gpu.events[since:] if event.kind in ("wait", "upload")]
            kind, size = _kind(output.batch), tuple(item.num_tokens for item in output.batch)
            before, graphs[size] = graphs.get(size), graphs.pop(None)
            stale = why_not_replayed(before, graphs[size]) if before is not None and kind == "decode" else None
            steps.append(Step(kind, gpu.counts(since), sites, stale))
            return output

        with patch.object(llm.runner, "execute", counted), patch.object(type(llm.runner.model), "forward", captured):
            found = _tokens(llm)
    if found != wanted:
        raise WrongResultError(f"tokens {found} instead of the CPU's {wanted}")
    return steps


@cache
def played(kernels: str, mode: str, scheme: str, K: int) -> list[Step]:
    """See `play`; Triton kernels in a process that interprets them."""
    from hybrid_kv.kernels.common.interpreter import start_interpreter

    if kernels == "torch":
        return play(kernels, mode, scheme, K)
    with ProcessPoolExecutor(1, get_context("spawn"), start_interpreter) as pool:
        return pool.submit(play, kernels, mode, scheme, K).result()


def steps(seed: int, kernels: str, mode: str, scheme: str, K: int, step: str) -> Counts:
    """The largest counts of any such step."""
    own = [one for one in played(kernels, mode, scheme, K) if one.kind == step]
    return {name: Count(max(one.counts[kind] for one in own), unit) for name, (kind, unit) in METRICS.items()}


def graphs(seed: int, kernels: str, mode: str, scheme: str) -> Counts:
    """Whether a decode step without drafts could be replayed from the one before it; with drafts sizes differ.

    Raises:
        WrongResultError: no two steps of decodes have one size.
    """
    known = [one.stale == "" for one in played(kernels, mode, scheme, 0) if one.stale is not None]
    if not known:
        raise WrongResultError("no two steps of decodes have one size")
    return {"capturable": Count(int(all(known)), "", "higher")}


def cells() -> list[Cell]:
    """Kernels, modes, schemes, drafts and kinds of steps."""
    engines = {name: VALUES[name] for name in ("kernels", "mode", "scheme")}
    quick = ("torch", "align", "slots")
    return [
        *grid("device", "steps", "count", steps, VALUES, [(*quick, 2)], units=UNITS),
        *grid("device", "graphs", "count", graphs, engines, [quick], units={"capturable": ""}),
    ]


def main() -> None:
    """Print where the host waits, and where it uploads."""
    kernels, mode, scheme, K = sys.argv[1:]
    by_kind: dict[str, list[Step]] = {}
    for step in played(kernels, mode, scheme, int(K)):
        by_kind.setdefault(step.kind, []).append(step)
    for kind, found in by_kind.items():
        print(f"{kind}: {len(found)} steps; of any of them at most")
        print("  " + ", ".join(f"{max(one.counts[key] for one in found)} {name}" for name, (key, _) in METRICS.items()))
        for site, count in sorted(Counter(site for step in found for site in step.sites).items()):
            print(f"  {count:4} {' '.join(f'{part:10}' for part in site)}")
        for stale, count in sorted(Counter(step.stale for step in found if step.stale).items()):
            print(f"  {count:4} stale      {stale}")


if __name__ == "__main__":
    main()
