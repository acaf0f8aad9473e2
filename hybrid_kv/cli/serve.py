"""`hybrid-kv serve`: the engine behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from hybrid_kv.cli.options import (
    AttentionBackendName,
    BlockSize,
    Device,
    Dtype,
    KVOffloadBytes,
    KVOffloadFolder,
    MambaCacheMode,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    NumBlocks,
    NumSpeculativeTokens,
    Scheme,
    SpeculativeMethod,
    engine_options,
)

API_KEY = "HYBRID_KV_API_KEY"


def serve(
    model: Annotated[str | None, typer.Option(help="Checkpoint folder; default: the embedded guard model.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="In the API; default: the folder's name.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file, instead of the checkpoint's own.")] = None,
    host: Annotated[str, typer.Option(help=f"Other than this machine only with {API_KEY}.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are answered 429.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request; a longer one is answered 413.")] = 2**22,
    grace: Annotated[int, typer.Option(min=0, help="Seconds to finish what is open when told to end.")] = 10,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    attention_backend: AttentionBackendName = None,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    mamba_cache_mode: MambaCacheMode = None,
    state_scheme: Scheme = None,
    speculative_method: SpeculativeMethod = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    kv_offload_bytes: KVOffloadBytes = None,
    kv_offload_folder: KVOffloadFolder = None,
    async_scheduling: Annotated[
        Literal["on", "off"] | None, typer.Option(help="Schedule a step before the last one's tokens are known.")
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, typer.Option(help="Schedule as for so many stages; one device computes them.")
    ] = None,
    dtype: Dtype = None,
    mamba_ssm_cache_dtype: Annotated[str | None, typer.Option(help="Of the states; float64 to go with it.")] = None,
    device: Device = None,
) -> None:
    """Serve a checkpoint over HTTP, in the way of OpenAI's API; ends with Ctrl-C or SIGTERM."""
    from hybrid_kv.errors import require

    require("safetensors", "tokenizers", "transformers", "fastapi", "uvicorn", "prometheus_client")
    from hybrid_kv import LLM
    from hybrid_kv.serve.app import Access
    from hybrid_kv.serve.server import Server, open_socket

    options = engine_options(locals())
    if async_scheduling is not None:
        options["async_scheduling"] = async_scheduling == "on"
    api_key = os.environ.get(API_KEY) or None
    template = _text(chat_template) if chat_template is not None else None
    if model is None:
        from hybrid_kv.accuracy.guard_model import FOLDER

        model = str(FOLDER)
    name = served_model_name or Path(model).resolve().name
    with open_socket(host, port, api_key is not None) as opened:
        llm = LLM(model, **options)
        server = Server(llm, Access(name, api_key, max_body_bytes, template), max_waiting, grace)
        url = f"http://{f'[{host}]' if ':' in host else host}:{opened.getsockname()[1]}/v1"
        print(f"{name} at {url}; Ctrl-C ends it", flush=True)
        server.run(sockets=[opened])


def _text(file: Path) -> str:
    from hybrid_kv.config import ConfigError
    from hybrid_kv.files import refuse_device

    refuse_device(file)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text: byte {error.start} is not UTF-8") from None
