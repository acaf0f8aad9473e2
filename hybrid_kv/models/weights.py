"""Bricks of `Family.convert_weights`: a checkpoint's tensors become those of our modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid_kv.config import ConfigError

Tensors = dict[str, torch.Tensor]


def renamed(tensors: Tensors, prefixes: Sequence[str], names: Mapping[str, str]) -> Tensors:
    """Return tensors without the first fitting prefix, and with each part of `names` replaced.

    Names are replaced in order.

    The weight of a convolution, `*.conv1d.weight` [channels, 1, kernel], becomes `*.conv_weight`
    [channels, kernel].

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
    """Join tensors of a checkpoint that are one here, one after the other.

    Others, and those without a first part, stay.

    Args:
        parts: ends of their stems: `q_proj`, `k_proj`, `v_proj`; also of their biases.
        whole: of the joined one: `qkv_proj`.

    Raises:
        ConfigError: one of them is missing.
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        end = next((end for end in parts if stem == end or stem.endswith(f".{end}")), None)
        head = stem.removesuffix(end or "")
        if end is None or f"{head}{parts[0]}.{kind}" not in tensors:
            result[name] = tensor
        elif end == parts[0]:
            names = [f"{head}{other}.{kind}" for other in parts]
            absent = [other for other in names if other not in tensors]
            if absent:
                raise ConfigError(f"the checkpoint has {name} but lacks {' and '.join(absent)}")
            result[f"{head}{whole}.{kind}"] = torch.cat([tensors[other] for other in names])
    return result


def converted(tensors: Tensors, prefixes: Sequence[str], names: Mapping[str, str]) -> Tensors:
    """Rename and join: queries, keys and values; gate and up; all experts.

    A file may have joined them already.
    """
    tensors = joined(renamed(tensors, prefixes, names), ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    tensors = stacked(joined(tensors, ("gate_proj", "up_proj"), "gate_up_proj"))
    return renamed(tensors, (), {".experts.gate_up_proj": ".experts.up_proj"})


def stacked(tensors: Tensors) -> Tensors:
    """Stack `*.experts.<i>.<name>.weight` of all experts to one `*.experts.<name>` [experts, …].

    Others stay as they are.

    Raises:
        ConfigError: an expert between the first and the last is missing.
    """
    result: Tensors = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        stem, separator, rest = name.partition(".experts.")
        number, _, weight = rest.partition(".")
        if separator and number.isdigit():
            experts.setdefault(f"{stem}.experts.{weight.removesuffix('.weight')}", {})[
                int(number)
            ] = tensor
        else:
            result[name] = tensor
    for name, by_number in experts.items():
        absent = sorted(set(range(max(by_number) + 1)) - by_number.keys())
        if absent:
            raise ConfigError(
                f"the checkpoint lacks {name} of expert {absent[0]}; download it again"
            )
        result[name] = torch.stack([by_number[i] for i in range(len(by_number))])
    return result
