"""OpenAI's JSON of the engine's outputs, whole or event by event; extensions as vLLM's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from hybrid_kv.check.serve.engine import Piece, Submission
from hybrid_kv.check.serve.schema import ChatRequest, CompletionRequest
from hybrid_kv.engine.text import Tokenizer
from hybrid_kv.request import Request
from hybrid_kv.sampling import TokenLogprobs

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's number for it


class _Answer:
    """The answer of both endpoints.

    A choice is made of pieces: one if the answer is whole, else one per event.
    """

    id_prefix: str
    whole: str  # the `object` of an answer …
    event: str  # … and of an event of a stream

    def __init__(
        self, sent: CompletionRequest | ChatRequest, model: str, tokenizer: Tokenizer | None
    ) -> None:
        self.sent = sent
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()  # choices of which something was said

    def document(self, submission: Submission, pieces: Sequence[Piece]) -> Json:
        """Return all choices, in order, of a piece each."""
        choices = [self._choice(piece, submission.requests[piece.index]) for piece in pieces]
        usage = self._usage(submission.requests)
        return (
            self._head
            | {"object": self.whole, "choices": choices, "usage": usage}
            | self._beside(submission)
        )

    def events(self, submission: Submission, piece: Piece) -> Iterable[Json]:
        """Yield the events of a piece for a stream."""
        yield self._event(self._choice(piece, submission.requests[piece.index]))

    def last_event(self, submission: Submission) -> Json | None:
        """Return the usage, if the client asked for it."""
        options = self.sent.stream_options
        if options is None or not options.include_usage:
            return None
        return self._head | {
            "object": self.event,
            "choices": [],
            "usage": self._usage(submission.requests),
        }

    def _event(self, choice: Json) -> Json:
        return self._head | {"object": self.event, "choices": [choice]}

    def _usage(self, requests: Sequence[Request]) -> Json:
        """Return the tokens of all choices of all prompts.

        A prompt counts once, with the hit of its first choice.
        """
        prompts = requests[:: self.sent.num_choices]
        prompt_tokens = sum(len(request.prompt_token_ids) for request in prompts)
        completion_tokens = sum(len(request.output_token_ids) for request in requests)
        if self.sent.max_tokens == 0:
            completion_tokens = 0  # the engine gives one to each; the client wants none
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(request.hit.num_tokens for request in prompts)
            },
        }

    def _beside(self, submission: Submission) -> Json:
        """Return fields of the answer as a whole."""
        return {}

    def _choice(self, piece: Piece, request: Request) -> Json:
        """Return the fields of a choice that both endpoints have."""
        ids = {"token_ids": list(piece.token_ids)} if self.sent.return_token_ids else {}
        reason = piece.output.finish_reason if piece.output is not None else None
        return {"index": piece.index, "finish_reason": reason, "logprobs": None} | ids

    def _token(self, token: int) -> str:
        """Return a token as a key or a text: its own characters, or its number.

        No other token has its number.
        """
        if self._tokenizer is None or self.sent.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._tokenizer.decode([token])


class CompletionAnswer(_Answer):
    """The answer to `/v1/completions`.

    With `echo` the first piece of a choice begins with the prompt.
    """

    id_prefix = "cmpl"
    whole = "text_completion"
    event = "text_completion"
    sent: CompletionRequest

    def __init__(self, sent: CompletionRequest, model: str, tokenizer: Tokenizer | None) -> None:
        super().__init__(sent, model, tokenizer)
        self._ends: dict[int, int] = {}  # of each choice's tokens so far, in characters

    def _choice(self, piece: Piece, request: Request) -> Json:
        sent = self.sent
        is_first = piece.index not in self._begun
        self._begun.add(piece.index)
        token_ids = list(piece.token_ids)
        content = piece.text
        logprobs: list[TokenLogprobs | None] = list(piece.logprobs)
        if sent.max_tokens == 0:
            token_ids = []
            content = ""
            logprobs = []
        choice = super()._choice(piece, request)
        if sent.return_token_ids:
            choice["token_ids"] = token_ids
            choice |= {"prompt_token_ids": request.prompt_token_ids} if is_first else {}
        if sent.echo and is_first:
            prompt = request.prompt_token_ids
            content = self._prompt_text(piece.index, prompt) + content
            token_ids = prompt + token_ids
            # Nothing stands before the first token.
            logprobs = [None, *request.prompt_logprobs, *logprobs]
        if sent.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece.index, token_ids, logprobs)
        return choice | {"text": content}

    def _prompt_text(self, index: int, token_ids: Sequence[int]) -> str:
        prompt = self.sent.prompts[index // self.sent.num_choices]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(token_ids) if self._tokenizer is not None else ""

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> Json:
        tokens = [self._token(token) for token in token_ids]
        *offsets, self._ends[index] = accumulate(map(len, tokens), initial=self._ends.get(index, 0))
        return {
            "text_offset": offsets,
            "token_logprobs": [
                None if entry is None else max(LEAST_LOGPROB, entry.logprob) for entry in logprobs
            ],
            "tokens": tokens,
            "top_logprobs": [
                None if entry is None else self._likeliest(token, entry)
                for token, entry in zip(tokens, logprobs, strict=True)
            ],
        }

    def _likeliest(self, token: str, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return log-probabilities by token, the chosen one too.

        Of tokens with the same characters the likelier one is kept.
        """
        by_token: dict[str, float] = {}
        for other, value in logprobs.top:
            by_token.setdefault(self._token(other), max(LEAST_LOGPROB, value))
        by_token.setdefault(token, max(LEAST_LOGPROB, logprobs.logprob))
        return by_token


class ChatAnswer(_Answer):
    """The answer to `/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole = "chat.completion"
    event = "chat.completion.chunk"
    sent: ChatRequest

    def events(self, submission: Submission, piece: Piece) -> Iterable[Json]:
        """Yield the events of a piece; before the first of a choice the speaker."""
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            delta = {"role": "assistant", "content": ""}
            yield self._event(
                {"index": piece.index, "delta": delta, "finish_reason": None}
            ) | self._beside(submission)
        choice = self._choice(piece, submission.requests[piece.index])
        choice["delta"] = {"content": choice.pop("message")["content"]}
        yield self._event(choice)

    def _beside(self, submission: Submission) -> Json:
        return (
            {"prompt_token_ids": submission.requests[0].prompt_token_ids}
            if self.sent.return_token_ids
            else {}
        )

    def _choice(self, piece: Piece, request: Request) -> Json:
        choice = super()._choice(piece, request) | {
            "message": {"role": "assistant", "content": piece.text}
        }
        if self.sent.logprobs:
            rows = zip(piece.token_ids, piece.logprobs, strict=True)
            content = [
                self._entry(token, entry.logprob)
                | {"top_logprobs": [self._entry(*other) for other in entry.top]}
                for token, entry in rows
            ]
            choice["logprobs"] = {"content": content}
        return choice

    def _entry(self, token: int, logprob: float) -> Json:
        characters = self._token(token)
        return {
            "token": characters,
            "logprob": max(LEAST_LOGPROB, logprob),
            "bytes": list(characters.encode()),
        }
