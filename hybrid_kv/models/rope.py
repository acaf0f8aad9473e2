"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of the first channels of each head.

The two halves of the rotated channels are pairs ("NeoX style"), as in every family here.
Frequencies of the scaled variants are transformers' (`modeling_rope_utils`). Variants whose
frequencies change with the length of a request (`dynamic`, `longrope`) are refused: keys in the
cache were rotated by others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from hybrid_kv.models.config_file import ConfigFile, shown

# Variants whose frequencies are the same for every request.
_FIXED = "linear", "llama3", "proportional", "yarn"
# Radians a token, and the scale; published ones are near 1, and an angle of float32 ends at 3e38.
_MOST = 1e9


@dataclass(frozen=True)
class Rope:
    """A rotation: channel i of the first half turns by `position * frequencies[i]`.

    Cosine and sine are multiplied by `scale`; with `wide` they are in float32 at least, so that
    half precision is rounded after the turn alone.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    wide: bool = False

    def rotation(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [num_tokens, 1, len(frequencies)] of positions [num_tokens].

        Angles are in float32.
        """
        if self.wide:
            dtype = torch.promote_types(dtype, torch.float32)
        angles = (positions.float()[:, None] * _on(positions.device, self.frequencies)).unsqueeze(1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


@lru_cache(64)
def _on(device: torch.device, frequencies: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(frequencies, dtype=torch.float32, device=device)


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate [num_tokens, num_heads, head_size]; the channels after the rotated ones stay."""
    cos, sin = rotation
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, rest) if rest.shape[-1] else turned, dim=-1)


def read_rope(
    file: ConfigFile, head_size: int, theta: float = 10_000.0, share: float = 1.0
) -> Rope:
    """Read `rope_parameters`, or older `rope_theta`, `rope_scaling` and `partial_rotary_factor`.

    Args:
        theta, share: base, and share of the channels that turn, where the file names none.

    Raises:
        ConfigError: values of a wrong type or that no model can have, or a variant whose
            frequencies change with the length of a request.
    """
    given = file.get("rope_parameters", "rope_scaling") or {}
    if not isinstance(given, dict):
        raise file.fail(f"rope_parameters={shown(given)} must be an object; correct the file")
    rope_file = ConfigFile({**file.values, **given}, file.source)
    factor = rope_file.number("partial_rotary_factor", share)
    size = int(head_size * factor) // 2 * 2
    base = rope_file.number("rope_theta", theta)
    kind = rope_file.text("rope_type", "type", default="default")
    if not 0 < size <= head_size:
        raise file.fail(f"partial_rotary_factor={factor} leaves no channel of {head_size}")
    if kind in ("default", "mrope"):  # of text alone: the three positions of a token are one
        # Models are built on the meta device, where no number can be read.
        exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
        rope = Rope(tuple((1.0 / base**exponents).tolist()))
    elif kind in _FIXED:
        parameters = {
            **given,
            "rope_type": kind,
            "rope_theta": base,
            "partial_rotary_factor": factor,
        }
        rope = _scaled(file, parameters, head_size)
    else:
        raise file.fail(
            f"rope_type={kind!r} is not supported; supported are default, {', '.join(_FIXED)} "
            "(keys in a cache cannot "
            "be rotated anew when a request grows)"
        )
    turning = rope.frequencies[: size // 2]  # of `proportional` the others are 0
    if not all(0 < number < _MOST for number in (*turning, rope.scale)):
        raise file.fail(
            f"rope_theta={base:g}, rope_parameters={shown(given)} make NaN of an angle; correct "
            "the file"
        )
    return rope


def _scaled(file: ConfigFile, parameters: dict[str, Any], head_size: int) -> Rope:
    from transformers import PreTrainedConfig  # an extra: only a checkpoint folder comes here
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes: dict[str, Any] = {
        "head_dim": head_size,
        "hidden_size": file.size("hidden_size"),
        "num_attention_heads": file.size("num_attention_heads"),
        "max_position_embeddings": file.size("max_position_embeddings", default=2048),
    }
    known = PreTrainedConfig(**sizes)
    known.rope_parameters = parameters
    try:
        with torch.device("cpu"):
            frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
                known, torch.device("cpu")
            )
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise file.fail(
            f"rope_parameters={shown(parameters)} cannot be used ({error}); correct the file"
        ) from None
    return Rope(tuple(frequencies.tolist()), float(scale))
