"""Exact kernels of a gated delta net and of attention.

The former have the contracts of those that SGLang compiles for CPUs.

They compute what `hybrid_kv.models.exact` computes: integers modulo a prime. Which slot is read,
written, tracked or committed is SGLang's. Tensors are [rows or tokens, …, width]; a state is
[states, width, state_size], as SGLang has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

MODEL_TYPE = "exact_hybrid"  # of the configuration that SGLang reads
PRIME = 2**31 - 1  # as in hybrid_kv.models.exact
chunk_size = 8  # tokens between two states that a prefill hands to the tracking of prefixes


def convolve(taps: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the convolution [..., dim] of windows and weights [..., dim, kernel]."""
    return ((taps + weight) * weight % PRIME).sum(-1) % PRIME


def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares [tokens, width] of the first heads of [1, tokens, heads, width]."""
    heads = [each[0, :, 0] for each in (q, k, v)]
    return sum((head * head % PRIME for head in heads), torch.zeros_like(heads[0])) % PRIME


def maps_of(c: torch.Tensor, to_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the affine maps a, b [..., states, width, size] of tokens c [..., width].

    Args:
        to_map: [states, 4, size, width]; a is never zero.
    """
    scale, offset = (to_map[:, first::2].transpose(-1, -2) for first in (0, 1))
    both = (c[..., None, None, :, None] * scale + offset) % PRIME
    return both[..., 0, :, :].clamp(min=1), both[..., 1, :, :]


def read(c: torch.Tensor, states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return outputs [..., width] of tokens c [..., width] and the states after them.

    Args:
        states: [..., states, width, size].
        out: [states, size, width].
    """
    y = c
    for i, weight in enumerate(out):
        mixed = (states[..., i, :, :] * weight.T % PRIME).sum(-1) % PRIME
        y = (mixed + y) * mixed % PRIME
    return y


def scan(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return the state [tokens, …] after each token of maps `s -> a s + b` [tokens, …]."""
    b = torch.cat([(a[:1] * start + b[:1]) % PRIME, b[1:]])
    shift = 1
    while shift < len(a):
        late = (a[shift:] * b[:-shift] + b[shift:]) % PRIME
        a = torch.cat([a[:shift], a[shift:] * a[:-shift] % PRIME])
        b = torch.cat([b[:shift], late])
        shift *= 2
    return b


def causal_conv1d_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str = "none", **given: Any
) -> torch.Tensor:
    """Return the convolution of tokens x [dim, tokens] in the same shape.

    The last window of each row goes to its slot of conv_states [slots, dim, kernel - 1].
    """
    y = torch.zeros_like(x)
    num_past = weight.shape[1] - 1
    conv_states = given["conv_states"]
    starts = given["query_start_loc"].tolist()
    seen = given["has_initial_state"].tolist()
    for row, slot in enumerate(given["cache_indices"].tolist()):
        first = starts[row]
        last = starts[row + 1]
        if slot < 0 or first == last:
            continue
        past = conv_states[slot].long() if seen[row] else x.new_zeros(len(x), num_past)
        both = torch.cat([past, x[:, first:last]], 1)
        y[:, first:last] = convolve(both.unfold(1, num_past + 1, 1), weight[:, None])
        conv_states[slot] = both[:, -num_past:].to(conv_states.dtype)
    return y


def parents_of(next_token: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """Return the parent of each draft [rows, drafts]; -1 of the first one.

    Both arguments have that shape: the first child, and the next sibling, of each draft.
    """
    parents = torch.full_like(next_token, -1)
    for row in range(len(next_token)):
        for i in range(next_token.shape[1]):
            last = i
            child = int(next_token[row, i])
            while child > last:  # a row that is padding may have nothing but zeros
                parents[row, child] = i
                last = child
                child = int(next_sibling[row, child])
    return parents


def _before(after: list[torch.Tensor], start: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Return what each row's draft goes on from: what came after its parent, or the start."""
    every = torch.arange(len(start))
    return torch.stack([start, *after])[parents.long() + 1, every]


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    activation: str = "none",
    **given: Any,
) -> torch.Tensor:
    """Return the convolution of x [rows, dim], or [rows, dim, drafts], in the same shape.

    Without drafts the window goes to the row's slot; with them, the window after each draft goes to
    scratch memory [rows, drafts, dim, kernel - 1], and the slot stays.
    """
    drafts = x[..., None] if x.dim() == 2 else x
    slots = given["conv_state_indices"].long()
    scratch = given.get("intermediate_conv_window")
    alive = slots >= 0
    start = conv_state[slots.clamp(min=0)].long()
    windows = list[torch.Tensor]()
    outputs = []
    parents = None
    if given.get("retrieve_next_token") is not None:
        parents = parents_of(given["retrieve_next_token"], given["retrieve_next_sibling"])
        given["retrieve_parent_token"].copy_(parents)
    for i in range(drafts.shape[2]):
        parent = torch.full((len(x),), i - 1) if parents is None else parents[:, i]
        both = torch.cat([_before(windows, start, parent), drafts[:, :, i : i + 1]], 2)
        outputs.append(convolve(both, weight) * alive[:, None])
        windows.append(both[:, :, 1:])
    if scratch is None:
        conv_state[slots[alive]] = windows[-1][alive].to(conv_state.dtype)
    else:
        places = given["intermediate_state_indices"][: len(x)].long()[alive]
        for i, window in enumerate(windows):
            scratch[places, i] = window[alive].to(scratch.dtype)
    y = torch.stack(outputs, 1).transpose(1, 2)  # laid out as SGLang lays out x
    return y if x.dim() == 3 else y[..., 0]


def gating(to_map: torch.Tensor, a: Any, b: Any, out: torch.Tensor) -> Any:
    """Return what stands for the gates: the weights of maps and outputs, as they are."""
    return to_map, out


def chunk_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """Return outputs [1, tokens, heads, width], nothing, and the states before each chunk.

    The latter are [1, chunks, states, width, size], row after row, as the chunked kernel has them.
    Each row begins with what is in its slot, and its last state goes there.
    """
    c = mix(q, k, v)
    y = torch.zeros_like(v)
    before = []
    a, b = maps_of(c, given["g"])
    initial_state = given["initial_state"]
    starts = given["cu_seqlens"].tolist()
    for row, slot in enumerate(given["initial_state_indices"].tolist()):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.start == tokens.stop:
            continue
        start = initial_state[max(slot, 0)].long() * (slot >= 0)
        states = scan(a[tokens], b[tokens], start)
        y[0, tokens, 0] = read(c[tokens], states, given["beta"])
        before.append(torch.cat([start[None], states[:-1]])[::chunk_size])
        if slot >= 0:
            initial_state[slot] = states[-1].to(initial_state.dtype)
    return y, None, torch.cat(before)[None] if before else None


def recurrent_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """Return the outputs [1, tokens, heads, width] of rows that all have as many tokens.

    The last state goes to the row's slot, or the state after each draft to scratch memory [rows,
    drafts, states, width, size].

    Raises:
        NotImplementedError: rows of different lengths.
    """
    lengths = given["cu_seqlens"].diff()
    rows = int((lengths > 0).sum())  # those after them are padding
    count = int(lengths[0]) if rows else 0
    if bool((lengths[:rows] != count).any()):
        raise NotImplementedError("rows of drafts that differ in length")
    y = torch.zeros_like(v)
    if not rows * count:
        return y
    y[0, : rows * count, 0] = advance(
        mix(q, k, v)[: rows * count].view(rows, count, -1),
        (given["A_log"], given["dt_bias"]),
        given["initial_state_source"],
        given["initial_state_indices"][:rows].long(),
        parents=given.get("retrieve_parent_token"),
        scratch=scratch_of(given),
        keeps_slots=bool(given.get("disable_state_update")),
    ).flatten(0, 1)
    return y


def scratch_of(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the memory for the states after drafts, and the places of rows, that a kernel has."""
    memory = given.get("intermediate_states_buffer")
    return None if memory is None else (memory, given["intermediate_state_indices"])


def advance(
    c: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    source: torch.Tensor,
    slots: torch.Tensor,
    *,
    parents: torch.Tensor | None,
    scratch: tuple[torch.Tensor, torch.Tensor] | None,
    keeps_slots: bool,
) -> torch.Tensor:
    """Return the outputs [rows, count, width] of tokens c in the same shape, zeros of padding.

    Args:
        weights: of maps and outputs, see `maps_of` and `read`.
        source: states by slot.
        slots: [rows] before the tokens; what is negative is padding.
        parents: token of the row [rows, count] after which each one comes, -1 of the first; None:
            the one before it.
        scratch: memory [places, count, …] for the states after all tokens, and the places of rows.
        keeps_slots: do not write the last state to the row's slot.
    """
    rows, count = c.shape[:2]
    to_map, out = weights
    alive = slots >= 0
    a, b = maps_of(c, to_map)
    start = source[slots.clamp(min=0)].long()
    states = list[torch.Tensor]()
    for i in range(count):
        parent = torch.full((rows,), i - 1) if parents is None else parents[:rows, i]
        states.append((a[:, i] * _before(states, start, parent) + b[:, i]) % PRIME)
    every = torch.stack(states, 1)
    if scratch is not None:
        memory, places = scratch
        memory[places[:rows].long()[alive], :count] = every[alive].to(memory.dtype)
    if not keeps_slots:
        source[slots[alive]] = states[-1][alive].to(source.dtype)
    return read(c, every, out) * alive[:, None, None]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    """Return outputs of the last tokens q [count, width] over keys and values [length, width]."""
    order = torch.arange(1, len(k) + 1)[:, None] * mark % PRIME
    v = v * (order * order % PRIME) % PRIME
    # (q + k)^2 v = q^2 v + 2 q k v + k^2 v: three sums over the keys serve all queries.
    terms = (v, k * v % PRIME, k * k % PRIME * v % PRIME)
    one, first, second = (term.cumsum(0)[len(k) - len(q) :] % PRIME for term in terms)
    return (q * q % PRIME * one % PRIME + 2 * (q * first % PRIME) + second) % PRIME


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mark: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Return outputs of drafts q [count, width]; visible [count, length] is the keys they see."""
    order = visible.cumsum(1)[..., None] * mark % PRIME
    weighted = v * (order * order % PRIME) % PRIME
    score = (q[:, None] + k) % PRIME
    mixed = score * score % PRIME * weighted % PRIME
    return (mixed * visible[..., None]).sum(1) % PRIME


def pack(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return hidden states [num_tokens, 2 * width + 1], exact in float32.

    They hold residues [num_tokens, width] and tokens [num_tokens].
    """
    return torch.cat([x >> 16, x & 0xFFFF, token[:, None]], 1).float()


def unpack(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residues and the tokens that `pack` was given."""
    high, low, token = hidden.long().split([hidden.shape[1] // 2] * 2 + [1], 1)
    return (high << 16) + low, token[:, 0]


def logits_of(
    x: torch.Tensor, token: torch.Tensor, logit_map: torch.Tensor, echo: int, cycle: int = 5
) -> torch.Tensor:
    """Return one-hot logits [num_tokens, vocabulary] after tokens with residues x.

    A checksum of the whole history draws one token in `echo`; the others follow their predecessor
    in a cycle, so that n-grams guess right at times.
    """
    mixed = (x[:, None] * logit_map[0] + logit_map[1]) % PRIME
    scores = (mixed * mixed % PRIME).sum(-1) % PRIME
    follower = token - token % cycle + (token + 1) % cycle
    chosen = torch.where(scores[:, 0] % echo == 0, scores.argmax(1), follower)
    return F.one_hot(chosen, scores.shape[1]).float() * 100
