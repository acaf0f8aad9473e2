"""A layer with two windows and two states, as no family has, runs through all the code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv import LLM
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, StatePart
from hybrid_kv.engine.record import record_logits
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import ForwardContext, Linear, empty
from hybrid_kv.models.mixers.conv import Projected, RecurrentMixer, Tensors
from hybrid_kv.sampling import SamplingParams

HIDDEN, VOCAB, TAPS = 8, 19, 3
NARROW, WIDE, KEYS = 4, 6, 2  # channels of the two windows, and what the second state is indexed by
F64 = torch.float64
PARTS = (
    StatePart("narrow", (TAPS - 1, NARROW), F64, "window"),
    StatePart("sums", (NARROW,), F64),
    StatePart("wide", (TAPS - 1, WIDE), F64, "window"),
    StatePart("outer", (WIDE, KEYS), F64),
)


class FourParts(RecurrentMixer):
    """A decayed sum of one window's channels, a decayed outer product of the other's with keys."""

    roles = tuple(part.role for part in PARTS)
    chunk_size = 1

    def __init__(self, name: str) -> None:
        super().__init__(name, NARROW + WIDE, TAPS, conv_bias=False)
        self.in_proj = Linear(HIDDEN, NARROW + WIDE + KEYS)
        self.decay = empty(2)
        self.out_proj = Linear(NARROW + WIDE, HIDDEN)

    def project(self, x: torch.Tensor) -> Projected:
        conv_in, keys = self.in_proj(x).split((NARROW + WIDE, KEYS), dim=-1)
        return Projected(conv_in, (keys,))

    def finish(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        return self.out_proj(mixed)

    def operands(self, conv_out: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        return conv_out, inputs[0]

    def update(
        self, sums: torch.Tensor, outer: torch.Tensor, conv_out: torch.Tensor, keys: torch.Tensor
    ) -> Tensors:
        narrow, wide = conv_out.split((NARROW, WIDE), dim=-1)
        outputs, after = [], []
        for u, v, key in zip(narrow.unbind(1), wide.unbind(1), keys.unbind(1), strict=True):
            sums = self.decay[0].sigmoid() * sums + u
            outer = self.decay[1].sigmoid() * outer + v[..., None] * key[:, None]
            outputs.append(torch.cat([sums, (outer * key[:, None]).sum(-1)], -1))
            after.append((sums, outer))
        return torch.stack(outputs, 1), *(torch.stack(part, 1) for part in zip(*after, strict=True))

    def scan(self, *operands: Any) -> Tensors:
        conv_out, keys, sums, outer, _, rows, offsets = operands
        y, *after = self.update(sums, outer, conv_out, keys)
        return y, *(part[rows, offsets - 1] for part in after)

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """Of one text: no cache, no chunk."""
        conv_in, (keys,), _ = self.project(x)
        seen = F.pad(conv_in, (0, 0, TAPS - 1, 0)).unfold(0, TAPS, 1)
        conv_out = F.silu((seen * self.conv_weight).sum(-1))
        zeros = x.new_zeros(1, NARROW), x.new_zeros(1, WIDE, KEYS)
        return self.finish(self.update(*zeros, conv_out[None], keys[None])[0][0], ())


class Attention(PagedAttention):
    """One head."""

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """Of one text."""
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        scores = (q @ k.T * HIDDEN**-0.5).masked_fill(
            torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf
        )
        return self.o_proj(scores.softmax(-1) @ v)


class FourPartsModel(nn.Module):
    """Attention between two layers with four parts."""

    vocab_size, mamba_chunk_size = VOCAB, 4

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        file = ConfigFile({"hidden_size": HIDDEN, "num_attention_heads": 1}, "config.json")
        attention = FullAttentionSpec(1, 1, HIDDEN, F64)
        self.mixers = nn.ModuleList(
            [FourParts("0"), Attention(file, "1", attention), FourParts("2")]
        )
        state = MambaSpec(1, PARTS)
        self.layer_specs: dict[str, KVCacheSpec] = {"0": state, "1": attention, "2": state}
        self.double()
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            weight.requires_grad_(requires_grad=False).copy_(
                torch.randn(weight.shape, generator=generator) * 0.4
            )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        x: torch.Tensor = self.embed(input_ids)
        for mixer in self.mixers:
            x = x + mixer(x, context)
        return x

    def alone(self, token_ids: list[int]) -> torch.Tensor:
        """Logits of every token."""
        x = self.embed(torch.tensor(token_ids))
        for mixer in self.mixers:
            x = x + mixer.alone(x)
        return self.compute_logits(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embed.weight.T

    def flush(self, steps: dict[str, Any], context: ForwardContext) -> None:
        raise AssertionError("its states are in blocks")


def prompts() -> list[list[int]]:
    """Two with a long common prefix, which is sent again at the end, and others between them."""
    generator = torch.Generator().manual_seed(1)
    shared, *others = (
        torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (33, 30, 41, 37)
    )
    return [shared, [*shared[:24], 3, 3, 3], *others, shared]


NGRAM = {"speculative_method": "ngram", "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"mamba_cache_mode": "all", "max_num_batched_tokens": 13},
        {"mamba_cache_mode": "align", "num_blocks": 44, "kv_offload_bytes": 1 << 20},
        {"mamba_cache_mode": "all", "num_speculative_tokens": 2, **NGRAM},
        {"mamba_cache_mode": "align", "num_speculative_tokens": 3, **NGRAM},
    ],
    ids=["chunks", "offload", "drafts", "drafts in align"],
)
def test_logits_are_those_alone(options: dict[str, Any]) -> None:
    model = FourPartsModel()
    llm = LLM(
        model,
        device="cpu",
        block_size=4,
        max_model_len=64,
        max_num_seqs=2,
        sanitize=True,
        **{
            "num_blocks": 400,
            "max_num_batched_tokens": 64,
            "attention_backend": "TORCH",
            **options,
        },
    )

    def preempt(llm: LLM) -> None:
        if llm.num_steps % 7 == 6 and llm.scheduler.running:
            llm.scheduler.preempt(llm.scheduler.running[-1])

    found = list(record_logits(llm, prompts(), SamplingParams(max_tokens=12), preempt))
    for output, logits in found:
        expected = model.alone([*output.prompt_token_ids, *output.token_ids[:-1]])[-len(logits) :]
        assert float((logits - expected).abs().max()) < 1e-9
    outputs = [output for output, _ in found]
    assert sum(output.num_preemptions for output in outputs)
    assert outputs[-1].cached_tokens >= 24
    if "kv_offload_bytes" in options:
        assert llm.manager.offload is not None
        assert llm.manager.offload.stats.loaded_blocks
    if "speculative_method" in options:
        assert sum(output.num_accepted_draft_tokens for output in outputs)
        assert any(output.num_accepted_draft_tokens < output.num_draft_tokens for output in outputs)
