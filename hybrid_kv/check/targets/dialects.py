"""Dialects in which servers take a request for token ids and give its answer.

Only the first was run here, others follow their sources. What is read of a reply is checked,
whatever was sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AliasPath, BaseModel, BeforeValidator, Field, RootModel, ValidationError

from hybrid_kv.check.targets.target import NUM_LIKELIEST, Answer, Ask, TargetError
from hybrid_kv.errors import printable

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
Json = dict[str, Any]

MOST_BYTES = 2**22  # of one reply: an answer has 2**14, a page of metrics 2**18
SHOWN = 200  # characters of a text that is not ours
# Metrics of a server that are counters of the contract, without its prefix and `_total`.
COUNTERS = {
    "prefix_cache_hits": "hits",
    "cached_tokens": "hits",
    "spec_decode_num_drafts": "verifications",
    "spec_verify_calls": "verifications",
    "spec_decode_num_draft_tokens": "drafts",
    "spec_decode_num_accepted_tokens": "accepted",
    "num_preemptions": "preemptions",
    "num_retracted_requests": "preemptions",
    "num_paused_requests": "preemptions",
}

Count = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Count
# `token_id:7`, as vLLM has it.
TokenName = Annotated[TokenId, BeforeValidator(lambda name: int(name.removeprefix("token_id:")))]
# The problems of a million items would take a gigabyte.
Some = Annotated[list[T], Field(fail_fast=True)]


def within(*path: str) -> Any:
    """Return a field that is found along these keys; None if it is not there."""
    return Field(None, validation_alias=AliasPath(*path))


def read(kind: type[M], raw: bytes) -> M:
    """Return what a server sent, parsed.

    A text is no number, and no number is cut to fit.

    Raises:
        TargetError: it is no JSON, or not of this kind.
    """
    try:
        return kind.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise TargetError(problem_of(error)) from None


def problem_of(error: ValidationError) -> str:
    """Return the first problem, with its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return one_line(f"{place}: {first['msg']}" if place else first["msg"])


def one_line(text: str | bytes) -> str:
    """Return the beginning of a text that is not ours, without what a terminal obeys."""
    text = text if isinstance(text, str) else text[: 4 * SHOWN].decode(errors="replace")
    return printable(" ".join(text[: 2 * SHOWN].split()))[:SHOWN]


async def bounded(stream: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a reply.

    Raises:
        TargetError: they are more than a reply has.
    """
    size = 0
    async for part in stream:
        size += max(len(part), 64)  # empty lines take their time, too
        if size > MOST_BYTES:
            raise TargetError(f"the server's reply has more than {MOST_BYTES:,} bytes")
        yield part


class Dialect(Protocol):
    """A server's own API.

    Attributes:
        path: where requests go.
        about: where it says its version.
        reset, preempt: where to ask for it; empty: nowhere.
    """

    path: str
    about: str
    reset: str
    preempt: str

    def body(self, ask: Ask, model: str, stream: bool) -> Json:
        """Return the body of a request."""

    def answer(self, raw: bytes) -> Answer:
        """Return the answer in a whole reply, or the new tokens in an event of a stream.

        Raises:
            TargetError: it has no token ids, or other values than such an answer has.
        """


class _Choice(BaseModel):
    index: int
    token_ids: Some[TokenId]
    logprobs: Some[float | None] | None = within("logprobs", "token_logprobs")
    likeliest: Some[dict[TokenName, float] | None] | None = within("logprobs", "top_logprobs")
    prompt: Some[TokenId] | None = within("prompt_token_ids")


class _Completion(BaseModel):
    choices: Some[_Choice]
    cached_tokens: Count | None = within("usage", "prompt_tokens_details", "cached_tokens")


class Completions:
    """`/v1/completions` with `return_token_ids`: vLLM, TRT-LLM, LMDeploy, `hybrid-kv serve`."""

    path, about, reset = "/v1/completions", "/version", "/reset_prefix_cache"
    preempt = "/reset_prefix_cache?reset_running_requests=true"

    def body(self, ask: Ask, model: str, stream: bool) -> Json:
        body = _given(stop=list(ask.stop) or None, seed=ask.seed, cache_salt=ask.salt or None)
        if ask.logprobs or ask.score:
            body |= {"logprobs": NUM_LIKELIEST, "return_tokens_as_token_ids": True}
        if ask.score:
            body |= {"echo": True}
        return body | {
            "model": model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "n": ask.n,
            "stream": stream,
            "ignore_eos": not ask.stop,
            "return_token_ids": True,
        }

    def answer(self, raw: bytes) -> Answer:
        reply = read(_Completion, raw)
        first, *others = sorted(reply.choices, key=lambda choice: choice.index) or [
            _Choice(index=0, token_ids=[])
        ]
        every = list(zip(first.logprobs or (), first.likeliest or (), strict=False))
        num_echoed = max(0, len(every) - len(first.token_ids))
        echoed = _logprobs((first.prompt or ())[1:num_echoed], every[1:num_echoed])
        rest = tuple(tuple(other.token_ids) for other in others)
        own = _logprobs(first.token_ids, every[num_echoed:])
        return Answer(
            tuple(first.token_ids), reply.cached_tokens, own, rest, prompt_logprobs=echoed
        )


def _given(**fields: Any) -> Json:
    """Return the fields that were requested: those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _logprobs(
    token_ids: Iterable[int], rows: Iterable[tuple[float | None, Mapping[int, float] | None]]
) -> tuple[Mapping[int, float], ...]:
    """Return log-probabilities by token id, one mapping for each token.

    A token without a log-probability, as the first of a prompt, ends the row.
    """
    found = []
    for token, (logprob, others) in zip(token_ids, rows, strict=False):
        if logprob is None:
            break
        found.append({**(others or {}), token: logprob})
    return tuple(found)


_Row = tuple[float | None, TokenId, Any]


class _Generated(BaseModel):
    output_ids: Some[TokenId]
    cached_tokens: Count | None = within("meta_info", "cached_tokens")
    logprobs: Some[_Row] | None = within("meta_info", "output_token_logprobs")
    likeliest: Some[Some[_Row]] | None = within("meta_info", "output_top_logprobs")
    scored: Some[_Row] | None = within("meta_info", "input_token_logprobs")
    scored_likeliest: Some[Some[_Row] | None] | None = within("meta_info", "input_top_logprobs")


_OneOrSome = RootModel[
    _Generated | Annotated[list[_Generated], Field(min_length=1, fail_fast=True)]
]


class SGLang:
    """`/generate`, where ids come and go without an option."""

    path, about, reset, preempt = "/generate", "/version", "/flush_cache", ""

    def body(self, ask: Ask, model: str, stream: bool) -> Json:
        sampling = _given(stop=list(ask.stop) or None, sampling_seed=ask.seed) | {
            "max_new_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "ignore_eos": not ask.stop,
            "n": ask.n,
        }
        body = _given(extra_key=ask.salt or None)
        if ask.logprobs or ask.score:
            body |= {"return_logprob": True, "top_logprobs_num": NUM_LIKELIEST}
        if ask.score:
            body |= {"logprob_start_len": 0}
        return body | {"input_ids": list(ask.prompt), "sampling_params": sampling, "stream": stream}

    def answer(self, raw: bytes) -> Answer:
        reply = read(_OneOrSome, raw).root
        first, *others = reply if isinstance(reply, list) else [reply]
        own = _logprobs(first.output_ids, _rows(first.logprobs, first.likeliest))
        scored_ids = [token for _, token, _ in first.scored or ()]
        # Nothing stands before a prompt's first token.
        scored = _logprobs(scored_ids[1:], _rows(first.scored, first.scored_likeliest)[1:])
        rest = tuple(tuple(other.output_ids) for other in others)
        return Answer(
            tuple(first.output_ids), first.cached_tokens, own, rest, prompt_logprobs=scored
        )


def _rows(
    own: Sequence[_Row] | None, likeliest: Sequence[Sequence[_Row] | None] | None
) -> list[tuple[float | None, dict[int, float]]]:
    """Return each token's own log-probability, and by token those of the likeliest."""
    rows = zip(own or (), likeliest or (), strict=False)
    return [
        (chosen[0], {token: logprob for logprob, token, _ in others or () if logprob is not None})
        for chosen, others in rows
    ]


class _Likely(BaseModel):
    id: TokenId
    logprob: float


class _Chosen(_Likely):
    top_logprobs: Some[_Likely]


class _Predicted(BaseModel):
    index: Count = 0
    tokens: Some[TokenId] = []
    cached_tokens: Count | None = within("timings", "cache_n")
    completion_probabilities: Some[_Chosen] | None = None


_OneOrSomePredicted = RootModel[
    _Predicted | Annotated[list[_Predicted], Field(min_length=1, fail_fast=True)]
]


class LlamaCpp:
    """`/completion` of llama.cpp's server."""

    path, about, reset, preempt = "/completion", "/props", "", ""

    def body(self, ask: Ask, model: str, stream: bool) -> Json:
        num_likeliest = NUM_LIKELIEST if ask.logprobs else None
        several = ask.n if ask.n > 1 else None
        given = _given(
            stop=list(ask.stop) or None, seed=ask.seed, n_probs=num_likeliest, n_cmpl=several
        )
        return given | {
            "prompt": list(ask.prompt),
            "n_predict": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": stream,
            "return_tokens": True,
            "ignore_eos": not ask.stop,
        }

    def answer(self, raw: bytes) -> Answer:
        reply = read(_OneOrSomePredicted, raw).root
        first, *others = (
            sorted(reply, key=lambda one: one.index) if isinstance(reply, list) else [reply]
        )
        # A draft that was accepted has a log-probability of 0 and no alternatives: nothing was
        # computed for it.
        rows = [
            (
                row.logprob if row.top_logprobs else None,
                {one.id: one.logprob for one in row.top_logprobs},
            )
            for row in first.completion_probabilities or ()
        ]
        rest = tuple(tuple(other.tokens) for other in others)
        return Answer(tuple(first.tokens), first.cached_tokens, _logprobs(first.tokens, rows), rest)


# By who owns the model in `/v1/models`.
DIALECTS: dict[str, type[Dialect]] = {"sglang": SGLang, "llamacpp": LlamaCpp}


def dialect_of(owner: str) -> Dialect:
    """Return the dialect of OpenAI's completions, unless the server is known to have its own."""
    return DIALECTS.get(owner.lower(), Completions)()
