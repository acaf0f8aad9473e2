"""Show that an answer of mlx-lm depends on longer prompts in its batch.

python mlx_batch.py FOLDER (jamba, nemotron_h …)
"""

import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import load_model

model, _ = load_model(Path(sys.argv[1]))
prompts = [mx.random.randint(1, 101, (n,), key=mx.random.key(n)).tolist() for n in (3, 10, 18, 30)]
alone = [
    list(zip(*generate_step(mx.array(prompt), model, max_tokens=6), strict=False))
    for prompt in prompts
]
generator = BatchGenerator(model, max_tokens=6)
uids = generator.insert(prompts)
batch = {uid: [] for uid in uids}
first = {}
while found := generator.next_generated():
    for one in found:
        batch[one.uid].append(one.token)
        first.setdefault(one.uid, one.logprobs)
wrong = False
for prompt, (tokens, rows), uid in zip(prompts, alone, uids, strict=False):
    off = mx.abs(mx.exp(rows[0]) - mx.exp(first[uid])).max().item()
    best = mx.sort(rows[0])[-2:].tolist()
    print(
        len(prompt),
        "tokens: alone",
        list(tokens),
        "in the batch",
        batch[uid],
        f"first token: a probability off by {off:.1e}, margin {best[1] - best[0]:.2f}",
    )
    wrong |= off > 1e-3
sys.exit(wrong)
