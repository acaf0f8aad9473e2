"""The check that a checkpoint is exact: transformers computes it in many ways.

Every operation's output is compared to the bit.

The reference is float64, the whole text at once. What differs from it first, in the order of
execution, is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import first_line
from hybrid_kv.models.exact_weights.design import Choices
from hybrid_kv.models.random_checkpoint import quiet
from hybrid_kv.models.transformers_cache import cache_argument, cache_of

DTYPES = ("float64", "float32", "bfloat16")
# What only scores are computed of. They are rounded, and may be: softmax makes 0 and 1 of them.
ROUNDED = ("q_proj", "k_proj", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "rotary_emb")
LENGTH = 70  # tokens of the longest texts: more than a chunk of a scan
PERIOD = 7

Outputs = dict[str, torch.Tensor]  # by module: [num_tokens, ...] float64


@dataclass(frozen=True)
class Difference:
    """The first operation that is not exact.

    Attributes:
        operation: the module whose output differs; it, or what computed its input from the one
            before, is not exact.
        before: the last module whose output is equal.
        token: of the text, the first that differs.
        computed, exact: the first number of it that differs.
    """

    operation: str
    before: str
    token: int
    computed: float
    exact: float

    def __str__(self) -> str:
        return (
            f"{self.operation}, after {self.before}: at token {self.token} "
            f"{self.computed:.9g} instead of {self.exact:.9g}"
        )


@dataclass(frozen=True)
class Result:
    """The result of one way to compute all texts.

    `difference` is None if each output of each operation is equal to the bit.
    """

    dtype: str
    way: str
    num_tokens: int
    difference: Difference | None


class _OutputRecorder:
    """Keeps the outputs of a model's modules, a row for each token."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {
            module: name
            for name, module in model.named_modules()
            if self._is_operation(name, module)
        }
        self._handles = [module.register_forward_hook(self._keep) for module in self._names]
        self._outputs: dict[str, list[torch.Tensor]] = {}

    @staticmethod
    def _is_operation(name: str, module: nn.Module) -> bool:
        is_leaf = not any(module.children())
        return (
            is_leaf
            and bool(name)
            and name.split(".")[-1] not in ROUNDED
            and not isinstance(module, nn.Conv1d)
        )

    def _keep(self, module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.dim() == 3:
            self._outputs.setdefault(self._names[module], []).append(output.detach().double())

    def take(self) -> dict[str, list[torch.Tensor]]:
        """Return the outputs since the last call, in the order of execution.

        [batch, num_tokens, ...] of each step.
        """
        outputs = self._outputs
        self._outputs = {}
        return outputs

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def texts_of(vocab_size: int, seed: int, length: int) -> list[list[int]]:
    """Return a random text, one that repeats a few tokens, one of a single token, and short ones.

    Texts of one length follow each other.
    """
    draw = Choices(seed)

    def tokens(count: int) -> list[int]:
        return [1 + draw.below(vocab_size - 1) for _ in range(count)]

    periodic = (tokens(PERIOD) * length)[:length]
    return [tokens(length), periodic, tokens(1) * length, tokens(1), tokens(PERIOD)]


def verify(folder: str | Path, seed: int = 0, length: int = LENGTH) -> Iterator[Result]:
    """Compute some texts in every way.

    Args:
        length: tokens of the longest texts.

    Raises:
        ConfigError: transformers does not load the checkpoint.
    """
    reference: list[Outputs] | None = None
    for dtype in DTYPES:
        model = _load(folder, dtype)
        texts = texts_of(model.config.vocab_size, seed, length)
        with quiet(), _recorded(model) as recorder:
            whole = _in_chunks(model, recorder, texts, lambda length: [length])
            if reference is None:
                reference = whole
            num_tokens = sum(map(len, texts))
            yield Result(dtype, "whole", num_tokens, _first_difference(whole, reference))
            for way, outputs in _ways(model, recorder, texts, seed):
                yield Result(dtype, way, num_tokens, _first_difference(outputs, reference))


def _ways(
    model: Any, recorder: _OutputRecorder, texts: Sequence[Sequence[int]], seed: int
) -> Iterator[tuple[str, list[Outputs]]]:
    draw = Choices(seed + 1)
    yield "token by token", _in_chunks(model, recorder, texts, lambda length: [1] * length)
    for most in (16, 70):
        sizes = partial(_drawn_sizes, most=most, draw=draw)
        yield f"drawn chunks of at most {most}", _in_chunks(model, recorder, texts, sizes)
    yield "padded batch", _in_batch(model, recorder, texts)
    with _drawn_orders(model, draw):
        yield "drawn orders of sums", _in_chunks(model, recorder, texts, lambda length: [length])
    model.set_attn_implementation("eager")
    yield "eager attention", _in_chunks(model, recorder, texts, lambda length: [length])


def _load(folder: str | Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
            )
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"transformers does not load {folder}: {first_line(error)}") from None
    return model.train(mode=False)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[_OutputRecorder]:
    recorder = _OutputRecorder(model)
    try:
        with torch.inference_mode():
            yield recorder
    finally:
        recorder.close()


def _drawn_sizes(length: int, most: int, draw: Choices) -> list[int]:
    sizes = list[int]()
    while sum(sizes) < length:
        sizes.append(min(length - sum(sizes), 1 + draw.below(most)))
    return sizes


def _in_chunks(
    model: Any,
    recorder: _OutputRecorder,
    texts: Sequence[Sequence[int]],
    sizes_of: Callable[[int], list[int]],
) -> list[Outputs]:
    """Compute texts of one length together, in chunks of the sizes that a length is cut into."""
    outputs = list[Outputs]()
    for length, group in groupby(texts, len):
        tokens = torch.tensor(list(group))
        cache = None
        for piece in tokens.split(sizes_of(length), dim=1):
            given = {cache_argument(model.forward): cache}
            cache = cache_of(model(piece, use_cache=True, **given))
        joined = {name: torch.cat(steps, dim=1) for name, steps in recorder.take().items()}
        outputs += [
            {name: output[row] for name, output in joined.items()} for row in range(len(tokens))
        ]
    return outputs


def _in_batch(
    model: Any, recorder: _OutputRecorder, texts: Sequence[Sequence[int]]
) -> list[Outputs]:
    longest = max(map(len, texts))
    tokens = torch.tensor([[0] * (longest - len(text)) + list(text) for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model(tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    outputs = {name: steps[0] for name, steps in recorder.take().items()}
    return [
        {name: output[row, longest - len(text) :] for name, output in outputs.items()}
        for row, text in enumerate(texts)
    ]


@contextmanager
def _drawn_orders(model: nn.Module, draw: Choices) -> Iterator[None]:
    """Every matrix product adds its terms in an order of its own."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        order = torch.tensor(draw.order(linear.in_features))
        linear.forward = _Permuted(linear, order)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


class _Permuted:
    """`nn.Linear` with the terms of its sums in another order."""

    def __init__(self, linear: nn.Linear, order: torch.Tensor) -> None:
        self._weight = linear.weight[:, order].contiguous()
        self._bias = linear.bias
        self._order = order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x[..., self._order], self._weight, self._bias)


def _first_difference(
    outputs: Sequence[Outputs], reference: Sequence[Outputs]
) -> Difference | None:
    """Return the first difference of all texts, in the order of execution."""
    before = "the start"
    for name in reference[0]:
        for computed, exact in zip(outputs, reference, strict=True):
            unequal = (computed[name] != exact[name]).nonzero()
            if len(unequal):
                place = tuple(unequal[0].tolist())
                return Difference(
                    name, before, place[0], float(computed[name][place]), float(exact[name][place])
                )
        before = name
    return None
