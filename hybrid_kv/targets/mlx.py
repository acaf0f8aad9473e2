"""mlx-lm, in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_kv.targets import remote
from hybrid_kv.targets.remote import Remote, python_of
from hybrid_kv.targets.target import Inside, Known

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
        "prefix=kept",
        "prefix=lru chunk=17",
        "batch=together chunk=17",
        "batch=together prefix=saved",
        "batch=together prefix=lru",
    ),
    # Attention alone is trimmed, and drafted for.
    {"attention": ("prefix=lru", "spec=draft2", "prefix=kept spec=draft2", "batch=together prefix=lru")},
)
known = (
    Known("0.32.2", "mlx_server_dies", ("prefix",), words="has an empty prompt"),
    Known("0.32.2", "mlx_draft_kept", ("prefix", "spec")),
    # With states, a cache serves what goes on with all of it.
    Known("0.32.2", "prefix=kept", ("prefix",), words="cached stayed 0"),
)


def start(folder: str, settings: Mapping[str, str]) -> Remote:
    """See `targets.target.Kind`."""
    return Remote(name, python_of(name, package), folder, settings)


def load() -> None:
    """See `targets.target.Kind`."""
    remote.load(name, python_of(name, package))
