"""How soon a damaged cache shows in the tokens of an exact checkpoint.

    python -m bench.damage FOLDER [--trials 200] [--out FILE.csv]

Each trial damages a kind of cache of transformers after a drawn text, in one layer or in all,
and counts whether the next two greedy tokens differ from the right ones.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness.arguments import ArgumentParser
from hybrid_kv.errors import run_command
from hybrid_kv.measure.results import Row, append_rows
from hybrid_kv.models.exact_weights.design import Choices
from hybrid_kv.models.random_checkpoint import quiet
from hybrid_kv.models.transformers_cache import cache_argument, cache_of

SHORTEST, LONGEST = 40, 224  # tokens of a text; each layer of attention reads the last 224
PAGE = 16  # tokens
NUM_NEW = 2  # tokens within which damage must show
PART = 40  # trials of which rows are kept at once
BATCH = 10  # texts of one length, which are damaged and continued together
CACHES = ("window", "state", "kv")
SCOPES = ("one layer", "all layers")

Tensors = list[torch.Tensor]  # of one layer's cache of a kind, [batch, ...] each


class Cell(NamedTuple):
    """The part of a cache that is damaged, and how."""

    cache: str
    scope: str
    kind: str


@dataclass(frozen=True)
class Texts:
    """Caches of a batch of texts of one length, and their right continuation.

    Attributes:
        right: after each text.
        old: without the last token.
        earlier: without the last page.
        draft: after a rejected draft, too.
        drafted: with a rejected draft in place of the last token.
        pages: [batch] the first token of a page of each text.
        answers: [batch, 1 + NUM_NEW] the first is what the text itself says.
    """

    right: Any
    old: Any
    earlier: Any
    draft: Any
    drafted: Any
    pages: torch.Tensor
    answers: torch.Tensor


Damage = Callable[[Texts, int, str], Tensors]  # of a layer's cache, by the layer's index


class Model:
    """transformers' model of a checkpoint, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.family: str = self._model.config.model_type
        self.vocab_size: int = self._model.config.vocab_size

    def read(self, tokens: torch.Tensor, cache: Any = None) -> tuple[Any, torch.Tensor]:
        """Return the cache after [batch, n] tokens, and the [batch] likeliest next ones."""
        given = {cache_argument(self._model.forward): cache}
        output = self._model(tokens, use_cache=True, logits_to_keep=1, **given)
        return cache_of(output), output.logits[:, -1].argmax(-1)

    def texts(self, draw: Choices, count: int) -> Texts:
        """Return drawn texts of one drawn length."""
        length = SHORTEST + draw.below(LONGEST - SHORTEST)
        drawn = [[self._token(draw) for _ in range(length)] for _ in range(count)]
        text = torch.tensor(drawn)
        earlier, _ = self.read(text[:, :-PAGE])
        old, _ = self.read(text[:, -PAGE:-1], copy.deepcopy(earlier))
        right, following = self.read(text[:, -1:], copy.deepcopy(old))
        others = torch.tensor([draw.below(self.vocab_size - 2) for _ in range(count)])
        wrong = 1 + (following + others) % (self.vocab_size - 1)  # never `following`
        draft, _ = self.read(wrong[:, None], copy.deepcopy(right))
        drafted, _ = self.read(wrong[:, None], copy.deepcopy(old))
        pages = torch.tensor([PAGE * draw.below(length // PAGE) for _ in range(count)])
        answers = torch.column_stack([following, self.continued(copy.deepcopy(right), following)])
        return Texts(right, old, earlier, draft, drafted, pages, answers)

    def continued(self, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Return the [batch, NUM_NEW] greedy tokens after [batch] tokens."""
        answers = list[torch.Tensor]()
        for _ in range(NUM_NEW):
            _, tokens = self.read(tokens[:, None], cache)
            answers.append(tokens)
        return torch.column_stack(answers)

    def _token(self, draw: Choices) -> int:
        return 1 + draw.below(self.vocab_size - 1)


def tensors_of(layer: Any, cache: str) -> Tensors:
    """Return the tensors of a layer's cache of a kind; none if it has no such cache."""
    if cache == "kv":
        keys = getattr(layer, "keys", None)
        return [] if keys is None else [keys, layer.values]
    if not hasattr(layer, "conv_states"):
        return []
    tensor = (layer.conv_states if cache == "window" else layer.recurrent_states)[0]
    return [] if tensor is None else [tensor]


def put(layer: Any, cache: str, tensors: Tensors) -> None:
    """Replace the tensors of a layer's cache of a kind."""
    if cache == "kv":
        layer.keys, layer.values = tensors
    else:
        (layer.conv_states if cache == "window" else layer.recurrent_states)[0] = tensors[0]


def copied(name: str) -> Damage:
    """Return the damage that puts another cache of `Texts` in place of the right one."""

    def damage(texts: Texts, index: int, cache: str) -> Tensors:
        return tensors_of(getattr(texts, name).layers[index], cache)

    return damage


def other_rows(texts: Texts, index: int, cache: str) -> Tensors:
    """Return the cache of the next text of the batch."""
    return [tensor.roll(1, 0) for tensor in tensors_of(texts.right.layers[index], cache)]


def token_old(texts: Texts, index: int, cache: str) -> Tensors:
    """Return a window or state without the last token; KV whose last slot was not written."""
    if cache != "kv":
        return copied("old")(texts, index, cache)
    tensors = [tensor.clone() for tensor in tensors_of(texts.right.layers[index], cache)]
    for tensor in tensors:
        tensor[:, :, -1] = 0.0
    return tensors


def zeroed(texts: Texts, index: int, cache: str) -> Tensors:
    """Return a window or state of zeros; KV with a page of them."""
    tensors = tensors_of(texts.right.layers[index], cache)
    zeros = [torch.zeros_like(tensor) for tensor in tensors]
    return zeros if cache != "kv" else in_page(texts, tensors, zeros)


def wrong_page(texts: Texts, index: int, cache: str) -> Tensors:
    """Return a window or state of an earlier page; KV with a page of another text."""
    if cache != "kv":
        return copied("earlier")(texts, index, cache)
    return in_page(
        texts, tensors_of(texts.right.layers[index], cache), other_rows(texts, index, cache)
    )


def rejected_draft(texts: Texts, index: int, cache: str) -> Tensors:
    """Return a cache with a rejected draft; its KV is in the slot of the last token."""
    return copied("drafted" if cache == "kv" else "draft")(texts, index, cache)


def in_page(texts: Texts, tensors: Tensors, others: Tensors) -> Tensors:
    """Return KV, with the drawn page of each text taken from `others`."""
    slots = torch.arange(tensors[0].shape[2])
    inside = (slots >= texts.pages[:, None]) & (slots < texts.pages[:, None] + PAGE)
    pairs = zip(tensors, others, strict=True)
    return [torch.where(inside[:, None, :, None], other, tensor) for tensor, other in pairs]


KINDS: dict[str, Damage] = {
    "a token old": token_old,
    "another row": other_rows,
    "zeroed": zeroed,
    "a wrong page": wrong_page,
    "a rejected draft": rejected_draft,
}


def damaged(texts: Texts, cell: Cell, damage: Damage, draw: Choices) -> Any:
    """Return a copy of the right cache with damage in all layers, or in one of each text.

    That one is drawn.
    """
    broken = copy.deepcopy(texts.right)
    layers = [i for i, layer in enumerate(broken.layers) if tensors_of(layer, cell.cache)]
    count = len(texts.answers)
    chosen = torch.tensor([layers[draw.below(len(layers))] for _ in range(count)])
    for index in layers:
        is_here = chosen == index if cell.scope == SCOPES[0] else torch.ones(count).bool()
        right = tensors_of(broken.layers[index], cell.cache)
        wrong = damage(texts, index, cell.cache)
        pairs = zip(wrong, right, strict=True)
        mixed = [torch.where(is_here.view(-1, *(1,) * (b.dim() - 1)), a, b) for a, b in pairs]
        put(broken.layers[index], cell.cache, mixed)
    return broken


def stacked(caches: Sequence[Any]) -> Any:
    """Return one cache whose batch is those of some caches, one after the other."""
    joined = copy.deepcopy(caches[0])
    for index, layer in enumerate(joined.layers):
        for cache in CACHES:
            if tensors_of(layer, cache):
                every = [tensors_of(each.layers[index], cache) for each in caches]
                put(layer, cache, [torch.cat(tensors) for tensors in zip(*every, strict=True)])
    return joined


def trials(
    model: Model, texts: Texts, kinds: Mapping[str, Damage], draw: Choices
) -> Iterator[tuple[Cell, int]]:
    """Damage each cache in each way, and count the texts whose next tokens show it."""
    caches = [
        cache for cache in CACHES if any(tensors_of(each, cache) for each in texts.right.layers)
    ]
    cells = [Cell(cache, scope, kind) for cache in caches for scope in SCOPES for kind in kinds]
    broken = stacked([damaged(texts, cell, kinds[cell.kind], draw) for cell in cells])
    answers = model.continued(broken, texts.answers[:, 0].repeat(len(cells)))
    shown = (answers.view(len(cells), -1, NUM_NEW) != texts.answers[:, 1:]).any(-1)
    yield from zip(cells, shown.sum(1).tolist(), strict=True)


def count_shown(
    model: Model, num_trials: int, seed: int, kinds: Mapping[str, Damage] = KINDS
) -> dict[Cell, int]:
    """Return how often each damage shows, of so many trials."""
    draw, shown = Choices(seed), Counter[Cell]()
    with torch.inference_mode():
        for begin in range(0, num_trials, BATCH):
            texts = model.texts(draw, min(BATCH, num_trials - begin))
            for cell, count in trials(model, texts, kinds, draw):
                shown[cell] += count
    return dict(shown)


def rows_of(family: str, shown: Mapping[Cell, int], num_trials: int) -> list[Row]:
    """Return a row for each cell: the share of its trials that showed."""
    rows = []
    for cell, count in shown.items():
        params = {"family": family, "within": NUM_NEW, **cell._asdict()}
        share = count / num_trials
        row = Row("exact_weights", "damage", "shown", share, "share", params, n=num_trials)
        rows.append(row)
    return rows


def main() -> None:
    parser = ArgumentParser("python -m bench.damage", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="append rows to it")
    options = parser.parse_args()
    with quiet():
        model = Model(options.folder)
    shown = Counter[Cell]()
    for begin in range(0, options.trials, PART):
        num_trials = min(PART, options.trials - begin)
        part = count_shown(model, num_trials, options.seed + begin)
        shown.update(part)
        if options.out is not None:
            append_rows(options.out, rows_of(model.family, part, num_trials))
    for cell, count in shown.items():
        of = f"{count} of {options.trials} within {NUM_NEW} tokens"
        print(f"{model.family}, {', '.join(cell)}: {of} ({count / options.trials:.1%})")


if __name__ == "__main__":
    run_command(main)
