"""Activations in bfloat16 with states in float32: every path leaves the same states.

Logits say little here, since activations are rounded everywhere. But the first layer with states
gets the same inputs on every path, and its states are sums in float32: two paths differ by some
1e-7 of a state, or by nothing. A state or a gate that goes through the activations' dtype on one of
them moves half of all elements by more than 1e-4.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import ScriptedProposer
from hybrid_kv.engine.llm import LLM
from hybrid_kv.kernels.recompute import join_state
from hybrid_kv.models.interface import Model
from hybrid_kv.sampling import SamplingParams

LIMIT = 1e-5  # of the median difference of an element, over the element
COPIES = 8  # of the request: products of fewer rows are rounded in another order
NUM_PROMPT = 45
NUM_NEW = 9
K = 3
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",
    "max_num_seqs": COPIES,
    "max_model_len": 128,
}


@dataclass(frozen=True)
class Narrow:
    """The path whose states are furthest from those of one prefill of the same tokens.

    Attributes:
        worst: the median of its elements' relative differences.
        path: in words; empty if there is no state in float32.
        num_paths: that were compared.
    """

    worst: float = 0.0
    path: str = ""
    num_paths: int = 0


def compare_paths(folder: str | Path, seed: int) -> Narrow:
    """Compare the first states of a checkpoint on each path with those of one prefill."""
    model = LLM(folder, **OPTIONS).model
    first = first_states(model)
    if first is None:
        return Narrow()
    rng = random.Random(seed)
    prompt = [rng.randrange(1, model.vocab_size) for _ in range(NUM_PROMPT)]
    whole: dict[tuple[int, ...], torch.Tensor] = {}
    distances: list[tuple[float, str]] = []
    for path, tokens, states in _paths(model, prompt, first):
        key = tuple(tokens)
        if key not in whole:
            _, whole[key] = _states(LLM(model, **OPTIONS), tokens, 1, first, 1)
        distance = (states - whole[key]).abs() / whole[key].abs().clamp_min(
            torch.finfo(torch.float32).tiny
        )
        distances.append((float(distance.nan_to_num(nan=1.0).median()), path))
    worst, path = max(distances)
    return Narrow(worst, path, len(distances))


def first_states(model: Model) -> str | None:
    """Return the name of the first layer that has states in float32 there; None if none has."""
    for name, spec in model.layer_specs.items():
        if isinstance(spec, MambaSpec) and any(
            state_part.role == "state" for state_part in spec.parts
        ):
            return name
    return None


def _paths(
    model: Model, prompt: list[int], first: str
) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    """Yield each path by name, the tokens that it has computed, and its states after them."""
    tokens, states = _states(LLM(model, **OPTIONS), prompt, NUM_NEW, first)
    yield "decodes", tokens, states
    yield "chunks", *_states(LLM(model, **OPTIONS, max_num_batched_tokens=11), tokens, 1, first, 1)
    spec = model.layer_specs[first]
    assert isinstance(spec, MambaSpec)
    # Of delta rules the ring keeps what a token has added, in the activations' dtype.
    schemes = ["slots", "recompute"] if spec.mamba_type == "mamba2" else ["slots"]
    for scheme in schemes:
        known = [[*tokens, *range(K)]] * COPIES
        proposer = ScriptedProposer("mixed", K, known, [NUM_PROMPT] * COPIES, 16, model.vocab_size)
        drafted = LLM(
            model, proposer=proposer, num_speculative_tokens=K, state_scheme=scheme, **OPTIONS
        )
        yield f"verify steps, {scheme}", *_states(drafted, prompt, NUM_NEW - K, first)


def _states(
    llm: LLM, prompt: list[int], num_new: int, first: str, copies: int = COPIES
) -> tuple[list[int], torch.Tensor]:
    """Return the computed tokens of a request and the states [elements] after them.

    The answer has at least `num_new` tokens.
    """
    poison(llm)
    params = SamplingParams(max_tokens=num_new + 2 * K, ignore_eos=True)
    requests = [llm.add_request(prompt, params) for _ in range(copies)]
    while len(requests[0].output_token_ids) < num_new:
        llm.step()
    kv_transfer = llm.send_request(requests[0])
    spec = llm.model.layer_specs[first]
    assert isinstance(spec, MambaSpec)
    parts = zip(spec.parts, kv_transfer.layers[first], strict=True)
    states = [state for state_part, state in parts if state_part.role == "state"]
    whole = [join_state(state[None]) if state.dtype == torch.int16 else state for state in states]
    tokens = [*kv_transfer.prompt_token_ids, *kv_transfer.output_token_ids]
    return tokens[: kv_transfer.num_computed_tokens], torch.cat(
        [state.flatten() for state in whole]
    )
