"""The operations of `kernels` as their papers write them: per token and head, in float64.

Nothing here is fast, and nothing here is shared with the code that the tests compare with it.
Operands are those of one row, arrays of numpy; `len` is its number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NO_SLOT = -1  # of a token that is stored nowhere


def sigmoid(x: Floats) -> Floats:
    """`1 / (1 + exp(-x))`, where neither overflows."""
    return np.exp(-np.logaddexp(0, -x))


def silu(x: Floats) -> Floats:
    """`x * sigmoid(x)` (Elfwing et al., 2017, arXiv 1702.03118)."""
    return x * sigmoid(x)


def softplus(x: Floats) -> Floats:
    """`log(1 + exp(x))`."""
    return np.logaddexp(0, x)


def softmax(x: Floats) -> Floats:
    """`exp(x) / sum(exp(x))`; the largest is taken off first, so that nothing overflows."""
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def bfloat16(x: Floats) -> Floats:
    """The nearest numbers of 8 significant bits; of two, the one farther from 0."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(mantissa * 2**8 + np.copysign(0.5, x)), exponent - 8)


def mamba2(
    state: Floats, x: Floats, dt: Floats, A: Floats, B: Floats, C: Floats, D: Floats
) -> tuple[Floats, Floats]:
    """The recurrence of Mamba-2 (Dao and Gu, 2024, arXiv 2405.21060, section 3).

    Args:
        state: [heads, head_dim, N] before the first token.
        x: [len, heads, head_dim]; dt: [len, heads] after softplus; A, D: [heads].
        B, C: [len, groups, N]; neighbouring heads share those of a group.

    Returns:
        y [len, heads, head_dim], and the state after each token, [len, heads, head_dim, N].
    """
    y, states = np.zeros_like(x), np.zeros((len(x), *state.shape))
    for t in range(len(x)):
        for head in range(len(A)):
            group = head * B.shape[1] // len(A)
            added = dt[t, head] * np.outer(x[t, head], B[t, group])
            states[t, head] = np.exp(dt[t, head] * A[head]) * state[head] + added
            y[t, head] = states[t, head] @ C[t, group] + D[head] * x[t, head]
        state = states[t]
    return y, states


def mamba1(
    state: Floats, x: Floats, dt: Floats, A: Floats, B: Floats, C: Floats, D: Floats
) -> tuple[Floats, Floats]:
    """The selective scan of Mamba-1 (Gu and Dao, 2023, arXiv 2312.00752, algorithm 2).

    Args:
        state: [channels, N] before the first token.
        x, dt: [len, channels]; A: [channels, N]; B, C: [len, N], shared by all channels; D:
            [channels].

    Returns:
        y [len, channels], and the state after each token, [len, channels, N].
    """
    y, states = np.zeros_like(x), np.zeros((len(x), *state.shape))
    for t in range(len(x)):
        for c in range(len(D)):
            states[t, c] = np.exp(dt[t, c] * A[c]) * state[c] + dt[t, c] * x[t, c] * B[t]
            y[t, c] = states[t, c] @ C[t] + D[c] * x[t, c]
        state = states[t]
    return y, states


def gated_delta(
    state: Floats, q: Floats, k: Floats, v: Floats, g: Floats, beta: Floats
) -> tuple[Floats, Floats]:
    """Compute the gated delta rule (arXiv 2412.06464): a state forgets, then learns its error.

    Args:
        state: [heads, V, K] before the first token.
        q, k: [len, heads, K]; v: [len, heads, V]; beta: [len, heads].
        g: log decay, [len, heads], or of each column of the state (arXiv 2510.26692), [len, heads,
            K].

    Returns:
        The outputs [len, heads, V], and the state after each token, [len, heads, V, K].
    """
    out, states = np.zeros_like(v), np.zeros((len(v), *state.shape))
    for t in range(len(v)):
        for head in range(v.shape[1]):
            old = state[head] * np.exp(g[t, head])
            wrong = v[t, head] - old @ k[t, head]
            states[t, head] = old + beta[t, head] * np.outer(wrong, k[t, head])
            out[t, head] = states[t, head] @ q[t, head]
        state = states[t]
    return out, states


def causal_conv1d(
    window: Floats, x: Floats, weight: Floats, bias: Floats | None, is_silu: bool = True
) -> tuple[Floats, Floats]:
    """Convolve each channel over time: a token sees `kernel` inputs, its own the last.

    Args:
        window: [kernel - 1, channels], the inputs before the first token.
        x: [len, channels]; weight: [channels, kernel]; bias: [channels].

    Returns:
        y [len, channels], and all inputs [kernel - 1 + len, channels]: the window after n tokens
        begins at row n.
    """
    y, inputs = np.zeros_like(x), np.concatenate([window, x])
    for t in range(len(x)):
        y[t] = (inputs[t : t + weight.shape[1]].T * weight).sum(1) + (0 if bias is None else bias)
    return silu(y) if is_silu else y, inputs


def gated_rms_norm(x: Floats, gate: Floats, weight: Floats, groups: int, eps: float) -> Floats:
    """Return RMSNorm (arXiv 1910.07467) of `x * silu(gate)`, of each group of channels.

    Args:
        x, gate: [len, channels]; weight: [channels].

    Returns:
        [len, channels].
    """
    y = np.zeros_like(x)
    size = x.shape[1] // groups
    for t in range(len(x)):
        for group in range(groups):
            own = slice(group * size, (group + 1) * size)
            gated = x[t, own] * silu(gate[t, own])
            y[t, own] = gated / np.sqrt(np.mean(gated**2) + eps) * weight[own]
    return y


def attention(
    query: Floats,
    key: Floats,
    value: Floats,
    positions: Sequence[int],
    scale: float,
    grid: int = 0,
    window: int = 0,
    sinks: Floats | None = None,
) -> Floats:
    """Compute causal attention (arXiv 1706.03762) with heads that share K and V (arXiv 2305.13245).

    Args:
        query: [len, heads, size] at `positions`.
        key: [num_keys, kv_heads, size]; value: [num_keys, kv_heads, value_size].
        grid: tokens at multiples of it are hidden; 0: none are.
        window: tokens that a query sees, its own included; 0: all up to its own.
        sinks: [heads], one more score for every query, without a value (arXiv 2508.10925).

    Returns:
        [len, heads, value_size]; zeros for a query that sees no token.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    out = np.zeros((len(query), heads, value.shape[2]))
    for t, position in enumerate(positions):
        first = max(0, position + 1 - window) if window else 0
        seen = [place for place in range(first, position + 1) if not grid or place % grid]
        for head in range(heads if seen else 0):
            shared = head * kv_heads // heads
            scores = key[seen, shared] @ query[t, head] * scale
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            out[t, head] = softmax(scores)[: len(seen)] @ value[seen, shared]
    return out


def route_softmax(logits: Floats, top_k: int, renormalise: bool) -> Floats:
    """Return each expert's weight: its probability if among the `top_k` largest, else 0.

    Args:
        logits: [num_experts].
        renormalise: to weights that add up to 1.

    Returns:
        [num_experts].
    """
    weights, probabilities = np.zeros_like(logits), softmax(logits)
    for expert in np.argsort(-logits)[:top_k]:
        weights[expert] = probabilities[expert]
    return weights / weights.sum() if renormalise else weights


def route_sigmoid(
    logits: Floats,
    bias: Floats | None,
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    renormalise: bool,
    scale: float,
    epsilon: float,
) -> Floats:
    """Route as DeepSeek-V3 (arXiv 2412.19437, 2.1.2): a bias chooses experts but weighs none.

    Args:
        logits, bias: [num_experts], in `num_groups` groups of neighbours. Only experts of the
            `top_k_groups` groups can be chosen whose best two add up to most.

    Returns:
        [num_experts], 0 for those that are not chosen.
    """
    scores = sigmoid(logits)
    choice = scores if bias is None else scores + bias
    groups = np.split(np.arange(len(logits)), num_groups)
    groups.sort(key=lambda group: -np.sort(choice[group])[-2:].sum())
    allowed = [expert for group in groups[:top_k_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[:top_k]
    total = scores[chosen].sum() + epsilon if renormalise else 1
    weights = np.zeros_like(logits)
    weights[chosen] = scores[chosen] / total * scale
    return weights


def experts(
    x: Floats, weights: Floats, up: Floats, down: Floats, activation: Callable[[Floats], Floats]
) -> Floats:
    """Return a mixture of experts (arXiv 1701.06538): the weighted sum of their outputs.

    Args:
        x: [in]; weights: [num_experts], 0 for an expert that is not chosen.
        up: [num_experts, up_out, in]; down: [num_experts, out, down_in].

    Returns:
        [out].
    """
    out = np.zeros(down.shape[1])
    for expert in np.flatnonzero(weights):
        out += weights[expert] * (down[expert] @ activation(up[expert] @ x))
    return out


def chunks(length: int, chunk_size: int) -> set[int]:
    """Yield the lengths of chunks, nearly equal and near `chunk_size`; two in a tie.

    The last chunk has the rest.
    """
    off = {count: abs(length - count * chunk_size) for count in range(1, length + 1)}
    return {-(-length // count) for count in off if off[count] == min(off.values())}


def slot(
    blocks: Sequence[int],
    position: int,
    block_size: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
) -> int:
    """Where a rank keeps a token; `NO_SLOT` if another one does, or no block reaches that far.

    The tokens of a virtual block of `block_size * cp_size` are dealt out to the ranks,
    `cp_interleave` at a time; each puts its own behind each other.

    Args:
        blocks: of the request, in manager blocks.
    """
    column, inside = divmod(position, block_size * cp_size)
    owners = [token // cp_interleave % cp_size for token in range(inside + 1)]
    if column >= len(blocks) or owners[inside] != cp_rank:
        return NO_SLOT
    return int(blocks[column]) * block_size + owners[:inside].count(cp_rank)


def kernel_blocks(blocks: Sequence[int], per_block: int, stride: int) -> list[int]:
    """Return the kernel blocks of manager blocks: `per_block` of each, `stride` apart."""
    return [int(block) * stride + part for block in blocks for part in range(per_block)]


def num_flushed(
    base_pos: int,
    n_hist: int,
    num_tokens: int,
    max_query_len: int,
    ring_len: int,
    block_size: int | None,
) -> int:
    """Return how many tokens a step of scheme `recompute` folds into its checkpoint.

    Args:
        base_pos: tokens that the checkpoint has seen; n_hist: accepted tokens in the ring behind
            it.
        num_tokens: of this step.
        block_size: tokens from one boundary to the next; None: there are none.
    """
    if block_size is not None and (left := block_size - base_pos % block_size) <= n_hist:
        return left
    return n_hist if n_hist + num_tokens + max_query_len > ring_len else 0


def ngram_drafts(tokens: Sequence[int], count: int, longest: int, shortest: int) -> list[int]:
    """Return what follows the first earlier occurrence of the longest end that recurs.

    Args:
        longest, shortest: tokens of an end.
    """
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return list(tokens[start + length : start + length + count])
    return []
