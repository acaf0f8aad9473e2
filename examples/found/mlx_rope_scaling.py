"""Show that mlx-lm drops the YaRN of an LFM2: any factor gives the same logits.

python mlx_rope_scaling.py FOLDER
"""

import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

text = mx.array([list(range(5, 69))])
rows = []
for factor in (1.0, 4.0, 16.0):
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }
    model, config = load_model(Path(sys.argv[1]), model_config={"rope_parameters": rope})
    rows.append(model(text)[0])
    print("factor", factor, "last logits", rows[-1][-1, :4].tolist())
same = all(bool(mx.array_equal(rows[0], row)) for row in rows)
print("all three are equal" if same else "they differ")
sys.exit(same)
