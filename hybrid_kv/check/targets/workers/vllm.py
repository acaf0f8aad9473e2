"""vLLM 0.32 in its own process, driven a step at a time.

It is started as `python vllm.py` and speaks the protocol of `pipe`. A setting that vLLM refuses,
or takes and then overrides, is a `ValueError` in its own words: it is not supported.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 2048, 8, 2048
# Bytes. vLLM fills its pool with zeros, 3.5 s of a start for each GiB; 2^28 are more blocks than
# all probes fill.
SMALL_MODEL, SMALL_POOL = 2**26, 2**28
EXACT_HEAD = 2  # numbers of a key
EXACT_BLOCK, EXACT_BLOCKS = 16, 2**10  # tokens of a block, and how many there are
ROOM = 640  # tokens of the one request that a tight pool holds for sure, where eight may run
PLAIN = {
    "prefix": "off",
    "spec": "none",
    "chunk": "whole",
    "blocks": "ample",
    "rows": "8",
    "block": "own",
    "match": "block",
    "retain": "last",
    "async": "off",
    "kernel": "own",
    "sanitize": "off",
    "runner": "v2",
    "graph": "off",
    "copies": "late",
}
# Engine arguments of levels that are words.
CHANGES: dict[tuple[str, str], dict[str, Any]] = {
    ("prefix", "on"): {"enable_prefix_caching": True},
    ("blocks", "tight"): {"max_model_len": ROOM},  # and see `vllm_case.make_tight`
    ("retain", "all"): {"prefix_cache_retention_interval": None},
    ("async", "on"): {"async_scheduling": True},
    ("sanitize", "on"): {},  # see `exact_arguments`
}
NUMBERS = {
    "chunk": "max_num_batched_tokens",
    "block": "block_size",
    "match": "prefix_match_unit",
    "retain": "prefix_cache_retention_interval",
    "rows": "max_num_seqs",
}
CAN = [
    "cached",
    "logprobs",
    "score",
    "reset",
    "preempt",
    "salt",
    "seed",
    "n",
    "abort",
    "batch",
    "steps",
    "top",
]
COUNTERS = {
    "vllm:prefix_cache_hits": "hits",
    "vllm:spec_decode_num_drafts": "verifications",
    "vllm:spec_decode_num_draft_tokens": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:num_preemptions": "preemptions",
}


def arguments(settings: dict[str, str]) -> dict[str, Any]:
    """Return vLLM's engine arguments for levels by factor.

    Raises:
        ValueError: no such factor or level.
    """
    options: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "dtype": "float32",
    }
    for factor, level in settings.items():
        if level != PLAIN.get(factor):
            options |= changes_of(factor, level)
    return options


def changes_of(factor: str, level: str) -> dict[str, Any]:
    """Return the engine arguments that a level sets.

    Raises:
        ValueError: no such factor or level.
    """
    if (factor, level) in CHANGES:
        return CHANGES[factor, level]
    word = level.rstrip("0123456789")
    match factor, word, level[len(word) :]:
        case ("kernel", "", _) | (("runner" | "graph" | "copies"), _, _):
            return {}  # no arguments: see `VllmEngine` and `vllm_gpu.choose`
        case "prefix", mode, "":
            return {"enable_prefix_caching": True, "mamba_cache_mode": mode}
        case "spec", method, number if number:
            drafts = {"method": method, "num_speculative_tokens": int(number)}
            lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}
            return {"speculative_config": drafts | lookup}
        case "chunk" | "block" | "match" | "retain" | "rows", "", number:
            return {NUMBERS[factor]: int(number)}
        case "dtype", _, _:
            return {"dtype": level}
    raise ValueError(f"{factor}={level} is not a setting of vLLM that is known here")


def exact_arguments(settings: dict[str, str]) -> dict[str, Any]:
    """Return the engine arguments that the exact model changes in a setting."""
    pool = {"kv_cache_memory_bytes": SMALL_POOL, "num_gpu_blocks_override": EXACT_BLOCKS}
    size: dict[str, Any] = {} if "block" in settings else {"block_size": EXACT_BLOCK}
    if settings.get("sanitize") == "on":
        size["hf_overrides"] = {"head_dim": EXACT_HEAD + 1}
    return {"load_format": "dummy", "max_model_len": ROOM, **pool, **size}


class VllmEngine:
    """The engine that `pipe.serve` drives; fields as in `hybrid_kv.check.targets.target`."""

    late = "vllm", "numba", "llvmlite"  # where the last two are, `load` cannot replace kernels
    _sanitizer: Any = None
    _gpu: Any = None  # the folder `vllm_gpu`, where the runners of a GPU are
    _renew: Callable[[Any], None] | None = None  # of the exact model

    def __init__(self, variant: str) -> None:
        self._on_gpu = variant == "gpu"

    def load(self) -> None:
        """Import the modules that every start needs, once in a process: 9 of its 12 s."""
        if self._on_gpu:
            self._gpu = pipe.sibling("vllm_gpu")
            self._gpu.prepare()
        self._case = pipe.sibling("vllm_case")
        self._case.declare_vision()
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.gpu_model_runner  # the one for CPUs is made of it
        from vllm.platforms import current_platform

        if self._gpu is not None:
            self._gpu.finish()
            return
        if replace := getattr(current_platform, "register_triton_kernel_overrides", None):
            replace()  # looks through all modules, and fails at llvmlite's
            type(current_platform).register_triton_kernel_overrides = lambda *_: None
        import vllm.v1.spec_decode.ngram_proposer  # noqa: F401  (it imports numba)

    def version(self) -> str:
        import vllm

        return vllm.__version__

    def start(self, folder: str, settings: dict[str, str]) -> dict[str, Any]:
        options = arguments(settings)
        with open(f"{folder}/config.json") as file:
            if "exact" in json.load(file):
                self._exact(folder, settings, options)
        try:
            self._start(folder, options, settings)
        except self._case.refusals(AssertionError, NotImplementedError) as error:
            if not str(error):  # an assertion without words refuses nothing: it is a bug
                raise
            raise ValueError(self._case.line_of(error)) from error

        # Of the exact model they say nothing.
        can = [name for name in CAN if name not in ("logprobs", "score") or self._renew is None]
        return {"can": can, "longest": options["max_model_len"]}

    def _start(self, folder: str, options: dict[str, Any], settings: dict[str, str]) -> None:
        import vllm
        from vllm.model_executor.models import registry
        from vllm.v1.engine.llm_engine import LLMEngine

        # Another process lacks those operators.
        registry._run_in_subprocess = lambda function: function()
        if settings.get("blocks") == "tight":
            self._case.make_tight()
        if sum(one.stat().st_size for one in os.scandir(folder)) < SMALL_MODEL:
            options["kv_cache_memory_bytes"] = SMALL_POOL
        if missing := options.keys() - vllm.EngineArgs.__dataclass_fields__.keys():
            raise ValueError(f"vLLM {vllm.__version__} has no {', '.join(sorted(missing))}")
        options = {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            **options,
        }
        engine_arguments = vllm.EngineArgs(folder, **options)
        self._llm = LLMEngine.from_engine_args(engine_arguments)
        if self._renew is not None:
            self._renew(self._llm)
        self._sent = 0
        config = self._llm.vllm_config
        taken = {
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }
        for name, value in taken.items():
            if options[name] != value:
                raise ValueError(f"vLLM took {name}={options[name]} and made it {value}")
        if self._gpu is not None:
            self._gpu.check(config, settings)
        # What a model cannot do may show in its first steps only.
        self.ask([{"prompt": [1, 2, 3], "max_tokens": 3, "salt": "start"}], 0)
        self._sent = 0  # what comes now counts from 0, as the sanitizer says it

    def _exact(self, folder: str, settings: dict[str, str], options: dict[str, Any]) -> None:
        """Make the exact model known to vLLM, and add the options that it needs."""
        module = pipe.sibling("vllm_exact")
        if settings.get("sanitize") == "on":
            self._sanitizer = module.sanitizer = pipe.sibling("vllm_sanitizer").VllmSanitizer()
        pipe.sibling("vllm_releases").adapt(module)
        module.register()
        self._renew = module.renew
        module.kernel_block_size = (
            int(settings["kernel"]) if settings.get("kernel", "own") != "own" else 0
        )
        if self._gpu is not None:
            self._gpu.choose(settings, options, module)
        elif settings.get("async") == "on":
            self._case.allow_async()
        module.add_head(options, folder)
        options |= exact_arguments(settings)

    def ask(self, requests: list[dict[str, Any]], preempt_every: int) -> list[dict[str, Any]]:
        first, self._sent = self._sent, self._sent + len(requests)
        return self._case.play(self._llm, requests, preempt_every, first)

    def counters(self) -> dict[str, float]:
        found = dict.fromkeys(COUNTERS.values(), 0.0)
        for metric in self._llm.get_metrics():
            if metric.name in COUNTERS:
                found[COUNTERS[metric.name]] += metric.value
        return found if self._gpu is None else found | self._gpu.counters()

    def wrong_read(self) -> str:
        """Return the first wrong read that the sanitizer saw; empty: none."""
        return self._sanitizer.found[0] if self._sanitizer.found else ""

    def reset(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("reset_prefix_cache says that it did not")
        if self._renew is not None:
            self._renew(self._llm)


if __name__ == "__main__":
    import pipe

    sys.path.pop(0)  # this folder: in it, `vllm` is this file
    pipe.serve(VllmEngine("gpu" if "gpu" in sys.argv else "cpu"))
