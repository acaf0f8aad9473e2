"""Bricks of `Family.convert_weights`: a checkpoint's tensors, by name, to those of our modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid_kv.config import ConfigError

Tensors = dict[str, torch.Tensor]


def renamed(tensors: Tensors, prefixes: Sequence[str], names: Mapping[str, str]) -> Tensors:
    """Without the first of `prefixes` that a name begins with, and each part of `names` replaced, in order.

    The weight of a convolution, `*.conv1d.weight` [channels, 1, kernel], becomes `*.conv_weight` [channels, kernel].

    Raises:
        ConfigError: two tensors would get one name.
    """
    converted: Tensors = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        name = name.removeprefix(prefix)
        for old, new in names.items():
            name = name.replace(old, new)
        if ".conv1d." in name:
            name = name.replace("conv1d.", "conv_")
            tensor = tensor.squeeze(1) if tensor.dim() == 3 else tensor
        if name in converted:
            raise ConfigError(f"the checkpoint holds {name} under two prefixes; leave one of them")
        converted[name] = tensor
    return converted


def joined(tensors: Tensors, parts: Sequence[str], whole: str) -> Tensors:
    """Tensors of a checkpoint that are one here, laid behind one another; others, and those without a first part, stay.

    Args:
        parts: ends of their stems: `q_proj`, `k_proj`, `v_proj`; also of their biases.
        whole: of the joined one: `qkv_proj`.

    Raises:
        ConfigError: one of them is missing.
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        part = next((part for part in parts if stem == part or stem.endswith(f".{part}")), None)
        head = stem.removesuffix(part or "")
        if part is None or f"{head}{parts[0]}.{kind}" not in tensors:
            result[name] = tensor
        elif part == parts[0]:
            names = [f"{head}{other}.{kind}" for other in parts]
            if absent := [other for other in names if other not in tensors]:
                raise ConfigError(f"the checkpoint has {name} but lacks {' and '.join(absent)}")
            result[f"{head}{whole}.{kind}"] = torch.cat([tensors[other] for other in names])
    return result


def converted(tensors: Tensors, prefixes: Sequence[str], names: Mapping[str, str]) -> Tensors:
    """`renamed`, and as one: queries, keys and values; gate and up; all experts, whether a file joins them or not."""
    tensors = joined(renamed(tensors, prefixes, names), ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    tensors = stacked(joined(tensors, ("gate_proj", "up_proj"), "gate_up_proj"))
    return renamed(tensors, (), {".experts.gate_up_proj": ".experts.up_proj"})


def stacked(tensors: Tensors) -> Tensors:
    """`*.experts.<i>.<name>.weight` of all experts as one `*.experts.<name>` [experts, …]; others as they are.

    Raises:
        ConfigError: an expert between the first and the last is missing.
    """
    result: Tensors = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        stem, found, rest = name.partition(".experts.")
        number, _, what = rest.partition(".")
        if found and number.isdigit():
            experts.setdefault(f"{stem}.experts.{what.removesuffix('.weight')}", {})[int(number)] = tensor
        else:
            result[name] = tensor
    for name, by_number in experts.items():
        if absent := sorted(set(range(max(by_number) + 1)) - by_number.keys()):
            raise ConfigError(f"the checkpoint lacks {name} of expert {absent[0]}; download it again")
        result[name] = torch.stack([by_number[i] for i in range(len(by_number))])
    return result
