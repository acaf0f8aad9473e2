"""Families by `model_type`. A family is one module that calls `register` when it is imported.

`hybrid_kv.models.families` imports those that come with the package; anybody else's needs only to
be imported before its checkpoint is loaded. `docs/adding-a-family.md` walks through one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.specs import SpecReader

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Tensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Family:
    """The facts of one family that no other part of this package knows.

    Attributes:
        kinds: the kind of every layer, in order, from config.json.
        caches: kind to the caches that such a layer keeps, by the suffix that names them; none for
            an MLP, `""` where there is one. Each reads its spec from config.json.
        build: (config, specs by layer name) to a module that is a `models.interface.Model`; None
            where the family can only be planned. Built on torch's meta device: parameters get their
            values from the checkpoint alone.
        convert_weights: the checkpoint's tensors to the module's, by name; raises `ConfigError` for
            a wrong one.
        skips: what the names of tensors begin with that a language model has no use for, such as a
            vision tower's.
        default_ssm_dtype: of the states where neither the user nor config.json names one; None: the
            model's.
        passes: how many times the model runs each of its layers, from config.json; each pass has
            caches of its own (`specs.cache_name`).
        sizes: `tiny` and `small` to keys of transformers' config class of the family, for
            checkpoints with random weights; those of the families that come with the package are in
            `sizes.yaml`.
        checked_against: what its logits were compared with, for people.
    """

    kinds: Callable[[ConfigFile], list[str]]
    caches: Mapping[str, Mapping[str, SpecReader]]
    build: Callable[[ConfigFile, dict[str, KVCacheSpec]], torch.nn.Module] | None = None
    convert_weights: Callable[[Tensors], Tensors] = dict
    skips: tuple[str, ...] = ()
    default_ssm_dtype: str | None = None
    passes: Callable[[ConfigFile], list[int]] | None = None
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    checked_against: str = "transformers: whole, in chunks, token by token"


def _no_shapes(file: ConfigFile) -> Mapping[str, tuple[int, ...] | str]:
    return {}


def _one_layer(file: ConfigFile) -> int:
    return 1


@dataclass(frozen=True)
class HeadFamily:
    """A multi-token-prediction head that lies in the target's own checkpoint.

    Attributes:
        prefix: of its tensors' names; the target has no use for these.
        build: (config, target) to a module that is a `models.interface.DraftHead`; its parameters
            are named as in the converted checkpoint, without the prefix. Raises `ConfigError` for a
            head of another kind.
        convert_weights: the checkpoint's tensors of that prefix to the module's, the prefix kept.
        shapes: of the checkpoint's tensors, by name without the prefix, for checkpoints with random
            weights; none where config.json has no head. A text in the place of a shape: the head
            has all tensors of the target that begin with it, too, and their names begin with the
            key.
        num_layers: that keep K and V, by config.json; 0: the checkpoint has no head. They join the
            target's attention groups.
    """

    prefix: str
    build: Callable[[ConfigFile, Any], torch.nn.Module]
    convert_weights: Callable[[Tensors], Tensors]
    shapes: Callable[[ConfigFile], Mapping[str, tuple[int, ...] | str]] = _no_shapes
    num_layers: Callable[[ConfigFile], int] = _one_layer


# What a family is `checked_against`.
AS_A_WHOLE = "transformers as a whole; in chunks on a cache it is wrong"
_SIZES = Path(__file__).with_name("sizes.yaml")
FAMILIES: dict[str, Family] = {}
_HEADS: dict[str, HeadFamily] = {}


def register(family: Family, *model_types: str) -> None:
    """Make a family known under its `model_type`s.

    Raises:
        ValueError: one of them is registered already.
    """
    _add(FAMILIES, family, model_types)


def register_head(head: HeadFamily, *model_types: str) -> None:
    """Make a draft head known for the checkpoints of these `model_type`s.

    Raises:
        ValueError: one of them has a head already.
    """
    _add(_HEADS, head, model_types)


def family_of(config: ConfigFile) -> Family:
    """Return the family of a config.json.

    Raises:
        ConfigError: no family has its `model_type`.
    """
    if config.model_type not in FAMILIES:
        raise config.fail(
            f"model_type {config.get('model_type')!r} is not supported; supported are "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[config.model_type]


def head_of(config: ConfigFile) -> HeadFamily | None:
    """Return the draft head that checkpoints of this `model_type` may have."""
    return _HEADS.get(config.model_type)


def require_head(config: ConfigFile) -> HeadFamily:
    """Return the draft head of a checkpoint.

    Raises:
        ConfigError: checkpoints of this `model_type` have none.
    """
    head = head_of(config)
    if head is None:
        raise config.fail(
            f"{config.model_type} checkpoints have no draft head that can be run; draft with "
            "n-grams instead"
        )
    return head


def runnable() -> list[str]:
    """Return the `model_type`s that can be built, not only planned."""
    return [name for name, family in FAMILIES.items() if family.build is not None]


def sizes_of(model_type: str) -> Mapping[str, Mapping[str, Any]]:
    """Return a family's sizes of checkpoints with random weights, see `Family.sizes`."""
    return FAMILIES[model_type].sizes or _packaged_sizes().get(model_type, {})


@cache
def _packaged_sizes() -> dict[str, dict[str, dict[str, Any]]]:
    import yaml

    sizes: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(_SIZES.read_text(encoding="utf-8"))
    return sizes


def sized() -> dict[str, list[str]]:
    """Return, by `model_type`, the sizes in which random checkpoints can be written."""
    return {name: list(sizes_of(name)) for name in FAMILIES if sizes_of(name)}


def overview() -> list[dict[str, Any]]:
    """Return a row for every `model_type`, those that run first."""
    rows = [
        {
            "model_type": name,
            "runs": family.build is not None,
            "draft_head": name in _HEADS,
            "sizes": list(sizes_of(name)),
            "checked_against": family.checked_against if family.build is not None else "",
        }
        for name, family in FAMILIES.items()
    ]
    by_name = sorted(rows, key=itemgetter("model_type"))
    return sorted(by_name, key=itemgetter("runs"), reverse=True)


def _add(known: dict[str, T], entry: T, model_types: tuple[str, ...]) -> None:
    taken = sorted(known.keys() & set(model_types))
    if taken:
        raise ValueError(f"model_type {taken[0]!r} is registered already")
    known.update(dict.fromkeys(model_types, entry))
