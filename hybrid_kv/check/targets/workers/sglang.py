"""SGLang 0.5.23 in its own process, driven a step at a time.

It is started as `python sglang.py` and speaks the protocol of `pipe`. A setting that SGLang
refuses, or takes and then overrides, is a `ValueError` in its own words: it is not supported.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

LONGEST = 640  # tokens of a prompt and its answer
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
    "context_length": LONGEST + 8,  # SGLang ends an answer some tokens earlier
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "max_mamba_cache_size": 60,
    "log_level": "error",
    "watchdog_timeout": 100000,
}
HOST = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}
# Arguments by level, the plainest first.
LEVELS: dict[str, dict[str, dict[str, Any]]] = {
    "prefix": {"off": {}, "on": {"disable_radix_cache": False}},
    # Where the states of prefixes come from.
    "buffer": {
        "none": {},
        "extra": {"mamba_radix_cache_strategy": "extra_buffer"},
        "lazy": {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
    },
    "overlap": {"off": {}, "on": {"disable_overlap_schedule": False}},
    "page": {  # tokens
        "1": {},
        "16": {"page_size": 16},
        "64": {"page_size": 64, "mamba_track_interval": 64},
    },
    # Tokens of prompts in a step.
    "chunk": {"whole": {}, "32": {"chunked_prefill_size": 32}, "48": {"chunked_prefill_size": 48}},
    "mixed": {"off": {}, "on": {"enable_mixed_chunk": True}},  # prompts and answers in one step
    # Pages and states in which four requests hardly fit, and prefixes are evicted.
    "blocks": {
        "ample": {},
        "tight": {"max_total_tokens": 900, "max_running_requests": 4, "max_mamba_cache_size": 24},
    },
    "retract": {"off": {}, "7": {}},  # steps, see `changes`
    "spec": {  # trees of drafts, by their breadth
        "none": {},
        "ngram4": {**DRAFTS, "speculative_ngram_max_bfs_breadth": 4},
        "ngram1": {**DRAFTS, "speculative_ngram_max_bfs_breadth": 1},
    },
    # Memory of the host, by when it is written.
    "host": {
        "off": {},
        "through": {**HOST, "hicache_write_policy": "write_through"},
        "back": {**HOST, "hicache_write_policy": "write_back"},
    },
    # Batches of decodes are padded to one of these, and replayed.
    "graph": {"off": {}, "on": {"cuda_graph_bs_decode": [2, 4, 8]}},
    # What SGLang does around the kernels of this attention backend.
    "branches": {"torch": {}, "triton": {"attention_backend": "triton"}},
    "tree": {"rust": {}, "python": {}},  # core of the radix tree, see `environment`
}
FEW_STATES = 12  # of a tight pool without extra buffers
CAN = ["cached", "reset", "preempt", "salt", "abort", "batch", "steps"]
CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"  # read when a tree is made


def arguments(settings: dict[str, str]) -> dict[str, Any]:
    """Return SGLang's server arguments of levels by factor.

    Raises:
        ValueError: no such factor or level.
    """
    options = dict(OPTIONS)
    for factor, level in settings.items():
        if level not in LEVELS.get(factor, {}):
            raise ValueError(f"{factor}={level} is not a setting of SGLang that is known here")
        options |= LEVELS[factor][level]
    if settings.get("blocks") == "tight" and settings.get("buffer", "none") == "none":
        options["max_mamba_cache_size"] = FEW_STATES
    return options


def environment(settings: dict[str, str]) -> dict[str, str]:
    """Return the variables that a setting needs."""
    return {CORE: settings.get("tree", "rust")}


def changes(settings: dict[str, str]) -> dict[str, Any]:
    """Return attributes of SGLang's scheduler module that a setting needs, and their values."""
    interval = settings.get("retract", "off")
    if interval == "off":
        return {"TEST_RETRACT": False}
    return {"TEST_RETRACT": True, "TEST_RETRACT_INTERVAL": int(interval)}


class SglangEngine:
    """The engine that `pipe.serve` drives; fields as in `hybrid_kv.check.targets.target`."""

    late = ("sglang",)

    def load(self) -> None:
        """Import the modules that every start needs, once in a process: most of its time."""
        self._cpu = pipe.sibling("sglang_cpu")
        self._cpu.prepare()
        # Its Triton launches kernels cheaply, and asks nothing of vLLM.
        pipe.sibling("vllm_gpu")
        import_module("vllm_gpu.interpreter").install()
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
        return self._engine.counters()

    def reset(self) -> None:
        """Forget the prefix cache."""
        self._engine.reset()


if __name__ == "__main__":
    import pipe

    sys.path.pop(0)  # this folder: in it, `sglang` is this file
    pipe.serve(SglangEngine())
