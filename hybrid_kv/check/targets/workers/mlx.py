"""mlx-lm 0.32 in its own process, driven as its server drives it.

It is started as `python mlx.py` and speaks the protocol of `pipe`.

Its answers go through `generate_step`, one request after another, or through `BatchGenerator`, all
together. A setting or a model that mlx-lm refuses is a `ValueError` in its own words.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COUNTERS = ("hits", "drafts", "accepted")
NUM_LIKELIEST = 5
LONGEST, EXACT_LONGEST = 2048, 640  # it sets no limit of its own
SERVER_CACHES = 10  # --prompt-cache-size
NOISE = 0.05  # of a weight's own size: a draft model that is right often, not always


class KeptCaches:
    """Caches that a caller keeps and continues.

    Each serves the one prompt that begins with the tokens that it holds.
    """

    def __init__(self) -> None:
        self._caches: dict[tuple[int, ...], Any] = {}

    def take(self, prompt: list[int]) -> tuple[Any, int]:
        """Return a cache and the number of tokens that it holds.

        They are None and 0 if there is none for this prompt.
        """
        held = (
            one
            for one in self._caches
            if len(one) < len(prompt) and one == tuple(prompt[: len(one)])
        )
        tokens: tuple[int, ...] = max(held, key=len, default=())
        return self._caches.pop(tokens, None), len(tokens)

    def give(self, tokens: list[int], cache: Any) -> None:
        self._caches[tuple(tokens)] = cache


class SavedCaches(KeptCaches):
    """Kept in files."""

    def __init__(self) -> None:
        super().__init__()
        self._folder, self._count = tempfile.TemporaryDirectory(), 0

    def take(self, prompt: list[int]) -> tuple[Any, int]:
        from mlx_lm.models.cache import load_prompt_cache

        path, num_cached = super().take(prompt)
        return (load_prompt_cache(path) if path else None), num_cached

    def give(self, tokens: list[int], cache: Any) -> None:
        from mlx_lm.models.cache import save_prompt_cache

        self._count += 1
        path = str(Path(self._folder.name) / f"{self._count}.safetensors")
        save_prompt_cache(path, cache)
        super().give(tokens, path)


class LruCaches:
    """The server's caches, of which those not used for the longest time go first."""

    def __init__(self) -> None:
        from mlx_lm.models.cache import LRUPromptCache

        self._caches = LRUPromptCache(SERVER_CACHES)

    def take(self, prompt: list[int]) -> tuple[Any, int]:
        cache, rest = self._caches.fetch_nearest_cache("", prompt)
        return cache, len(prompt) - len(rest)

    def give(self, tokens: list[int], cache: Any) -> None:
        self._caches.insert_cache("", tokens, cache)


class MlxEngine:
    """See `pipe.serve`."""

    def version(self) -> str:
        import mlx_lm

        return mlx_lm.__version__

    def start(self, folder: str, settings: dict[str, str]) -> dict[str, Any]:
        from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

        spec = settings.get("spec", "none")
        self._store = {"off": None, "kept": KeptCaches, "saved": SavedCaches, "lru": LruCaches}[
            settings.get("prefix", "off")
        ]
        chunk = settings.get("chunk", "whole")
        self._step = LONGEST if chunk == "whole" else int(chunk)
        self._num_drafts = 0 if spec == "none" else int(spec.removeprefix("draft"))
        # With a draft model the server takes one request after another, too.
        self._together = settings.get("batch", "one") == "together" and not self._num_drafts
        dtype = settings.get("dtype", "float32")
        self._model = load(Path(folder), dtype)
        if self._num_drafts:
            if not can_trim_prompt_cache(cache := make_prompt_cache(self._model)):
                kinds = ", ".join(sorted({type(one).__name__ for one in cache}))
                raise ValueError(
                    f"spec={spec}: it drafts only with caches that can be trimmed, not with {kinds}"
                )
            self._draft = noisy(load(Path(folder), dtype))
        self._counts: Counter[str] = Counter()
        self.reset()
        is_exact = hasattr(self._model, "echo")
        can = ["cached", "reset", "abort", *(["batch", "steps"] if self._together else ["seed"])]
        can += [] if is_exact else ["logprobs"]  # of the exact model they say nothing
        return {"can": can, "longest": EXACT_LONGEST if is_exact else LONGEST}

    def ask(self, requests: list[dict[str, Any]], preempt_every: int) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{"token_ids": [], "logprobs": []} for _ in requests]
        (self._all_together if self._together else self._one_by_one)(requests, answers)
        return answers

    def counters(self) -> dict[str, float]:
        return {name: float(self._counts[name]) for name in COUNTERS}

    def reset(self) -> None:
        self._caches = self._store() if self._store else None
        self._batch: Any = None

    def _take(self, prompt: list[int], answer: dict[str, Any]) -> tuple[Any, list[int]]:
        """Return a cache, and the tokens of the prompt that it lacks."""
        cache, num_cached = self._caches.take(prompt) if self._caches else (None, 0)
        answer["cached_tokens"] = num_cached
        self._counts["hits"] += num_cached
        return cache, prompt[num_cached:]

    def _give(self, tokens: list[int], cache: Any) -> None:
        if self._caches:
            self._caches.give(tokens, cache)

    def _one_by_one(self, requests: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
        waiting = list(range(len(requests)))
        while waiting:
            complete = len(requests) - len(waiting)
            i = next((i for i in waiting if requests[i]["after"] <= complete), waiting[0])
            waiting.remove(i)
            try:
                self._one(requests[i], answers[i])
            except Exception as error:
                answers[i]["error"] = said(error)

    def _one(self, ask: dict[str, Any], answer: dict[str, Any]) -> None:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        cache, rest = self._take(ask["prompt"], answer)
        if cache is None:
            cache = make_prompt_cache(self._model)
            if self._num_drafts:
                cache += make_prompt_cache(self._draft)
        if ask["seed"] is not None:
            mx.random.seed(ask["seed"])
        end = (
            ask["max_tokens"]
            if ask["abort_after"] is None
            else min(ask["abort_after"], ask["max_tokens"])
        )
        for token, logprobs in self._steps(mx.array(rest), cache, ask):
            note(ask, answer, token, logprobs)
            if len(answer["token_ids"]) >= end:
                break
        self._give(ask["prompt"] + answer["token_ids"], cache)

    def _steps(self, prompt: Any, cache: Any, ask: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        from mlx_lm.generate import generate_step, speculative_generate_step

        shared = {
            "max_tokens": ask["max_tokens"],
            "sampler": sampler(ask),
            "prompt_cache": cache,
            "prefill_step_size": self._step,
        }
        if not self._num_drafts:
            yield from generate_step(prompt, self._model, **shared)
            return
        steps = speculative_generate_step(
            prompt, self._model, self._draft, num_draft_tokens=self._num_drafts, **shared
        )
        known, drafted = 0, True
        for token, logprobs, from_draft in steps:
            if drafted:  # the first token of a round
                self._counts["drafts"] += min(ask["max_tokens"] - known, self._num_drafts)
            self._counts["accepted"] += from_draft
            known, drafted = known + 1, not from_draft
            yield int(token), logprobs

    def _all_together(self, requests: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
        from mlx_lm.generate import BatchGenerator

        if self._batch is None:
            self._batch = BatchGenerator(self._model, prefill_step_size=self._step)
        running: dict[int, int] = {}
        waiting, step = list(range(len(requests))), 0
        try:
            while waiting or running:
                complete = len(requests) - len(waiting) - len(running)
                ready = [
                    i
                    for i in waiting
                    if requests[i]["after"] <= complete and requests[i]["step"] <= step
                ]
                # A step that nothing runs in is never reached.
                for i in ready or ([] if running else waiting[:1]):
                    waiting.remove(i)
                    self._insert(requests[i], answers[i], i, running)
                self._next(requests, answers, running)
                step += 1
        except Exception as error:
            # The server's only thread ends here; the requests of the batch get no more.
            for i in running.values():
                answers[i]["error"] = said(error)
            for i in waiting:
                answers[i]["error"] = f"never sent, after {said(error)}"
            self.reset()

    def _insert(
        self, ask: dict[str, Any], answer: dict[str, Any], i: int, running: dict[int, int]
    ) -> None:
        cache, rest = self._take(ask["prompt"], answer)
        held = ask["prompt"][: len(ask["prompt"]) - len(rest)]
        try:
            (uid,) = self._batch.insert(
                [rest],
                [ask["max_tokens"]],
                caches=[cache],
                all_tokens=[held],
                samplers=[sampler(ask)],
            )
            running[uid] = i
        except ValueError as error:
            answer["error"] = said(error)

    def _next(
        self, requests: list[dict[str, Any]], answers: list[dict[str, Any]], running: dict[int, int]
    ) -> None:
        prompts, tokens = self._batch.next()
        if self._caches:  # the server keeps what a prompt's last token starts from
            ended = [one.uid for one in prompts if one.end_of_segment and not one.end_of_prompt]
            for cache, held in self._batch.extract_cache(ended).values():
                self._give(held[:], cache)
        for one in tokens:
            i = running[one.uid]
            note(requests[i], answers[i], one.token, one.logprobs)
            if one.finish_reason is not None:
                self._give(one.all_tokens[:], one.prompt_cache)
                del running[one.uid]
            elif (
                requests[i]["abort_after"] is not None
                and len(answers[i]["token_ids"]) >= requests[i]["abort_after"]
            ):
                self._batch.remove([one.uid])
                del running[one.uid]


def load(folder: Path, dtype: str) -> Any:
    """Return the model in a dtype.

    Raises:
        ValueError: mlx-lm does not know it.
    """
    import json

    import mlx.core as mx
    from mlx_lm.utils import load_model

    config = json.loads((folder / "config.json").read_text())
    if "exact" in config:
        return pipe.sibling("mlx_exact").MlxModel(config)
    try:
        model, _ = load_model(folder, model_config=as_on_the_hub(config))
    except (ValueError, TypeError, KeyError, AttributeError, FileNotFoundError) as error:
        raise ValueError(f"{config['model_type']} is not loaded: {said(error)}") from error
    model.set_dtype(getattr(mx, dtype))
    return model


def as_on_the_hub(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys of the checkpoints that mlx-lm was written for.

    transformers 5 writes some of them otherwise.
    """
    kinds = config.get("layer_types") or []
    found = {key: untagged(value) for key, value in config.items()}
    found.setdefault("rope_theta", (config.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    model_type = config["model_type"]
    if model_type.startswith("qwen3") and "full_attention" in kinds:
        found |= {"full_attention_interval": kinds.index("full_attention") + 1}
        found |= {"model_type": model_type.removesuffix("_text")}
    elif model_type == "granitemoehybrid":
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        found |= {"layer_types": [names.get(kind, kind) for kind in kinds]}
        found |= {"position_embedding_type": config.get("position_embedding_type") or "nope"}
    elif model_type == "mamba2":
        found |= {"intermediate_size": config["expand"] * config["hidden_size"]}
    elif model_type == "kimi_linear" and "linear_attn_config" not in config:
        found["linear_attn_config"] = {
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
            "num_heads": config["linear_num_heads"],
            "head_dim": config["linear_head_dim"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        }
        found |= {
            "first_k_dense_replace": config["mlp_layer_types"].count("dense"),
            "mla_use_nope": True,
        }
    return found


def untagged(value: Any) -> Any:
    """Return `{"__float__": "Infinity"}`, which transformers 5 writes, as the number that it is."""
    if isinstance(value, list):
        return [untagged(one) for one in value]
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value


def noisy(model: Any) -> Any:
    """Return a draft model: these weights, a little off.

    For an exact model it is one that draws half as often.
    """
    import mlx.core as mx
    from mlx.utils import tree_map

    if hasattr(model, "echo"):
        model.echo *= 2
        return model
    mx.random.seed(0)
    model.update(
        tree_map(
            lambda w: w + NOISE * mx.abs(w).mean() * mx.random.normal(w.shape, w.dtype),
            model.parameters(),
        )
    )
    return model


def sampler(ask: dict[str, Any]) -> Any:
    from mlx_lm.sample_utils import make_sampler

    return make_sampler(ask["temperature"])


def note(ask: dict[str, Any], answer: dict[str, Any], token: int, logprobs: Any) -> None:
    """Keep a token of an answer.

    Its log-probability and those of the likeliest are kept with it where they were requested.
    """
    import mlx.core as mx
    import numpy as np

    answer["token_ids"].append(token)
    if ask["logprobs"]:
        row = np.array(logprobs.astype(mx.float32))
        best = np.argsort(row)[-NUM_LIKELIEST:]
        answer["logprobs"].append({int(one): float(row[one]) for one in (*best, token)})


def said(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:300]}"


if __name__ == "__main__":
    import pipe

    sys.path.pop(0)  # this folder: in it, `mlx` is this file
    pipe.serve(MlxEngine())
