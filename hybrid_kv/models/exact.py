"""A hybrid model over the integers modulo a prime: every cache mistake becomes a wrong token.

It has the same layers, cache pages, metadata and scheduler as a real model, but no rounding, so
that batching, chunking, paging, drafting and recomputation must not change a single bit. Each token
changes a Mamba state by its own affine map `s -> a s + b (mod p)` and a convolution by its whole
window; attention mixes every earlier token with a weight of its position, once when it is written
and once, by its place in the block table, when it is read. So a token applied twice, skipped, taken
from another row, from an older state or in another order gives other tokens from there on.

`ExactOracle` computes the same function for one request alone, without a cache, in the plainest
code. Layers and oracle stay in one file because each is read against the other.

The cache is torch's, the arithmetic is numpy's: on arrays this small an operation costs a third of
torch's.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.mamba import MambaMetadata
from hybrid_kv.attention.paged import PagedAttentionMetadata
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlotsSpec,
    StatePart,
)
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.models.layers import ForwardContext

Residues = npt.NDArray[np.int64]

PRIME = 2**31 - 1  # int64 holds the product of a residue and the sum of two, and any residue more


# Windows and states of a layer: Mamba has one of each, three and five are as in KDA. W is a short
# convolution: what would be its state has no elements, as in engines where each layer must have
# one.
PARTS: dict[str, tuple[int, int]] = {"M": (1, 1), "W": (1, 0), "T": (1, 2), "V": (3, 2)}
# With states that are rounded after each token and stored with scales: what is rounded depends on
# the seed and the token's position, what is stored on the state.
ROUNDED: dict[str, tuple[int, int]] = {"E": (1, 1)}
STATEFUL = ChainMap(PARTS, ROUNDED)  # with what is added to `PARTS`
NUM_SCALES = 61
# K/V heads of an attention layer, all but the last one unused: bytes per token alone tell these
# layers apart.
KV_HEADS = {"*": 1, "+": 2, "#": 3}
LATENT = "L"  # attention with one vector per token, K next to V
# Attention with a sliding window: tokens that a query sees, and K/V heads. Next to the blocks of
# the guard one is shorter than most of them, one longer than many; the third is as a drafter's,
# whose tokens are wider than those of `*`. Next to an engine's blocks of 16 tokens the last one is
# sharp: before a block's first token it sees a block and one token more.
WINDOWS: dict[str, tuple[int, int]] = {"~": (6, 1), "=": (19, 1), "-": (6, 2), "_": (18, 1)}
ATTENTION = (*KV_HEADS, LATENT, *WINDOWS)
# A model with a block drafter (`ExactBlockHead`): tokens that its queries see, and K/V heads. One
# window is shorter than most blocks of drafts, one longer.
BLOCK_HEADS: dict[str, tuple[int, int]] = {">": (6, 2), "}": (19, 1)}
# Of a model with such a head five of six tokens follow the one before them, and the head guesses
# with the same rule, but for one of sixteen: so about six of eight drafts are right.
ECHO, GUESS = 6, 16


@dataclass(frozen=True)
class ExactConfig:
    """Geometry: `width` residues per token, and a `pattern` with one letter per layer.

    The letters of `STATEFUL` are layers with states, those of `KV_HEADS` attention with one, two or
    three times the bytes per token: next to states that makes blocks of other sizes share the pool,
    alone pages of other sizes share a table. `LATENT` has the bytes of `*` in one part. Those of
    `WINDOWS` see the last tokens alone. One of `BLOCK_HEADS` at the end is a head for drafts, and
    no layer of the model.
    """

    pattern: str = "M*MM*"
    width: int = 2
    conv_kernel: int = 4
    state_size: int = 2
    vocab_size: int = 97
    seed: int = 0

    @property
    def layers(self) -> str:
        """The letters of the model's layers."""
        return self.pattern.rstrip("".join(BLOCK_HEADS))

    @property
    def head(self) -> str:
        """The letter of the block drafter; empty without one."""
        return self.pattern[len(self.layers) :][:1]


def _draw(generator: np.random.Generator, *shape: int) -> Residues:
    return generator.integers(1, PRIME, size=shape)


def affine_scan(a: Residues, b: Residues) -> None:
    """Replace each map `s -> a s + b` by its composition with all before it along dimension 1.

    It takes log2(len) steps.
    """
    shift = 1
    while shift < a.shape[1]:
        b[:, shift:] = (a[:, shift:] * b[:, :-shift] + b[:, shift:]) % PRIME
        a[:, shift:] = a[:, shift:] * a[:, :-shift] % PRIME
        shift *= 2


def _padded_rows(metadata: MambaMetadata) -> tuple[Residues, Residues, Residues]:
    """Return lengths [rows], positions [max_len] in a row, and tokens [rows, max_len] of a step."""
    kinds = [rows for rows in (metadata.decode_rows, metadata.prefill_rows) if rows is not None]
    lengths = np.concatenate([rows.lengths.numpy() for rows in kinds])
    steps = np.arange(max(rows.max_len for rows in kinds))
    # Padding repeats the row's last token.
    tokens = (lengths.cumsum() - lengths)[:, None] + np.minimum(steps, lengths[:, None] - 1)
    return lengths, steps, tokens


class ExactMamba:
    """A layer with windows [conv_kernel - 1, width] and states [state_size, width] of residues."""

    def __init__(
        self,
        name: str,
        config: ExactConfig,
        generator: np.random.Generator,
        num_windows: int = 1,
        num_states: int = 1,
    ) -> None:
        self.name = name
        draw = partial(_draw, generator)
        self.conv = [draw(config.conv_kernel, config.width) for _ in range(num_windows)]
        self.to_map = [draw(4, config.state_size, config.width) for _ in range(num_states)]
        self.out = [draw(config.state_size, config.width) for _ in range(num_states)]

    def convolve(self, taps: Sequence[Residues]) -> Residues:
        """Convolve each window with the token after it, [..., kernel, width]: [..., width]."""
        mixed = [
            ((seen + conv) * conv % PRIME).sum(-2) % PRIME
            for conv, seen in zip(self.conv, taps, strict=True)
        ]
        y = mixed[0] * mixed[0] % PRIME
        for other in mixed[1:]:
            y = (y + other * other) % PRIME
        return y

    def maps(self, c: Residues, i: int) -> tuple[Residues, Residues]:
        """Return tokens' affine maps for state i: a, b [..., state_size, width], a never zero."""
        both = (c[..., None, None, :] * self.to_map[i][::2] + self.to_map[i][1::2]) % PRIME
        return np.maximum(both[..., 0, :, :], 1), both[..., 1, :, :]

    def inputs(self, x: Residues) -> list[Residues]:
        """Return each window's view of a token, [..., width] each."""
        return [x, *((x * (i + 2) + i) % PRIME for i in range(len(self.conv) - 1))]

    def read(self, c: Residues, states: Sequence[Residues]) -> Residues:
        """Return outputs [..., width] from each token's convolution and the states after it."""
        y = c
        for out, state in zip(self.out, states, strict=True):
            mixed = (state * out % PRIME).sum(-2) % PRIME
            y = (mixed + y) * mixed % PRIME
        return y

    def __call__(self, x: Residues, context: ForwardContext) -> Residues:
        """Run tokens [num_tokens, width] by the rules of `hybrid_kv.attention.mamba`.

        Decodes and prefills are convolved in one padded batch: they differ in what becomes of their
        states.
        """
        metadata: MambaMetadata = context.metadata[self.name]
        views = [view.numpy() for view in context.views[self.name]]
        windows = views[: len(self.conv)]
        states = views[len(self.conv) :][: len(self.out)]
        indices = metadata.state_indices.numpy()
        split = metadata.num_decodes
        size = len(self.conv[0]) - 1
        window_rows = np.arange(size)
        lengths, steps, tokens = _padded_rows(metadata)
        places = (
            metadata.window_indices.numpy()[:, None],
            metadata.window_rows.numpy()[:, None] + window_rows,
        )
        before = [window[places].astype(np.int64) for window in windows]
        start = self.load(views, metadata.source_indices.numpy())
        if metadata.has_initial_state is not None:
            fresh = split + np.flatnonzero(~metadata.has_initial_state.numpy())
            for values in (*before, *start):
                values[fresh] = 0

        taps = steps[:, None] + np.arange(size + 1)
        inputs = [
            np.concatenate([old, new[tokens]], axis=1)
            for old, new in zip(before, self.inputs(x), strict=True)
        ]
        c = self.convolve([both[:, taps] for both in inputs])
        noise = self.noise(metadata, tokens)
        outputs = []
        if metadata.decode_rows is not None:
            width = metadata.decode_rows.max_len
            decodes = c[:split, :width], lengths[:split]
            history = metadata.rollback.history
            if history is not None and states:
                ring = context.row_memory[self.name].x.numpy()[:, 0]
                outputs.append(self.recompute(*decodes, states, ring, history))
            else:
                y, after = self.scan(*decodes, [s[:split] for s in start], noise[:split, :width])
                outputs.append(y)
                targets = metadata.decode_targets.numpy()  # the null block of what padding leaves
                self.store(views, targets, [v.reshape(-1, *v.shape[2:]) for v in after])
            for window, both in zip(windows, inputs, strict=True):
                window[indices[:split, 0], : size - 1 + width] = both[:split, 1 : size + width]
        if metadata.prefill_rows is not None:
            y, after = self.scan(
                c[split:], lengths[split:], [s[split:] for s in start], noise[split:]
            )
            outputs.append(y)
            rows, ends, blocks = (values.numpy() for values in metadata.prefill_states)
            self.store(views, blocks, [values[rows, ends - 1] for values in after])
            for window, both in zip(windows, inputs, strict=True):
                window[blocks, :size] = both[split + rows[:, None], ends[:, None] + window_rows]
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs)

    def load(self, views: Sequence[Residues], blocks: Residues) -> list[Residues]:
        """Return the states [n, state_size, width] in `blocks` [n]."""
        states = views[len(self.conv) :][: len(self.out)]
        return [state[blocks].astype(np.int64) for state in states]

    def store(
        self, views: Sequence[Residues], blocks: Residues, states: Sequence[Residues]
    ) -> None:
        """Put states [n, state_size, width] each into `blocks` [n]."""
        for view, values in zip(views[len(self.conv) :], states, strict=False):
            view[blocks] = values

    def noise(self, metadata: MambaMetadata, tokens: Residues) -> Residues:
        """Return what rounding adds to the states after `tokens` [rows, len]: [rows, len, …]."""
        return np.zeros((*tokens.shape, 1, 1), dtype=np.int64)

    def scan(
        self,
        c: Residues,
        lengths: Residues,
        states: Sequence[Residues],
        noise: Residues | int = 0,
    ) -> tuple[Residues, list[Residues]]:
        """Return outputs [num_tokens, width], and each state after every token.

        States are [rows, len, state_size, width].

        Args:
            c: [rows, len, width], the tokens of a step's decodes, or of its prefills, after the
                convolutions; padded.
            lengths: [rows].
            noise: [rows, len, state_size, width], added to each state.
        """
        after = []
        for i, state in enumerate(states):
            a, b = self.maps(c, i)
            b = (b + noise) % PRIME
            b[:, 0] = (a[:, 0] * state + b[:, 0]) % PRIME
            affine_scan(a, b)
            after.append(b)
        real = np.arange(c.shape[1]) < lengths[:, None]
        return self.read(c, after)[real], after

    def recompute(
        self,
        c: Residues,
        lengths: Residues,
        states: Sequence[Residues],
        ring: Residues,
        step: RecomputeStep,
    ) -> Residues:
        """Return the outputs of tokens that see a state and, after it, the inputs in a ring.

        The ring is [num_rows, ring_len, width].
        """
        y, _ = self.scan(c, lengths, self._flush(states, ring, step))
        kept = lengths * (step.src.numpy() > NULL_BLOCK)
        row, j = np.nonzero(np.arange(c.shape[1]) < kept[:, None])
        place = (step.ring_start.numpy() + step.n_hist.numpy())[row] + j
        ring[step.rows.numpy()[row], place % ring.shape[1]] = c[row, j]
        return y

    def flush(self, step: RecomputeStep, context: ForwardContext) -> None:
        """Write the states that are due of requests that run no tokens."""
        states = [
            view.numpy() for view in context.views[self.name][len(self.conv) :][: len(self.out)]
        ]
        if states:
            self._flush(states, context.row_memory[self.name].x.numpy()[:, 0], step)

    def _flush(
        self, state: Sequence[Residues], ring: Residues, step: RecomputeStep
    ) -> list[Residues]:
        """Write the states that are due; return each state after all of the history.

        They are [D, state_size, width].
        """
        rows, src, dst, start, length, flush = (values.numpy() for values in step[:6])
        j = np.arange(1 + length.max())  # one more: the map after no token
        place = (start[:, None] + np.maximum(j - 1, 0)) % ring.shape[1]
        history = ring[rows[:, None], place].astype(np.int64)
        none = (j == 0) | (j > length[:, None])
        due = flush > 0
        after = []
        for i, view in enumerate(state):
            a, b = self.maps(history, i)
            a[none] = 1
            b[none] = 0
            affine_scan(a, b)
            states = (a * view[src][:, None] + b) % PRIME
            view[dst[due]] = states[due, flush[due]]
            after.append(states[:, -1])
        return after


class ExactRounded(ExactMamba):
    """A layer whose state is rounded after each token, and stored with scales [width].

    Rounding adds to a state what depends on the engine's seed, on the token's position and on the
    element: a state that is rounded twice, or as that of another token, is another one. A scale is
    chosen by the state; what is stored is the state over it.
    """

    def __init__(self, name: str, config: ExactConfig, generator: np.random.Generator) -> None:
        super().__init__(name, config, generator)
        self.mark = _draw(generator, config.state_size, config.width)
        self._scales = _draw(generator, NUM_SCALES)
        self._inverses = np.array([pow(scale, -1, PRIME) for scale in self._scales.tolist()])

    def load(self, views: Sequence[Residues], blocks: Residues) -> list[Residues]:
        values, scales = (view[blocks].astype(np.int64) for view in views[1:])
        return [values * scales[:, None] % PRIME]

    def store(
        self, views: Sequence[Residues], blocks: Residues, states: Sequence[Residues]
    ) -> None:
        _, values, scales = views
        (state,) = states
        chosen = state.sum(-2) % NUM_SCALES
        values[blocks] = state * self._inverses[chosen][:, None] % PRIME
        scales[blocks] = self._scales[chosen]

    def noise(self, metadata: MambaMetadata, tokens: Residues) -> Residues:
        seed = 0 if metadata.rounding is None else metadata.rounding.seed
        turn = (metadata.positions.numpy()[tokens] + 1 + 1009 * seed) % PRIME
        return (turn * turn % PRIME)[..., None, None] * self.mark % PRIME


class ExactAttention:
    """Attention `o_i = sum_{i - window < j <= i} (q_i + k_j)^2 * v_j * weight_j`.

    `k_j` is marked by the position of token j. Without a window the sum is over all j <= i.
    """

    def __init__(
        self,
        name: str,
        config: ExactConfig,
        generator: np.random.Generator,
        window: int | None = None,
    ) -> None:
        self.name = name
        self.window = window
        self.qkv = _draw(generator, 3, config.width)
        self.write_mark = _draw(generator, config.width)
        self.read_mark = _draw(generator, config.width)
        # Of as many positions as were wanted so far.
        self._weights = np.empty((0, config.width), dtype=np.int64)

    def weights(self, count: int) -> Residues:
        """Return the weights of the first `count` positions, [count, width]."""
        if len(self._weights) < count:
            order = (np.arange(2 * count)[:, None] + 1) * self.read_mark % PRIME
            self._weights = order * order % PRIME
        return self._weights[:count]

    def project(self, x: Residues, positions: Residues) -> Residues:
        """Return q, k, v [3, num_tokens, width]; k carries its position."""
        qkv = x * self.qkv[:, None] % PRIME
        mark = (positions[:, None] + 1) * self.write_mark % PRIME
        qkv[1] = (qkv[1] + mark * mark) % PRIME
        return qkv

    def _cache(self, context: ForwardContext) -> tuple[Residues, Residues]:
        """Return K and V [num_kernel_blocks, kernel_block_size, width], as views."""
        views = [view.numpy() for view in context.views[self.name]]
        if len(views) == 1:
            width = views[0].shape[-1] // 2
            return views[0][..., :width], views[0][..., width:]
        return views[0][:, :, -1], views[1][:, :, -1]

    def attend(
        self, query: Residues, key: Residues, value: Residues, positions: Residues
    ) -> Residues:
        """Attend from queries [rows, len, width] to keys and values [rows, keys, width].

        Positions are [rows, len].
        """
        weighted = value * self.weights(key.shape[1]) % PRIME
        score = (query[:, :, None] + key[:, None]) % PRIME
        mixed = score * score % PRIME * weighted[:, None] % PRIME
        behind = positions[..., None] - np.arange(key.shape[1])
        visible = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
        # A product of matrices: with few values after it, numpy's sum over an axis takes six times
        # as long.
        return (visible[..., None, :] @ mixed)[..., 0, :] % PRIME

    def store(self, x: Residues, positions: Residues, context: ForwardContext) -> Residues:
        """Write K and V of tokens [num_tokens, width]; return their queries, same shape."""
        metadata: PagedAttentionMetadata = context.metadata[self.name]
        keys, values = self._cache(context)
        slots = metadata.slot_mapping.slots.numpy()
        query, key, value = self.project(x, positions)
        real = slots >= 0
        block, offset = np.divmod(slots[real], keys.shape[1])
        keys[block, offset] = key[real]
        values[block, offset] = value[real]
        return query

    def __call__(self, x: Residues, positions: Residues, context: ForwardContext) -> Residues:
        metadata: PagedAttentionMetadata = context.metadata[self.name]
        query = self.store(x, positions, context)
        keys, values = self._cache(context)
        outputs = []
        for segment in metadata.parts:
            rows = segment.rows.padded(
                torch.from_numpy(query[segment.start : segment.start + segment.num_tokens])
            ).numpy()
            table = segment.block_table.numpy()
            shape = (len(table), -1, x.shape[1])
            seen_keys, seen_values = (
                cache[table].reshape(shape).astype(np.int64) for cache in (keys, values)
            )
            out = self.attend(rows, seen_keys, seen_values, segment.positions.numpy())
            outputs.append(segment.rows.flat(torch.from_numpy(out)).numpy())
        return np.concatenate(outputs)


def echoed(scores: Residues, tokens: Residues, one_in: int) -> Residues:
    """Let the token after each of `tokens` be the likeliest, but once in `one_in` times.

    Args:
        scores: [..., vocab_size] residues.
        tokens: [...], the last ones.
    """
    follower = ((tokens + 1) % scores.shape[-1])[..., None]
    plain = np.take_along_axis(scores, follower, -1)
    raised = np.where(scores[..., :1] % one_in, PRIME, plain)
    scores = scores.copy()
    np.put_along_axis(scores, follower, raised, -1)
    return scores


class ExactBlockHead:
    """A block drafter (`models.interface.BlockDraftHead`) of one layer with a sliding window.

    Its keys and values are those of the model's hidden states, and, after them, of the last token
    and of masks. Like the model it takes for likeliest the token after the last one, or by its own
    checksum another: a mask j places after token t is read as token t + j.
    """

    def __init__(
        self, config: ExactConfig, embedding: Residues, generator: np.random.Generator
    ) -> None:
        window, heads = BLOCK_HEADS[config.head]
        self.attention = ExactAttention("head", config, generator, window)
        self.embedding = embedding
        self.mask = _draw(generator, config.width)
        self.logit_map = _draw(generator, 2, config.vocab_size, config.width)
        self.layer_specs: dict[str, KVCacheSpec] = {
            "head": SlidingWindowSpec(1, heads, config.width, torch.int32, window)
        }

    def store(self, hidden: torch.Tensor, context: ForwardContext) -> None:
        """See `models.interface.BlockDraftHead`."""
        positions = context.metadata[self.attention.name].positions
        self.attention.store(hidden.numpy()[:, :-1], positions.numpy(), context)

    def __call__(
        self, token_ids: torch.Tensor, num_drafts: int, context: ForwardContext
    ) -> torch.Tensor:
        """See `models.interface.BlockDraftHead`."""
        tokens = token_ids.numpy()
        x = np.empty((len(tokens), 1 + num_drafts, len(self.mask)), dtype=np.int64)
        x[:, 0] = self.embedding[tokens]
        x[:, 1:] = self.mask
        flat = x.reshape(-1, len(self.mask))
        positions = context.metadata[self.attention.name].positions
        y = self.attention(flat, positions.numpy(), context)
        mixed = ((flat * 3 + y) % PRIME).reshape(x.shape)[:, 1:]
        last = (tokens[:, None] + np.arange(num_drafts)) % len(self.embedding)
        return torch.from_numpy(np.concatenate([mixed, last[..., None]], axis=-1))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocab_size] float64 of hidden states [..., width + 1]."""
        mixed = hidden.numpy()
        scores = echoed(scored(mixed[..., :-1], self.logit_map), mixed[..., -1], GUESS)
        return torch.from_numpy(scores.astype(np.float64))


def scored(hidden: Residues, logit_map: Residues) -> Residues:
    """Return a residue [..., vocab_size] for each token, of hidden states [..., width]."""
    scale, offset = logit_map
    mixed = (hidden[..., None, :] * scale + offset) % PRIME
    return np.einsum("...w->...", mixed * mixed % PRIME) % PRIME


def _state_spec(
    config: ExactConfig, K: int, num_windows: int, num_states: int, num_scales: int = 0
) -> MambaSpec:
    window = (config.conv_kernel - 1 + K, config.width)
    state = (config.state_size, config.width)
    return MambaSpec(
        block_size=1,
        parts=(
            *(StatePart(f"window{i}", window, torch.int32, "window") for i in range(num_windows)),
            *(StatePart(f"state{i}", state, torch.int32) for i in range(num_states)),
            *([] if num_states else [StatePart("nothing", (0, config.width), torch.int32)]),
            *(
                StatePart(f"scale{i}", (config.width,), torch.int32, "scale")
                for i in range(num_scales)
            ),
        ),
        rollback=SlotsSpec(K),
        # What `attention.rollback.Recompute` keeps, of which only x is used.
        inputs=(
            StatePart("x", (1, config.width), torch.int32),
            StatePart("B", (1, 0), torch.int32),
            StatePart("dt", (1,), torch.float32),
        ),
    )


def _layer(
    name: str, letter: str, config: ExactConfig, generator: np.random.Generator
) -> ExactMamba | ExactAttention:
    if letter in ROUNDED:
        return ExactRounded(name, config, generator)
    if letter in PARTS:
        return ExactMamba(name, config, generator, *PARTS[letter])
    window = WINDOWS[letter][0] if letter in WINDOWS else None
    return ExactAttention(name, config, generator, window)


class ExactModel:
    """The model.

    `compute_logits` returns float64 residues: pseudo-random, and exactly equal wherever computed.

    Args:
        num_speculative_tokens: drafts per step that the cache must be able to roll back.
    """

    mamba_chunk_size: int | None = 4

    def __init__(self, config: ExactConfig | None = None, num_speculative_tokens: int = 0) -> None:
        self.config = config = config or ExactConfig()
        generator = np.random.default_rng(config.seed)
        self.vocab_size = config.vocab_size
        self.embedding = _draw(generator, config.vocab_size, config.width)
        self.logit_map = _draw(generator, 2, config.vocab_size, config.width)
        self.layers: list[ExactMamba | ExactAttention] = [
            _layer(f"layers.{i}", letter, config, generator)
            for i, letter in enumerate(config.layers)
        ]
        self.block_head = ExactBlockHead(config, self.embedding, generator) if config.head else None
        specs: dict[str, KVCacheSpec] = {
            **{
                letter: _state_spec(config, num_speculative_tokens, *counts)
                for letter, counts in PARTS.items()
            },
            **{
                letter: _state_spec(config, num_speculative_tokens, *counts, num_scales=counts[1])
                for letter, counts in ROUNDED.items()
            },
            **{
                letter: FullAttentionSpec(1, heads, config.width, torch.int32)
                for letter, heads in KV_HEADS.items()
            },
            LATENT: MLAAttentionSpec(1, head_size=2 * config.width, dtype=torch.int32),
            **{
                letter: SlidingWindowSpec(1, heads, config.width, torch.int32, window)
                for letter, (window, heads) in WINDOWS.items()
            },
        }
        self.layer_specs = {f"layers.{i}": specs[letter] for i, letter in enumerate(config.layers)}

    @property
    def fingerprint(self) -> str:
        """Text that tells this model's stored blocks from another's.

        The weights follow from the configuration.
        """
        return f"{type(self).__qualname__}({self.config})"

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Return hidden states [num_tokens, width] int64 of tokens and positions [num_tokens].

        With a block drafter their last column is the token.
        """
        x = self.embedding[input_ids.numpy()]
        for layer in self.layers:
            y = (
                layer(x, context)
                if isinstance(layer, ExactMamba)
                else layer(x, positions.numpy(), context)
            )
            x = (x * 3 + y) % PRIME
        if self.block_head is not None:
            x = np.concatenate([x, input_ids.numpy()[:, None]], axis=1)
        return torch.from_numpy(x)

    def flush(self, steps: dict[str, RecomputeStep], context: ForwardContext) -> None:
        """See `models.interface.Model`."""
        for layer in self.layers:
            if isinstance(layer, ExactMamba) and layer.name in steps:
                layer.flush(steps[layer.name], context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_tokens, vocab_size] float64 of hidden [num_tokens, width] int64."""
        return torch.from_numpy(self.logits(hidden.numpy()).astype(np.float64))

    def logits(self, hidden: Residues) -> Residues:
        """Return the logits [..., vocab_size] of hidden states [..., width]."""
        if self.block_head is None:
            return scored(hidden, self.logit_map)
        return echoed(scored(hidden[..., :-1], self.logit_map), hidden[..., -1], ECHO)


def _plain(values: Any) -> Any:
    """Turn arrays, and lists of them, into lists of integers."""
    return [_plain(value) for value in values] if isinstance(values, list) else values.tolist()


def _weights(layer: ExactMamba | ExactAttention) -> dict[str, Any]:
    return {k: _plain(v) for k, v in vars(layer).items() if k in _WEIGHTS}


def _zeros(rows: int, width: int) -> list[list[int]]:
    return [[0] * width for _ in range(rows)]


def _greedy(logits: Residues, position: int) -> int:
    return int(np.argmax(logits))


_WEIGHTS = ("conv", "to_map", "out", "mark", "qkv", "write_mark", "read_mark")
# Of one token, key and value of each channel.
_Terms = list[tuple[int, int]]


class ExactOracle:
    """An oracle that runs a request alone: no batch, no cache, no paging, no chunk.

    A token at a time, in Python's integers.

    Args:
        seed: of the engine, for states that are rounded.
    """

    def __init__(self, model: ExactModel, seed: int = 0) -> None:
        self.config = model.config
        self._seed = seed
        self._embedding: list[list[int]] = model.embedding.tolist()
        self._layers = [_weights(layer) for layer in model.layers]
        self._logit_map = model.logit_map
        self._head = model.block_head

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        choose: Callable[[Residues, int], int] = _greedy,
        hidden: list[list[int]] | None = None,
    ) -> list[int]:
        """Return the continuation of `prompt`.

        Args:
            choose: picks a token from the logits [vocab_size] and the position that it will have;
                greedy by default.
            hidden: gets the hidden state [width] of each token.
        """
        config = self.config
        channels = range(self.config.width)
        counts = [STATEFUL.get(letter, (0, 0)) for letter in config.layers]
        windows = [
            [_zeros(config.conv_kernel - 1, config.width) for _ in range(n)] for n, _ in counts
        ]
        states = [[_zeros(config.state_size, config.width) for _ in range(n)] for _, n in counts]
        sums = [[[0] * config.width for _ in range(3)] for _ in config.layers]
        seen: list[list[_Terms]] = [[] for _ in config.layers]
        output: list[int] = []
        tokens = list(prompt)
        position = 0
        while position < len(tokens):
            x = self._embedding[tokens[position]]
            for i, letter in enumerate(config.layers):
                if letter in STATEFUL:
                    turn = (position + 1 + 1009 * self._seed) ** 2
                    y = self._mamba(self._layers[i], x, windows[i], states[i], turn)
                else:
                    if letter in WINDOWS:
                        self._forget(sums[i], seen[i], WINDOWS[letter][0])
                    y = self.attention(self._layers[i], x, position, sums[i], seen[i])
                x = [(x[channel] * 3 + y[channel]) % PRIME for channel in channels]
            if hidden is not None:
                hidden.append(x)
            position += 1
            if position == len(tokens) and len(output) < max_tokens:
                scores = self._scores(x, self._logit_map, tokens[-1], ECHO)
                token = choose(scores, len(tokens))
                output.append(token)
                if len(output) == max_tokens:
                    break
                tokens.append(token)
        return output

    def drafts(self, hidden: Sequence[list[int]], token: int, num_drafts: int) -> list[int]:
        """Return what the block drafter guesses after a token, without a cache.

        Args:
            hidden: [num_tokens, width], of all tokens before it.
        """
        head = self._head
        assert head is not None
        window = BLOCK_HEADS[self.config.head][0]
        weights = _weights(head.attention)
        sums = [[0] * self.config.width for _ in range(3)]
        seen: list[_Terms] = []
        first = max(0, len(hidden) - window + 1)
        masks = [head.mask.tolist()] * num_drafts
        inputs = [*hidden[first:], self._embedding[token], *masks]
        guesses = list[int]()
        for position, x in enumerate(inputs, first):
            self._forget(sums, seen, window)
            y = self.attention(weights, x, position, sums, seen)
            mixed = [(a * 3 + b) % PRIME for a, b in zip(x, y, strict=True)]
            last = (token + len(guesses)) % self.config.vocab_size
            if position > len(hidden):
                guesses.append(_greedy(self._scores(mixed, head.logit_map, last, GUESS), position))
        return guesses

    def _scores(self, x: list[int], logit_map: Residues, token: int, one_in: int) -> Residues:
        """Return the logits [vocab_size] after a token, of its hidden state."""
        scale, offset = logit_map
        mixed = (np.array(x) * scale + offset) % PRIME
        scores: Residues = (mixed * mixed % PRIME).sum(-1) % PRIME
        if self._head is not None and scores[0] % one_in:
            scores[(token + 1) % len(scores)] = PRIME
        return scores

    @staticmethod
    def _mamba(
        weights: dict[str, Any],
        x: list[int],
        windows: list[list[list[int]]],
        states: list[list[list[int]]],
        turn: int,
    ) -> list[int]:
        for j, window in enumerate(windows):
            window.append([(value * (j + 1) + j - 1) % PRIME for value in x] if j else x)
        result = []
        for i in range(len(x)):
            c = 0
            for window, conv in zip(windows, weights["conv"], strict=True):
                mixed = 0
                for inputs, weight in zip(window, conv, strict=True):
                    mixed += (inputs[i] + weight[i]) * weight[i]
                c += mixed * mixed
            y = c = c % PRIME
            for state, maps, out in zip(states, weights["to_map"], weights["out"], strict=True):
                a_scale, a_offset, b_scale, b_offset = maps
                total = 0
                for n, row in enumerate(state):
                    a = max((c * a_scale[n][i] + a_offset[n][i]) % PRIME, 1)
                    b = c * b_scale[n][i] + b_offset[n][i]
                    noise = turn * weights["mark"][n][i] if "mark" in weights else 0
                    row[i] = (row[i] * a + b + noise) % PRIME
                    total += row[i] * out[n][i]
                y = (total + y) * total % PRIME
            result.append(y)
        for window in windows:
            del window[0]
        return result

    @staticmethod
    def _forget(sums: list[list[int]], seen: list[_Terms], window: int) -> None:
        """Take out of the sums what the next token does not see."""
        if len(seen) < window:
            return
        for i, (key, value) in enumerate(seen.pop(0)):
            for power in range(3):
                sums[power][i] = (sums[power][i] - key**power * value) % PRIME

    @staticmethod
    def attention(
        weights: dict[str, Any],
        x: list[int],
        position: int,
        sums: list[list[int]],
        seen: list[_Terms],
    ) -> list[int]:
        result = []
        terms: _Terms = []
        seen.append(terms)
        for i, (to_query, to_key, to_value) in enumerate(zip(*weights["qkv"], strict=True)):
            query = x[i] * to_query
            key = x[i] * to_key + ((position + 1) * weights["write_mark"][i]) ** 2
            value = x[i] * to_value * ((position + 1) * weights["read_mark"][i]) ** 2
            terms.append((key, value))
            # (q + k)^2 v = q^2 v + 2 q k v + k^2 v, so that three sums stand for all earlier
            # tokens.
            for power in range(3):
                sums[power][i] = (sums[power][i] + key**power * value) % PRIME
            result.append(
                (query * query * sums[0][i] + 2 * query * sums[1][i] + sums[2][i]) % PRIME
            )
        return result
