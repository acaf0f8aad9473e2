"""What several commands take and do alike: options with one meaning, where rows go, and JSON instead of a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hybrid_kv.cache.modes import MODES
from hybrid_kv.choices import DraftMethod, StateScheme

if TYPE_CHECKING:
    CacheMode = str
else:
    CacheMode = Literal[tuple(MODES)]
SCHEME_HELP = "How drafts are undone: a state after each token (slots), or one state and a ring of inputs (replay)."

# What an engine is started with; None leaves it at the engine's own default.
MaxNumSeqs = Annotated[int | None, typer.Option(help="Requests that run at once.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens per step.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of prompt and answer at most.")]
AttentionBackendName = Annotated[str | None, typer.Option(help="Layout and kernel block sizes, such as FLASH_ATTN.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per attention block.")]
NumBlocks = Annotated[int | None, typer.Option(help="Blocks in the pool; few of them force preemptions.")]
MambaCacheMode = Annotated[CacheMode | None, typer.Option(help="align and all turn prefix caching on.")]
Scheme = Annotated[StateScheme | None, typer.Option(help=SCHEME_HELP)]
SpeculativeMethod = Annotated[DraftMethod | None, typer.Option(help="Where drafts come from.")]
NumSpeculativeTokens = Annotated[int | None, typer.Option(help="Draft tokens verified per step (K).")]
KVOffloadBytes = Annotated[int | None, typer.Option(help="Host memory for cached blocks.")]
KVOffloadFolder = Annotated[str | None, typer.Option(help="Folder for cached blocks.")]
Dtype = Annotated[str | None, typer.Option(help="Of the arithmetic; auto takes the config's.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
_ENGINE = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "attention_backend", "block_size", "num_blocks",
    "mamba_cache_mode", "state_scheme", "speculative_method", "num_speculative_tokens", "kv_offload_bytes",
    "kv_offload_folder", "pipeline_parallel_size", "dtype", "mamba_ssm_cache_dtype", "device",
)  # fmt: skip

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutFile = Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.")]
Select = Annotated[list[str] | None, typer.Option("-k", help="Only what has this in its name; may be repeated.")]
ResultsFolder = Annotated[
    Path | None, typer.Option("--results", help="Folder whose CSV gets the rows; default: out, which git ignores.")
]
Record = Annotated[bool, typer.Option("--record", help="Append the rows to the project's own, in results.")]


def engine_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's arguments that go to the engine and are not None."""
    return {name: arguments[name] for name in _ENGINE if arguments.get(name) is not None}


def require_at_least_one(**options: int | None) -> None:
    from hybrid_kv.errors import ConfigError

    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer >= 1")


def rows_file(name: str, folder: Path | None, record: bool) -> Path:
    """The CSV called `name` that a command appends its rows to; it can be written.

    Raises:
        HybridKVError: it cannot, or both `--results` and `--record` were given.
    """
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.results import check_writable

    if record and folder is not None:
        raise ConfigError(f"--record and --results {folder} exclude each other; give one of them")
    file = (Path("results") if record else folder or Path("out")) / name
    check_writable(file)
    return file


def show(document: Any, as_json: bool, out: Path | None, table: Callable[[], None]) -> None:
    """Print the table or the JSON document, and write the document to `out`, which must not cost what is printed."""
    from hybrid_kv.files import write_whole

    text = json.dumps(document, indent=2) if as_json or out is not None else ""
    try:
        if out is not None:
            write_whole(out, text + "\n")
    finally:
        if as_json:
            print(text)
        else:
            table()
