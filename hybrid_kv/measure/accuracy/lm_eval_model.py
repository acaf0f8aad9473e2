"""The engine as a model of lm-eval: `python -m hybrid_kv.measure.accuracy --model hybrid_kv …`.

lm-eval 0.4.13 has no plug-in point for models: this module must be imported before the model is
looked up. That command is lm-eval's own with the import done. A plain `lm_eval` imports what a task
file names with `!function`, if the file is given by its path: our `tasks/gsm8k_synth.yaml` does so,
and `tasks/register.yaml`, which has no questions and goes with any other tasks. In Python,
importing this module is enough.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

# lm-eval fills its registry only while that is empty: let it, before we register.
import lm_eval.models  # noqa: F401 - see above
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hybrid_kv.check.guard_model import embedded
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.measure.accuracy.chat import ChatMode, template_of
from hybrid_kv.measure.accuracy.tasks import NO_ANSWER

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from hybrid_kv.engine.llm import LLM, RequestOutput
    from hybrid_kv.sampling import SamplingParams

_GENERATION_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed"}
# The texts of lm-eval's request, if it caches them; the context; the continuation.
_Tokens = tuple[tuple[str, str] | None, list[int], list[int]]
_log = logging.getLogger("hybrid_kv.measure.accuracy")


@register_model("hybrid_kv")
class HybridKVLM(TemplateLM):  # type: ignore[misc]  # lm-eval is not typed
    """An `LLM` as an lm-eval model.

    All requests of a call go to the engine at once, which batches them continuously.

    Args:
        pretrained: a checkpoint folder, or an embedded guard model by name; default: the first of
            these.
        llm: a ready engine, instead of `pretrained` and `options`.
        max_gen_toks: limit of an answer when the task gives none (lm-eval's own default).
        batch_size, max_batch_size: the engine batches by itself; a number other than lm-eval's
            default of 1 becomes `max_num_seqs`, with a warning.
        device: as for the engine; `cuda:0`, lm-eval's default on its command line, means auto.
        progress: show a bar while the engine works.
        think_end_token: what ends the reasoning of an answer, which is then cut off.
        options: fields of `EngineConfig`, `CacheConfig` and `SchedulerConfig`; an unknown one is an
            error.

    Attributes:
        outputs: what the engine generated, by (task, doc_id), one entry per repeat.
        seconds: time spent in the engine.
    """

    def __init__(
        self,
        pretrained: str | Path | None = None,
        *,
        llm: LLM | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str = "auto",
        progress: bool = True,
        think_end_token: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.mode = ChatMode(think_end_token=think_end_token)
        if llm is not None and (pretrained is not None or options):
            raise ConfigError("give either a ready engine or the model and its options, not both")
        if llm is None:
            from hybrid_kv.engine.llm import LLM

            device = "auto" if device == "cuda:0" else device
            options = _with_batch_size(options, batch_size, max_batch_size)
            llm = LLM(embedded(pretrained), device=device, **options)
        self.llm = llm
        self.tokenizer: Any = llm.tokenizer
        self.max_gen_toks = max_gen_toks
        self.progress = progress
        self.outputs: dict[tuple[str | None, int | None], list[RequestOutput]] = defaultdict(list)
        self.seconds = 0.0

    @property
    def model_name(self) -> str:
        """The name of a model without a folder."""
        return type(self.llm.model).__name__

    @property
    def caches_prefixes(self) -> bool:
        """True if tokens of a prompt may come from the cache."""
        return self.llm.config.cache.enable_prefix_caching

    def drafted(self) -> dict[str, int]:
        """Return the counts of drafts of all requests."""
        every = [output for repeats in self.outputs.values() for output in repeats]
        names = ("num_draft_tokens", "num_accepted_draft_tokens", "num_verifications")
        return {name: sum(getattr(output, name) for output in every) for name in names}

    def close(self) -> None:
        """Do nothing: nothing outlives this object."""

    # ---- between text and tokens ----

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text whose first token is scored: the tokenizer's bos, else its eos.

        Raises:
            HybridKVError: it has neither.
        """
        for token in (getattr(self._tokenizer, "bos_token_id", None), self.eot_token_id):
            if token is not None:
                return int(token)
        raise HybridKVError(
            "the tokenizer has neither a bos nor an eos token, so nothing can precede a scored text"
        )

    @property
    def max_length(self) -> int:
        """The most tokens that a prompt may have. The engine keeps one more for the answer."""
        return self.llm.config.scheduler.max_model_len - 1

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in lm-eval's cache of requests."""
        return str(
            getattr(self._tokenizer, "name_or_path", type(self._tokenizer).__name__)
        ).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a text.

        By default the tokenizer adds its special tokens, but not a second bos.
        """
        bos = getattr(self._tokenizer, "bos_token", None)
        if add_special_tokens is None and bos and string.startswith(bos):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self._tokenizer.encode(string, **options))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as a prompt, by the checkpoint's template.

        Raises:
            HybridKVError: the checkpoint has none.
        """
        return template_of(self._tokenizer, self.tokenizer_name)(
            chat_history, add_generation_prompt
        )

    @property
    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise HybridKVError("this engine has no tokenizer; give LLM(..., tokenizer=...)")
        return self.tokenizer

    # ---- requests of lm-eval ----

    def sampling_params(self, generation_kwargs: dict[str, Any], index: int) -> SamplingParams:
        """Return the engine's parameters for request number `index` of a call.

        A sampled request gets a seed of its own, made of `seed` (default: the engine's) and its
        number, so that repeats of a question differ and a second run of the same call does not.

        Raises:
            ConfigError: a parameter that the engine does not know.
        """
        from hybrid_kv.sampling import SamplingParams

        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(generation_kwargs, self.max_gen_toks))
        unknown = sorted(set(kwargs) - _GENERATION_KEYS)
        if unknown:
            raise ConfigError(
                f"generation_kwargs {', '.join(unknown)} not supported; use "
                f"{', '.join(sorted(_GENERATION_KEYS))}"
            )
        seed = int(kwargs.get("seed", self.llm.config.seed))
        return SamplingParams(
            max_tokens=kwargs["max_gen_toks"],
            temperature=float(kwargs.get("temperature", 1.0)) if kwargs["do_sample"] else 0.0,
            top_k=int(kwargs.get("top_k", 0)),
            top_p=float(kwargs.get("top_p", 1.0)),
            seed=seed * 1_000_003 + index,
            stop=self.mode.stops_while_generating(
                kwargs["until"], getattr(self.tokenizer, "eos_token", None)
            ),
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue every prompt.

        A request that the engine rejected yields `NO_ANSWER` and is logged as a warning.
        """
        params = [
            self.sampling_params(request.args[1], index) for index, request in enumerate(requests)
        ]
        bos = getattr(self.tokenizer, "bos_token", None)
        prompts = [
            self.tok_encode(text) if bos and text.startswith(bos) else text
            for text in _texts(requests)
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, progress=self.progress and not disable_tqdm)
        self.seconds += time.perf_counter() - start
        texts = []
        for request, output in zip(requests, outputs, strict=True):
            self.outputs[request.task_name, request.doc_id].append(output)
            until = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["until"]
            text = NO_ANSWER if output.error is not None else self.mode.answer(output.text, until)
            texts.append(text)
            if output.error is None:
                self.cache_hook.add_partial("generate_until", request.args, text)
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            _log.warning(
                "%d of %d requests could not run; the first: %s",
                len(errors),
                len(outputs),
                errors[0],
            )
        return texts

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of every text, in windows of `max_length` tokens.

        The first token is included.
        """
        windows: list[_Tokens] = []
        lengths = []
        for text in _texts(requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            disjoint = [make_disjoint_window(window) for window in rolling]
            windows += [(None, *window) for window in disjoint]
            lengths.append(len(disjoint))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(length)) for length in lengths]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: list[_Tokens],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is greedy.

        Long contexts lose their beginning.

        Raises:
            HybridKVError: a continuation is empty or longer than a prompt may be.
        """
        from hybrid_kv.measure.accuracy.score import score

        pairs = []
        num_cut = 0
        for _text, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise HybridKVError(
                    f"a continuation of {len(continuation)} tokens cannot be scored, the limit is "
                    f"{self.max_length}; model_args max_model_len=N raises it"
                )
            kept = (
                self.max_length - len(continuation) + 1
            )  # the last token is only looked for, not run
            num_cut += len(context) > kept
            pairs.append((context[-kept:], continuation))
        if num_cut:
            _log.warning(
                "%d of %d contexts were cut from the left to fit max_model_len", num_cut, len(pairs)
            )
        start = time.perf_counter()
        scores: list[tuple[float, bool]] = [
            *score(self.llm, pairs, self.progress and not disable_tqdm)
        ]
        self.seconds += time.perf_counter() - start
        for request, scored in zip(requests, scores, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], scored)
        return scores


def _texts(requests: list[Instance]) -> list[str]:
    return [request.args[0] for request in requests]


def _with_batch_size(
    options: dict[str, Any], batch_size: int | str | None, max_batch_size: int | None
) -> dict[str, Any]:
    """Return the engine's options with the meaning of lm-eval's batch sizes for them."""
    text = str(batch_size)
    if text in ("None", "1") or text.split(":")[0] == "auto":
        batch_size = max_batch_size
    if batch_size is None:
        return options
    if "max_num_seqs" in options:
        _log.warning(
            "batch_size %s is ignored: max_num_seqs=%s says it", batch_size, options["max_num_seqs"]
        )
        return options
    try:
        number = int(batch_size)
    except ValueError:
        raise ConfigError(f"batch_size={batch_size!r} must be a number or auto") from None
    _log.warning(
        "batch_size %d: the engine batches by itself, so at most %d requests run at once",
        number,
        number,
    )
    return options | {"max_num_seqs": number}
