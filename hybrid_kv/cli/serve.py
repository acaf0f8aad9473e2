"""`hybrid-kv serve`: the engine behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid_kv import environment
from hybrid_kv.cli.options import Model, dataclass_options, engine_options


@dataclass(frozen=True, kw_only=True)
class HTTPOptions:
    """The address of the server, and its limits."""

    host: Annotated[
        str, typer.Option(help=f"Address; other machines need {environment.API_KEY}.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Waiting requests; others are answered 429.")
    ] = 256
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Longest request; others are answered 413.")
    ] = 2**20
    receive_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds to send headers, and a body.")
    ] = 60
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds to finish open requests at shutdown.")
    ] = 10


@engine_options
@dataclass_options
def serve(
    http: HTTPOptions,
    model: Model = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in the API; default: the folder's.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file, instead of the checkpoint's own.")
    ] = None,
    **engine: Any,
) -> None:
    """Serve a checkpoint over HTTP with OpenAI's API, until Ctrl-C or SIGTERM."""
    from hybrid_kv.errors import require

    require("safetensors", "tokenizers", "transformers", "fastapi", "uvicorn", "prometheus_client")
    from hybrid_kv import LLM
    from hybrid_kv.check.guard_model import embedded
    from hybrid_kv.check.serve.app import Access
    from hybrid_kv.check.serve.server import Server, open_socket
    from hybrid_kv.cli.plan import report_memory
    from hybrid_kv.files import read_text

    api_key = environment.api_key()
    template = read_text(chat_template) if chat_template is not None else None
    folder = embedded(model)
    name = served_model_name or Path(folder).resolve().name
    access = Access(name, api_key, http.max_body_bytes, template, http.receive_timeout)
    with open_socket(http.host, http.port, api_key is not None) as opened:
        report_memory(str(folder), engine)
        server = Server(LLM(folder, **engine), access, http.max_waiting, http.grace)
        host = f"[{http.host}]" if ":" in http.host else http.host
        opened.listen()  # who reads the address may connect
        url = f"http://{host}:{opened.getsockname()[1]}/v1"
        print(f"{name} at {url}; Ctrl-C ends it", flush=True)
        server.run(sockets=[opened])
