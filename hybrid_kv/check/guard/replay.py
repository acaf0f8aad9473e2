"""A scenario as a file, and played again step by step.

The file is JSON: what `Scenario` has, a request a line, and the rule that it broke when it was
written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, fields
from typing import Any, TypeVar, get_args, get_type_hints

from hybrid_kv.check.guard.play import play, unwarned
from hybrid_kv.check.guard.scenario import SCRIPTS, Disturbance, Scenario
from hybrid_kv.config import ConfigError, engine_config
from hybrid_kv.models.exact import ATTENTION, BLOCK_HEADS, STATEFUL, ExactConfig
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import ScheduledRequest
from hybrid_kv.sampling import SamplingParams

T = TypeVar("T")

FORMAT = "hybrid-kv scenario"
VERSION = 1
NUM_STEPS = 12  # of a story, the last ones
# Of a case, prompts and answers; of each number in its options; of each size in bytes. A hundred
# times what the guard draws: more runs for hours, or needs all memory.
MAX_TOKENS = 100_000
MAX_NUMBER = 2**20
MAX_MEMORY = 2**30


def to_json(scenario: Scenario, rule: str = "") -> str:
    """Return the text of a scenario's file; `rule` is for the reader."""
    parts = asdict(scenario)
    prompts = parts.pop("prompts")
    params = parts.pop("params")
    requests = [
        {"prompt": prompt, **_changed(SamplingParams(**fields_of_params))}
        for prompt, fields_of_params in zip(prompts, params, strict=True)
    ]
    return as_text(FORMAT, rule, parts, "requests", requests)


def as_text(form: str, rule: str, parts: Mapping[str, Any], name: str, many: Sequence[Any]) -> str:
    """Return the text of a case's file.

    Args:
        form: its format.
        parts: entries, a line each.
        name: of the list `many`, which has a line for each of its items.
    """
    values = {"format": form, "version": VERSION, "rule": rule, **parts}
    lines = {key: json.dumps(value) for key, value in values.items()}
    lines[name] = "[\n  " + ",\n  ".join(map(json.dumps, many)) + "\n ]"
    return "{\n" + ",\n".join(f' "{key}": {text}' for key, text in lines.items()) + "\n}\n"


def parts_of(document: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """Return the parts that `as_text` was given.

    Raises:
        KeyError, ValueError: another version, or other names.
    """
    parts = {key: value for key, value in document.items() if key not in ("format", "rule")}
    version = parts.pop("version")
    if version != VERSION:
        raise ValueError(f"version {version!r}, not {VERSION}")
    strange = sorted(parts.keys() ^ names)
    if strange:
        raise ValueError(f"{strange[0]!r} is unknown or missing")
    return parts


def from_json(text: str, name: str = "scenario") -> Scenario:
    """Return the scenario of a file's text; `name` is the file's, for the error.

    Raises:
        ConfigError: it is no scenario, of another version, or has a value that no scenario can
            have.
    """
    return from_text(text, name, from_document)


def from_text(text: str, name: str, read: Callable[[Any], T]) -> T:
    """Read a file's text as JSON, and that as a case.

    Raises:
        ConfigError: it cannot be read so.
    """
    try:
        return read(json.loads(text))
    except KeyError as error:
        problem = f"{error} is missing"
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        problem = str(error)
    raise ConfigError(
        f"{name} is no scenario of this version: {problem}; write it anew with hybrid-kv guard"
    )


def from_document(document: Any) -> Scenario:
    """Return the scenario of a file's JSON.

    Raises:
        ConfigError, KeyError, TypeError, ValueError, AttributeError: as `from_json`.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"format {FORMAT!r} is not named")
    names = {field.name for field in fields(Scenario)} - {"prompts", "params"}
    parts = parts_of(document, names | {"requests"})
    requests = [dict(request) for request in parts["requests"]]
    prompts = [request.pop("prompt") for request in requests]
    seed, layers, drafts = (parts[key] for key in ("seed", "layers", "drafts"))
    options = tuples(parts["options"])
    cell = tuples(parts["cell"])
    waves = tuple(parts["waves"])
    numbers = [seed, *waves, *(token for prompt in prompts for token in prompt)]
    not_integers = [number for number in numbers if type(number) is not int]
    if not_integers:
        raise ValueError(f"{not_integers[0]!r} is no integer")
    vocab_size = ExactConfig.vocab_size
    outside = [token for prompt in prompts for token in prompt if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token {outside[0]} is outside the vocabulary of {vocab_size}")
    if not prompts or (waves and (sum(waves) != len(prompts) or min(waves) < 1)):
        raise ValueError(f"waves of {list(waves)} requests, but {len(prompts)} requests")
    if (
        not isinstance(layers, str)
        or not 0 < len(layers) <= 64
        or set(ExactConfig(layers).layers) - set(STATEFUL) - set(ATTENTION)
    ):
        raise ValueError(f"layers {layers!r} are not 1 to 64 of {''.join((*STATEFUL, *ATTENTION))}")
    if drafts == "dflash" and not ExactConfig(layers).head:
        raise ValueError(f"layers {layers!r} end with no block drafter: {' or '.join(BLOCK_HEADS)}")
    if drafts not in SCRIPTS:
        raise ValueError(f"drafts {drafts!r} are none of {', '.join(SCRIPTS)}")
    engine_config(options)
    if type(options.get("max_model_len")) is not int:
        raise ValueError("options have no max_model_len")
    if drafts not in ("none", "ngram") and type(options.get("num_speculative_tokens")) is not int:
        raise ValueError("options have no num_speculative_tokens")
    events = tuple(_event(**event) for event in parts["events"])
    params = [SamplingParams(**request) for request in requests]
    answers = sum(min(each.max_tokens, options["max_model_len"]) for each in params)
    check_size(sum(map(len, prompts)) + answers, options)
    return Scenario(seed, layers, options, prompts, params, waves, drafts, events, cell)


def check_size(num_tokens: int, options: Mapping[str, Any]) -> None:
    """Refuse a case that is larger than any that the guard writes.

    Raises:
        ValueError: it has too many tokens, or an option is too large.
    """
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"prompts and answers of {num_tokens:,} tokens, more than {MAX_TOKENS:,}")
    for name, value in options.items():
        most = MAX_MEMORY if name.endswith("_bytes") else MAX_NUMBER
        if isinstance(value, int) and value > most:
            raise ValueError(f"{name}={value} is more than {most:,}")


def _event(what: Any, first: int, every: int = 0) -> Disturbance:
    known = get_args(get_type_hints(Disturbance)["what"])
    if what not in known or any(
        type(n) is not int or not 0 <= n <= MAX_TOKENS for n in (first, every)
    ):
        raise ValueError(
            f"event {what!r} at step {first!r} and every {every!r} is none of {', '.join(known)}"
        )
    return Disturbance(what, first, every)


def tuples(parts: dict[str, Any]) -> dict[str, Any]:
    """Replace lists by tuples, those inside of lists, too: JSON has lists only."""
    return {key: _tuple(value) for key, value in parts.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from the defaults, and `max_tokens`."""
    usual = vars(SamplingParams())
    return {
        key: value
        for key, value in vars(params).items()
        if key == "max_tokens" or value != usual[key]
    }


class _Story(EngineObserver):
    """The story of a play: each step in words."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_prepare(self, batch: Sequence[ScheduledRequest]) -> None:
        self.lines.append(f"step {len(self.lines)}: " + "; ".join(map(_in_words, batch)))

    def on_commit(self, tokens: Sequence[Sequence[int]]) -> None:
        given = ", ".join(str(len(new)) for new in tokens)
        self.lines[-1] += f" -> {given} tokens"


def _in_words(item: ScheduledRequest) -> str:
    name = item.request.request_id
    start = item.num_computed_tokens
    end = item.num_computed_tokens + item.num_tokens
    if item.is_decode:
        return f"request {name} decodes token {start} and {item.num_drafts} drafts"
    hit = f" behind {start} cached ones" if item.overwrite and start else ""
    return f"request {name} prefills tokens {start} to {end - 1} of {item.request.num_tokens}{hit}"


@unwarned()
def tell(scenario: Scenario) -> tuple[str, list[str]]:
    """Play a scenario; return the first rule that it breaks, empty if none, and its story."""
    story = _Story()
    wrong = play(scenario, [story])[0].wrong[:1]
    sent = [
        f"request {i}: {prompt}" for i, prompt in enumerate(scenario.prompts) if len(prompt) <= 64
    ]
    lines = [
        f"{scenario}",
        *sent,
        *story.lines[-NUM_STEPS:],
        *(failure.report for failure in wrong),
    ]
    return "".join(failure.rule for failure in wrong), lines
