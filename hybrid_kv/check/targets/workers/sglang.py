"""SGLang 0.5.23 in its own process, driven a step at a time.

It is started as `python sglang.py` and speaks the protocol of `pipe`. A setting that SGLang
refuses, or takes and then overrides, is a `ValueError` in its own words: it is not supported.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

LONGEST = 640  # tokens of a prompt and its answer
PLAIN = {
    "prefix": "off",
    "buffer": "none",
    "overlap": "off",
    "page": "1",
    "chunk": "whole",
    "tree": "rust",
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "mamba_radix_cache_strategy": "no_buffer",
    "mamba_track_interval": 16,
    "page_size": 1,
    "chunked_prefill_size": 1024,
    "context_length": LONGEST,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "max_mamba_cache_size": 60,
    "log_level": "error",
    "watchdog_timeout": 100000,
}
BUFFERS = {"extra": "extra_buffer", "lazy": "extra_buffer_lazy"}
CAN = ["cached", "reset", "preempt", "salt", "abort", "batch", "steps"]
CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"  # read when a tree is made


def arguments(settings: dict[str, str]) -> dict[str, Any]:
    """Return SGLang's server arguments of levels by factor.

    Raises:
        ValueError: no such factor or level.
    """
    options = dict(OPTIONS)
    for factor, level in settings.items():
        match factor, level:
            case _ if level == PLAIN.get(factor):
                pass
            case "tree", "python":
                pass  # see `environment`
            case "prefix", "on":
                options["disable_radix_cache"] = False
            case "buffer", ("extra" | "lazy"):
                options["mamba_radix_cache_strategy"] = BUFFERS[level]
            case "overlap", "on":
                options["disable_overlap_schedule"] = False
            case "page", ("16" | "64"):
                options["page_size"] = int(level)
                options["mamba_track_interval"] = max(int(level), options["mamba_track_interval"])
            case "chunk", _ if level.isdecimal():
                options["chunked_prefill_size"] = int(level)
            case _:
                raise ValueError(f"{factor}={level} is not a setting of SGLang that is known here")
    return options


def environment(settings: dict[str, str]) -> dict[str, str]:
    """Return the variables that a setting needs."""
    return {CORE: settings.get("tree", PLAIN["tree"])}


def changes(settings: dict[str, str]) -> dict[str, Any]:
    """Return attributes of SGLang's scheduler module that a setting needs, and their values."""
    return {}


class Engine:
    """The engine that `pipe.serve` drives; fields as in `hybrid_kv.check.targets.target`."""

    late = ("sglang",)

    def load(self) -> None:
        """Import the modules that every start needs, once in a process: most of its time."""
        self._cpu = pipe.sibling("sglang_cpu")
        self._cpu.prepare()
        self._cpu.finish()

    def version(self) -> str:
        """Return SGLang's version."""
        import sglang

        return sglang.__version__

    def start(self, folder: str, settings: dict[str, str]) -> dict[str, Any]:
        """Start a scheduler; return what it can do.

        Raises:
            ValueError: SGLang does not know the setting or the model.
        """
        with open(f"{folder}/config.json") as file:
            config = json.load(file)
        if "exact" not in config:
            raise ValueError("SGLang on a CPU runs the exact model alone; use --exact")
        os.environ |= environment(settings)
        try:
            self._engine = self._cpu.start(config, arguments(settings), changes(settings))
        except (AssertionError, NotImplementedError) as error:
            if not str(error):  # an assertion without words refuses nothing: it is a bug
                raise
            raise ValueError(str(error).strip().splitlines()[0]) from error
        # What a setting cannot do may show in its first steps only.
        self.ask([{"prompt": [1, 2, 3], "max_tokens": 3}], 0)
        return {"can": CAN, "longest": LONGEST}

    def ask(self, requests: list[dict[str, Any]], preempt_every: int) -> list[dict[str, Any]]:
        """Return the answers to requests."""
        return self._engine.ask(requests, preempt_every)

    def counters(self) -> dict[str, float]:
        """Return what occurred since the start."""
        return self._engine.counters

    def reset(self) -> None:
        """Forget the prefix cache."""
        self._engine.reset()


if __name__ == "__main__":
    import pipe

    sys.path.pop(0)  # this folder: in it, `sglang` is this file
    pipe.serve(Engine())
