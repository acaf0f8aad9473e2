"""A setting just inside of a limit runs; one just outside is rejected with its reason."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.check.guard.scenario import SmallBlocksFirst, answer_book
from hybrid_kv.config import ConfigError
from hybrid_kv.kernels.recompute import shortest_ring_len
from hybrid_kv.models.exact import ExactModel

BLOCK, NUM_NEW = 8, 6
DRAFTS = {"speculative_method": "ngram"}
RECOMPUTE = {"state_scheme": "recompute"}


class Limit(NamedTuple):
    """Settings on both sides of a limit, the outer one's error, and the lengths of the prompts."""

    inside: dict[str, Any]
    outside: dict[str, Any]
    reason: str
    prompts: tuple[int, int] = (12, 12)


def limits() -> list[Limit]:
    found = []
    # The groups of attention and of states come in either order.
    for mode, layers, late in ((*both, False) for both in product(("align", "all"), ("M*", "*M"))):
        own = {**DRAFTS, "mamba_cache_mode": mode, "layers": layers, "async_scheduling": late}
        found.append((own, BLOCK))
    # two steps' drafts
    found.append(({**DRAFTS, "mamba_cache_mode": "align", "async_scheduling": True}, BLOCK // 2))
    result = [
        Limit(
            {**own, "num_speculative_tokens": most - 1},
            {**own, "num_speculative_tokens": most},
            f"needs Mamba blocks of at least {BLOCK + 1} tokens, not {BLOCK}",
        )
        for own, most in found
    ]
    for k in (1, 3, 6):
        ring, least = {**RECOMPUTE, **DRAFTS, "num_speculative_tokens": k}, shortest_ring_len(1 + k)
        result.append(
            Limit(
                {**ring, "recompute_ring_len": least},
                {**ring, "recompute_ring_len": least - 1},
                f"is too short for num_speculative_tokens={k}, which needs {least}",
            )
        )
    own = {**RECOMPUTE, "kind": "mamba1"}
    reason = 'state_scheme="recompute" is not for mamba1 layers; use slots'
    result.append(Limit({**own, "layers": "W*"}, {**own, "layers": "M*"}, reason))
    for size, changes in (
        (2 * BLOCK, {"mamba_cache_mode": "all"}),
        (BLOCK // 2, {"mamba_block_size": BLOCK}),
    ):
        own = {"mamba_cache_mode": "align", "mamba_block_size": size}
        result.append(
            Limit(
                {**own, **changes},
                own,
                f"cannot be kept: mode align needs the attention block size {BLOCK}",
            )
        )
    result += [
        Limit(RECOMPUTE, {**RECOMPUTE, "layers": "**"}, "the model has no Mamba layer"),
        Limit(RECOMPUTE, {"state_scheme": "ring"}, "state_scheme='ring'; use slots or recompute"),
        Limit(
            {**RECOMPUTE, "recompute_ring_len": 32},
            {"recompute_ring_len": 32},
            "_ring_len=32 sizes the ring",
        ),
        Limit({}, {}, "the prompt is empty", (1, 0)),
        *(
            Limit({}, {}, f"the prompt has {n} tokens, max_model_len is 64", (63, n))
            for n in (64, 65, 90)
        ),
    ]
    for length in (11, 19, 20):
        logical_blocks = -(-(length + NUM_NEW - 1) // BLOCK)  # the last token is never cached
        for mode, states in (
            ("none", 1),
            ("align", min(2, logical_blocks)),
            ("all", logical_blocks),
        ):
            own = {"mamba_cache_mode": mode}
            result.append(
                Limit(
                    {**own, "num_blocks": 1 + states + logical_blocks},
                    {**own, "num_blocks": states + logical_blocks},
                    f"tokens never fit in {states + logical_blocks - 1} cache blocks",
                    (length, length),
                )
            )
    return result


def without_inputs(model: ExactModel, kind: str) -> ExactModel:
    """Return the model with layers of this kind, without the inputs of their states."""
    changed = copy(model)
    changed.layer_specs = {
        name: replace(spec, inputs=(), mamba_type=kind) if isinstance(spec, MambaSpec) else spec
        for name, spec in model.layer_specs.items()
    }
    return changed


def error_of(setting: dict[str, Any], prompt: int) -> str:
    """What an engine, or its answer to a prompt of this length, says is wrong; empty if it runs."""
    options = {
        "device": "cpu",
        "attention_backend": SmallBlocksFirst.name,
        "block_size": BLOCK,
        "num_blocks": 200,
        "max_num_seqs": 2,
        "max_model_len": 64,
        "layers": "M*",
        "kind": None,
        **setting,
    }
    book, kind = answer_book(options.pop("layers")), options.pop("kind")
    model = without_inputs(book.model, kind) if kind else book.model
    params = SamplingParams(max_tokens=NUM_NEW)
    try:
        (output,) = LLM(model, **options).generate([list(range(prompt))], params, progress=False)
    except ConfigError as error:
        return str(error)
    if output.error is None:
        assert output.token_ids == book.answer(list(range(prompt)), params, 64)
    return output.error or ""


@pytest.mark.parametrize("limit", limits(), ids=lambda limit: f"{limit.reason} {limit.outside}")
def test_what_is_allowed_runs_and_what_is_not_is_rejected(limit: Limit) -> None:
    assert error_of(limit.inside, limit.prompts[0]) == ""
    assert limit.reason in error_of(limit.outside, limit.prompts[1])
