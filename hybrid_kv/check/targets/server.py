"""Any server that speaks OpenAI's API, by its address; what it can do is found out by asking."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import AliasChoices, BaseModel, Field

from hybrid_kv import environment
from hybrid_kv.check.targets.dialects import (
    COUNTERS,
    Count,
    Dialect,
    bounded,
    dialect_of,
    one_line,
    read,
    within,
)
from hybrid_kv.check.targets.target import Answer, Ask, Kind, TargetError
from hybrid_kv.config import ConfigError

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

SECONDS = 300.0  # for one reply
OK = 200
# A counter's name without a prefix and `_total`, and its value.
METRIC = re.compile(r"^(?:\w+:)?(\w+?)(?:_total)?(?:\{.*\})? (\S+)", re.M)
TRIAL = tuple(range(3, 93)) * 6  # longer than most blocks


class _Card(BaseModel):
    id: str
    owned_by: str | None = None
    max_model_len: Count | None = None
    n_ctx: Count | None = within("meta", "n_ctx")


class _Cards(BaseModel):
    data: Annotated[list[_Card], Field(min_length=1, fail_fast=True)]


class _About(BaseModel):
    version: str = Field(validation_alias=AliasChoices("version", "build_info"))
    # Of llama.cpp, whose slots may share the length that it reports for each.
    total_slots: Annotated[Count, Field(ge=1)] = 1


def kind_at(url: str) -> Kind:
    """Return the kind of a server that is running already.

    The folder of its checkpoint is for the oracle alone. The server is taken to compute
    in the dtype that the checkpoint names, as servers do by default.
    """
    return Kind(url, {"dtype": ("auto",)}, lambda folder, settings: ServerTarget(url, settings))


class ServerTarget:
    """See `targets.target.Target`.

    Args:
        url: with or without `/v1`.

    Attributes:
        model: as the server calls it.

    Raises:
        ConfigError: nothing answers there, or not in token ids.
    """

    def __init__(self, url: str, settings: Mapping[str, str]) -> None:
        self.settings: Mapping[str, str] = dict(settings)
        self.batch_class: Callable[..., RequestBatch] = RequestBatch
        key = environment.target_key()
        self.url = url.removesuffix("/").removesuffix("/v1")
        # What is packed may be a thousand times as large.
        self._headers = {"Accept-Encoding": "identity"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        try:
            (card, *_) = self._get(_Cards, "/v1/models").data
        except TargetError as error:
            raise ConfigError(f"{url}: no model is served there: {error}") from None
        self.name = one_line(card.owned_by or "server")
        self.longest = card.max_model_len or card.n_ctx or 2048
        self.model, self._dialect = card.id, dialect_of(self.name)
        self.version = "of unknown version"
        with suppress(TargetError):
            about = self._get(_About, self._dialect.about)
            self.version, self.longest = (
                one_line(about.version),
                max(2, self.longest // about.total_slots),
            )
        self.can = frozenset(self._found_out(url))

    def _found_out(self, url: str) -> list[str]:
        prompt = TRIAL[: max(1, min(len(TRIAL), self.longest // 2))]
        first = self._one(Ask(prompt, max_tokens=2))
        if first.error or not first.token_ids:
            raise ConfigError(f"{url}: it answers without token ids: {first.error or 'none came'}")
        self.counters()
        posts = {
            "reset": self._can_post(self._dialect.reset),
            "preempt": self._can_post(self._dialect.preempt),
        }
        again, other = (self._one(Ask(prompt, max_tokens=2, salt=salt)) for salt in ("", "trial"))
        is_cached = again.cached_tokens is not None
        draws = [
            self._one(Ask(prompt[:9], max_tokens=8, temperature=1.0, seed=7)).token_ids
            for _ in range(2)
        ]
        can = posts | {
            "cached": is_cached,
            "salt": is_cached and not other.error and not other.cached_tokens,
            "logprobs": bool(self._one(Ask(prompt[:9], max_tokens=2, logprobs=True)).logprobs),
            "score": bool(self._one(Ask(prompt[:9], max_tokens=1, score=True)).prompt_logprobs),
            "n": len(self._one(Ask(prompt[:9], max_tokens=2, n=2)).others) == 1,
            "seed": draws[0] == draws[1] != (),
        }
        if can["reset"]:
            self.reset()
        return ["batch", "abort", *(name for name, is_there in can.items() if is_there)]

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        """See `Target.ask`."""
        return _answered(self._ask(requests, preempt_every))

    def _one(self, ask: Ask) -> Answer:
        return self.ask([ask])[0]

    async def _ask(self, requests: Sequence[Ask], preempt_every: int) -> list[Answer]:
        async with self._session() as session:
            batch = self.batch_class(session, self._dialect, self.model, preempt_every)
            return list(await asyncio.gather(*(batch.ask(ask) for ask in requests)))

    def counters(self) -> Mapping[str, float]:
        """See `Target.counters`."""
        found: dict[str, float] = {}
        status, page = self._request("GET", "/metrics")
        for name, value in METRIC.findall(page.decode(errors="replace") if status == OK else ""):
            if counter := COUNTERS.get(name):
                found[counter] = found.get(counter, 0.0) + _count(value, counter)
        return found

    def reset(self) -> None:
        """See `Target.reset`."""
        self._request("POST", self._dialect.reset)

    def close(self) -> None:
        """See `Target.close`; the server is not ours to end."""

    def _session(self) -> aiohttp.ClientSession:
        limit = aiohttp.ClientTimeout(SECONDS)
        # A server may end an idle connection at the moment at which the next request goes into it.
        once = aiohttp.TCPConnector(force_close=True)
        return aiohttp.ClientSession(
            f"{self.url}/",
            connector=once,
            headers=self._headers,
            timeout=limit,
            auto_decompress=False,
        )

    def _request(self, method: str, path: str) -> tuple[int, bytes]:
        """Return the status and the body of a reply."""

        async def request() -> tuple[int, bytes]:
            async with self._session() as session, _sent(session, method, path) as reply:
                return reply.status, await _body(reply)

        return _answered(request())

    def _get(self, kind: type[M], path: str) -> M:
        status, raw = self._request("GET", path)
        if status != OK:
            raise TargetError(_refusal(status, raw))
        return read(kind, raw)

    def _can_post(self, path: str) -> bool:
        return bool(path) and self._request("POST", path)[0] == OK


def _count(text: str, counter: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) < 2**63:
            return value
    raise TargetError(
        f"the server's counter of {counter} is {one_line(text)}; a counter is a number from 0 on"
    )


def _answered(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a query to a server.

    Raises:
        TargetError: the server is gone, or hangs.
    """
    try:
        return asyncio.run(work)
    except asyncio.TimeoutError:
        raise TargetError(f"the server did not answer in {SECONDS:g} s") from None
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError):
        raise TargetError(
            "the server closed the connection before its reply was complete"
        ) from None
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
        raise TargetError(
            f"the server does not answer: {type(error).__name__} {one_line(str(error))}"
        ) from None


def _sent(session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    """Return a request that follows no redirect: its target is no server that was named."""
    return session.request(method, path.removeprefix("/"), json=body, allow_redirects=False)


def _refusal(status: int, raw: bytes) -> str:
    return f"HTTP {status}: {one_line(raw)}".removesuffix(": ")


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    return b"".join([part async for part in bounded(reply.content.iter_any())])


class RequestBatch:
    """Requests of one batch, which wait for one another and are preempted together."""

    def __init__(
        self, session: aiohttp.ClientSession, dialect: Dialect, model: str, preempt_every: int
    ) -> None:
        self._session, self._dialect, self._model, self._every = (
            session,
            dialect,
            model,
            preempt_every,
        )
        self._complete, self._tokens, self._undisturbed = 0, 0, 0
        self._changed = asyncio.Condition()

    async def ask(self, ask: Ask) -> Answer:
        async with self._changed:
            await self._changed.wait_for(lambda: self._complete >= ask.after)
        try:
            is_streamed = ask.abort_after is not None or (
                self._every > 0 and ask.n == 1 and not ask.logprobs and not ask.score
            )
            answer = await self.answer(ask, is_streamed)
            if (most := max(map(len, (answer.token_ids, *answer.others)))) > ask.max_tokens:
                return Answer((), error=f"{most} tokens for max_tokens={ask.max_tokens}")
            return answer
        finally:
            async with self._changed:
                self._complete += 1
                self._changed.notify_all()

    async def answer(self, ask: Ask, is_streamed: bool, **fields: object) -> Answer:
        """Return the answer to one request, whose body also has these fields."""
        return await (self._stream(ask, fields) if is_streamed else self._whole(ask, fields))

    async def _whole(self, ask: Ask, fields: Mapping[str, object]) -> Answer:
        async with self._post(ask, fields, stream=False) as reply:
            raw = await _body(reply)
            if reply.status != OK:
                return Answer((), error=_refusal(reply.status, raw))
        try:
            return self._dialect.answer(raw)
        except TargetError as error:
            return Answer((), error=f"no token ids: {error}")

    async def _stream(self, ask: Ask, fields: Mapping[str, object]) -> Answer:
        tokens: list[int] = []
        most = ask.max_tokens + 1 if ask.abort_after is None else ask.abort_after
        async with self._post(ask, fields, stream=True) as reply:
            if reply.status != OK:
                return Answer((), error=_refusal(reply.status, await _body(reply)))
            async for raw in _events(reply):
                try:
                    piece = self._dialect.answer(raw).token_ids
                except TargetError:  # an error in the middle of an answer, as a rule
                    return Answer(
                        tuple(tokens), error=f"an event without token ids: {one_line(raw)}"
                    )
                tokens += piece
                await self._count(len(piece))
                if len(tokens) >= most:
                    reply.close()  # or what is left of the answer would be read
                    break
        return Answer(tuple(tokens))

    def _post(self, ask: Ask, fields: Mapping[str, object], stream: bool) -> Any:
        body = self._dialect.body(ask, self._model, stream) | dict(fields)
        return _sent(self._session, "POST", self._dialect.path, body)

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Return a request that is no one's answer."""
        return _sent(self._session, "POST", path, body)

    async def _count(self, num_tokens: int) -> None:
        self._tokens += num_tokens
        if self._every and self._tokens - self._undisturbed >= self._every:
            self._undisturbed = self._tokens
            async with _sent(self._session, "POST", self._dialect.preempt):
                pass


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in bounded(reply.content):
        text = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and text != b"[DONE]":
            yield text
