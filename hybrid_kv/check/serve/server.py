"""The server of an engine on a socket, which ends in order.

It ends on request, by a signal, or because its engine failed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from contextlib import ExitStack
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hybrid_kv.check.serve.app import Access, Front
from hybrid_kv.check.serve.engine import Engine
from hybrid_kv.check.serve.metrics import Metrics
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM

HARD_LIMIT = 10  # seconds beyond the grace until a reader that does not read is dropped


def open_socket(host: str, port: int, has_key: bool) -> socket.socket:
    """Bind an address of our own; no client can connect before it listens.

    Args:
        port: 0 takes a free one.
        has_key: others need one, so others than this machine are let in only then.

    Raises:
        ConfigError: it cannot be had, or would serve all machines.
    """
    if not _is_loopback(host) and not has_key:
        raise ConfigError(
            f"--host {host} can be reached from other machines: set HYBRID_KV_API_KEY, or use "
            "127.0.0.1"
        )
    with ExitStack() as closing:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )[0]
            opened = closing.enter_context(socket.socket(family, kind, protocol))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"--host {host} --port {port}: {reason}; give another") from None
        closing.pop_all()
    return opened


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Connection(H11Protocol):
    """uvicorn's connection, with a time limit until a request's headers are complete."""

    def __init__(self, receive_timeout: float, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._start_timer = partial(self.loop.call_later, receive_timeout, self._end_if_idle)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._timer.cancel()
        self._timer = self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()

    def _end_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.cycle is not None and self.cycle.more_body:
            self.transport.close()  # a body that is still on its way would hold the server up


class Server(uvicorn.Server):
    """A server of an `LLM` over HTTP. `run(sockets=[…])` returns when it has ended.

    Args:
        max_waiting: sequences that may wait beyond those that run at once.
        grace: seconds that open requests get when the server ends; then they are aborted.
    """

    def __init__(self, llm: LLM, access: Access, max_waiting: int = 256, grace: int = 10) -> None:
        self.access = access
        self.metrics = Metrics(llm, access.model)
        llm.observers.append(self.metrics)
        self.engine = Engine(llm, max_waiting, self.metrics.begun, self.metrics.ended, self._end)
        self.grace = grace
        app = Front(self.engine, self.metrics, access).app
        http: Any = partial(_Connection, access.receive_timeout)
        limits: Any = {"timeout_graceful_shutdown": grace + HARD_LIMIT, "http": http}
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", **limits)
        )

    def _end(self) -> None:
        self.should_exit = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal; raise what a step raised."""
        self.engine.start()
        try:
            super().run(sockets)
        finally:
            self.engine.stop()
        if self.engine.failure is not None:
            raise self.engine.failure

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End the server on Ctrl-C and SIGTERM, and nothing else.

        uvicorn's own would raise them again at its end.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and end those that are open in time."""
        timer = asyncio.get_running_loop().call_later(self.grace, self.engine.abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
