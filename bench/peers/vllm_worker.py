"""One `vllm.LLM`, driven by lines of JSON, run by an environment that has vLLM and no file of ours.

`python vllm_worker.py FOLDER MAX_NUM_SEQS MAX_MODEL_LEN DTYPE` answers `{"version": …}` when the
checkpoint runs. Each line `{"prompts": [[1, 2]], "max_tokens": 8}` is then answered with
`{"tokens": [[3, …]], "seconds": …}`: greedy, and the CPU time of the thread that calls vLLM.
`{"error": …}` instead of either is the last answer. What else is printed goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes every core
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the clock of this process sees no other
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [
        folder for folder in sys.path if folder != here
    ]  # vLLM would take our kernels.py for the hub's package

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    os.environ.update(SETTINGS)
    folder, max_num_seqs, max_model_len, dtype = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
    )
    try:
        import torch

        # torchvision as it is published has no operators for a CPU build of torch, and needs these
        # two when models that could see import it.
        vision = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            vision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import vllm

        # Known as a class, not by name, a model is not looked at in another process first, which
        # has no such operators.
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            (architecture,) = json.load(file)["architectures"]
        if (lazy := vllm.ModelRegistry.models.get(architecture)) is not None:
            vllm.ModelRegistry.register_model(architecture, lazy.load_model_cls())
        llm = vllm.LLM(
            folder,
            dtype=dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        torch.set_num_threads(1)

        def generate(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
            greedy = vllm.SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            start = time.thread_time()
            outputs = llm.generate(inputs, greedy, use_tqdm=False)
            seconds = time.thread_time() - start
            return {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "seconds": seconds,
            }

        generate([[1, 2]], 2)  # what a model cannot do may show in its first steps only
        answer(version=vllm.__version__)
        for line in sys.stdin:
            answer(**generate(**json.loads(line)))
    except Exception as error:
        answer(error=_line(error))


def _line(error: Exception) -> str:
    """Return what went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


if __name__ == "__main__":
    main()
    os._exit(0)  # vLLM's threads would keep the process
