"""How servers spell a request for token ids and its answer. Read from their sources; only the first was run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hybrid_kv.targets.target import Answer, Ask

Json = dict[str, Any]
NUM_LIKELIEST = 5
# Of the metrics behind a server's prefix, those that are counters of the contract, with `_total` left out.
COUNTERS = {
    "prefix_cache_hits": "hits",
    "cached_tokens": "hits",
    "spec_decode_num_draft_tokens": "drafts",
    "spec_decode_num_accepted_tokens": "accepted",
    "num_preemptions": "preemptions",
    "num_retracted_requests": "preemptions",
    "num_paused_requests": "preemptions",
}


class Dialect(Protocol):
    """A server's own API.

    Attributes:
        path: where requests go.
        reset, preempt: where to ask for it; empty: nowhere.
    """

    path: str
    reset: str
    preempt: str

    def body(self, ask: Ask, model: str, stream: bool) -> Json:
        """What is sent."""

    def answer(self, reply: Json) -> Answer:
        """What came back, whole.

        Raises:
            KeyError, TypeError: it has no token ids.
        """

    def piece(self, reply: Json) -> tuple[int, ...]:
        """The new tokens of an event of a stream."""


class Completions:
    """`/v1/completions` with `return_token_ids`: vLLM, TRT-LLM, LMDeploy, `hybrid-kv serve`."""

    path, reset = "/v1/completions", "/reset_prefix_cache"
    preempt = "/reset_prefix_cache?reset_running_requests=true"

    def body(self, ask: Ask, model: str, stream: bool) -> Json:
        body: Json = {
            "model": model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "n": ask.n,
            "stream": stream,
            "ignore_eos": not ask.stop,
            "return_token_ids": True,
        }
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.seed is not None:
            body["seed"] = ask.seed
        if ask.salt:
            body["cache_salt"] = ask.salt
        if ask.logprobs:
            body |= {"logprobs": NUM_LIKELIEST, "return_tokens_as_token_ids": True}
        return body

    def answer(self, reply: Json) -> Answer:
        first, *others = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        return Answer(
            tuple(first["token_ids"]),
            details.get("cached_tokens"),
            self._logprobs(first),
            tuple(tuple(other["token_ids"]) for other in others),
        )

    @staticmethod
    def _logprobs(choice: Json) -> tuple[Mapping[int, float], ...]:
        reply = choice.get("logprobs") or {}
        found = []
        for token, own, likeliest in zip(
            choice["token_ids"], reply.get("token_logprobs") or (), reply.get("top_logprobs") or (), strict=False
        ):
            by_id = {int(name.removeprefix("token_id:")): value for name, value in likeliest.items()}
            found.append({**by_id, token: own})
        return tuple(found)

    def piece(self, reply: Json) -> tuple[int, ...]:
        return tuple(token for choice in reply["choices"][:1] for token in choice["token_ids"])


class SGLang:
    """`/generate`, where ids come and go without an option."""

    path, reset, preempt = "/generate", "/flush_cache", ""

    def body(self, ask: Ask, model: str, stream: bool) -> Json:
        sampling: Json = {
            "max_new_tokens": ask.max_tokens, "temperature": ask.temperature, "ignore_eos": not ask.stop, "n": ask.n,
        }  # fmt: skip
        if ask.stop:
            sampling["stop"] = list(ask.stop)
        if ask.seed is not None:
            sampling["sampling_seed"] = ask.seed
        body: Json = {"input_ids": list(ask.prompt), "sampling_params": sampling, "stream": stream}
        if ask.salt:
            body["extra_key"] = ask.salt
        if ask.logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": NUM_LIKELIEST}
        return body

    def answer(self, reply: Any) -> Answer:
        first, *others = reply if isinstance(reply, list) else [reply]
        meta = first["meta_info"]
        own: Sequence[Any] = meta.get("output_token_logprobs") or ()
        likeliest: Sequence[Any] = meta.get("output_top_logprobs") or ()
        logprobs = tuple(
            {**{int(row[1]): row[0] for row in rows}, int(one[1]): one[0]}
            for one, rows in zip(own, likeliest, strict=False)
        )
        rest = tuple(tuple(other["output_ids"]) for other in others)
        return Answer(tuple(first["output_ids"]), meta.get("cached_tokens"), logprobs, rest)

    def piece(self, reply: Json) -> tuple[int, ...]:
        return tuple(reply["output_ids"])


class LlamaCpp:
    """`/completion` of llama.cpp's server."""

    path, reset, preempt = "/completion", "", ""

    def body(self, ask: Ask, model: str, stream: bool) -> Json:
        body: Json = {
            "prompt": list(ask.prompt), "n_predict": ask.max_tokens, "temperature": ask.temperature, "stream": stream,
            "cache_prompt": True, "return_tokens": True, "ignore_eos": not ask.stop,
        }  # fmt: skip
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.seed is not None:
            body["seed"] = ask.seed
        if ask.logprobs:
            body["n_probs"] = NUM_LIKELIEST
        return body

    def answer(self, reply: Json) -> Answer:
        logprobs = tuple(
            {**{int(row["id"]): row["logprob"] for row in one["top_logprobs"]}, int(one["id"]): one["logprob"]}
            for one in reply.get("completion_probabilities") or ()
        )
        return Answer(tuple(reply["tokens"]), (reply.get("timings") or {}).get("cache_n"), logprobs)

    def piece(self, reply: Json) -> tuple[int, ...]:
        return tuple(reply.get("tokens") or ())


# By who owns the model in `/v1/models`.
DIALECTS: dict[str, type[Dialect]] = {"sglang": SGLang, "llamacpp": LlamaCpp}


def dialect_of(owner: str) -> Dialect:
    """That of OpenAI's completions unless the server is known to have its own."""
    return DIALECTS.get(owner.lower(), Completions)()
