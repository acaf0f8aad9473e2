"""A GPU that is not there, for vLLM's GPU worker and both of its model runners.

Nothing of vLLM is copied or edited. It is set in the process: `prepare` before torch, Triton and
vLLM are imported, `finish` after that, `choose` before an engine is started. Modules of this folder
import each other, torch, Triton and vLLM alone: a reproducer contains them.

What is replaced, and what that hides:

- `platform`, `worker`: finding and measuring a device. Hides: memory profiling.
- `streams`: all streams run at once. Hides: order between streams, but for copies to the host and
  from pinned memory.
- `copies`: see there. Hides: whether a tensor is the host's or the device's, where neither is
  pinned; what a wait by `item` or `tolist` covers.
- `uva`: memory of the host that both sides see. Hides: readers that are operations of torch, not
  kernels of Triton.
- `graphs`: recorded operations. Hides: memory that graphs share, and what dies before a replay.
- `interpreter`: kernels run as numpy, a program at a time. Hides: races in a kernel, what the
  compiler does, speed.
- Top-k and top-p: vLLM's fallback in torch. JIT warm-up: off. States are copied by 1 program, not
  16: hide that code.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

RUNNERS = {"v2": "1", "v1": "0"}  # VLLM_USE_V2_MODEL_RUNNER
GRAPHS = {"decode": "FULL_DECODE_ONLY", "full": "FULL_AND_PIECEWISE", "broken": "PIECEWISE"}
CAPTURED = [1, 2, 4, 6, 8, 12, 16, 24, 32]  # tokens of a step


def prepare() -> None:
    """Make this process one without a GPU, whose Triton interprets.

    Its vLLM finds the device of this folder.

    Raises:
        ValueError: the environment has no Triton.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        import_module("triton")
    except ImportError:
        raise ValueError(
            "runner=v2 and v1 need Triton in vLLM's environment; use runner=cpu"
        ) from None
    for name in ("streams", "copies", "graphs"):
        import_module(f"{__name__}.{name}").install()
    uva, graphs, interpreter = (
        import_module(f"{__name__}.{name}") for name in ("uva", "graphs", "interpreter")
    )
    interpreter.install(interpreter.Watchers(uva.note_readers, graphs.keep_launch))
    _pretend_to_measure()
    import vllm.platforms

    platform = import_module(f"{__name__}.platform").PretendPlatform
    platform.worker = f"{__name__}.worker.PretendWorker"
    vllm.platforms._current_platform = platform()
    # What is built for CPUs else asks for a Triton that compiles for them.
    vllm.platforms.vllm_version_matches_substr = lambda build: False


def _pretend_to_measure() -> None:
    """Let `torch.cuda` and `torch.accelerator` answer what is asked about a device."""
    import torch

    def memory(*_: Any) -> tuple[int, int]:
        platform = sys.modules[f"{__name__}.platform"]
        return platform.FREE_MEMORY, platform.TOTAL_MEMORY

    names = {
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "set_device_index": lambda *_: None,
        "empty_cache": lambda *_: None,
        "get_memory_info": memory,
        "memory_stats": lambda *_: {},
        "memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
    }
    for name, value in names.items():
        setattr(torch.accelerator, name, value)
    for name in ("mem_get_info", "empty_cache"):
        setattr(torch.cuda, name, {**names, "mem_get_info": memory}[name])


def finish() -> None:
    """Replace what vLLM's modules have imported."""
    import_module("vllm.v1.worker.gpu.model_runner")
    import_module("vllm.v1.worker.gpu_model_runner")
    import_module(f"{__name__}.worker").install()


def choose(settings: dict[str, str], options: dict[str, Any], model: Any) -> None:
    """Add to vLLM's options what a setting of the next engine needs.

    Args:
        settings: levels by factor: `runner`, `graph`, `copies`.
        model: the module of the exact model.

    Raises:
        ValueError: a level is for the runner of CPUs alone.
    """
    if settings.get("sanitize", "off") != "off":
        raise ValueError("sanitize=on follows the rows of runner=cpu alone")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = RUNNERS[settings.get("runner", "v2")]
    import_module(f"{__name__}.copies").choose_order(settings.get("copies", "late"))
    options["kernel_config"] = {"enable_jit_warmup": False}
    if (graph := settings.get("graph", "off")) != "off":
        options["enforce_eager"] = False
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": GRAPHS[graph],
            "cudagraph_capture_sizes": CAPTURED,
        }
    if graph in ("broken", "full"):
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
        breaks = import_module(f"{__name__}.breaks")
        breaks.mark(model.VllmAttention)
        breaks.mark(model.VllmMamba)


def check(config: Any, settings: dict[str, str]) -> None:
    """Raise `ValueError` if vLLM took a setting of an engine and then made it another one."""
    runner, graph = settings.get("runner", "v2"), settings.get("graph", "off")
    if config.use_v2_model_runner != (runner == "v2"):
        raise ValueError(
            f"vLLM took runner={runner} and made it {'v1' if runner == 'v2' else 'v2'}"
        )
    mode = config.compilation_config.cudagraph_mode.name
    if (mode == "NONE") != (graph == "off"):
        raise ValueError(f"vLLM took graph={graph} and made it {mode}")


def counters() -> dict[str, float]:
    """Return what occurred in this process so far."""
    copies, graphs, interpreter = (
        import_module(f"{__name__}.{name}") for name in ("copies", "graphs", "interpreter")
    )
    return {
        "replays": graphs.replays,
        "kernels": interpreter.launches,
        "late copies": copies.late_copies,
        "changed uploads": copies.changed_uploads.total(),
    }
