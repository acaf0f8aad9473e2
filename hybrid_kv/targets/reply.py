"""Where a server's reply becomes typed values: what is behind this is checked, whatever was sent."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Annotated, Any, TypeVar

from pydantic import AliasPath, BaseModel, BeforeValidator, Field, ValidationError

from hybrid_kv.errors import printable
from hybrid_kv.targets.target import TargetError

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

MOST_BYTES = 2**22  # of one reply: an answer has 2**14, a page of metrics 2**18
SHOWN = 200  # characters of a text that is not ours

Count = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Count
# `token_id:7`, as vLLM has it.
TokenName = Annotated[TokenId, BeforeValidator(lambda name: int(name.removeprefix("token_id:")))]
Some = Annotated[list[T], Field(fail_fast=True)]  # the problems of a million items would take a gigabyte


def within(*path: str) -> Any:
    """A field that is found along these keys; None if it is not there."""
    return Field(None, validation_alias=AliasPath(*path))


def read(kind: type[M], raw: bytes) -> M:
    """What a server said. A text is no number, and no number is cut to fit.

    Raises:
        TargetError: it is no JSON, or not of this kind.
    """
    try:
        return kind.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise TargetError(problem_of(error)) from None


def problem_of(error: ValidationError) -> str:
    """The first problem, with its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return one_line(f"{place}: {first['msg']}" if place else first["msg"])


def one_line(text: str | bytes) -> str:
    """The beginning of a text that is not ours, without what a terminal obeys."""
    text = text if isinstance(text, str) else text[: 4 * SHOWN].decode(errors="replace")
    return printable(" ".join(text[: 2 * SHOWN].split()))[:SHOWN]


async def bounded(stream: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The parts of a reply.

    Raises:
        TargetError: they are more than a reply has.
    """
    size = 0
    async for part in stream:
        size += max(len(part), 64)  # empty lines take their time, too
        if size > MOST_BYTES:
            raise TargetError(f"the server's reply has more than {MOST_BYTES:,} bytes")
        yield part
