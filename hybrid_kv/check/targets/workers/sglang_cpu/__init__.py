"""SGLang's scheduler with the exact model on a CPU.

Nothing of SGLang is copied or edited on disk. It is set in the process: `prepare` before SGLang is
imported, `finish` after that; then a `play.SglangScheduler`. Modules of this folder import each
other, torch and SGLang alone: a reproducer contains them.

What is replaced, and what that hides, is in docs/changed-sglang.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def prepare() -> None:
    """Make this process one in which SGLang can be imported."""
    import_module(f"{__name__}.stand").prepare()


def finish() -> None:
    """Import SGLang's scheduler, and let it run on a CPU what it knows for other devices."""
    import_module("sglang.srt.managers.scheduler")
    import_module(f"{__name__}.stand").finish()
    import_module(f"{__name__}.model")


def start(config: dict[str, Any], options: dict[str, Any], changes: dict[str, Any]) -> Any:
    """Return a `play.SglangScheduler`."""
    return import_module(f"{__name__}.play").SglangScheduler(config, options, changes)


def replay(case: dict[str, Any]) -> None:
    """Play the case of a reproducer, and end with 1 while its answer is wrong."""
    prepare()
    finish()
    import_module(f"{__name__}.play").main(case)
