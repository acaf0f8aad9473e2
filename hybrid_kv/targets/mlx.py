"""mlx-lm, in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_kv.targets.remote import Remote, python_of
from hybrid_kv.targets.target import Inside

name, package = "mlx", "mlx_lm"
size = "tiny"
factors = {
    # kept: a caller goes on with a request's cache; saved: through a file; lru: what the server does.
    "prefix": ("off", "kept", "saved", "lru"),
    "spec": ("none", "draft2"),  # drafts by the same model with a little noise on its weights
    "chunk": ("whole", "17"),  # prefill_step_size
    "batch": ("one", "together"),  # generate_step one after another, or BatchGenerator
}
inside = Inside(
    factors,
    (
        "chunk=17",
        "prefix=kept,saved,lru",
        "prefix=lru chunk=17",
        "batch=together chunk=17",
        "batch=together prefix=kept,saved,lru",
        "batch=together prefix=lru chunk=17",
    ),
    {"attention": ("prefix=lru", "spec=draft2", "prefix=kept spec=draft2", "batch=together prefix=lru")},  # trimmed
)


def start(folder: str, settings: Mapping[str, str]) -> Remote:
    """See `targets.target.Kind`."""
    return Remote(name, python_of(name, package), folder, settings)
