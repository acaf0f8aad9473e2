"""vLLM, in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_kv.targets.remote import Remote, python_of
from hybrid_kv.targets.script import beginning, ending, with_folder
from hybrid_kv.targets.target import Ask
from hybrid_kv.targets.workers.vllm import NUM_LIKELIEST, arguments

name = "vllm"
size = "small"  # its kernels for CPUs refuse the tiny one's widths
# In this order a default guard asks them: what takes longest first, so that no core waits at the end; what vLLM refuses
# or dies of at its start last.
factors = {
    "prefix": (
        "off",
        "all",
        "on",
    ),  # on: the mode that vLLM takes by itself; all: a `mamba_cache_mode` of some versions
    "chunk": ("whole", "17", "100"),
    "blocks": ("ample", "tight"),
    "retain": ("last", "all"),  # prefix_cache_retention_interval: which Mamba states stay
    "block": ("own", "32"),  # tokens; a hybrid's grow until a Mamba state fits
    "match": ("block", "32"),  # prefix_match_unit: hits may end inside a block
    "dtype": ("float32", "bfloat16"),
    "spec": ("none", "ngram3", "mtp3", "mtp1"),
    "async": ("off", "on"),
}
# What every script for vLLM on a CPU begins with, those of `examples/found/` too.
HEADING = """\
# ruff: noqa: E402
import os
import sys

os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
import torch

vision = torch.library.Library("torchvision", "DEF")  # missing in PyPI's torchvision beside a CPU build of torch
for op in ("nms", "qnms"):
    vision.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import vllm
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda function: function()  # it would lack those operators
"""


def start(folder: str, settings: Mapping[str, str]) -> Remote:
    """See `targets.target.Kind`."""
    return Remote(name, python_of(name, "vllm"), folder, settings)


def script(case: Any) -> str | None:
    """Plays a `probes.reproducer.Case` again; None if it is made of what `vllm.LLM` has no words for."""
    steered = any(one.preempt_every or any(ask.after or ask.abort_after for ask in one.asks) for one in case.rounds)
    if steered or case.settings.get("blocks") == "tight":
        return None
    rounds = "\n".join(f"    {[_request(ask) for ask in one.asks]}," for one in case.rounds)
    return f"""{beginning(case, with_folder(case.model))}
{HEADING}
llm = vllm.LLM(sys.argv[1], enforce_eager=True, skip_tokenizer_init=True, **{arguments(dict(case.settings))})
rounds = [  # prompts that are sent together, and their sampling
{rounds}
]
for asks in rounds:
    params = [vllm.SamplingParams(ignore_eos=True, detokenize=False, **fields) for _, fields in asks]
    answers = llm.generate([prompt for prompt, _ in asks], params, use_tqdm=False)
answer = answers[{case.index}]
got = list(answer.outputs[0].token_ids)
{ending(case, "answer.outputs[0].logprobs[len(expected) - 1][expected[-1]].logprob", "answer.num_cached_tokens")}"""


def _request(ask: Ask) -> tuple[dict[str, Any], dict[str, Any]]:
    """A prompt and its sampling, as the worker asks them."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(ask.prompt)}
    fields: dict[str, Any] = {"max_tokens": ask.max_tokens, "temperature": ask.temperature}
    if ask.n > 1 and not ask.temperature:
        fields |= {"temperature": 1.0, "top_k": 1}
    prompt |= {"cache_salt": ask.salt} if ask.salt else {}
    fields |= {"seed": ask.seed} if ask.seed is not None else {}
    fields |= {"n": ask.n} if ask.n > 1 else {}
    fields |= {"logprobs": NUM_LIKELIEST} if ask.logprobs else {}
    return prompt, fields
