"""`hybrid-kv export ENGINE FOLDER`: a test that the engine's own repository can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_kv.cli.options import MAX_SEED


def export(
    engine: Annotated[str, typer.Argument(help="sglang or vllm.", show_default=False)],
    folder: Annotated[
        Path,
        typer.Argument(
            help="Where to write; made if it is not there, empty if it is.", show_default=False
        ),
    ],
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the traffic.")] = 0,
) -> None:
    """Write a test of an engine's caches that needs the engine alone: no GPU, no weights.

    The exact model runs over the engine's own scheduler, pools and metadata.
    """
    from hybrid_kv.check.exports import sglang, vllm
    from hybrid_kv.config import ConfigError
    from hybrid_kv.files import new_folder

    writers = {
        "sglang": (sglang.write_test, "SGLang's Python: python test_exact_hybrid_cache.py"),
        "vllm": (vllm.write_test, "vLLM's Python: pytest test_exact_hybrid_cache.py"),
    }
    if engine not in writers:
        names = " or ".join(writers)
        raise ConfigError(f"{engine}: there is no test to export for it; use {names}")
    write_test, command = writers[engine]
    with new_folder(folder) as made:
        write_test(made, seed)
    print(f"{folder}: run it with {command}")
