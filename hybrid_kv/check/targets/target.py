"""The interface to an engine that the guard did not write.

It has four verbs; token ids go in and token ids come out. A target says what it can do (`can`) and
what it can be started with (`Kind.factors`); nothing else is assumed of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hybrid_kv.config import HybridKVError

if TYPE_CHECKING:
    from hybrid_kv.sampling import TokenLogprobs

NUM_LIKELIEST = 5  # tokens whose log-probabilities are wanted next to the answer's own

# What a target may be able to do beyond greedy answers; a check that needs more than there is is
# "not supported".
CAPABILITIES = {
    "cached": "says how many tokens of a prompt came from its cache",
    "logprobs": "gives the log-probabilities of its answer's tokens and of the likeliest others",
    "score": "gives those of a prompt's tokens, which it then computes without its cache",
    "reset": "forgets its prefix cache on request",
    "preempt": "preempts what runs on request",
    "salt": "shares cached prefixes only among requests of one salt",
    "seed": "samples reproducibly",
    "seed in all settings": "samples the same in every setting, with drafts and without",
    "n": "gives several answers to one prompt",
    "abort": "ends a request early on request",
    "batch": "runs several requests at once",
    "steps": "takes a request before a certain step",
    "top": "draws from the likeliest tokens alone: top-k and top-p",
    "hot": "takes any temperature, not only those up to 2",
    "sleep": "gives up the memory of its cache on request, and takes it again: see `Sleeper`",
}
# What `counters` may hold, summed since the start. A check that saw none of what it is about is
# void.
COUNTERS = ("hits", "drafts", "accepted", "verifications", "preemptions")


@dataclass(frozen=True, repr=False)
class Ask:
    """One request.

    Attributes:
        prompt: token ids.
        max_tokens: of the answer.
        temperature: 0 is greedy.
        top_k, top_p: draw from so many of the likeliest tokens, and of those from the fewest that
            have this share; 0 and 1: from all.
        n: answers wanted.
        logprobs: give them too.
        score: give those of the prompt's tokens too, computed without the prefix cache.
        salt: whose prefixes it may share; empty: everybody's.
        after: it is sent once so many answers of its batch are complete; 0: at once.
        step: it is sent before this step of the engine, counted from the batch's first, if anything
            still runs then.
        abort_after: it is ended once it has so many tokens; None: not.
        stop: texts that end the answer, as the end-of-text token then does; a target without a
            tokenizer goes on.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 12
    temperature: float = 0.0
    seed: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    n: int = 1
    logprobs: bool = False
    score: bool = False
    salt: str = ""
    after: int = 0
    step: int = 0
    abort_after: int | None = None
    stop: tuple[str, ...] = ()

    def __repr__(self) -> str:
        extras = [f"{name}={value!r}" for name, value in self.extras().items()]
        return f"Ask({', '.join([str(list(self.prompt)), *extras])})"

    def extras(self) -> dict[str, Any]:
        """Return the fields that are not at their default, without the prompt."""
        plain = vars(Ask(()))
        return {
            key: value
            for key, value in vars(self).items()
            if key != "prompt" and value != plain[key]
        }


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        token_ids: the answer, without the prompt; with the end-of-text token if that ended it. It
            ends nothing where the engine has an option for it: every answer is then as long as it
            may be.
        cached_tokens: of the prompt, from the prefix cache; None if the target does not say.
        logprobs: for each token of the answer, log-probabilities by token id: its own and those of
            the likeliest.
        prompt_logprobs: the same for each token of the prompt but the first, where they were
            wanted.
        others: the answers after the first, where `n` > 1.
        error: one line; `token_ids` is then what there was.
        is_greedy: each token is meant to be the likeliest; else a search chose it, and `logprobs`
            alone can be wrong.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int | None = None
    logprobs: tuple[Mapping[int, float], ...] = ()
    others: tuple[tuple[int, ...], ...] = ()
    error: str = ""
    is_greedy: bool = True
    prompt_logprobs: tuple[Mapping[int, float], ...] = ()


class TargetError(HybridKVError):
    """The engine died, hangs or says nothing that can be read: a finding, one line.

    Attributes:
        version: of an engine that did not start; empty if it was not heard.
    """

    version = ""


class Sleeper(Protocol):
    """A target that can sleep."""

    def sleep(self) -> None:
        """Give up the memory of the cache, and take it again: its content is gone."""


class Target(Protocol):
    """A running engine with one model.

    Attributes:
        name, version: of the engine.
        can: of `CAPABILITIES`.
        settings: what it was started with, of its kind's factors.
        longest: tokens that a prompt and its answer may have together.
    """

    name: str
    version: str
    can: frozenset[str]
    settings: Mapping[str, str]
    longest: int

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        """Send all requests at once, but for `after`, and wait until the last is complete.

        Answers come in the order of the requests.

        Args:
            preempt_every: preempt all that runs, and forget the prefix cache, whenever the answers
                have so many more tokens. 0: never.
        """

    def counters(self) -> Mapping[str, float]:
        """Return those of `COUNTERS` that the engine has, since its start."""

    def reset(self) -> None:
        """Forget the prefix cache."""

    def close(self) -> None:
        """End it and free what it holds. A closed target may be closed again."""


def by_token(
    tokens: Iterable[int], logprobs: Iterable[TokenLogprobs]
) -> tuple[Mapping[int, float], ...]:
    """Return log-probabilities as an `Answer` has them."""
    return tuple(
        {**dict(one.top), token: one.logprob} for token, one in zip(tokens, logprobs, strict=False)
    )


def is_plain(kind: Kind, settings: Mapping[str, str], factors: Iterable[str]) -> bool:
    """Return whether these factors are at their plainest level in a setting.

    Factors that the kind does not have are skipped.
    """
    plainest = {factor: kind.factors[factor][0] for factor in factors if factor in kind.factors}
    return all(settings.get(factor, level) == level for factor, level in plainest.items())


@dataclass(frozen=True)
class Inside:
    """The factors and default settings with which an engine runs an exact model.

    Attributes:
        further: settings of models that show what the default one cannot, by the model's name.
        model: the default one, of `exact.PATTERNS`.
        is_only: the engine runs no other model here.
        keeps: gets levels by factor; whether the cache then keeps what `probes.bounds.Kept` says.
        looks_up: gets levels by factor; whether drafts are then looked up and none is cut short.
        has_windows: its attention may see the last tokens alone.
        is_central: models leave caches and masks to the engine. Next to the exact model random
            weights then run in the settings of the prefix cache alone.
    """

    factors: Mapping[str, Sequence[str]]
    matrix: tuple[str, ...]
    further: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_central: bool = False
    model: str = "mixed"
    is_only: bool = False
    keeps: Callable[[Mapping[str, str]], bool] = lambda settings: False
    looks_up: Callable[[Mapping[str, str]], bool] = lambda settings: False
    has_windows: bool = False


@dataclass(frozen=True)
class Known:
    """A reported failure of a release, or something that it cannot show.

    A run reports it and does not count it as a failure.

    Attributes:
        name: of the script of `examples/found` that shows it, or of the setting that explains it.
        factors: that are not at their plainest level where it happens, or `factor=level`.
        probe: the only one that sees it; empty: any.
        words: part of what is then said, with the tokens that are wrong; empty: anything.
        setting: the only one, as the matrix has it; empty: those of the factors.
        shortest: tokens of the prompts with which the probe goes on; 0: it does not.
        model: the only exact model, of `exact.PATTERNS`, that has it; empty: any; random: none.
    """

    release: str
    name: str
    factors: tuple[str, ...] = ()
    probe: str = ""
    words: str = ""
    setting: str = ""
    shortest: int = 0
    model: str = ""


@dataclass
class Kind:
    """An engine that can be started; a module of `targets` has its own as `KIND`.

    Attributes:
        name: as `hybrid-kv check` takes it.
        factors: levels by factor, the plainest first. Common ones: `prefix` (off, on, or modes),
            `spec` (none, ngram3, mtp1 …), `chunk` (whole, or tokens of a step), `blocks` (ample,
            tight).
        start: gets the folder of a checkpoint and levels by factor; a factor that is missing has
            its plainest level. It raises `ConfigError` if the engine is not installed, or does not
            know the setting or the model, and `TargetError` if it does not start.
        size: of the checkpoint that is made where `--model` names a family and no size.
        inside: how it runs an exact model; None: it cannot.
        known: failures of its releases.
        apart: factors that exclude the prefix cache.
        matrix: settings of a default guard; empty: `probes.run.default_matrix` derives them from
            the factors.
        package: of an engine that runs in an environment of its own; empty: it runs in this Python.
        python: of that environment, or the server of a build; empty: the one that is found.
        at: gets a build that the user names, where that is no Python with the package.
        load: begins to import the engine for a checkpoint and levels by factor, where that takes
            long.
        variant_of: which variant of the engine these need, see `remote.remote_kind`.
        is_slow: gets levels by factor; whether a default guard with an exact model plays only its
            own probes there.
    """

    name: str
    factors: Mapping[str, Sequence[str]]
    start: Callable[[str, Mapping[str, str]], Target]
    size: str = "tiny"
    inside: Inside | None = None
    known: Sequence[Known] = ()
    apart: Sequence[str] = ()
    matrix: Sequence[str] = ()
    package: str = ""
    python: str = ""
    at: Callable[[str], Kind] | None = None
    load: Callable[[str, Mapping[str, str]], object] | None = None
    variant_of: Callable[[str, Mapping[str, str]], str] = lambda folder, settings: ""
    is_slow: Callable[[Mapping[str, str]], bool] = lambda settings: False
