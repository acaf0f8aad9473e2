"""Any server that speaks OpenAI's API, by its address; what it can do is found out by asking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from hybrid_kv import environment
from hybrid_kv.config import ConfigError
from hybrid_kv.targets.dialects import COUNTERS, Dialect, dialect_of
from hybrid_kv.targets.target import Answer, Ask, Target, TargetError

T = TypeVar("T")

SECONDS = 300.0  # for one answer
OK = 200
TRIAL = tuple(range(3, 93)) * 6  # longer than most blocks


@dataclass
class Address:
    """A server that is running already. See `targets.target.Kind`.

    It is taken to compute in the dtype that the checkpoint names, as servers do by default.
    """

    name: str
    factors: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"dtype": ("auto",)})
    size: str = "tiny"

    def start(self, folder: str, settings: Mapping[str, str]) -> Target:
        """See `targets.target.Kind`; `folder` is for the oracle alone."""
        return Server(self.name, settings)


class Server:
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
        key = environment.target_key()
        self._url = url.removesuffix("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            (card,) = json.loads(self._request("GET", "/v1/models")[1])["data"][:1]
        except (TargetError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--target {url}: no model is served there: {error or type(error).__name__}") from None
        self.name = str(card.get("owned_by") or "server")
        self.longest = int(card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx") or 2048)
        self.model, self._dialect = str(card["id"]), dialect_of(self.name)
        self.version = self._version()
        self.can: frozenset[str] = frozenset()
        self.can = frozenset(self._found_out(url))

    def _found_out(self, url: str) -> list[str]:
        prompt = TRIAL[: max(1, min(len(TRIAL), self.longest // 2))]
        first = self._one(Ask(prompt, max_tokens=2))
        if first.error or not first.token_ids:
            raise ConfigError(f"--target {url}: it answers without token ids: {first.error or 'none came'}")
        can = ["batch", "abort"]
        if self._can_post(self._dialect.reset):
            can.append("reset")
        if self._can_post(self._dialect.preempt):
            can.append("preempt")
        again = self._one(Ask(prompt, max_tokens=2))
        if again.cached_tokens is not None:
            can.append("cached")
            other = self._one(Ask(prompt, max_tokens=2, salt="trial"))
            if not other.error and not other.cached_tokens:
                can.append("salt")
        if self._one(Ask(prompt[:9], max_tokens=2, logprobs=True)).logprobs:
            can.append("logprobs")
        if len(self._one(Ask(prompt[:9], max_tokens=2, n=2)).others) == 1:
            can.append("n")
        draws = [self._one(Ask(prompt[:9], max_tokens=8, temperature=1.0, seed=7)).token_ids for _ in range(2)]
        if draws[0] == draws[1] != ():
            can.append("seed")
        if "reset" in can:
            self.reset()
        return can

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        """See `Target.ask`."""
        return _answered(self._ask(requests, preempt_every))

    def _one(self, ask: Ask) -> Answer:
        return self.ask([ask])[0]

    async def _ask(self, requests: Sequence[Ask], preempt_every: int) -> list[Answer]:
        async with self._session() as session:
            batch = _Batch(session, self._dialect, self.model, preempt_every)
            return list(await asyncio.gather(*(batch.ask(ask) for ask in requests)))

    def counters(self) -> Mapping[str, float]:
        """See `Target.counters`."""
        found: dict[str, float] = {}
        with suppress(TargetError, ValueError):
            status, text = self._request("GET", "/metrics")
            for family in text_string_to_metric_families(text if status == OK else ""):
                name = COUNTERS.get(family.name.rpartition(":")[2].removesuffix("_total"))
                if name is not None:
                    totals = (one.value for one in family.samples if not one.name.endswith("_created"))
                    found[name] = found.get(name, 0.0) + sum(totals)
        return found

    def reset(self) -> None:
        """See `Target.reset`."""
        self._request("POST", self._dialect.reset)

    def close(self) -> None:
        """See `Target.close`; the server is not ours to end."""

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self._url, headers=self._headers, timeout=aiohttp.ClientTimeout(SECONDS))

    def _request(self, method: str, path: str) -> tuple[int, str]:
        """Status and text."""

        async def request() -> tuple[int, str]:
            async with self._session() as session, session.request(method, path) as reply:
                return reply.status, await reply.text()

        return _answered(request())

    def _can_post(self, path: str) -> bool:
        return bool(path) and self._request("POST", path)[0] == OK

    def _version(self) -> str:
        with suppress(TargetError, ValueError, KeyError, TypeError):
            return str(json.loads(self._request("GET", "/version")[1])["version"])
        return "of unknown version"


def _answered(work: Coroutine[Any, Any, T]) -> T:
    """
    Raises:
        TargetError: the server is gone, or hangs.
    """
    try:
        return asyncio.run(work)
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise TargetError(f"the server does not answer: {type(error).__name__} {error}") from None


class _Batch:
    """Requests of one batch, which wait for one another and are preempted together."""

    def __init__(self, session: aiohttp.ClientSession, dialect: Dialect, model: str, preempt_every: int) -> None:
        self._session, self._dialect, self._model, self._every = session, dialect, model, preempt_every
        self._complete, self._tokens, self._undisturbed = 0, 0, 0
        self._changed = asyncio.Condition()

    async def ask(self, ask: Ask) -> Answer:
        async with self._changed:
            await self._changed.wait_for(lambda: self._complete >= ask.after)
        try:
            is_streamed = ask.abort_after is not None or (self._every > 0 and ask.n == 1 and not ask.logprobs)
            return await (self._stream(ask) if is_streamed else self._whole(ask))
        finally:
            async with self._changed:
                self._complete += 1
                self._changed.notify_all()

    async def _whole(self, ask: Ask) -> Answer:
        body = self._dialect.body(ask, self._model, False)
        async with self._session.post(self._dialect.path, json=body) as reply:
            text = await reply.text()
            if reply.status != OK:
                return Answer((), error=f"HTTP {reply.status}: {text[:200]}")
        try:
            return self._dialect.answer(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            return Answer((), error=f"no token ids: {type(error).__name__} {error}")

    async def _stream(self, ask: Ask) -> Answer:
        tokens: list[int] = []
        body = self._dialect.body(ask, self._model, True)
        async with self._session.post(self._dialect.path, json=body) as reply:
            if reply.status != OK:
                return Answer((), error=f"HTTP {reply.status}: {(await reply.text())[:200]}")
            async for text in _events(reply):
                try:
                    piece = self._dialect.piece(json.loads(text))
                except (KeyError, TypeError, ValueError):  # an error in the middle of an answer, as a rule
                    return Answer(tuple(tokens), error=f"an event without token ids: {text[:200]}")
                tokens += piece
                await self._count(len(piece))
                if ask.abort_after is not None and len(tokens) >= ask.abort_after:
                    reply.close()  # or what is left of the answer would be read
                    break
        return Answer(tuple(tokens))

    async def _count(self, num_tokens: int) -> None:
        self._tokens += num_tokens
        if self._every and self._tokens - self._undisturbed >= self._every:
            self._undisturbed = self._tokens
            async with self._session.post(self._dialect.preempt):
                pass


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for raw in reply.content:
        line = raw.decode()
        text = line.removeprefix("data:").strip()
        if line.startswith("data:") and text != "[DONE]":
            yield text
