"""vLLM in its own process, driven a step at a time: `python vllm.py`, spoken to as `pipe` says; for vLLM 0.32.

A setting that vLLM refuses, or takes and then overrides, is a `ValueError` in its own words: it not supported.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

NUM_LIKELIEST = 5
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 2048, 8, 2048
# Bytes. vLLM fills its pool with zeros, 3.5 s of a start for each GiB; 2^28 are more blocks than all probes fill.
SMALL_MODEL, SMALL_POOL = 2**26, 2**28
EXACT_HEAD = 2  # numbers of a key
EXACT_BLOCK, EXACT_BLOCKS = 16, 2**10  # tokens of a block, and how many there are
MOST_IDLE = 1000  # steps; the chunks of all prompts are fewer
ROOM = 640  # tokens of the one request that a tight pool holds for sure, where eight may run
CAN = ["cached", "logprobs", "reset", "preempt", "salt", "seed", "n", "abort", "batch", "steps"]
COUNTERS = {
    "vllm:prefix_cache_hits": "hits",
    "vllm:spec_decode_num_draft_tokens": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:num_preemptions": "preemptions",
}


def arguments(settings: dict[str, str]) -> dict[str, Any]:
    """vLLM's engine arguments of levels by factor.

    Raises:
        ValueError: no such factor or level.
    """
    found: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "dtype": "float32",
    }
    for factor, level in settings.items():
        digits = level.lstrip("abcdefghijklmnopqrstuvwxyz")
        word, number = level[: len(level) - len(digits)], int(digits) if digits.isdecimal() else 0
        match factor, word, number:
            case ("prefix", "off", 0) | ("spec", "none", 0) | ("chunk", "whole", 0) | ("blocks", "ample" | "tight", 0):
                pass
            case ("block", "own", 0) | ("match", "block", 0) | ("retain", "last", 0) | ("async", "off", 0):
                pass
            case ("kernel", "own", 0) | ("sanitize", "off" | "on", 0):
                pass
            case ("prefix", "on", 0):
                found["enable_prefix_caching"] = True
            case "prefix", mode, 0:
                found |= {"enable_prefix_caching": True, "mamba_cache_mode": mode}
            case "spec", method, 1 | 2 | 3 | 4 | 5 | 6 | 7:
                found["speculative_config"] = {"method": method, "num_speculative_tokens": number}
                if method == "ngram":
                    found["speculative_config"] |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
            case "chunk", "", number if number:
                found["max_num_batched_tokens"] = number
            case "block", "", number if number:
                found["block_size"] = number
            case "match", "", number if number:
                found["prefix_match_unit"] = number
            case "retain", "all", 0:
                found["prefix_cache_retention_interval"] = None
            case "kernel", "", number if number:
                pass  # of the exact model's attention, see `_start`
            case "async", "on", 0:
                found["async_scheduling"] = True
            case "dtype", _, _:
                found["dtype"] = level
            case _:
                raise ValueError(f"{factor}={level} is not a setting of vLLM that is known here")
    if settings.get("blocks") == "tight":
        found["max_model_len"] = ROOM
    return found


def exact_arguments(settings: dict[str, str]) -> dict[str, Any]:
    """What the exact model changes in these."""
    pool = {"kv_cache_memory_bytes": SMALL_POOL, "num_gpu_blocks_override": EXACT_BLOCKS}
    size: dict[str, Any] = {} if "block" in settings else {"block_size": EXACT_BLOCK}
    if settings.get("sanitize") == "on":
        size["hf_overrides"] = {"head_dim": EXACT_HEAD + 1}
    return {"load_format": "dummy", "max_model_len": ROOM, **pool, **size}


class Engine:
    """What `pipe.serve` needs; fields as in `hybrid_kv.targets.target`."""

    late = "vllm", "numba", "llvmlite"  # where the last two are, `load` cannot replace kernels
    _sanitizer: Any = None
    _renew: Callable[[Any], None] | None = None  # of the exact model

    def load(self) -> None:
        """What every start imports, and does once in a process: 9 of its 12 s."""
        pipe.sibling("vllm_case").declare_vision()
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.gpu_model_runner  # the one for CPUs is made of it
        from vllm.platforms import current_platform

        if replace := getattr(current_platform, "register_triton_kernel_overrides", None):
            replace()  # looks through all modules, and fails at llvmlite's
            type(current_platform).register_triton_kernel_overrides = lambda *_: None
        import vllm.v1.spec_decode.ngram_proposer  # noqa: F401  (it imports numba)

    def version(self) -> str:
        import vllm

        found: str = vllm.__version__
        return found

    def start(self, folder: str, settings: dict[str, str]) -> dict[str, Any]:
        options = arguments(settings)
        with open(f"{folder}/config.json") as file:
            if "exact" in json.load(file):
                self._exact(folder, settings, options)
        try:
            self._start(folder, options, settings.get("blocks") == "tight")
        except refusals(AssertionError, NotImplementedError) as error:
            if not str(error):  # an assertion without words refuses nothing: it is a bug
                raise
            raise ValueError(_line(error)) from error

        # Of the exact model they say nothing.
        can = [name for name in CAN if name != "logprobs" or self._renew is None]
        return {"can": can, "longest": options["max_model_len"]}

    def _start(self, folder: str, options: dict[str, Any], tight: bool) -> None:
        import vllm
        from vllm.model_executor.models import registry
        from vllm.v1.engine.llm_engine import LLMEngine

        registry._run_in_subprocess = lambda function: function()  # another process lacks those operators
        if tight:
            make_tight()
        if sum(one.stat().st_size for one in os.scandir(folder)) < SMALL_MODEL:
            options["kv_cache_memory_bytes"] = SMALL_POOL
        if missing := options.keys() - vllm.EngineArgs.__dataclass_fields__.keys():
            raise ValueError(f"vLLM {vllm.__version__} has no {', '.join(sorted(missing))}")
        engine_arguments = vllm.EngineArgs(
            folder, enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=False, **options
        )
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
        # What a model cannot do may show in its first steps only.
        self.ask([{"prompt": [1, 2, 3], "max_tokens": 3, "salt": "start"}], 0)
        self._sent = 0  # what comes now counts from 0, as the sanitizer says it

    def _exact(self, folder: str, settings: dict[str, str], options: dict[str, Any]) -> None:
        """Make the exact model known to vLLM, and add the options that it needs."""
        module = pipe.sibling("vllm_exact")
        if settings.get("sanitize") == "on":
            self._sanitizer = module.sanitizer = pipe.sibling("vllm_sanitizer").Sanitizer()
        pipe.sibling("vllm_releases").adapt(module)
        module.register()
        self._renew = module.renew
        module.kernel_block_size = int(settings["kernel"]) if settings.get("kernel", "own") != "own" else 0
        if settings.get("async") == "on":
            allow_async()
        module.add_head(options, folder)
        options |= exact_arguments(settings)

    def ask(self, requests: list[dict[str, Any]], preempt_every: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{} for _ in requests]
        parts: list[dict[int, Any]] = [{} for _ in requests]  # of n answers, an output has one
        running: dict[str, int] = {}
        waiting, undisturbed, step, last = list(range(len(requests))), 0, 0, 0
        while waiting or running:
            ended = len(requests) - len(waiting) - len(running)
            ready = [i for i in waiting if requests[i].get("after", 0) <= ended and requests[i].get("step", 0) <= step]
            # A step that nothing runs in is never reached.
            for i in ready or (waiting[:1] if not running else []):
                waiting.remove(i)
                try:
                    running[self._send(requests[i])] = i
                except refusals() as error:
                    found[i]["error"] = _line(error)
            known = sum(len(one.token_ids) for each in parts for one in each.values())
            if preempt_every and known - undisturbed >= preempt_every:
                undisturbed = known
                self._llm.reset_prefix_cache(reset_running_requests=True)
            step += 1
            outputs = self._llm.step()
            last = step if outputs else last
            if step - last > MOST_IDLE:
                raise RuntimeError(f"{len(running)} requests run, and {MOST_IDLE} steps bring no token")
            for output in outputs:
                if (i := running.get(output.request_id, -1)) < 0:
                    continue
                found[i]["cached_tokens"] = output.num_cached_tokens
                parts[i] |= {one.index: one for one in output.outputs}
                limit = requests[i].get("abort_after")
                if limit is not None and not output.finished:
                    lengths = [len(one.token_ids) for one in parts[i].values()]
                    if len(lengths) < requests[i].get("n", 1) or min(lengths) < limit:
                        continue
                    self._llm.abort_request([output.request_id])
                elif not output.finished:
                    continue
                del running[output.request_id]
        return [one | _texts(each) for one, each in zip(found, parts, strict=True)]

    def _send(self, ask: dict[str, Any]) -> str:
        from vllm import SamplingParams

        more: dict[str, int] = {}
        temperature, n = ask.get("temperature", 0.0), ask.get("n", 1)
        if n > 1 and not temperature:  # refused; with one token to draw from, a draw is greedy
            temperature, more = 1.0, {"top_k": 1}
        params = SamplingParams(
            max_tokens=ask["max_tokens"],
            temperature=temperature,
            seed=ask.get("seed"),
            n=n,
            logprobs=NUM_LIKELIEST if ask.get("logprobs") else None,
            ignore_eos=True,
            detokenize=False,
            **more,
        )
        prompt = {"prompt_token_ids": list(ask["prompt"])}
        if ask.get("salt"):
            prompt["cache_salt"] = ask["salt"]
        name, self._sent = str(self._sent), self._sent + 1
        self._llm.add_request(name, prompt, params)
        return name

    def counters(self) -> dict[str, float]:
        found = dict.fromkeys(COUNTERS.values(), 0.0)
        for metric in self._llm.get_metrics():
            if metric.name in COUNTERS:
                found[COUNTERS[metric.name]] += metric.value
        return found

    def wrong_read(self) -> str:
        """The first thing that the sanitizer saw; empty: nothing."""
        return self._sanitizer.found[0] if self._sanitizer.found else ""

    def reset(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("reset_prefix_cache says that it did not")
        if self._renew is not None:
            self._renew(self._llm)


def make_tight() -> None:
    """The pool of the next engine holds what its longest request takes, for which vLLM has no option."""
    import vllm.v1.engine.core as core
    from vllm.v1.core import kv_cache_utils

    plan: Callable[..., Any] = core.get_kv_cache_configs

    def tight(config: Any, specs: Any, *more: Any) -> Any:
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs[0]))
        needed = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
        block = kv_cache_utils._pool_bytes_per_block(config, groups)
        config.cache_config.num_gpu_blocks_override = 1 + -(-needed // block)  # the first one is the null block
        return plan(config, specs, *more)

    core.get_kv_cache_configs = tight


def allow_async() -> None:
    """vLLM takes asynchronous steps from CPUs, whose operators do not need them; the scheduler's code is the same."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def allowing(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(allowing)


def refusals(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What vLLM raises if it cannot do what it gets, for which it has no class up to 0.26."""
    import vllm.exceptions

    return *more, ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError)


def _texts(parts: dict[int, Any]) -> dict[str, Any]:
    texts = [list(parts[i].token_ids) for i in sorted(parts)]
    found: dict[str, Any] = {"token_ids": texts[0] if texts else [], "others": texts[1:]}
    if texts and parts[0].logprobs:
        found["logprobs"] = [{token: one.logprob for token, one in step.items()} for step in parts[0].logprobs]
    return found


def _line(error: Exception) -> str:
    """What went wrong, in one line; pydantic's first is only a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])


if __name__ == "__main__":
    import pipe

    sys.path.pop(0)  # this folder: in it, `vllm` is this file
    pipe.serve(Engine())
