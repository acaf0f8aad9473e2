"""Show that transformers computes again, after itself, what a kept cache of a Mamba-2 holds.

The same holds for Falcon-Mamba.

python transformers_kept_mamba.py FOLDER
"""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
forward, lengths = model.backbone.forward, []


def watched(input_ids=None, **given):
    lengths.append(input_ids.shape[1])
    return forward(input_ids=input_ids, **given)


model.backbone.forward = watched
ids = torch.randint(2, 101, (1, 40), generator=torch.Generator().manual_seed(0))
options = {
    "max_new_tokens": 1,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
first = model.generate(ids[:, :30], **options)
# 5.24 has one name for every model's cache; before, a Mamba took it by another one than it gave.
takes, gives = ("cache", "cache") if "cache" in first else ("cache_params", "past_key_values")
second = model.generate(ids, **{takes: first[gives]}, **options)
computed = lengths[-1]
with torch.no_grad():
    whole = model(input_ids=ids, use_cache=False).logits[0, -1].log_softmax(-1)
off = float((second.logits[0][0].log_softmax(-1) - whole).abs().max())
print(f"of 40 tokens, 30 of them in the cache, {computed} are computed; off by {off:.3g}")
sys.exit(computed != 10 or off > 1e-4)
