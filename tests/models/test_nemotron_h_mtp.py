"""The MTP head with a paged cache against a dense one, on the guard model's weights.

The dense head is that of `accuracy.guard_model`, which trains it, with the keys at
multiples of the grid masked. Everything is float64, where the two differ by rounding only: at most
1e-9.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accuracy.guard_model import GuardModel, load_checkpoint
from accuracy.tokenizer import encode
from hybrid_kv.check.guard.float64 import KeepFloat64
from hybrid_kv.check.guard_model import FOLDER, problems
from hybrid_kv.config import CacheConfig, ConfigError, EngineConfig
from hybrid_kv.models.causal_lm import CausalLM
from hybrid_kv.models.interface import DraftHead
from hybrid_kv.models.loader import load_head, load_model
from hybrid_kv.models.random_checkpoint import write_checkpoint
from tests.models.paged_head import CPU, Paged, pairs
from tests.support.checkpoints import edit, edit_config

Request = tuple[torch.Tensor, torch.Tensor]

TOLERANCE = 1e-9
LENGTHS = (70, 33, 5, 48)
HUGE = 10**6


@pytest.fixture(scope="module")
def reference() -> GuardModel:
    return load_checkpoint(FOLDER, torch.float64).requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return load_model(FOLDER, EngineConfig(dtype="float64"), CPU)


@pytest.fixture
def head(target: CausalLM) -> DraftHead:
    return load_head(FOLDER, target)


@pytest.fixture(scope="module")
def requests(reference: GuardModel) -> list[Request]:
    """(token ids, hidden state after norm_f of each token) per request."""
    items = problems.eval_set(3, len(LENGTHS))
    ids = [encode(item.prompt)[:length] for item, length in zip(items, LENGTHS, strict=True)]
    with torch.no_grad(), KeepFloat64():
        return [(torch.tensor(row), reference.decode(torch.tensor([row]))[0][0]) for row in ids]


def dense(
    reference: GuardModel, hidden: torch.Tensor, ids: torch.Tensor, grid: int
) -> torch.Tensor:
    """Run the head on hidden [t, d] of tokens 0 … t-1, ids [t] of 1 … t: outputs of 1 … t."""
    with KeepFloat64():
        first, last = reference.mtp.layers
        x = reference.mtp.join(hidden, reference.decoder.model.embeddings(ids))
        attention, t = first.mixer, len(ids)
        config, size = reference.config, attention.head_dim
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        normed = first.norm(x)
        query, key, value = (
            p(normed).view(t, h, size) for p, h in zip(projections, heads, strict=True)
        )
        group, places = heads[0] // heads[1], torch.arange(t)
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        seen = (places <= places[:, None]) & ((places + 1) % grid != 0)
        scores = torch.einsum("ihd,jhd->hij", query, key) * size**-0.5
        # NaN: a query that sees no key
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        mixed = torch.einsum("hij,jhd->ihd", weights, value)
        return last.final_layernorm(last(x + attention.o_proj(mixed.flatten(1))))


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((out - expected).abs().max()) <= TOLERANCE


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the book, where a softmax over nothing is NaN."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return (query @ key.mT * scale + mask).softmax(-1) @ value


@pytest.mark.parametrize(
    "kernel", [torch.nn.functional.scaled_dot_product_attention, plain_attention]
)
@pytest.mark.parametrize("layout", [(0, 4, 8), (1, 3, 3), (2, 16, 32), (0, 4, 1), (1, 8, HUGE)])
def test_any_chunks_in_any_batch_equal_the_dense_head(
    reference: GuardModel,
    head: DraftHead,
    requests: list[Request],
    layout: tuple[int, int, int],
    kernel: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts may come in between: the slots they wrote are overwritten by the true pairs.

    And whatever the kernel makes of a query without a key, as all are on a grid of 1: torch's
    differ by version and device.
    """
    seed, block_size, grid = layout
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    rng = random.Random(seed)
    head.grid = grid
    expected = [dense(reference, hidden[:-1], ids[1:], grid) for ids, hidden in requests]
    paged = Paged(head, len(requests), block_size)
    done, rejected = [0] * len(requests), 0
    while unfinished := [r for r, n in enumerate(LENGTHS) if done[r] < n]:
        rows = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        stops = [min(LENGTHS[r], done[r] + rng.choice((1, 1, 3, 7, 20))) for r in rows]
        outputs = paged.step(
            [
                (r, done[r], *pairs(requests[r], done[r], s))
                for r, s in zip(rows, stops, strict=True)
            ]
        )
        for r, stop, out in zip(rows, stops, outputs, strict=True):
            first = max(done[r], 1)  # the pair at position 0 does not exist
            if stop > first:
                assert_close(out[first - done[r] :], expected[r][first - 1 : stop - 1])
            done[r] = stop
            drafts = [int(head.compute_logits(out[-1:]).argmax())] if stop > 1 else []
            joined, ids = requests[r][1][: stop - 1], requests[r][0][1:stop]
            for step in range(2 if drafts else 0):
                joined, ids = (
                    torch.cat([joined, out[-1:]]),
                    torch.cat([ids, torch.tensor(drafts[-1:])]),
                )
                (out,) = paged.step([(r, stop + step, out[-1:], ids[-1:])])
                assert_close(out, dense(reference, joined, ids, grid)[-1:])
                drafts.append(int(head.compute_logits(out).argmax()))
            rejected += stop < LENGTHS[r] and drafts[:1] != [int(requests[r][0][stop])]
    assert rejected, "no draft was wrong: nothing had to be overwritten"


def test_the_grid_must_be_set(head: DraftHead, requests: list[Request]) -> None:
    ids, hidden = requests[0]
    with pytest.raises(ValueError, match="grid"):
        Paged(head, 1).step([(0, 0, hidden[:1], ids[:1])])
    with pytest.raises(ValueError, match="grid=0"):
        head.grid = 0


def test_logits_are_the_targets(
    reference: GuardModel, target: CausalLM, head: DraftHead, requests: list[Request]
) -> None:
    _, hidden = requests[0]
    with torch.no_grad():
        assert torch.equal(head.compute_logits(hidden), reference.lm_head(hidden))
        raw = torch.randn(3, hidden.shape[1], dtype=torch.float64)
        with KeepFloat64():
            normed = reference.decoder.model.norm_f(raw)
        assert_close(target.normed(raw), normed)
        assert torch.equal(head.normed(raw), target.normed(raw))
        assert_close(target.compute_logits(raw), reference.lm_head(normed))
        assert torch.equal(target.logits(target.normed(raw)), target.compute_logits(raw))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes(reference: GuardModel, requests: list[Request], dtype: str) -> None:
    """The logits in lower precision, relative to the largest: rounding only."""
    config = EngineConfig(cache=CacheConfig(kv_cache_dtype=dtype), dtype=dtype)
    target = load_model(FOLDER, config, CPU)
    head = load_head(FOLDER, target)
    head.grid = 16
    ids, hidden = requests[0]
    expected = reference.lm_head(dense(reference, hidden[:-1], ids[1:], 16))
    paged = Paged(head, 1, dtype=target.layer_specs["layers.3"].dtype)
    before, next_ids = pairs((ids, hidden.to(target.embed_tokens.weight.dtype)), 0, len(ids))
    (out,) = paged.step([(0, 0, before, next_ids)])
    assert out.dtype == target.embed_tokens.weight.dtype
    logits = head.compute_logits(out[1:])
    assert logits.dtype == torch.float32
    relative = float((logits - expected).abs().max() / expected.abs().max())
    assert relative < {"float32": 2e-6, "bfloat16": 0.03}[dtype]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / name, tmp_path / name)
    return tmp_path


def refused(folder: Path, target: CausalLM, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        load_head(folder, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, 2, None])
def test_a_checkpoint_without_a_head(folder: Path, target: CausalLM, count: int | None) -> None:
    edit_config(folder, num_nextn_predict_layers=count)
    refused(
        folder, target, f"num_nextn_predict_layers={count or 0}, 1 is supported; draft with n-grams"
    )


def test_a_head_of_other_layers(folder: Path, target: CausalLM) -> None:
    edit_config(folder, mtp_layers_block_type=["linear_attention", "moe"])
    refused(folder, target, r"\('mamba', 'moe'\) is not supported")
    edit_config(folder, mtp_layers_block_type=None)
    refused(folder, target, "mtp_hybrid_override_pattern is missing")
    edit_config(folder, mtp_hybrid_override_pattern="*-")
    load_head(folder, target)


def test_tensors_that_lack_or_do_not_fit(folder: Path, target: CausalLM) -> None:
    prefix = "mtp.layers.0."
    edit(folder, lambda tensors: tensors.pop(prefix + "hnorm.weight"))
    refused(folder, target, r"lacks 1 tensors, the first is mtp\.hnorm\.weight")
    edit(folder, lambda tensors: tensors.update({prefix + "hnorm.weight": torch.ones(3)}))
    refused(folder, target, r"mtp\.hnorm\.weight has shape \(3,\), config\.json says \(128,\)")
    edit(folder, lambda tensors: tensors.update({prefix + "hnorm.weight": torch.ones(128)}))
    edit(folder, lambda tensors: tensors.update({"mtp.layers.2.norm.weight": torch.ones(3)}))
    refused(folder, target, r"does not know, the first is mtp\.layers\.2\.norm\.weight")
    edit(folder, lambda tensors: tensors.pop(prefix + "mixer.v_proj.weight"))
    refused(
        folder, target, r"has mtp\.layer\.mixer\.q_proj\.weight but lacks mtp\.layer\.mixer\.v_proj"
    )
    load_model(folder, EngineConfig(dtype="float32"), CPU)  # which has no use for the head


def test_a_target_without_attention(folder: Path, target: CausalLM) -> None:
    class Recurrent(type(target)):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.layer_specs = {"layers.0": target.layer_specs["layers.0"]}

    refused(folder, Recurrent(), "no attention layer")


def test_a_head_whose_layers_the_model_lacks_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its draft head has a layer 'moe'"):
        write_checkpoint(
            "nemotron_h",
            tmp_path,
            keys={"layers_block_type": ["linear_attention", "full_attention"]},
        )
