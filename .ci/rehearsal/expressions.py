"""Expressions of GitHub's workflows, evaluated by Jinja.

Jinja has the same operators under other names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import ChainableUndefined
from jinja2.sandbox import SandboxedEnvironment

EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")
FUNCTIONS = ("cancelled", "success", "toJSON", "fromJSON")
_JINJA = SandboxedEnvironment(undefined=ChainableUndefined)


class Names(dict[str, Any]):
    """Values by name, with an underscore for each hyphen, which Jinja takes for a minus."""

    def __missing__(self, name: str) -> Any:
        for key, value in self.items():
            if key.replace("-", "_") == name:
                return value
        raise KeyError(name)


def evaluate(expression: str, values: Mapping[str, Any], success: bool) -> Any:
    """Return an expression's value; a name that has none is empty.

    Args:
        values: what its names begin with.
        success: what `success()` returns.
    """
    text = expression.strip().replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text)
    text = re.sub(r"(?<=\w)-(?=\w)", "_", text)
    compiled = _JINJA.compile_expression(text, undefined_to_none=False)
    return compiled(
        **values,
        success=lambda: success,
        cancelled=lambda: False,
        toJSON=json.dumps,
        fromJSON=json.loads,
    )


def filled(texts: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Return texts with the values of the expressions in them."""
    found = {}
    for key, text in texts.items():
        parts = EXPRESSION.split(str(text))  # every second one is an expression
        parts[1::2] = [str(evaluate(part, values, success=True)) for part in parts[1::2]]
        found[key] = "".join(parts)
    return found


def condition(job_or_step: Mapping[str, Any]) -> str:
    """Return its `if`; without a function of the state that means: if nothing has failed."""
    text = str(job_or_step.get("if", "")).strip()
    if text.startswith("${{"):
        text = text.removeprefix("${{").removesuffix("}}").strip()
    if "cancelled()" in text:
        return text
    return f"success() && ({text})" if text else "success()"


def unknown_names(text: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names and functions of an expression that nothing here has a value for."""
    text = re.sub(r"'[^']*'", "", text)
    for name in re.findall(r"(\w+)\s*\(", text):
        if name not in FUNCTIONS:
            yield name
    for root, rest in re.findall(r"\b([a-z]\w*)\.([\w.-]+)", text):
        if root not in ("needs", "steps") and rest not in values.get(root, ()):
            yield f"{root}.{rest}"
