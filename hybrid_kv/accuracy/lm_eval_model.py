"""lm-eval's view of the engine: `lm_eval --model hybrid_kv --model_args pretrained=FOLDER,max_num_seqs=8`.

lm-eval 0.4.13 has no plug-in point for models: this module has to be imported before the model is looked up.
`python -m hybrid_kv.accuracy` is lm-eval's command line with that done; so is naming our task by its file (`--tasks
hybrid_kv/accuracy/tasks/gsm8k_synth.yaml`), which lm-eval imports first. In Python, importing this module is enough.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval.models  # noqa: F401 - lm-eval fills its registry only while that is empty: let it, before we register
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from hybrid_kv.config import ConfigError, HybridKVError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from hybrid_kv.engine.llm import LLM, RequestOutput
    from hybrid_kv.sampling import SamplingParams

GUARD_MODEL = Path(__file__).parent / "guard_model"

# What lm-eval is told when the engine refused a request. No filter finds a number in it; the engine's own message has
# numbers, which `flexible-extract` would take for the answer.
REFUSED = "[invalid]"

_GENERATION_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed"}
_log = logging.getLogger("hybrid_kv.accuracy")


class UnsupportedRequestError(HybridKVError, NotImplementedError):
    """A kind of lm-eval request that the engine cannot answer."""


@register_model("hybrid_kv")
class HybridKVLM(LM):  # type: ignore[misc]  # lm-eval is not typed
    """An `LLM` as an lm-eval model. All requests of a call go to the engine at once, which batches them continuously.

    Args:
        pretrained: a checkpoint folder; default: the embedded guard model.
        llm: a ready engine, instead of `pretrained` and `options`.
        max_gen_toks: limit of an answer when the task gives none (lm-eval's own default).
        batch_size, max_batch_size: lm-eval always passes them; the engine's limit is `max_num_seqs`.
        device: as for the engine; `cuda:0`, which lm-eval's command line passes unasked, means auto.
        progress: show a bar while generating.
        options: fields of `EngineConfig`, `CacheConfig` and `SchedulerConfig`; an unknown one is an error.

    Attributes:
        outputs: what the engine returned, by (task, doc_id), one entry per repeat.
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
        **options: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) not in ("None", "1", "auto") or max_batch_size is not None:
            raise ConfigError(f"batch_size={batch_size}: the engine batches by itself; give model_args max_num_seqs=N")
        if llm is not None and (pretrained is not None or options):
            raise ConfigError("give either a ready engine or the model and its options, not both")
        if llm is None:
            from hybrid_kv.engine.llm import LLM

            device = "auto" if device == "cuda:0" else device
            llm = LLM(pretrained if pretrained is not None else GUARD_MODEL, device=device, **options)
        self.llm = llm
        self.max_gen_toks = max_gen_toks
        self.progress = progress
        self.outputs: dict[tuple[str | None, int | None], list[RequestOutput]] = defaultdict(list)
        self.seconds = 0.0

    def sampling_params(self, generation_kwargs: dict[str, Any], index: int) -> SamplingParams:
        """The engine's parameters for request number `index` of a call.

        A sampled request gets a seed of its own, made of `seed` (default: the engine's) and its number, so that repeats
        of a question differ and a second run of the same call does not.

        Raises:
            ConfigError: a parameter that the engine does not know.
        """
        from lm_eval.models.utils import normalize_gen_kwargs

        from hybrid_kv.sampling import SamplingParams

        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(generation_kwargs, self.max_gen_toks))
        if unknown := sorted(set(kwargs) - _GENERATION_KEYS):
            raise ConfigError(
                f"generation_kwargs {', '.join(unknown)} not supported; use {', '.join(sorted(_GENERATION_KEYS))}"
            )
        seed = int(kwargs.get("seed", self.llm.config.seed))
        return SamplingParams(
            max_tokens=kwargs["max_gen_toks"],
            temperature=float(kwargs.get("temperature", 1.0)) if kwargs["do_sample"] else 0.0,
            top_k=int(kwargs.get("top_k", 0)),
            top_p=float(kwargs.get("top_p", 1.0)),
            seed=seed * 1_000_003 + index,
            stop=tuple(stop for stop in kwargs["until"] if stop),  # lm-eval ignores empty ones, too
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue every prompt. A request that the engine refused yields `REFUSED` and is logged as a warning."""
        params = [self.sampling_params(request.args[1], index) for index, request in enumerate(requests)]
        prompts = [request.args[0] for request in requests]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, progress=self.progress and not disable_tqdm)
        self.seconds += time.perf_counter() - start
        texts = []
        for request, output in zip(requests, outputs, strict=True):
            self.outputs[request.task_name, request.doc_id].append(output)
            texts.append(output.text if output.error is None else REFUSED)
            if output.error is None:
                self.cache_hook.add_partial("generate_until", request.args, output.text)
        if errors := [output.error for output in outputs if output.error is not None]:
            _log.warning("%d of %d requests could not run; the first: %s", len(errors), len(outputs), errors[0])
        return texts

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not supported."""
        raise _unsupported("loglikelihood")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Not supported."""
        raise _unsupported("loglikelihood_rolling")


def _unsupported(kind: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"hybrid_kv answers generate_until requests only, not {kind}; choose a task whose output_type is generate_until"
    )
