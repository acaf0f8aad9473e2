"""The front: routes, access, limits and errors, in an asyncio loop.

The engine runs in its own thread.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import reprlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hybrid_kv import __version__
from hybrid_kv.check.serve.answers import ChatAnswer, CompletionAnswer, Json
from hybrid_kv.check.serve.engine import Engine, Piece, StoppedError, Submission
from hybrid_kv.check.serve.metrics import Metrics
from hybrid_kv.check.serve.schema import (
    BadRequestError,
    ChatRequest,
    CompletionRequest,
    Prompt,
    Sent,
    parse,
)
from hybrid_kv.check.serve.template import render
from hybrid_kv.config import ConfigError, HybridKVError

Answer = CompletionAnswer | ChatAnswer
VERBS = ("sleep", "wake_up")  # methods of the engine without arguments
CLIENT_CLOSED_REQUEST = 499  # nginx's number; clients have gone
MAX_TEMPLATES = 2  # that run at once, each in a process


@dataclass(frozen=True)
class Access:
    """The clients that are served, and how much at once. Without `api_key` all are.

    Args:
        max_body_bytes: of a request, and of the text that a template makes of it.
        receive_timeout: seconds to send the headers of a request, and again for its body.
    """

    model: str
    api_key: str | None = None
    max_body_bytes: int = 2**20
    chat_template: str | None = None
    receive_timeout: float = 60


class ApiError(HybridKVError):
    """A request that is at fault, in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Front:
    """The routes of one engine."""

    def __init__(self, engine: Engine, metrics: Metrics, access: Access) -> None:
        self.engine = engine
        self.metrics = metrics
        self.access = access
        self.started = int(time.time())
        self._templates = asyncio.Semaphore(MAX_TEMPLATES)
        self.app = FastAPI(title="hybrid-kv", docs_url=None, redoc_url=None, openapi_url=None)
        posts = {f"/{verb}": self.run_verb for verb in VERBS}
        posts |= {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat_completions,
        }
        posts |= {"/reset_prefix_cache": self.reset_prefix_cache}
        gets = {
            "/v1/models": self.models,
            "/is_sleeping": self.is_sleeping,
            "/metrics": self.prometheus,
        }
        access_free = {"/version": self.version, "/health": self.health}
        guarded = [Depends(self._authorize)]
        for method, needs, routes in (
            ("POST", guarded, posts),
            ("GET", guarded, gets),
            ("GET", [], access_free),
        ):
            for path, route in routes.items():
                self.app.add_api_route(
                    path, route, methods=[method], response_model=None, dependencies=needs
                )
        self.app.exception_handler(HybridKVError)(_refused)
        self.app.exception_handler(HTTPException)(_no_route)
        self.app.exception_handler(Exception)(_refused)  # a bug: uvicorn logs it

    # ---- routes ----

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        sent = await self._parsed(request, CompletionRequest)
        self.engine.check_room(len(sent.prompts) * sent.num_choices)
        prompts = await run_in_threadpool(self._encoded, sent.prompts)
        answer = CompletionAnswer(sent, self.access.model, self.engine.llm.tokenizer)
        # OpenAI's default; 0 with echo.
        max_tokens = 16 if sent.max_tokens is None else max(1, sent.max_tokens)
        logprobs = {
            "logprobs": sent.logprobs,
            "prompt_logprobs": sent.logprobs if sent.echo else None,
        }
        return await self._answer(request, answer, prompts, {"max_tokens": max_tokens} | logprobs)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation, by the checkpoint's own template."""
        sent = await self._parsed(request, ChatRequest)
        self.engine.check_room(sent.num_choices)
        answer = ChatAnswer(sent, self.access.model, self.engine.llm.tokenizer)
        prompt = await self._conversation(sent)
        given = sent.max_completion_tokens or sent.max_tokens
        max_tokens = given or max(1, self.engine.llm.config.scheduler.max_model_len - len(prompt))
        num_top = (sent.top_logprobs or 0) if sent.logprobs else None
        return await self._answer(
            request, answer, [prompt], {"max_tokens": max_tokens, "logprobs": num_top}
        )

    async def models(self) -> Response:
        """List the model that there is."""
        limit = self.engine.llm.config.scheduler.max_model_len
        card = {
            "id": self.access.model,
            "object": "model",
            "created": self.started,
            "owned_by": "hybrid-kv",
        }
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": limit}]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached prefixes.

        With `reset_running_requests=true` running requests are preempted first.
        """
        value = request.query_params.get("reset_running_requests", "false").lower()
        if value not in ("true", "false"):
            raise BadRequestError(
                f"reset_running_requests={value} must be true or false", "reset_running_requests"
            )
        await self.engine.call(partial(self.engine.llm.reset_prefix_cache, value == "true"))
        return Response()

    async def run_verb(self, request: Request) -> Response:
        """Call the method of the engine that the path names."""
        await self.engine.call(getattr(self.engine.llm, request.url.path.removeprefix("/")))
        return Response()

    async def is_sleeping(self) -> Response:
        """Tell whether requests wait for `wake_up`."""
        return JSONResponse({"is_sleeping": self.engine.llm.is_sleeping})

    async def prometheus(self) -> Response:
        """Return the counters."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> Response:
        """Return this package's version."""
        return JSONResponse({"version": __version__})

    async def health(self) -> Response:
        """Return 200 as long as the engine takes requests."""
        if not self.engine.is_alive:
            raise StoppedError("the engine has stopped")
        return Response()

    # ---- requests ----

    async def _authorize(self, request: Request) -> None:
        if self.access.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # In constant time: how long a wrong key is compared must not tell how much of it is right.
        expected = self.access.api_key.encode(errors="surrogateescape")  # as the environment had it
        is_right = hmac.compare_digest(key.encode("latin-1"), expected)
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401, "no valid API key: send it as Authorization: Bearer KEY", "invalid_api_key"
            )

    async def _parsed(self, request: Request, kind: type[Sent]) -> Sent:
        try:
            body = await asyncio.wait_for(self._body(request), self.access.receive_timeout)
        except (asyncio.TimeoutError, ClientDisconnect):
            raise ApiError(
                408, f"the body did not arrive within {self.access.receive_timeout:g} s"
            ) from None
        sent = parse(kind, body)
        if sent.model is not None and sent.model != self.access.model:
            message = (
                f"the model {reprlib.repr(sent.model)} does not exist; this server serves "
                f"{self.access.model!r}"
            )
            raise ApiError(404, message, "model_not_found")
        return sent

    def _encoded(self, prompts: list[Prompt]) -> list[Prompt]:
        """Encode each prompt once, whatever the number of choices."""
        encode = self.engine.llm.tokenizer.encode if self.engine.llm.tokenizer is not None else None
        return [
            encode(prompt) if encode and isinstance(prompt, str) else prompt for prompt in prompts
        ]

    async def _conversation(self, sent: ChatRequest) -> list[int]:
        """Return a template's prompt of messages; a template writes the special tokens itself."""
        tokenizer: Any = self.engine.llm.tokenizer
        given = self.access.chat_template
        default = getattr(tokenizer, "chat_template", None)
        template = default if given is None else given
        if template is None:
            raise BadRequestError(
                f"{self.access.model} has no chat template: start the server with --chat-template, "
                "or send "
                "/v1/completions",
                "messages",
            )
        messages = [message.as_template_input() for message in sent.messages]
        variables: Json = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        variables |= tokenizer.special_tokens_map
        try:
            async with self._templates:
                rendered = await run_in_threadpool(
                    render, template, variables, self.access.max_body_bytes
                )
        except ConfigError as error:
            raise BadRequestError(
                f"the chat template refuses these messages: {error}", "messages"
            ) from None
        return list(await run_in_threadpool(tokenizer.encode, rendered, add_special_tokens=False))

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"content-type is {kind!r}; send JSON as application/json")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.access.max_body_bytes:
                raise ApiError(413, f"the body is longer than {self.access.max_body_bytes} bytes")
        return bytes(body)

    async def _answer(
        self, request: Request, answer: Answer, prompts: list[Prompt], options: Json
    ) -> Response:
        sent = answer.sent
        params = [
            sent.sampling_params(choice=choice, **options) for choice in range(sent.num_choices)
        ]
        submission = Submission(
            [(prompt, choice_params) for prompt in prompts for choice_params in params],
            bool(sent.stream),
        )
        if submission.wants_steps:
            # What is wrong with it is said with a status of its own.
            await self.engine.submit(submission)
            return _Stream(self._events(answer, submission), self.engine, submission)
        work = asyncio.ensure_future(self._document(answer, submission))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return (
                JSONResponse(work.result())
                if work.done()
                else Response(status_code=CLIENT_CLOSED_REQUEST)
            )
        finally:
            work.cancel()
            gone.cancel()
            self.engine.abort(submission)

    async def _document(self, answer: Answer, submission: Submission) -> Json:
        await self.engine.submit(submission)
        pieces = [piece async for piece in self._pieces(submission)]
        return answer.document(submission, sorted(pieces, key=attrgetter("index")))

    async def _events(self, answer: Answer, submission: Submission) -> AsyncIterator[str]:
        try:
            async for piece in self._pieces(submission):
                for event in answer.events(submission, piece):
                    yield _event(event)
        except HybridKVError as error:
            yield _event(_error(error)[1])
            return
        last = answer.last_event(submission)
        if last is not None:
            yield _event(last)
        yield "data: [DONE]\n\n"

    async def _pieces(self, submission: Submission) -> AsyncIterator[Piece]:
        """Yield pieces until all sequences have ended."""
        left = len(submission.sequences)
        while left:
            piece = await submission.pieces.get()
            if isinstance(piece, StoppedError):
                raise piece
            left -= piece.output is not None
            yield piece


class _Stream(StreamingResponse):
    """Server-sent events. Sequences that outlive it are aborted: their reader has gone."""

    def __init__(self, events: AsyncIterator[str], engine: Engine, submission: Submission) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.engine = engine
        self.submission = submission

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self.engine.abort(self.submission)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(document: Json) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _error(error: Exception) -> tuple[int, Json]:
    """Return the status and the document of an error, in OpenAI's form and one line."""
    status = getattr(error, "status", 400 if isinstance(error, ConfigError) else 500)
    kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(
        status, "invalid_request_error"
    )
    message = f"internal error: {type(error).__name__}"
    if isinstance(error, HybridKVError):
        message = " ".join(str(error).split())
    details = {
        "message": message,
        "type": kind,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return status, {"error": details}


async def _refused(_: Request, error: Exception) -> Response:
    status, document = _error(error)
    close = {"Connection": "close"}  # what is left of the body will not be read
    headers = {
        401: {"WWW-Authenticate": "Bearer"},
        408: close,
        413: close,
        429: {"Retry-After": "1"},
    }.get(status)
    return JSONResponse(document, status, headers)


async def _no_route(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _refused(request, ApiError(error.status_code, message))
