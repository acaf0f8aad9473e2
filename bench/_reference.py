"""References of all results: the plainest loops, in float64, in numpy, without the timed code."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness.cells import WrongResultError

Floats = npt.NDArray[np.float64]


def equal(what: str, result: Any, expected: Any) -> float:
    """Return 0.0 for the right integers, or raise `WrongResultError`."""
    got, wanted = np.asarray(result), np.asarray(expected)
    if got.shape != wanted.shape:
        raise WrongResultError(f"{what} has shape {got.shape}, expected {wanted.shape}")
    if wrong := int((got != wanted).sum()):
        where = np.argwhere(got != wanted)[0].tolist()
        raise WrongResultError(
            f"{what}: {wrong} of {wanted.size} entries are wrong, the first at {where}"
        )
    return 0.0


def near(what: str, result: Any, expected: Any, tolerance: float) -> float:
    """Return the largest error as a share of the largest expected magnitude."""
    got, wanted = np.asarray(result, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if got.shape != wanted.shape:
        raise WrongResultError(f"{what} has shape {got.shape}, expected {wanted.shape}")
    error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    if not error <= tolerance:
        raise WrongResultError(
            f"{what}: largest error {error:.3g} of the largest value, tolerance {tolerance:.3g}"
        )
    return error


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def softplus(x: Floats) -> Floats:
    return np.logaddexp(x, 0)


def convolution(window: Floats, x: Floats, weight: Floats, bias: Floats) -> Floats:
    """Return SiLU of a causal depthwise convolution.

    window: [rows, kernel - 1, channels]; x: [rows, len, channels].
    """
    inputs = np.concatenate([window, x], axis=1)
    kernel = weight.shape[1]
    steps = [(inputs[:, t : t + kernel] * weight.T).sum(1) + bias for t in range(x.shape[1])]
    return silu(np.stack(steps, axis=1))


def recurrence(
    state: Floats,
    x: Floats,
    dt: Floats,
    A: Floats,
    B: Floats,
    C: Floats,
    D: Floats,
    last: bool = False,
) -> tuple[Floats, Floats]:
    """Return Mamba-2's outputs and states, token by token.

    Outputs: [rows, len, heads, head_dim]; states after each: [rows, len, heads, head_dim, N].

    Args:
        last: of the states only the last ones, [rows, heads, head_dim, N]; those of a prompt are
            gigabytes.
        state: [rows, heads, head_dim, N]; x: [rows, len, heads, head_dim]; dt: [rows, len, heads]
            after softplus;
        A, D: [heads]; B, C: [rows, len, groups, N].
    """
    per_group = x.shape[2] // B.shape[2]
    outputs, states = [], []
    for t in range(x.shape[1]):
        b, c = (np.repeat(part[:, t], per_group, axis=1)[:, :, None] for part in (B, C))
        decay = np.exp(dt[:, t] * A)[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b
        outputs.append((state * c).sum(-1) + D[:, None] * x[:, t])
        states += [] if last else [state]
    return np.stack(outputs, axis=1), state if last else np.stack(states, axis=1)


def delta_rule(
    state: Floats, q: Floats, k: Floats, v: Floats, decays: Floats, beta: Floats, last: bool = False
) -> tuple[Floats, Floats]:
    """Return the outputs and states of the gated delta rule, token by token.

    Outputs: [rows, len, heads, V]; states after each: [rows, len, heads, V, K].

    Args:
        last: see `recurrence`.
        state: [rows, heads, V, K]; q, k: [rows, len, heads, K]; v: [rows, len, heads, V]; beta:
            [rows, len, heads];
        decays: [rows, len, heads, 1 or K].
    """
    outputs, states = [], []
    for t in range(v.shape[1]):
        state = state * decays[:, t, :, None]
        wrong = v[:, t] - (state * k[:, t, :, None]).sum(-1)
        state = state + (beta[:, t, :, None] * wrong)[..., None] * k[:, t, :, None]
        outputs.append((state * q[:, t, :, None]).sum(-1))
        states += [] if last else [state]
    return np.stack(outputs, axis=1), state if last else np.stack(states, axis=1)


def attention(query: Floats, key: Floats, value: Floats, scale: float) -> Floats:
    """Return causal softmax attention of one row, whose queries are the last tokens.

    query: [len, heads, size]; key, value: [tokens, kv heads, size].
    """
    length, tokens = len(query), len(key)
    per_head = query.shape[1] // key.shape[1]
    k, v = np.repeat(key, per_head, axis=1), np.repeat(value, per_head, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, k) * scale
    future = np.arange(tokens) > np.arange(tokens - length, tokens)[:, None]
    weights = np.exp(np.where(future, -np.inf, scores - scores.max(-1, keepdims=True)))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
