"""How soon does a damaged cache show in the tokens of an exact checkpoint?

Each trial damages one kind of cache of transformers behind a drawn text, in one layer or in all, and counts whether the
next two greedy tokens are the right ones: `python -m bench.damage FOLDER --trials 200`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness.arguments import ArgumentParser
from hybrid_kv.errors import run_command
from hybrid_kv.models.exact_weights.design import Choices
from hybrid_kv.models.random_checkpoint import quiet

SHORTEST, LONGEST = 40, 240  # tokens of a text
PAGE = 16  # tokens
NUM_NEW = 2  # tokens within which damage must show
CACHES = ("window", "state", "kv")
SCOPES = ("one layer", "all layers")


@dataclass(frozen=True)
class Texts:
    """Caches of related texts, and what follows the first.

    Attributes:
        right: of the text.
        old: without its last token.
        earlier: without its last page.
        other: of another text of the same length.
        draft: with one more token, which was rejected.
        drafted: with a rejected token in the last one's place.
        expected: the tokens behind the text, the first of which the logits of the text say.
    """

    right: Any
    old: Any
    earlier: Any
    other: Any
    draft: Any
    drafted: Any
    expected: list[int]


Damage = Callable[[Any, "Texts", int, str, Choices], None]


class Model:
    """transformers' model of a checkpoint, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
        self.vocab_size: int = self._model.config.vocab_size

    def read(self, tokens: list[int], cache: Any = None) -> tuple[Any, int]:
        """The cache behind some tokens, and the likeliest next one."""
        output = self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        return output.past_key_values, int(output.logits[0, -1].argmax())

    def texts(self, draw: Choices) -> Texts:
        """Of a drawn length."""
        length = SHORTEST + draw.below(LONGEST - SHORTEST)
        text, other = ([1 + draw.below(self.vocab_size - 1) for _ in range(length)] for _ in range(2))
        earlier, _ = self.read(text[:-PAGE])
        old, _ = self.read(text[-PAGE:-1], copy.deepcopy(earlier))
        right, following = self.read(text[-1:], copy.deepcopy(old))
        wrong = 1 + (following + draw.below(self.vocab_size - 2)) % (self.vocab_size - 1)
        draft, _ = self.read([wrong], copy.deepcopy(right))
        drafted, _ = self.read([wrong], copy.deepcopy(old))
        expected = [following, *self.continued(copy.deepcopy(right), following)]
        return Texts(right, old, earlier, self.read(other)[0], draft, drafted, expected)

    def continued(self, cache: Any, token: int) -> list[int]:
        """The next tokens, greedily."""
        found = list[int]()
        for _ in range(NUM_NEW):
            _, token = self.read([token], cache)
            found.append(token)
        return found


def holds(layer: Any, cache: str) -> bool:
    """Whether a layer of transformers' cache has that kind."""
    if cache == "kv":
        return getattr(layer, "keys", None) is not None
    return hasattr(layer, "conv_states") and tensor_of(layer, cache) is not None


def tensor_of(layer: Any, cache: str) -> torch.Tensor | None:
    """The window or the state of a layer; None: it has none."""
    return (layer.conv_states if cache == "window" else layer.recurrent_states)[0]


def put(layer: Any, cache: str, tensor: torch.Tensor) -> None:
    """Replace the window or the state of a layer."""
    (layer.conv_states if cache == "window" else layer.recurrent_states)[0] = tensor.clone()


def copied(name: str) -> Damage:
    """The whole window or state of another one of `Texts`; the slots of KV that differ."""

    def damage(cache: Any, texts: Texts, index: int, kind: str, draw: Choices) -> None:
        layer, source = cache.layers[index], getattr(texts, name).layers[index]
        if kind == "kv":
            layer.keys, layer.values = source.keys.clone(), source.values.clone()
        else:
            put(layer, kind, tensor_of(source, kind))

    return damage


def token_old(cache: Any, texts: Texts, index: int, kind: str, draw: Choices) -> None:
    """A window or state without the last token; KV whose last slot was not written."""
    if kind != "kv":
        copied("old")(cache, texts, index, kind, draw)
        return
    cache.layers[index].keys[:, :, -1] = 0.0
    cache.layers[index].values[:, :, -1] = 0.0


def zeroed(cache: Any, texts: Texts, index: int, kind: str, draw: Choices) -> None:
    """A window or state of zeros, or a page of them."""
    layer = cache.layers[index]
    if kind != "kv":
        put(layer, kind, torch.zeros_like(tensor_of(layer, kind)))
        return
    page = drawn_page(layer, draw)
    layer.keys[:, :, page] = 0.0
    layer.values[:, :, page] = 0.0


def wrong_page(cache: Any, texts: Texts, index: int, kind: str, draw: Choices) -> None:
    """The window or state of an earlier page, or a page of another text."""
    if kind != "kv":
        copied("earlier")(cache, texts, index, kind, draw)
        return
    layer, source = cache.layers[index], texts.other.layers[index]
    page = drawn_page(layer, draw)
    layer.keys[:, :, page] = source.keys[:, :, page]
    layer.values[:, :, page] = source.values[:, :, page]


def rejected_draft(cache: Any, texts: Texts, index: int, kind: str, draw: Choices) -> None:
    """A window or state behind a rejected draft, or its KV in the slot of the token that replaced it."""
    copied("drafted" if kind == "kv" else "draft")(cache, texts, index, kind, draw)


def drawn_page(layer: Any, draw: Choices) -> slice:
    """A page that is full."""
    begin = PAGE * draw.below(layer.keys.shape[2] // PAGE)
    return slice(begin, begin + PAGE)


KINDS: dict[str, Damage] = {
    "a token old": token_old,
    "another row": copied("other"),
    "zeroed": zeroed,
    "a wrong page": wrong_page,
    "a rejected draft": rejected_draft,
}


def trials(model: Model, texts: Texts, draw: Choices) -> Iterator[tuple[tuple[str, str, str], bool]]:
    """Each kind of damage in each cache behind one text: whether it shows."""
    layers = range(len(texts.right.layers))
    for kind in CACHES:
        having = [i for i in layers if holds(texts.right.layers[i], kind)]
        for scope in SCOPES if having else ():
            chosen = having if scope == SCOPES[1] else [having[draw.below(len(having))]]
            for name, damage in KINDS.items():
                damaged, state = copy.deepcopy(texts.right), draw.below(2**31)
                for index in chosen:
                    damage(damaged, texts, index, kind, Choices(state))  # the same page in each layer
                shows = model.continued(damaged, texts.expected[0]) != texts.expected[1:]
                yield (kind, scope, name), shows


def main() -> None:
    parser = ArgumentParser("python -m bench.damage", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, shown, counts = Choices(options.seed), Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    with quiet(), torch.inference_mode():
        model = Model(options.folder)
        for _ in range(options.trials):
            for key, shows in trials(model, model.texts(draw), draw):
                counts[key] += 1
                shown[key] += shows
    for key, count in counts.items():
        print(f"{', '.join(key)}: {shown[key]} of {count} within {NUM_NEW} tokens ({shown[key] / count:.1%})")


if __name__ == "__main__":
    run_command(main)
