"""Questions as a conversation, and answers that begin with reasoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.engine.text import stop_position
from hybrid_kv.measure.accuracy.tasks import NO_ANSWER

Template = Callable[..., str]


@dataclass(frozen=True)
class ChatMode:
    """The form of questions, and the part of an answer that is read.

    Attributes:
        apply_chat_template: of the checkpoint, with the shots in the user's turn.
        think_end_token: what ends the reasoning, such as `</think>`; what stands before it is not
            read, and an answer whose reasoning does not end is none.
        max_gen_toks: most tokens of an answer, its reasoning included; None: the task's limit, else
            lm-eval's 256.
    """

    apply_chat_template: bool = False
    think_end_token: str | None = None
    max_gen_toks: int | None = None

    def __post_init__(self) -> None:
        if self.think_end_token == "":
            raise ConfigError(
                "think_end_token is empty; leave it out, or name what ends the reasoning"
            )
        if self.max_gen_toks is not None and self.max_gen_toks < 1:
            raise ConfigError(f"max_gen_toks={self.max_gen_toks} must be at least 1")

    @property
    def params(self) -> dict[str, Any]:
        """Fields that are not at their defaults, as rows and samples keep them."""
        return {name: value for name, value in asdict(self).items() if value}

    def stops_while_generating(self, until: Sequence[str], end: str | None) -> tuple[str, ...]:
        """Return the texts that end generation.

        The task's may stand in the reasoning: with reasoning only the end of the turn counts.
        """
        if self.think_end_token is None:
            return tuple(text for text in until if text)  # lm-eval ignores empty ones, too
        return (end,) if end else ()

    def answer(self, text: str, until: Sequence[str]) -> str:
        """Return the part of a generated text that is read."""
        if self.think_end_token is None:
            return text
        _, ended, answer = text.rpartition(self.think_end_token)
        if not ended:
            return NO_ANSWER
        answer = answer.lstrip()
        position = stop_position(answer, tuple(text for text in until if text))
        return answer if position is None else answer[:position]


PLAIN = ChatMode()


def mode_of(params: Mapping[str, Any]) -> ChatMode:
    """Return the mode of a run whose samples have these params.

    Raises:
        HybridKVError: they are no such values.
    """
    known = {name: params[name] for name in asdict(PLAIN) if name in params}
    kinds = {"apply_chat_template": bool, "think_end_token": str, "max_gen_toks": int}
    odd = [name for name, value in known.items() if type(value) is not kinds[name]]
    if odd:
        raise HybridKVError(
            f"{odd[0]} {known[odd[0]]!r} of the baseline cannot be used; write the file again"
        )
    return ChatMode(**known)


def template_of(tokenizer: Any, name: str) -> Template:
    """Return a checkpoint's chat template, as lm-eval calls it.

    Raises:
        HybridKVError: there is none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise HybridKVError(
            f"{name} has no chat template; leave --apply_chat_template out or add one to its "
            "tokenizer_config.json"
        )

    def apply(chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    return apply
