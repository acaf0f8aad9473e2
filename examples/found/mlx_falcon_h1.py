"""Show that mlx-lm drops key_multiplier of Falcon-H1: any value gives the same logits.

python mlx_falcon_h1.py FOLDER
"""

import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

text = mx.array([list(range(5, 35))])
rows = []
for multiplier in (0.1, 1.0, 10.0):
    model, config = load_model(
        Path(sys.argv[1]), model_config={"key_multiplier": multiplier, "rope_theta": 10000.0}
    )
    rows.append(model(text)[0])
    print("key_multiplier", model.args.key_multiplier, "last logits", rows[-1][-1, :4].tolist())
same = all(bool(mx.array_equal(rows[0], row)) for row in rows)
print("all three are equal" if same else "they differ")
sys.exit(same)
