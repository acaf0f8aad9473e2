"""transformers: Jamba and Falcon-Mamba forget their state when more than one token follows.

python transformers_chunk_forgets.py FOLDER
"""

import inspect
import itertools
import sys

import torch
from transformers import AutoModelForCausalLM, DynamicCache

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
names = ("cache", "cache_params", "past_key_values")  # since 5.24; before, of Mamba; of others
name = next(name for name in names if name in inspect.signature(model.forward).parameters)
ids = torch.randint(1, 101, (1, 30), generator=torch.Generator().manual_seed(0))


def logprobs(cut):
    cache = DynamicCache(config=model.config)
    rows = [
        model(ids[:, a:b], use_cache=True, **{name: cache}).logits[0]
        for a, b in itertools.pairwise(cut)
    ]
    return torch.cat(rows).log_softmax(-1)


with torch.no_grad():
    whole = logprobs((0, 30))
    singly = logprobs(tuple(range(31)))
    halves = logprobs((0, 15, 30))
print("token by token: off by", float((singly - whole).abs().max()))
print(
    "in two halves: off by",
    float((halves - whole).abs().max()),
    "in the second half alone",
    [round(float(x), 3) for x in (halves - whole).abs().amax(-1)[15:20]],
)
print("last token", halves[-1].argmax().item(), "expected", whole[-1].argmax().item())
sys.exit(bool((halves - whole).abs().max() > 1e-3))
