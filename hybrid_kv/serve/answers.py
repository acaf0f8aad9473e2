"""From what the engine gave to OpenAI's JSON, whole or event by event. Extensions are spelled as vLLM's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from hybrid_kv.engine.llm import RequestOutput
from hybrid_kv.engine.text import Tokenizer
from hybrid_kv.request import Request
from hybrid_kv.serve.engine import Piece, Submission
from hybrid_kv.serve.schema import ChatRequest, CompletionRequest

Json = dict[str, Any]


def usage(requests: Sequence[Request], num_choices: int) -> Json:
    """Tokens of all choices of all prompts; a prompt counts once, with the hit of its first choice."""
    prompts = requests[::num_choices]
    prompt_tokens = sum(len(request.prompt_token_ids) for request in prompts)
    completion_tokens = sum(len(request.output_token_ids) for request in requests)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.hit.num_tokens for request in prompts)},
    }


class _Answer:
    """What both endpoints say in the same way."""

    id_prefix: str
    whole, event = "", ""  # the `object` of an answer, and of an event of a stream

    def __init__(self, asked: CompletionRequest | ChatRequest, model: str, tokenizer: Tokenizer | None) -> None:
        self.asked, self.tokenizer = asked, tokenizer
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def document(self, submission: Submission, outputs: Sequence[RequestOutput]) -> Json:
        """All choices, in order."""
        choices = [
            self._choice(Piece(index, output.token_ids, output.text, output), request, is_first=True)
            for index, (request, output) in enumerate(zip(submission.requests, outputs, strict=True))
        ]
        numbers = usage(submission.requests, self.asked.num_choices)
        return self._head | {"object": self.whole, "choices": choices, "usage": numbers} | self._beside(submission)

    def events(self, submission: Submission, piece: Piece, is_first: bool) -> Iterable[Json]:
        """What a piece is to a stream; `is_first`: of its choice."""
        raise NotImplementedError

    def last_event(self, submission: Submission) -> Json | None:
        """The usage, if it was asked for."""
        options = self.asked.stream_options
        if options is None or not options.include_usage:
            return None
        return self._head | {
            "object": self.event, "choices": [], "usage": usage(submission.requests, self.asked.num_choices),
        }  # fmt: skip

    def _beside(self, submission: Submission) -> Json:
        return {}

    def _choice(self, piece: Piece, request: Request, is_first: bool) -> Json:
        raise NotImplementedError

    def _common(self, piece: Piece) -> Json:
        ids = {"token_ids": list(piece.token_ids)} if self.asked.return_token_ids else {}
        reason = piece.output.finish_reason if piece.output is not None else None
        return {"index": piece.index, "logprobs": None, "finish_reason": reason} | ids


class CompletionAnswer(_Answer):
    """To `/v1/completions`."""

    id_prefix, whole, event = "cmpl", "text_completion", "text_completion"
    asked: CompletionRequest

    def events(self, submission: Submission, piece: Piece, is_first: bool) -> Iterable[Json]:
        choice = self._choice(piece, submission.requests[piece.index], is_first)
        yield self._head | {"object": self.event, "choices": [choice]}

    def _choice(self, piece: Piece, request: Request, is_first: bool) -> Json:
        choice = self._common(piece) | {"text": piece.text}
        if is_first and self.asked.return_token_ids:
            choice["prompt_token_ids"] = request.prompt_token_ids
        return choice


class ChatAnswer(_Answer):
    """To `/v1/chat/completions`."""

    id_prefix, whole, event = "chatcmpl", "chat.completion", "chat.completion.chunk"
    asked: ChatRequest

    def events(self, submission: Submission, piece: Piece, is_first: bool) -> Iterable[Json]:
        if is_first:
            choice = {"index": piece.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield self._head | {"object": self.event, "choices": [choice]} | self._beside(submission)
        choice = self._common(piece) | {"delta": {"content": piece.text}}
        yield self._head | {"object": self.event, "choices": [choice]}

    def _beside(self, submission: Submission) -> Json:
        return {"prompt_token_ids": submission.requests[0].prompt_token_ids} if self.asked.return_token_ids else {}

    def _choice(self, piece: Piece, request: Request, is_first: bool) -> Json:
        return self._common(piece) | {"message": {"role": "assistant", "content": piece.text}}
