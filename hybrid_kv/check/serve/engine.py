"""The thread that owns the engine.

The front gives it commands through a queue and hears of its steps through others.

A sequence is *waiting for the thread* (its command is queued), then *open* (the scheduler has it,
waiting or running), then *ended*: by itself, by an abort that the next step carries out, or because
the engine failed. Commands run between steps, in the order in which they were given, so an abort
follows the submission that it is for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from hybrid_kv.check.serve.schema import Prompt
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.engine.text import TextStream
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams, TokenLogprobs

T = TypeVar("T")


class BusyError(HybridKVError):
    """There is no room for more sequences now; there will be."""

    status = 429
    code = "too_many_requests"


class StoppedError(HybridKVError):
    """The engine takes no commands any more."""

    status = 503


@dataclass(frozen=True)
class Piece:
    """A step's tokens for sequence number `index` of a submission.

    `output` comes with the last piece of a sequence.

    `logprobs` are as many as tokens, or empty where the client wants none.
    """

    index: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs]
    output: RequestOutput | None = None


@dataclass(eq=False)
class Submission:
    """The sequences of one HTTP request, and their tokens so far.

    Args:
        wants_steps: a piece for every step that gives tokens; else one piece per sequence, when it
            ends.
    """

    sequences: Sequence[tuple[Prompt, SamplingParams]]
    wants_steps: bool = False
    requests: list[Request] = field(default_factory=list)  # once they are open
    arrived: float = field(default_factory=time.perf_counter)
    pieces: asyncio.Queue[Piece | StoppedError] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def put(self, piece: Piece | StoppedError) -> None:
        """Put a piece from the engine's thread; it is dropped when the front has gone."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


@dataclass(eq=False)
class _Open:
    """A sequence that the scheduler has."""

    request: Request
    submission: Submission
    index: int
    stream: TextStream | None
    num_sent: int = 0  # of its tokens

    def piece(self, output: RequestOutput | None) -> Piece | None:
        """Return the new tokens, if their reader takes them now."""
        if output is None and not self.submission.wants_steps:
            return None
        new = self.request.output_token_ids[self.num_sent :]
        if output is None and not new:
            return None
        logprobs = self.request.logprobs[self.num_sent :]
        self.num_sent += len(new)
        new_text = ""
        if self.stream is not None:
            new_text = (
                self.stream.add(new)
                if output is None
                else output.text[self.stream.num_characters :]
            )
        return Piece(self.index, new, new_text, logprobs, output)


class Engine:
    """An `LLM` and the thread that owns it from `start` to `stop`.

    Args:
        max_waiting: sequences that may be open beyond those that run at once.
        on_begin: called from the thread when a sequence is open, with the time at which it arrived.
        on_end: called from the thread when it has ended.
        on_failure: called from the thread when a step raised; the engine has stopped then.

    Attributes:
        failure: what a step raised.
    """

    def __init__(
        self,
        llm: LLM,
        max_waiting: int,
        on_begin: Callable[[Request, float], None],
        on_end: Callable[[RequestOutput], None],
        on_failure: Callable[[], None],
    ) -> None:
        self.llm = llm
        self.max_open = llm.config.scheduler.max_num_seqs + max_waiting
        self.on_begin = on_begin
        self.on_end = on_end
        self.on_failure = on_failure
        self.failure: BaseException | None = None
        self._open: dict[str, _Open] = {}
        self._commands: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._closing = threading.Lock()  # between the last command and the end of the thread
        self._is_closed = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- for the front ----

    def start(self) -> None:
        """Begin to take commands."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True while commands are taken."""
        return self._thread.is_alive() and not self._is_closed

    def check_room(self, count: int) -> None:
        """Check the room before any work for a request of `count` sequences.

        Raises:
            ConfigError: so many can never be open.
            BusyError: too many are open.
        """
        if count > self.max_open:
            raise ConfigError(
                f"{count} sequences in one request, {self.max_open} may be open; send fewer at once"
            )
        if len(self._open) + count > self.max_open:
            raise BusyError(
                f"{len(self._open)} of {self.max_open} sequences are open, {count} more do not "
                "fit; try again later"
            )

    async def submit(self, submission: Submission) -> None:
        """Open all sequences of a submission, or none.

        Raises:
            ConfigError: one of them can never run.
            BusyError: too many are open.
            StoppedError: the engine has stopped.
        """
        try:
            await self.call(partial(self._submit, submission))
        except asyncio.CancelledError:
            self.abort(submission)
            raise

    def abort(self, submission: Submission) -> None:
        """End the open sequences of a submission; their blocks return at the next step."""

        def aborting() -> None:
            for request in submission.requests:
                self.llm.abort(request.request_id)

        with suppress(StoppedError):
            self._give(aborting)

    def abort_all(self) -> None:
        """End every open sequence; their readers get what they have, as aborted."""
        with suppress(StoppedError):
            self._give(self._abort_all)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps.

        Raises:
            StoppedError: the engine has stopped.
            Exception: what the function raises.
        """
        return await asyncio.wrap_future(self._give(function))

    def stop(self) -> None:
        """End what is open, and the thread."""

        def stopping() -> None:
            self._abort_all()
            self._is_stopping = True

        with suppress(StoppedError):
            self._give(stopping)
        self._thread.join()

    # ---- the thread ----

    def _give(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._closing:
            if self._is_closed:
                raise StoppedError(self._why())
            self._commands.put((function, future))
        return future

    def _why(self, failure: BaseException | None = None) -> str:
        failure = failure or self.failure
        if failure is None:
            return "the server is shutting down"
        return f"the engine has failed, the server's log says how: {type(failure).__name__}"

    def _run(self) -> None:
        try:
            while not self._is_stopping or self._open:
                self._take_commands()
                if self.llm.has_work:
                    self._step()
        except BaseException as error:
            self.failure = error
        finally:
            self._close()
        if self.failure is not None:
            self.on_failure()

    def _take_commands(self) -> None:
        """Run the commands that are there; without a request, wait for one."""
        while not self._commands.empty() or not (self.llm.has_work or self._is_stopping):
            function, future = self._commands.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            # The command's fault; anything else leaves an engine in an unknown state.
            except HybridKVError as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(StoppedError(self._why(error)))
                raise

    def _submit(self, submission: Submission) -> None:
        if self._is_stopping:
            raise StoppedError(self._why())
        self.check_room(len(submission.sequences))
        try:
            for prompt, params in submission.sequences:
                request = self.llm.add_request(prompt, params)
                submission.requests.append(request)
                self._check_length(request)
        except BaseException:
            for request in submission.requests:
                self.llm.scheduler.finish(request)
            submission.requests.clear()
            raise
        tokenizer = self.llm.tokenizer
        for index, request in enumerate(submission.requests):
            stream = TextStream(tokenizer, request.params.stop) if tokenizer is not None else None
            self._open[request.request_id] = _Open(request, submission, index, stream)
            self.on_begin(request, submission.arrived)

    def _check_length(self, request: Request) -> None:
        """Refuse an answer that `max_model_len` would cut.

        A client could not tell it from a whole one.
        """
        length = len(request.prompt_token_ids)
        limit = self.llm.config.scheduler.max_model_len
        if length + request.params.max_tokens > limit:
            raise ConfigError(
                f"the prompt's {length} tokens and max_tokens={request.params.max_tokens} are more "
                "than max_model_len="
                f"{limit}; lower max_tokens or shorten the prompt"
            )

    def _step(self) -> None:
        ended = {request.request_id: reason for request, reason in self.llm.step()}
        for request_id, sequence in list(self._open.items()):
            reason = ended.get(request_id)
            output = self.llm.output(sequence.request, reason) if reason is not None else None
            if output is not None:
                del self._open[request_id]
                self.on_end(output)
            piece = sequence.piece(output)
            if piece is not None:
                sequence.submission.put(piece)

    def _abort_all(self) -> None:
        self.llm.wake_up()  # What is aborted is ended by a step.
        for request_id in self._open:
            self.llm.abort(request_id)

    def _close(self) -> None:
        """Notify all clients that still wait."""
        with self._closing:
            self._is_closed = True
        error = StoppedError(self._why())
        for submission in {
            id(sequence.submission): sequence.submission for sequence in self._open.values()
        }.values():
            submission.put(error)
        self._open.clear()
        while not self._commands.empty():
            _, future = self._commands.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
