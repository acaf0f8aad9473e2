"""lm-eval's view of a target: any engine or server of `hybrid_kv.check.targets`, in token ids."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

from hybrid_kv.check.targets.kinds import kind_of
from hybrid_kv.check.targets.target import Answer, Ask, Target
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import RequestOutput
from hybrid_kv.engine.text import may_stop, stop_position
from hybrid_kv.measure.accuracy.chat import PLAIN, ChatMode, template_of
from hybrid_kv.measure.accuracy.tasks import NO_ANSWER
from hybrid_kv.models.loader import load_eos_token_ids, load_tokenizer, resolve_folder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

MAX_GEN_TOKS = 256  # lm-eval's own default
AT_ONCE = 32  # requests; a server refuses more than it lets wait


def start_target(target: str, folder: str | Path, caches: bool = False) -> Target:
    """Start the engine, or a client of the server, that runs a checkpoint.

    Args:
        target: as `targets.kinds.kind_of` has it; an engine is started in its plainest setting.
        caches: with the prefix cache, where that is an engine's setting.

    Raises:
        ConfigError: the engine is unknown, the address does not respond, or it serves another
            model.
        TargetError: the engine does not start.
    """
    kind = kind_of(target)
    levels = kind.factors.get("prefix", ()) if caches else ()
    # `on` is what an engine takes by itself.
    settings = {"prefix": "on" if "on" in levels else levels[1]} if levels else {}
    started = kind.start(str(resolve_folder(folder)), settings)
    served = getattr(started, "model", None)
    expected = Path(folder).name
    if served is not None and Path(served).name != expected:
        started.close()
        raise ConfigError(
            f"--target {target} serves {served}, not {expected}; name its checkpoint with --model"
        )
    return started


class TargetLM(LM):  # type: ignore[misc]  # lm-eval is not typed
    """A target as an lm-eval model.

    Args:
        target: as for `start_target`.
        mode: its reasoning is cut off.
        folder: the checkpoint; behind an address, the one that is served: its tokenizer makes the
            prompts.

    Attributes:
        outputs: what came back, by (task, doc_id), one entry per repeat.
        seconds: from the first request to the last answer.
        caches_prefixes: some answer said how many tokens came from a cache.

    Raises:
        ConfigError: the engine is unknown, the address does not respond, or it serves another
            model.
        TargetError: the engine does not start.
    """

    def __init__(self, target: str, folder: str | Path, mode: ChatMode = PLAIN) -> None:
        super().__init__()
        self.mode = mode
        self._name = Path(folder).name
        self.tokenizer = load_tokenizer(folder)
        self._ends = load_eos_token_ids(resolve_folder(folder))
        self.target = start_target(target, folder)
        self.outputs: dict[tuple[str | None, int | None], list[RequestOutput]] = defaultdict(list)
        self.seconds = 0.0
        self.caches_prefixes = False
        self._counted: dict[str, int] = {}

    @property
    def model_name(self) -> str:
        """The engine; not its address, which is private where rows are published."""
        return f"{self.target.name} {self.target.version}"

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in lm-eval's cache of requests."""
        return self._name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as a prompt, by the checkpoint's template."""
        return template_of(self.tokenizer, self.tokenizer_name)(chat_history, add_generation_prompt)

    def close(self) -> None:
        """End an engine that was started."""
        self.target.close()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue every prompt greedily. A request that failed yields `NO_ANSWER`.

        Raises:
            ConfigError: the task samples.
            TargetError: the engine died, or says nothing that can be read.
        """
        sent = [self._ask(request, index) for index, request in enumerate(requests)]
        start = time.perf_counter()
        before = self.target.counters()
        answers = self.target.ask(sent)
        self.seconds += time.perf_counter() - start
        self._count(before)
        texts = []
        for request, ask, answer in zip(requests, sent, answers, strict=True):
            output = self._output(request.args[0], ask, answer)
            self.outputs[request.task_name, request.doc_id].append(output)
            until = normalize_gen_kwargs(request.args[1], MAX_GEN_TOKS)["until"]
            texts.append(
                NO_ANSWER if output.error is not None else self.mode.answer(output.text, until)
            )
        return texts

    def _count(self, before: Mapping[str, float]) -> None:
        for name, value in self.target.counters().items():
            self._counted[name] = self._counted.get(name, 0) + int(value - before.get(name, 0.0))

    def drafted(self) -> dict[str, int]:
        """Return the counts of drafts, by the engine's counters.

        Requests of others meanwhile count, too.
        """
        verifications = self._counted.get("verifications", 0)
        accepted = self._counted.get("accepted")
        if accepted is None and verifications:
            # SGLang counts verifications alone. Each gives a token besides the accepted ones, and a
            # prefill one.
            every = [output for repeats in self.outputs.values() for output in repeats]
            accepted = sum(max(0, len(output.token_ids) - 1) for output in every) - verifications
        return {
            "num_draft_tokens": self._counted.get("drafts", 0),
            "num_accepted_draft_tokens": max(0, accepted or 0),
            "num_verifications": verifications,
        }

    def _ask(self, request: Instance, index: int) -> Ask:
        text, given = request.args
        kwargs: dict[str, Any] = normalize_gen_kwargs(given, MAX_GEN_TOKS)
        if kwargs["do_sample"]:
            raise ConfigError("a target cannot run a task that samples; leave do_sample out")
        stop = self.mode.stops_while_generating(kwargs["until"], self.tokenizer.eos_token)
        bos = getattr(self.tokenizer, "bos_token", None)  # a template has written it
        prompt = tuple(
            self.tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos)))
        )
        room = max(
            1, self.target.longest - len(prompt)
        )  # our engine ends an answer there, a server refuses it
        return Ask(
            prompt, min(kwargs["max_gen_toks"], room), stop=stop, after=max(0, index - AT_ONCE + 1)
        )

    def _output(self, prompt: str, ask: Ask, answer: Answer) -> RequestOutput:
        """Return an answer as this engine would give it.

        A target may not know what ends an answer, and go on.
        """
        self.caches_prefixes |= answer.cached_tokens is not None
        tokens, reason = self._ended(answer.token_ids, ask.stop)
        text = self._text(tokens)
        position = stop_position(text, ask.stop)
        if position is not None:
            text = text[:position]
        elif tokens and tokens[-1] in self._ends:
            text = self._text(tokens[:-1])
        return RequestOutput(
            "",
            prompt,
            list(ask.prompt),
            tokens,
            text,
            "error" if answer.error else reason,
            error=answer.error or None,
            cached_tokens=answer.cached_tokens or 0,
        )

    def _ended(self, token_ids: Sequence[int], stops: tuple[str, ...]) -> tuple[list[int], str]:
        """Return the tokens up to the first that ends the answer, and that one."""
        tokens: list[int] = []
        for token in token_ids:
            tokens.append(token)
            may = stops and may_stop(self.tokenizer, tokens, stops)
            if token in self._ends or (
                may and stop_position(self._text(tokens), stops) is not None
            ):
                return tokens, "stop"
        return tokens, "length"

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        """Refuse: servers score prompts in too many ways."""
        raise ConfigError("a target cannot score, only generate; use a task that generates")

    loglikelihood_rolling = loglikelihood
