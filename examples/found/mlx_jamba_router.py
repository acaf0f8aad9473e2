"""Show that mlx-lm's Jamba makes the chosen experts' weights sum to one.

    python mlx_jamba_router.py FOLDER

The model takes them from a softmax over all experts (transformers' JambaSparseMoeBlock, which does
not normalise).
"""

import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.jamba import JambaSparseMoeBlock
from mlx_lm.utils import load_model

model, _ = load_model(Path(sys.argv[1]))
block = next(
    layer.feed_forward
    for layer in model.layers
    if isinstance(layer.feed_forward, JambaSparseMoeBlock)
)
x = mx.random.normal((1, 5, model.args.hidden_size), key=mx.random.key(0))
weights = mx.softmax(block.router(x), axis=-1)
chosen = mx.argsort(-weights, axis=-1)[..., : block.num_experts_per_tok]
kept = mx.take_along_axis(weights, chosen, axis=-1)
expected = (block.switch_mlp(x, chosen) * kept[..., None]).sum(-2)
ratio = (block(x) / expected).mean(-1)[0]
print(
    "weights of the chosen experts sum to",
    kept.sum(-1)[0].tolist(),
    "; the block's output is larger by",
    ratio.tolist(),
)
off = mx.abs(block(x) - expected).max().item()
print("largest difference", off)
sys.exit(off > 1e-3)
