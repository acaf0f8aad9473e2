"""NemotronH's draft head with a mixture of experts, as in Nemotron-3, against a dense one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.paged_head import check_head, dense_mask
from tests.models.parity import checkpoint

LATENT = {"moe_latent_size": 12, "mlp_bias": True}


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


class DenseHead:
    """transformers' attention and mixture in the places that the checkpoint's names give them."""

    def __init__(self, folder: Path) -> None:
        # Not above: every worker of a run imports every test, and these take seconds.
        from transformers import NemotronHConfig
        from transformers.models.nemotron_h.modeling_nemotron_h import (
            NemotronHAttention,
            NemotronHMoE,
        )

        config = NemotronHConfig.from_pretrained(folder, attn_implementation="eager")
        self.tensors = load_file(folder / "model.safetensors")
        self.attention, self.moe = NemotronHAttention(config, 0), NemotronHMoE(config)
        own = {
            name.removeprefix("mtp.layers."): t
            for name, t in self.tensors.items()
            if name.startswith("mtp.")
        }
        self.own = own
        self.attention.load_state_dict(
            {
                name.removeprefix("0.mixer."): t
                for name, t in own.items()
                if name.startswith("0.mixer.")
            }
        )
        moe = {
            name.removeprefix("1.mixer."): t
            for name, t in own.items()
            if name.startswith("1.mixer.")
        }
        for kind in ("up_proj", "down_proj"):
            experts = range(config.n_routed_experts)
            moe[f"experts.{kind}"] = torch.stack(
                [moe.pop(f"experts.{i}.{kind}.weight") for i in experts]
            )
        self.moe.load_state_dict(moe)

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, grid: int) -> torch.Tensor:
        """Hidden states of tokens 0 … t-1 and ids of tokens 1 … t to logits of tokens 2 … t+1."""
        own, embedding = self.own, self.tensors["backbone.embeddings.weight"][ids]
        joined = [norm(embedding, own["0.enorm.weight"]), norm(hidden, own["0.hnorm.weight"])]
        x = torch.cat(joined, -1) @ own["0.eh_proj.weight"].T
        mask = dense_mask(len(ids), grid)
        x = x + self.attention(norm(x, own["0.norm.weight"])[None], attention_mask=mask)[0][0]
        x = x + self.moe(norm(x, own["1.norm.weight"])[None])[0]
        return norm(x, own["1.final_layernorm.weight"]) @ self.tensors["lm_head.weight"].T


@pytest.mark.parametrize("keys", [{}, LATENT], ids=["plain", "latent"])
@pytest.mark.parametrize("grid", [4, 10**6])
def test_the_draft_head_equals_a_dense_one(
    tmp_path_factory: pytest.TempPathFactory, grid: int, keys: dict[str, Any]
) -> None:
    folder = checkpoint(tmp_path_factory, "nemotron_h", keys)[1]
    check_head(folder, DenseHead(folder), grid)
