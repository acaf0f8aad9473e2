"""Show that a cache of mlx-lm lacks the last token that was given out with a draft model.

    python mlx_draft_kept.py FOLDER (llama)

The next turn starts one position too early; mlx_lm.server stores the cache under a key with that
token.
"""

import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

model, _ = load_model(Path(sys.argv[1]))
wrong = False
for first in ([(7 * i + j) % 100 + 1 for i in range(20)] for j in range(4)):
    plain, drafted = make_prompt_cache(model), make_prompt_cache(model) + make_prompt_cache(model)
    answer = [
        token
        for token, _ in generate_step(mx.array(first), model, max_tokens=4, prompt_cache=plain)
    ]
    steps = speculative_generate_step(
        mx.array(first), model, model, num_draft_tokens=3, max_tokens=4, prompt_cache=drafted
    )
    assert [int(token) for token, *_ in steps] == answer
    print(
        "tokens",
        len(first) + 4,
        "held without drafts",
        plain[0].offset,
        "with drafts",
        drafted[0].offset,
    )
    turn = mx.array([5, 6, 7])
    expected = [
        token
        for token, _ in generate_step(mx.array(first + answer + [5, 6, 7]), model, max_tokens=4)
    ]
    steps = speculative_generate_step(
        turn, model, model, num_draft_tokens=3, max_tokens=4, prompt_cache=drafted
    )
    got = [int(token) for token, *_ in steps]
    print(
        "second turn",
        got,
        "cold",
        expected,
        "kept without drafts",
        [token for token, _ in generate_step(turn, model, max_tokens=4, prompt_cache=plain)],
    )
    wrong |= got != expected
sys.exit(wrong)
