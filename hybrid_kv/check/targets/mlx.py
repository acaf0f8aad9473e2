"""mlx-lm, in an environment of its own."""

from __future__ import annotations

from hybrid_kv.check.targets.remote import remote_kind
from hybrid_kv.check.targets.target import Inside, Known

_FACTORS = {
    # kept: a caller goes on with a request's cache; saved: through a file; lru: as the server does.
    "prefix": ("off", "kept", "saved", "lru"),
    "spec": ("none", "draft2"),  # drafts by the same model with a little noise on its weights
    "chunk": ("whole", "17"),  # prefill_step_size
    "batch": ("one", "together"),  # generate_step one after another, or BatchGenerator
}
_INSIDE = Inside(
    _FACTORS,
    (
        "prefix=kept",
        "prefix=lru chunk=17",
        "batch=together chunk=17",
        "batch=together prefix=saved",
        "batch=together prefix=lru",
    ),
    # Attention alone is trimmed, and drafted for.
    {
        "attention": (
            "prefix=lru",
            "spec=draft2",
            "prefix=kept spec=draft2",
            "batch=together prefix=lru",
        )
    },
)
_KNOWN = (
    Known("0.32.2", "mlx_server_dies", ("prefix",), words="has an empty prompt"),
    Known("0.32.2", "mlx_draft_kept", ("prefix", "spec")),
    # With states, a cache serves what goes on with all of it.
    Known("0.32.2", "prefix=kept", ("prefix",), words="cached stayed 0"),
)
# The exact model has none.
_DTYPES = {"dtype": ("float32", "bfloat16")}
KIND = remote_kind("mlx", "mlx_lm", {**_FACTORS, **_DTYPES}, inside=_INSIDE, known=_KNOWN)
