"""`hybrid-kv generate`: prompts continued on the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli.options import AsJson, Model, OutFile, dataclass_options, engine_options, show

if TYPE_CHECKING:
    from hybrid_kv.engine.llm import RequestOutput


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The choice of tokens, and the end of an answer."""

    max_tokens: Annotated[int, typer.Option(help="Tokens per answer at most.")] = 64
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens up to this probability.")
    ] = 1.0
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
    ] = None


@engine_options
@dataclass_options
def generate(
    sampling: SamplingOptions,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts; without any, one per line of stdin."),
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
    out: OutFile = None,
    **engine: Any,
) -> None:
    """Continue prompts with a checkpoint, through paged block tables."""
    from hybrid_kv import LLM, SamplingParams
    from hybrid_kv.check.guard_model import FOLDERS, embedded
    from hybrid_kv.cli.plan import report_memory
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs

    require("safetensors", "tokenizers", "transformers")
    check_outputs(out)
    texts = prompts or _lines_of_stdin()
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=tuple(sampling.stop or ()),
    )
    folder = embedded(model)
    if folder not in FOLDERS.values():
        report_memory(str(folder), engine)
    llm = LLM(folder, **engine)
    outputs = llm.generate(texts, params, progress=len(texts) > 1)
    documents = [_document(output) for output in outputs]
    show(documents, as_json, out, _print_outputs, outputs)
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise ConfigError("; ".join(errors))


def _lines_of_stdin() -> list[str]:
    from hybrid_kv.config import ConfigError

    if sys.stdin is None:
        raise ConfigError("no prompt: give one as an argument; standard input is closed")
    try:
        # A prompt is UTF-8 in every locale.
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not text: byte {error.start} is not UTF-8") from None
    if not text:
        raise ConfigError("no prompt: give one as an argument or on standard input")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _document(output: RequestOutput) -> dict[str, Any]:
    names = ("prompt", "text", "token_ids", "finish_reason", "error")
    return {name: getattr(output, name) for name in names}


def _print_outputs(outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        if output.error is None:
            print(f"{output.prompt}{output.text}")
