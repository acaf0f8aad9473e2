"""transformers: Falcon-H1 with mamba_rms_norm cannot decode two texts at once.

python transformers_falcon_h1_batch.py FOLDER [static]
"""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
ids = torch.randint(1, 101, (2, 30), generator=torch.Generator().manual_seed(0))
more = {"cache_implementation": sys.argv[2]} if sys.argv[2:] else {}
options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
model.model.layers[0].mamba.register_forward_hook(
    lambda m, a, out: print("mixer's output", tuple(out.shape))
)
alone = [
    model.generate(row[None], attention_mask=torch.ones(1, 30), **options)[0, 30:].tolist()
    for row in ids
]
try:
    batch = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **more)[
        :, 30:
    ].tolist()
except Exception as error:
    batch = repr(error)[:160]
print("alone", alone, "both", batch)
sys.exit(batch != alone)
