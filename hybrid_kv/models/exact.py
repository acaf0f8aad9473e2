"""A hybrid model over the integers modulo a prime: every cache mistake becomes a wrong token.

It has the same layers, cache pages, metadata and scheduler as a real model, but no rounding, so that batching,
chunking, paging, drafting and recomputation must not change a single bit. Each token changes a Mamba state by its own
affine map `s -> a s + b (mod p)` and a convolution by its whole window; attention mixes every earlier token with a
weight of its position, once when it is written and once, by its place in the block table, when it is read. So a token
applied twice, skipped, taken from another row, from an older state or in another order gives other tokens from there
on.

`ExactOracle` computes the same function for one request alone, without a cache, in the plainest code.

The cache is torch's, the arithmetic is numpy's: on arrays this small an operation costs a third of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.mamba import DecodeReplay, MambaMetadata
from hybrid_kv.attention.paged import PagedAttentionMetadata
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec
from hybrid_kv.models.layers import ForwardContext

Residues = npt.NDArray[np.int64]

PRIME = 2**31 - 1  # int64 holds the product of a residue and the sum of two, and any residue more


@dataclass(frozen=True)
class ExactConfig:
    """Geometry: `width` residues per token, and a `pattern` with one letter per layer.

    M is Mamba and * attention; + is attention with twice the K/V bytes per token, so that blocks of another size share
    the pool.
    """

    pattern: str = "M*MM*"
    width: int = 2
    conv_kernel: int = 4
    state_size: int = 2
    vocab_size: int = 97
    seed: int = 0


def _draw(generator: np.random.Generator, *shape: int) -> Residues:
    return generator.integers(1, PRIME, size=shape)


def _affine_scan(a: Residues, b: Residues) -> None:
    """Replace each map `s -> a s + b` by its composition with all before it along dimension 1, in log2(len) steps."""
    shift = 1
    while shift < a.shape[1]:
        b[:, shift:] = (a[:, shift:] * b[:, :-shift] + b[:, shift:]) % PRIME
        a[:, shift:] = a[:, shift:] * a[:, :-shift] % PRIME
        shift *= 2


class ExactMamba:
    """State `[state_size, width]` residues; window `[conv_kernel - 1, width]` residues."""

    def __init__(self, name: str, config: ExactConfig, generator: np.random.Generator) -> None:
        self.name = name
        self.conv = _draw(generator, config.conv_kernel, config.width)
        self.to_map = _draw(generator, 4, config.state_size, config.width)
        self.out = _draw(generator, config.state_size, config.width)

    def convolve(self, taps: Residues) -> Residues:
        """[..., kernel, width], a token behind its window, to [..., width]."""
        y = ((taps + self.conv) * self.conv % PRIME).sum(-2) % PRIME
        return y * y % PRIME

    def maps(self, c: Residues) -> tuple[Residues, Residues]:
        """The affine map of each token: a, b [..., state_size, width], a never zero."""
        both = (c[..., None, None, :] * self.to_map[::2] + self.to_map[1::2]) % PRIME
        return np.maximum(both[..., 0, :, :], 1), both[..., 1, :, :]

    def read(self, c: Residues, state: Residues) -> Residues:
        """[..., width] from each token's convolution and the state after it."""
        y = (state * self.out % PRIME).sum(-2) % PRIME
        return (y + c) * y % PRIME

    def __call__(self, x: Residues, context: ForwardContext) -> Residues:
        """[num_tokens, width] to the same, by the rules of `hybrid_kv.attention.mamba`.

        Decodes and prefills run in one padded batch: they differ only in what they write.
        """
        metadata: MambaMetadata = context.metadata[self.name]
        conv_state, ssm_state = (view.numpy() for view in context.views[self.name])
        indices, split = metadata.state_indices.numpy(), metadata.num_decodes
        kernel = len(self.conv)
        window_rows = np.arange(kernel - 1)
        parts = [rows.lengths.numpy() for rows in (metadata.decode_rows, metadata.prefill_rows) if rows is not None]
        lengths = np.concatenate(parts)
        steps = np.arange(lengths.max())
        # Padding repeats the row's last token.
        tokens = (lengths.cumsum() - lengths)[:, None] + np.minimum(steps, lengths[:, None] - 1)

        first = metadata.num_accepted_tokens.numpy()[:, None] - 1
        window = conv_state[metadata.window_indices.numpy()[:, None], first + window_rows].astype(np.int64)
        state = ssm_state[metadata.source_indices.numpy()].astype(np.int64)
        if metadata.replay is not None:
            state[:split] = self.fold(metadata.replay, context)
        if metadata.has_initial_state is not None:
            fresh = split + np.flatnonzero(~metadata.has_initial_state.numpy())
            window[fresh] = state[fresh] = 0

        inputs = np.concatenate([window, x[tokens]], axis=1)
        c = self.convolve(inputs[:, steps[:, None] + np.arange(kernel)])
        a, states = self.maps(c)
        states[:, 0] = (a[:, 0] * state + states[:, 0]) % PRIME
        _affine_scan(a, states)

        if split:
            width = int(lengths[:split].max())
            conv_state[indices[:split, 0], : kernel - 2 + width] = inputs[:split, 1 : kernel - 1 + width]
            if metadata.replay is None:
                ssm_state[indices[:split, :width]] = states[:split, :width]
            else:
                self._append(metadata.replay, context, c[:split])
        if metadata.prefill_rows is not None:
            rows, ends, blocks = np.arange(split, len(lengths)), lengths[split:], indices[split:, 0]
            if metadata.boundary_rows is not None:
                assert metadata.boundary_offsets is not None and metadata.boundary_indices is not None
                rows = np.concatenate([rows, split + metadata.boundary_rows.numpy()])
                ends = np.concatenate([ends, metadata.boundary_offsets.numpy()])
                blocks = np.concatenate([blocks, metadata.boundary_indices.numpy()])
            ssm_state[blocks] = states[rows, ends - 1]
            conv_state[blocks, : kernel - 1] = inputs[rows[:, None], ends[:, None] + window_rows]
        return self.read(c, states)[steps < lengths[:, None]]

    def fold(self, replay: DecodeReplay, context: ForwardContext) -> Residues:
        """Scheme `replay`: write the states that are due; the states [D, state_size, width] after all of history."""
        step, ssm_state = replay.step, context.views[self.name][1].numpy()
        ring = context.rings[self.name].x.numpy()[:, 0]
        rows, src, dst, start, length, flush = (
            part.numpy() for part in (step.rows, step.src, step.dst, step.ring_start, step.n_hist, step.n_flush)
        )
        j = np.arange(1 + length.max())  # one more: the map after no token
        place = (start[:, None] + np.maximum(j - 1, 0)) % ring.shape[1]
        a, b = self.maps(ring[rows[:, None], place].astype(np.int64))
        none = (j == 0) | (j > length[:, None])
        a[none], b[none] = 1, 0
        _affine_scan(a, b)
        states = (a * ssm_state[src][:, None] + b) % PRIME
        due = flush > 0
        ssm_state[dst[due]] = states[due, flush[due]]
        return states[:, -1]

    def _append(self, replay: DecodeReplay, context: ForwardContext, c: Residues) -> None:
        """Put the tokens of a step, [D, len, width], behind the history of their rows."""
        step, ring = replay.step, context.rings[self.name].x.numpy()[:, 0]
        lengths = np.diff(replay.cu_seqlens.numpy()) * (step.src.numpy() > NULL_BLOCK)
        row, j = np.nonzero(np.arange(c.shape[1]) < lengths[:, None])
        place = (step.ring_start.numpy() + step.n_hist.numpy())[row] + j
        ring[step.rows.numpy()[row], place % ring.shape[1]] = c[row, j]


class ExactAttention:
    """`o_i = sum_{j <= i} (q_i + k_j)^2 * v_j * weight_j`, with `k_j` marked by the position of token j."""

    def __init__(self, name: str, config: ExactConfig, generator: np.random.Generator) -> None:
        self.name = name
        self.qkv = _draw(generator, 3, config.width)
        self.write_mark = _draw(generator, config.width)
        self.read_mark = _draw(generator, config.width)

    def project(self, x: Residues, positions: Residues) -> Residues:
        """q, k, v [3, num_tokens, width]; k carries its position."""
        qkv = x * self.qkv[:, None] % PRIME
        mark = (positions[:, None] + 1) * self.write_mark % PRIME
        qkv[1] = (qkv[1] + mark * mark) % PRIME
        return qkv

    def attend(self, query: Residues, key: Residues, value: Residues, positions: Residues) -> Residues:
        """query [rows, len, width]; key, value [rows, keys, width]; positions [rows, len]."""
        places = np.arange(key.shape[1])
        order = (places[:, None] + 1) * self.read_mark % PRIME
        weighted = value * (order * order % PRIME) % PRIME
        score = (query[:, :, None] + key[:, None]) % PRIME
        mixed = score * score % PRIME * weighted[:, None] % PRIME
        visible = places <= positions[..., None]
        return mixed.sum(2, where=visible[..., None]) % PRIME

    def __call__(self, x: Residues, positions: Residues, context: ForwardContext) -> Residues:
        metadata: PagedAttentionMetadata = context.metadata[self.name]
        keys, values = (view.numpy()[:, :, -1] for view in context.views[self.name])
        slots = metadata.slot_mapping.slots.numpy()
        query, key, value = self.project(x, positions)
        real = slots >= 0
        block, offset = np.divmod(slots[real], keys.shape[1])
        keys[block, offset], values[block, offset] = key[real], value[real]
        outputs = []
        for part in metadata.parts:
            rows = part.rows.padded(torch.from_numpy(query[part.start : part.start + part.num_tokens])).numpy()
            table = part.block_table.numpy()
            shape = (len(table), -1, x.shape[1])
            seen_keys, seen_values = (cache[table].reshape(shape).astype(np.int64) for cache in (keys, values))
            out = self.attend(rows, seen_keys, seen_values, part.positions.numpy())
            outputs.append(part.rows.flat(torch.from_numpy(out)).numpy())
        return np.concatenate(outputs)


class ExactModel:
    """The model. `compute_logits` returns float64 residues: pseudo-random, and exactly equal wherever computed.

    Args:
        num_speculative_tokens: drafts per step that the cache must be able to undo.
    """

    mamba_chunk_size: int | None = 4

    def __init__(self, config: ExactConfig | None = None, num_speculative_tokens: int = 0) -> None:
        self.config = config = config or ExactConfig()
        generator = np.random.default_rng(config.seed)
        self.vocab_size = config.vocab_size
        self.embedding = _draw(generator, config.vocab_size, config.width)
        self.logit_map = _draw(generator, 2, config.vocab_size, config.width)
        self.layers = [
            (ExactMamba if letter == "M" else ExactAttention)(f"layers.{i}", config, generator)
            for i, letter in enumerate(config.pattern)
        ]
        window = (config.conv_kernel - 1 + num_speculative_tokens, config.width)
        specs: dict[str, KVCacheSpec] = {
            "M": MambaSpec(
                block_size=1,
                shapes=(window, (config.state_size, config.width)),
                dtypes=(torch.int32, torch.int32),
                num_speculative_blocks=num_speculative_tokens,
                input_shapes=((1, config.width), (1, 0), (1,)),
                input_dtypes=(torch.int32, torch.int32, torch.float32),
            ),
            "*": FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=config.width, dtype=torch.int32),
            "+": FullAttentionSpec(block_size=1, num_kv_heads=2, head_size=config.width, dtype=torch.int32),
        }
        self.layer_specs = {f"layers.{i}": specs[letter] for i, letter in enumerate(config.pattern)}

    @property
    def fingerprint(self) -> str:
        """Tells this model's stored blocks from another's: the weights follow from the configuration."""
        return f"{type(self).__qualname__}({self.config})"

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] each to [num_tokens, width] int64."""
        x = self.embedding[input_ids.numpy()]
        for layer in self.layers:
            y = layer(x, context) if isinstance(layer, ExactMamba) else layer(x, positions.numpy(), context)
            x = (x * 3 + y) % PRIME
        return torch.from_numpy(x)

    def fold(self, replays: dict[str, DecodeReplay], context: ForwardContext) -> None:
        """See `models.interface.Model`."""
        for layer in self.layers:
            if isinstance(layer, ExactMamba):
                layer.fold(replays[layer.name], context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, width] int64 to [num_tokens, vocab_size] float64."""
        return torch.from_numpy(self.logits(hidden.numpy()).astype(np.float64))

    def logits(self, hidden: Residues) -> Residues:
        """[..., width] to [..., vocab_size]."""
        scale, offset = self.logit_map
        mixed = (hidden[..., None, :] * scale + offset) % PRIME
        return (mixed * mixed % PRIME).sum(-1) % PRIME


class ExactOracle:
    """The same request alone: no batch, no cache, no paging, no chunk; a token at a time, in Python's integers."""

    def __init__(self, model: ExactModel) -> None:
        self.config = model.config
        self._embedding: list[list[int]] = model.embedding.tolist()
        self._layers = [{k: v.tolist() for k, v in vars(layer).items() if k != "name"} for layer in model.layers]
        self._logit_map = model.logit_map

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        choose: Callable[[Residues, int], int] = lambda logits, position: int(np.argmax(logits)),
    ) -> list[int]:
        """The continuation of `prompt`, the stop token included.

        Args:
            choose: picks a token from the logits [vocab_size] and the position that it will have; greedy by default.
        """
        config, channels = self.config, range(self.config.width)
        windows = [[[0] * config.width for _ in range(config.conv_kernel - 1)] for _ in config.pattern]
        states = [[[0] * config.width for _ in range(config.state_size)] for _ in config.pattern]
        sums = [[[0] * config.width for _ in range(3)] for _ in config.pattern]
        output: list[int] = []
        tokens = list(prompt)
        position = 0
        while position < len(tokens):
            x = self._embedding[tokens[position]]
            for i, letter in enumerate(config.pattern):
                if letter == "M":
                    y = self._mamba(self._layers[i], x, windows[i], states[i])
                else:
                    y = self._attention(self._layers[i], x, position, sums[i])
                x = [(x[channel] * 3 + y[channel]) % PRIME for channel in channels]
            position += 1
            if position == len(tokens) and len(output) < max_tokens:
                scale, offset = self._logit_map
                mixed = (np.array(x) * scale + offset) % PRIME
                token = choose((mixed * mixed % PRIME).sum(-1) % PRIME, len(tokens))
                output.append(token)
                if token in stop_token_ids or len(output) == max_tokens:
                    break
                tokens.append(token)
        return output

    @staticmethod
    def _mamba(weights: dict[str, Any], x: list[int], window: list[list[int]], state: list[list[int]]) -> list[int]:
        conv, (a_scale, a_offset, b_scale, b_offset), out = weights["conv"], weights["to_map"], weights["out"]
        window.append(x)
        result = []
        for i in range(len(x)):
            c = 0
            for inputs, weight in zip(window, conv, strict=True):
                c += (inputs[i] + weight[i]) * weight[i]
            c = c * c % PRIME
            y = 0
            for n, row in enumerate(state):
                a = max((c * a_scale[n][i] + a_offset[n][i]) % PRIME, 1)
                b = c * b_scale[n][i] + b_offset[n][i]
                row[i] = (row[i] * a + b) % PRIME
                y += row[i] * out[n][i]
            result.append((y + c) * y % PRIME)
        del window[0]
        return result

    @staticmethod
    def _attention(weights: dict[str, Any], x: list[int], position: int, sums: list[list[int]]) -> list[int]:
        result = []
        for i, (to_query, to_key, to_value) in enumerate(zip(*weights["qkv"], strict=True)):
            query = x[i] * to_query
            key = x[i] * to_key + ((position + 1) * weights["write_mark"][i]) ** 2
            value = x[i] * to_value * ((position + 1) * weights["read_mark"][i]) ** 2
            # (q + k)^2 v = q^2 v + 2 q k v + k^2 v, so that three sums stand for all earlier tokens.
            for power in range(3):
                sums[power][i] = (sums[power][i] + key**power * value) % PRIME
            result.append((query * query * sums[0][i] + 2 * query * sums[1][i] + sums[2][i]) % PRIME)
        return result
