"""A hybrid model over the integers modulo a prime: every cache mistake becomes a wrong token.

It has the same layers, cache pages, metadata and scheduler as a real model, but no rounding, so that batching,
chunking, paging and recomputation must not change a single bit. Each token changes a Mamba state by its own affine map
`s -> a s + b (mod p)` and a convolution by its whole window; attention mixes every earlier token with a weight of its
position, once when it is written and once, by its place in the block table, when it is read. So a token applied twice,
skipped, taken from another row, from an older state or in another order gives other tokens from there on.

`ExactOracle` computes the same function for one request alone, without a cache, in the plainest code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hybrid_kv.attention.mamba import MambaMetadata
from hybrid_kv.attention.paged import PagedAttentionMetadata
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec
from hybrid_kv.kernels.paged_attention import gather_kv, write_kv
from hybrid_kv.models.layers import ForwardContext

Residues = npt.NDArray[np.int64]

PRIME = 2**31 - 1  # products of two residues fit in int64


@dataclass(frozen=True)
class ExactConfig:
    """`pattern` has one letter per layer, M for Mamba and * for attention; `width` residues per token."""

    pattern: str = "M*MM*"
    width: int = 2
    conv_kernel: int = 4
    state_size: int = 2
    vocab_size: int = 97
    seed: int = 0


def _draw(generator: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(generator.integers(1, PRIME, size=shape))


def _segmented_affine_scan(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inclusive composition of the maps `s -> a s + b` along dimension 1, in log2(len) steps."""
    shift = 1
    while shift < a.shape[1]:
        head_a, head_b = a[:, :-shift], b[:, :-shift]
        tail_a, tail_b = a[:, shift:], b[:, shift:]
        new_a = head_a * tail_a % PRIME
        new_b = (head_b * tail_a % PRIME + tail_b) % PRIME
        a = torch.cat([a[:, :shift], new_a], dim=1)
        b = torch.cat([b[:, :shift], new_b], dim=1)
        shift *= 2
    return a, b


class ExactMamba(nn.Module):
    """State `[state_size * width]` residues; window `[conv_kernel - 1, width]` residues."""

    def __init__(self, name: str, config: ExactConfig, generator: np.random.Generator) -> None:
        super().__init__()
        self.name = name
        self.conv = nn.Buffer(_draw(generator, config.conv_kernel, config.width))
        self.to_map = nn.Buffer(_draw(generator, 4, config.state_size, config.width))
        self.out = nn.Buffer(_draw(generator, config.state_size, config.width))

    def convolve(self, inputs: torch.Tensor) -> torch.Tensor:
        """[rows, kernel - 1 + len, width] to [rows, len, width]."""
        kernel = len(self.conv)
        length = inputs.shape[1] - kernel + 1
        y = torch.zeros_like(inputs[:, :length])
        for j in range(kernel):
            # Squared after the weight, so that moving the window by one is no mere renaming of weights.
            y = (y + (inputs[:, j : j + length] + self.conv[j]) % PRIME * self.conv[j]) % PRIME
        return y * y % PRIME

    def maps(self, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The affine map of each token: a, b [rows, len, state_size, width], a never zero."""
        c = c.unsqueeze(-2)
        a = (c * self.to_map[0] + self.to_map[1]) % PRIME
        b = (c * self.to_map[2] + self.to_map[3]) % PRIME
        return a.clamp(min=1), b

    def read(self, c: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """[..., width] from each token's convolution and the state after it."""
        y = (state * self.out % PRIME).sum(-2) % PRIME
        return (y + c) % PRIME * y % PRIME

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        metadata: MambaMetadata = context.metadata[self.name]
        conv_state, ssm_state = context.views[self.name]
        split = metadata.num_decodes
        outputs = []
        if split:
            indices = metadata.state_indices[:split]
            inputs = torch.cat([conv_state[indices].long(), x[:split].unsqueeze(1)], dim=1)
            c = self.convolve(inputs)
            a, b = self.maps(c)
            state = (ssm_state[indices].long() * a[:, 0] + b[:, 0]) % PRIME
            outputs.append(self.read(c[:, 0], state))
            self._store(indices, inputs[:, 1:], state, conv_state, ssm_state)
        rows = metadata.prefill_rows
        if rows is not None:
            assert metadata.has_initial_state is not None
            indices = metadata.state_indices[split:]
            initial = metadata.has_initial_state[:, None, None]
            window = torch.where(initial, conv_state[indices].long(), 0)
            before = torch.where(initial, ssm_state[indices].long(), 0)
            inputs = torch.cat([window, rows.padded(x[split:])], dim=1)
            c = self.convolve(inputs)
            a, b = self.maps(c)
            a, b = _segmented_affine_scan(a, b)
            states = (before.unsqueeze(1) * a + b) % PRIME
            outputs.append(rows.flat(self.read(c, states)))
            row = torch.arange(rows.num_rows, device=x.device)
            last = rows.lengths[:, None] + torch.arange(window.shape[1], device=x.device)
            self._store(indices, inputs[row[:, None], last], states[row, rows.lengths - 1], conv_state, ssm_state)
        return torch.cat(outputs)

    @staticmethod
    def _store(
        indices: torch.Tensor,
        window: torch.Tensor,
        state: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
    ) -> None:
        conv_state.index_copy_(0, indices, window.to(conv_state.dtype))
        ssm_state.index_copy_(0, indices, state.to(ssm_state.dtype))


class ExactAttention(nn.Module):
    """`o_i = sum_{j <= i} (q_i + k_j)^2 * v_j * weight_j`, with `k_j` marked by the position of token j."""

    def __init__(self, name: str, config: ExactConfig, generator: np.random.Generator) -> None:
        super().__init__()
        self.name = name
        self.qkv = nn.Buffer(_draw(generator, 3, config.width))
        self.write_mark = nn.Buffer(_draw(generator, config.width))
        self.read_mark = nn.Buffer(_draw(generator, config.width))

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [..., width]; k carries its position."""
        query, key, value = (x * weight % PRIME for weight in self.qkv)
        mark = (positions.unsqueeze(-1) + 1) * self.write_mark % PRIME
        return query, (key + mark * mark) % PRIME, value

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """query [rows, len, width]; key, value [rows, keys, width]; visible [rows, len, keys]."""
        order = (torch.arange(key.shape[1], device=key.device).unsqueeze(-1) + 1) * self.read_mark % PRIME
        weighted = value * (order * order % PRIME) % PRIME
        score = (query.unsqueeze(2) + key.unsqueeze(1)) % PRIME
        mixed = score * score % PRIME * weighted.unsqueeze(1) % PRIME
        return mixed.masked_fill(~visible.unsqueeze(-1), 0).sum(2) % PRIME

    def forward(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        metadata: PagedAttentionMetadata = context.metadata[self.name]
        key_cache, value_cache = context.views[self.name]
        query, key, value = self.project(x, positions)
        dtype = key_cache.dtype
        write_kv(key.to(dtype).unsqueeze(1), value.to(dtype).unsqueeze(1), key_cache, value_cache, metadata.slots)
        outputs = []
        for part in metadata.parts:
            rows = part.rows.padded(query[part.start : part.start + part.num_tokens])
            keys = gather_kv(key_cache, part.block_table).squeeze(2).long()
            values = gather_kv(value_cache, part.block_table).squeeze(2).long()
            visible = torch.arange(keys.shape[1], device=x.device) <= part.positions.unsqueeze(-1)
            outputs.append(part.rows.flat(self.attend(rows, keys, values, visible)))
        return torch.cat(outputs)


class ExactModel(nn.Module):
    """The model. `compute_logits` returns float64 residues: pseudo-random, and exactly equal wherever computed."""

    mamba_chunk_size: int | None = 4

    def __init__(self, config: ExactConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ExactConfig()
        generator = np.random.default_rng(config.seed)
        self.vocab_size = config.vocab_size
        self.embedding = nn.Buffer(_draw(generator, config.vocab_size, config.width))
        self.logit_map = nn.Buffer(_draw(generator, 2, config.vocab_size, config.width))
        kinds = {"M": ExactMamba, "*": ExactAttention}
        self.layers = nn.ModuleList(
            kinds[letter](f"layers.{i}", config, generator) for i, letter in enumerate(config.pattern)
        )
        mamba = MambaSpec(
            block_size=1,
            shapes=((config.conv_kernel - 1, config.width), (config.state_size, config.width)),
            dtypes=(torch.int32, torch.int32),
        )
        attention = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=config.width, dtype=torch.int32)
        self.layer_specs: dict[str, KVCacheSpec] = {
            f"layers.{i}": mamba if letter == "M" else attention for i, letter in enumerate(config.pattern)
        }

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x = self.embedding[input_ids]
        for layer in self.layers:
            y = layer(x, positions, context) if isinstance(layer, ExactAttention) else layer(x, context)
            x = (x * 3 + y) % PRIME
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, width] int64 to [num_tokens, vocab_size] float64."""
        scale, offset = self.logit_map
        mixed = (hidden.unsqueeze(1) * scale % PRIME + offset) % PRIME
        return (mixed * mixed % PRIME).sum(-1).remainder(PRIME).double()


class ExactOracle:
    """The same request alone: no batch, no cache, no paging, no chunk; a token at a time, in numpy."""

    def __init__(self, model: ExactModel) -> None:
        self.model = model
        self._weights = {name: value.numpy() for name, value in model.state_dict().items()}

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
        config = self.model.config
        windows: dict[int, Residues] = {
            i: np.zeros((config.conv_kernel - 1, config.width), np.int64) for i in range(len(config.pattern))
        }
        states: dict[int, Residues] = {
            i: np.zeros((config.state_size, config.width), np.int64) for i in range(len(config.pattern))
        }
        seen: dict[int, list[tuple[Residues, Residues]]] = {i: [] for i in range(len(config.pattern))}
        output: list[int] = []
        tokens = list(prompt)
        position = 0
        while position < len(tokens):
            x = self._weights["embedding"][tokens[position]]
            for i, letter in enumerate(config.pattern):
                y = self._mamba(i, x, windows, states) if letter == "M" else self._attention(i, x, position, seen[i])
                x = (x * 3 + y) % PRIME
            position += 1
            if position == len(tokens) and len(output) < max_tokens:
                scale, offset = self._weights["logit_map"]
                mixed = (x * scale % PRIME + offset) % PRIME
                token = choose((mixed * mixed % PRIME).sum(-1) % PRIME, len(tokens))
                output.append(token)
                if token in stop_token_ids or len(output) == max_tokens:
                    break
                tokens.append(token)
        return output

    def _mamba(self, i: int, x: Residues, windows: dict[int, Residues], states: dict[int, Residues]) -> Residues:
        conv, maps, out = (self._weights[f"layers.{i}.{name}"] for name in ("conv", "to_map", "out"))
        window = np.concatenate([windows[i], x[None]])
        c = np.zeros_like(x)
        for j, weight in enumerate(conv):
            c = (c + (window[j] + weight) % PRIME * weight) % PRIME
        c = c * c % PRIME
        a = np.maximum((c * maps[0] + maps[1]) % PRIME, 1)
        b = (c * maps[2] + maps[3]) % PRIME
        windows[i] = window[1:]
        states[i] = (states[i] * a + b) % PRIME
        y = (states[i] * out % PRIME).sum(0) % PRIME
        return (y + c) % PRIME * y % PRIME

    def _attention(self, i: int, x: Residues, position: int, seen: list[tuple[Residues, Residues]]) -> Residues:
        qkv, write, read = (self._weights[f"layers.{i}.{name}"] for name in ("qkv", "write_mark", "read_mark"))
        query, key, value = (x * weight % PRIME for weight in qkv)
        mark = (position + 1) * write % PRIME
        seen.append(((key + mark * mark) % PRIME, value))
        keys, values = (np.array(part) for part in zip(*seen, strict=True))
        order = (np.arange(len(seen))[:, None] + 1) * read % PRIME
        score = (query + keys) % PRIME
        return (score * score % PRIME * (values * (order * order % PRIME) % PRIME) % PRIME).sum(0) % PRIME
