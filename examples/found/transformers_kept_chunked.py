"""transformers: prefill_chunk_size on a kept cache computes the cached tokens a second time.

python transformers_kept_chunked.py FOLDER
"""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()


def generate(ids, **more):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        **more,
    )


first = torch.randint(1, 101, (1, 30), generator=torch.Generator().manual_seed(0))
turn = torch.cat([generate(first).sequences, torch.tensor([[5, 6, 7]])], 1)
cold = generate(turn).sequences[0, turn.shape[1] :].tolist()
results = {"cold": cold}
for name, how in {
    "kept": {},
    "kept, chunks": {"prefill_chunk_size": 16},
    "kept, lookup": {"prompt_lookup_num_tokens": 3},
}.items():
    output = generate(first)
    word = "cache" if "cache" in output else "past_key_values"  # since 5.24; before
    cache = output[word]
    held = cache.get_seq_length()
    done = generate(turn, **{word: cache}, **how)
    results[name] = done.sequences[0, turn.shape[1] :].tolist()
    print(
        name,
        results[name],
        f"cache held {held}, text is {done.sequences.shape[1]}, cache now {cache.get_seq_length()}",
    )
margins = (
    torch.log_softmax(
        model(torch.tensor([turn[0].tolist() + cold])).logits[0, turn.shape[1] - 1 : -1], -1
    )
    .topk(2)
    .values
)
print("cold", cold, "margins", (margins[:, 0] - margins[:, 1]).tolist())
sys.exit(any(tokens != cold for tokens in results.values()))
