"""Attention layers whose pages differ in bytes, from the plan to a block that comes back from a file (vllm!38554)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.cache import offload
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheConfig, UniformTypeKVCacheSpecs
from hybrid_kv.guard.poison import poison
from hybrid_kv.guard.scenario import SmallBlocksFirst, SmallKVFirst, answer_book
from hybrid_kv.models.exact import ExactConfig, ExactModel
from hybrid_kv.models.layers import ForwardContext

VOCAB, WIDTH = 97, 12
PARAMS = SamplingParams(max_tokens=9)
BACKENDS = pytest.mark.parametrize("backend", [SmallBlocksFirst.name, SmallKVFirst.name])


class Attention(nn.Module):
    """Query heads `[4, head_size]` over fewer K/V heads."""

    def __init__(self, name: str, num_kv_heads: int, head_size: int) -> None:
        super().__init__()
        self.name, self.heads, self.head_size = name, (4, num_kv_heads, num_kv_heads), head_size
        self.qkv = nn.Linear(WIDTH, sum(self.heads) * head_size, bias=False, dtype=torch.float64)
        self.out = nn.Linear(4 * head_size, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        metadata, views = context.metadata[self.name], context.views[self.name]
        query, key, value = self.qkv(x).view(len(x), -1, self.head_size).split(self.heads, dim=1)
        metadata.compute.store(key, value, *views, metadata.slot_mapping)
        outputs = []
        for part in metadata.parts:
            rows = part.rows.padded(query[part.start : part.start + part.num_tokens])
            outputs.append(part.rows.flat(part.compute.attend(rows, *views, part, self.head_size**-0.5)))
        return self.out(torch.cat(outputs).flatten(1))


class Toy(nn.Module):
    """Three attention layers of `2 * heads * size` = 10, 24 and 28 numbers per token."""

    GEOMETRIES = ((1, 5), (4, 3), (2, 7))
    mamba_chunk_size = None
    vocab_size = VOCAB

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(Attention(f"layers.{i}", *sizes) for i, sizes in enumerate(self.GEOMETRIES))
        self.layer_specs = {
            f"layers.{i}": FullAttentionSpec(1, *sizes, torch.float64) for i, sizes in enumerate(self.GEOMETRIES)
        }

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x, context)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sin(40 * hidden) @ self.embed.weight.T  # so that small differences make other tokens


MODELS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "exact": (lambda: ExactModel(ExactConfig(pattern="*+#*")), [16, 32, 48, 16]),  # bytes of a token, layer by layer
    "toy": (Toy, [80, 192, 224]),
}


def prompts() -> list[list[int]]:
    """Two with a beginning in common, two without, all of them with full blocks."""
    rng = np.random.default_rng(3)
    drawn = [rng.integers(0, VOCAB, size=length).tolist() for length in (21, 33, 18, 40)]
    return [*drawn, drawn[1][:24] + drawn[0]]


def engine(model: Any, backend: str = SmallKVFirst.name, **options: Any) -> LLM:
    llm = LLM(
        model, attention_backend=backend, block_size=8, num_blocks=80, max_num_seqs=3, max_num_batched_tokens=20,
        max_model_len=80, device="cpu", **{"enable_prefix_caching": True, "sanitize": True, **options},
    )  # fmt: skip
    poison(llm)
    return llm


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompts(), PARAMS, progress=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", MODELS)
@BACKENDS
def test_vllm_38554_blocks_of_unequal_pages_come_back_from_host_and_folder(
    name: str, backend: str, tmp_path: Path
) -> None:
    build, token_bytes = MODELS[name]
    uncached = engine(build(), backend, enable_prefix_caching=False)
    expected = tokens(uncached)
    assert len({token for answer in expected for token in answer}) > 10, "a model that repeats itself shows nothing"
    (group,) = uncached.plan.config.groups
    assert isinstance(group.spec, UniformTypeKVCacheSpecs)
    assert [len(buffer) for buffer in uncached.runner.raw_buffers] == [80 * 8 * size for size in token_bytes]

    llm = engine(build(), backend, kv_offload_bytes=1 << 20, kv_offload_folder=tmp_path)
    assert tokens(llm) == expected
    llm.reset_prefix_cache()
    assert tokens(llm) == expected
    tier = llm.manager.offload
    assert tier is not None and tier.block_bytes == (8 * sum(token_bytes),)
    assert tier.stats.host_hits == tier.stats.loaded_blocks >= 8
    assert tier.stats.loaded_bytes == tier.stats.loaded_blocks * 8 * sum(token_bytes)

    restarted = engine(build(), backend, kv_offload_folder=tmp_path)
    assert tokens(restarted) == expected
    assert restarted.manager.offload is not None and restarted.manager.offload.stats.folder_hits >= 8


def test_the_exact_model_with_unequal_pages_gives_the_oracles_tokens() -> None:
    book = answer_book("*+#*")
    assert tokens(engine(book.model)) == [book.answer(prompt, PARAMS, 80) for prompt in prompts()]


def test_a_tier_that_takes_the_first_layers_page_for_all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of vllm!38554: what comes back is not what was stored."""
    build, _ = MODELS["exact"]
    expected = tokens(engine(build()))
    views = offload._page_views

    class FirstPage(KVCacheConfig):
        @property
        def buffer_page_sizes(self) -> tuple[int, ...]:
            sizes = super().buffer_page_sizes
            return sizes[:1] * len(sizes)

    monkeypatch.setattr(offload, "_page_views", lambda c, raw: views(FirstPage(c.num_blocks, c.groups), raw))
    llm = engine(build(), kv_offload_bytes=1 << 20, sanitize=False)
    assert tokens(llm) == expected
    llm.reset_prefix_cache()
    assert tokens(llm) != expected


def test_a_cache_that_takes_the_first_layers_page_for_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = KVCacheConfig.buffer_page_sizes.fget
    assert sizes is not None
    monkeypatch.setattr(KVCacheConfig, "buffer_page_sizes", property(lambda c: sizes(c)[:1] * len(sizes(c))))
    with pytest.raises(RuntimeError, match="out of bounds"):
        engine(MODELS["exact"][0]())
