"""The exact model as a model of mlx-lm.

It computes integers modulo a prime, over mlx-lm's own caches and masks. `generate_step`,
`BatchGenerator`, caches, masks and drafts are mlx-lm's, only the layers are not. They compute what
`hybrid_kv.models.exact` computes: one row, slot or state of another text is a wrong token, without
any tolerance. The file needs mlx-lm 0.32 and nothing else: the weights are in the checkpoint's
`config.json`.
"""

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import ArraysCache, KVCache

PRIME = 2**31 - 1  # as in hybrid_kv.models.exact
CYCLE = 5


class MlxLayer(nn.Module):  # type: ignore[misc]
    """Its weights as arrays of int64."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        for name, value in weights.items():
            setattr(self, name, mx.array(value, dtype=mx.int64))


class MlxAttention(MlxLayer):
    """Attention with `o_i = sum_{j <= i} (q_i + k_j)^2 v_j`.

    k_j has its token's position, v_j its number among the seen keys.
    """

    def __call__(self, x: Any, cache: Any) -> Any:
        """Return the output for x [batch, len, width], in the same shape."""
        length = x.shape[1]
        mask = create_attention_mask(x, cache, return_array=True)
        first = cache.offset[:, None] if isinstance(cache.offset, mx.array) else cache.offset
        positions = (first + mx.arange(length)).astype(mx.int64).reshape(-1, length, 1)
        q, k, v = (x * weight % PRIME for weight in self.qkv)
        mark = (positions + 1) * self.write_mark % PRIME
        keys, values = cache.update_and_fetch(((k + mark * mark) % PRIME)[:, None], v[:, None])
        if mask is None:
            mask = mx.ones((1, 1, length, keys.shape[2]), dtype=mx.bool_)
        visible = mask.reshape(-1, *mask.shape[-2:], 1)  # [batch or 1, len, keys, 1]
        order = mx.cumsum(visible.astype(mx.int64), axis=2) * self.read_mark % PRIME
        weighted = values * (order * order % PRIME) % PRIME
        score = (q[:, :, None] + keys) % PRIME
        return mx.where(visible, score * score % PRIME * weighted % PRIME, 0).sum(2) % PRIME

    def make_cache(self) -> Any:
        return KVCache()


class MlxMamba(MlxLayer):
    """Windows [conv_kernel - 1, width] and states [state_size, width].

    Each token changes them by its own affine map.
    """

    def __call__(self, x: Any, cache: Any) -> Any:
        """Return the output for x [batch, len, width], in the same shape."""
        (rows, length, width), kernel = x.shape, self.conv.shape[1]
        mask = create_ssm_mask(x, cache)
        real = mx.ones((rows, length), dtype=mx.bool_) if mask is None else mask
        taps, c = mx.arange(length)[:, None] + mx.arange(kernel), mx.array(0, dtype=mx.int64)
        for i, conv in enumerate(self.conv):
            own = (x * (i + 1) + i - 1) % PRIME if i else x
            old = (
                mx.zeros((rows, kernel - 1, width), dtype=mx.int64)
                if cache[i] is None
                else cache[i]
            )
            both = mx.concatenate([old, mx.where(real[..., None], own, 0)], axis=1)
            if cache.lengths is None:
                cache[i] = mx.contiguous(both[:, length:])
            else:  # padding on the right
                ends = mx.clip(cache.lengths, 0, length)[:, None] + mx.arange(kernel - 1)
                cache[i] = mx.take_along_axis(both, ends[..., None], axis=1)
            mixed = ((both[:, taps] + conv) * conv % PRIME).sum(-2) % PRIME
            c = (c + mixed * mixed) % PRIME
        y, mask = c, real[..., None, None]
        for i, (to_map, out) in enumerate(zip(self.to_map, self.out, strict=True), len(self.conv)):
            maps = (c[..., None, None, :] * to_map[::2] + to_map[1::2]) % PRIME
            a, b = mx.where(mask, mx.maximum(maps[:, :, 0], 1), 1), mx.where(mask, maps[:, :, 1], 0)
            after = scan(a, b, mx.zeros_like(a[:, 0]) if cache[i] is None else cache[i])
            cache[i] = mx.contiguous(after[:, -1])
            mixed = (after * out % PRIME).sum(-2) % PRIME
            y = (mixed + y) * mixed % PRIME
        cache.advance(length)
        return y

    def make_cache(self) -> Any:
        return ArraysCache(len(self.conv) + len(self.out))


def scan(a: Any, b: Any, start: Any) -> Any:
    """Return the state [batch, len, state_size, width] after each token of maps `s -> a s + b`."""
    b = mx.concatenate([(a[:, :1] * start[:, None] + b[:, :1]) % PRIME, b[:, 1:]], axis=1)
    shift = 1
    while shift < a.shape[1]:
        late = (a[:, shift:] * b[:, :-shift] + b[:, shift:]) % PRIME
        a = mx.concatenate([a[:, :shift], a[:, shift:] * a[:, :-shift] % PRIME], axis=1)
        b = mx.concatenate([b[:, :shift], late], axis=1)
        shift *= 2
    return b


class MlxModel(nn.Module):  # type: ignore[misc]
    """The model of a `config.json`.

    Logits are one-hot: a checksum of the whole history draws one token in `echo`. The others follow
    their predecessor in a cycle of five; a draft model with another `echo` is right as a rule.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        exact = config["exact"]
        self.echo = exact["echo"]
        self.embedding, self.logit_map = (
            mx.array(exact[one], dtype=mx.int64) for one in ("embedding", "logit_map")
        )
        self.layers = [
            (MlxMamba if one["kind"] else MlxAttention)(one["weights"]) for one in exact["layers"]
        ]

    def make_cache(self) -> list[Any]:
        return [layer.make_cache() for layer in self.layers]

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        """Return logits [batch, len, vocabulary] of inputs [batch, len]."""
        x = self.embedding[inputs]
        for layer, own in zip(self.layers, cache or self.make_cache(), strict=True):
            x = (x * 3 + layer(x, own)) % PRIME
        scale, offset = self.logit_map
        mixed = (x[..., None, :] * scale + offset) % PRIME
        scores = (mixed * mixed % PRIME).sum(-1) % PRIME
        token = inputs.astype(mx.int64)
        follower = token - token % CYCLE + (token + 1) % CYCLE
        chosen = mx.where(
            scores[..., 0] % self.echo == 0, mx.argmax(scores, axis=-1).astype(mx.int64), follower
        )
        return mx.where(chosen[..., None] == mx.arange(scores.shape[-1]), 100.0, 0.0)
