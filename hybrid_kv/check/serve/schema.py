"""The requests of clients: OpenAI's fields, and vLLM's extensions that the engine has.

Validation is strict and complete: an unknown field is rejected by name, since one that is silently
dropped gives an answer to another question than was sent.
"""

from __future__ import annotations

import reprlib
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hybrid_kv.config import ConfigError
from hybrid_kv.sampling import SamplingParams

MAX_LOGPROBS = 20  # alternatives per token, as in vLLM and OpenAI's chat
MAX_CHOICES = 128  # `n`, as in OpenAI
MAX_STOPS = 64  # stop strings, and stop tokens: each step looks for all of them

Prompt = str | list[int]
Zero = Annotated[float, Field(ge=0, le=0)]
Count = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class BadRequestError(ConfigError):
    """A body that cannot be answered; `param` is the field at fault, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Body):
    """Options of a stream: with `include_usage` a last event has the usage, and no choices."""

    include_usage: bool = False


class _Sampled(_Body):
    """The fields that completions and chat share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)] | str | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None  # of OpenAI's accounting: it changes no answer
    # Clients send these unasked; any other value would change the answer.
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> _Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    def sampling_params(self, max_tokens: int, choice: int = 0, **more: Any) -> SamplingParams:
        """Return the parameters of choice number `choice`, which draws with a seed of its own.

        Raises:
            ConfigError: a value that the engine refuses.
        """
        seed = self.seed
        if seed is not None and -(2**63) <= seed < 2**63:
            seed = (seed + choice + 2**63) % 2**64 - 2**63
        return SamplingParams(
            max_tokens,
            1.0 if self.temperature is None else self.temperature,
            0 if self.top_k in (None, -1) else self.top_k,  # -1: vLLM's clients keep all with it
            1.0 if self.top_p is None else self.top_p,
            seed,
            tuple([self.stop] if isinstance(self.stop, str) else self.stop or ()),
            tuple(self.stop_token_ids or ()),
            self.ignore_eos,
            self.cache_salt or "",
            **more,
        )


class CompletionRequest(_Sampled):
    """`POST /v1/completions`. `prompt` is a text, token ids, or a list of either."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Count | None = None
    echo: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _is_a_prompt(cls, value: Any) -> Any:
        if not isinstance(value, str) and not is_token_ids(value):
            several = isinstance(value, list) and all(
                isinstance(prompt, str) or is_token_ids(prompt) for prompt in value
            )
            if not several:
                raise ValueError("must be a text, a list of token ids, or a list of these")
            if not value:
                raise ValueError("is an empty list; give at least one prompt")
        return value

    @model_validator(mode="after")
    def _nothing_is_wanted(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 gives no token; give at least 1, or echo=true")
        return self

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts, one or several."""
        return (
            self.prompt
            if isinstance(self.prompt, list) and not is_token_ids(self.prompt)
            else [self.prompt]
        )


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of a conversation; which roles there are is the template's business."""

    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    def as_template_input(self) -> dict[str, str]:
        """Return the message as chat templates read it."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "".join(piece.text for piece in self.content)
        )
        return {"role": self.role, "content": content} | (
            {"name": self.name} if self.name is not None else {}
        )


class ChatRequest(_Sampled):
    """`POST /v1/chat/completions`.

    Without a limit an answer may take what `max_model_len` leaves it.
    """

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


def is_token_ids(value: object) -> bool:
    """Return whether a value is a list of integers, not empty; True is none."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


Sent = TypeVar("Sent", CompletionRequest, ChatRequest)


def parse(kind: type[Sent], body: bytes) -> Sent:
    """Parse the body of a request.

    Raises:
        BadRequestError: the first thing that is wrong with it, in one line.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(key) for key in first["loc"])[:100] or None
    field = str(first["loc"][0])[:100] if first["loc"] else None
    if first["type"] == "json_invalid":
        raise BadRequestError(
            f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
        )
    if first["type"] == "extra_forbidden" or str(field).endswith("_penalty"):
        raise BadRequestError(f"{name} is not supported; leave it out", field)
    problem = first["msg"].removeprefix("Value error, ")
    if name is None or first["type"] == "missing":
        raise BadRequestError(problem if name is None else f"{name} is missing", field)
    raise BadRequestError(f"{name}: {problem}, given {reprlib.repr(first['input'])}", field)
