"""A guard model: transformers' decoder, and the MTP head that transformers lacks.

The shipped config.json gives the sizes. An MTP head drafts the token after next: it joins the
decoder's output of token i (after the final norm) with the embedding of token i+1, runs attention
and an MLP on that, and the decoder's ``lm_head`` reads the result. For a further token it takes its
own output in the place of the decoder's.

Shapes: b batch, t tokens, d hidden.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeTextRotaryEmbedding,
    load_balancing_loss_func,
)

from hybrid_kv.check.guard_model import FOLDERS
from hybrid_kv.models.random_checkpoint import quiet

BALANCE_WEIGHT = 0.01  # of the loss that keeps a router from leaving experts unused
CONFIGS = ("config.json", "generation_config.json")


class NemotronHead(nn.Module):
    """A head by the convention of vLLM's ``nemotron_h_mtp``.

    It has two layers, which own the parts that join and the last norm.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, eps, blocks = config.hidden_size, config.layer_norm_epsilon, copy.deepcopy(config)
        blocks.layers_block_type = config.mtp_layers_block_type
        first, last = self.layers = nn.ModuleList(NemotronHBlock(blocks, i) for i in range(2))
        first.enorm, first.hnorm = NemotronHRMSNorm(d, eps), NemotronHRMSNorm(d, eps)
        first.eh_proj = nn.Linear(2 * d, d, bias=False)
        last.final_layernorm = NemotronHRMSNorm(d, eps)

    def join(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        first = self.layers[0]
        return first.eh_proj(torch.cat([first.enorm(embedding), first.hnorm(hidden)], -1))

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        first, last = self.layers
        return last.final_layernorm(last(first(self.join(hidden, embedding))))


class Qwen35Head(nn.Module):
    """A head by the convention of vLLM's ``qwen3_5_mtp``: attention, then its own experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            Qwen3_5MoeRMSNorm(d, eps),
            Qwen3_5MoeRMSNorm(d, eps),
        )
        self.fc = nn.Linear(2 * d, d, bias=False)
        self.layers = nn.ModuleList(
            [Qwen3_5MoeDecoderLayer(config, config.layer_types.index("full_attention"))]
        )
        self.norm = Qwen3_5MoeRMSNorm(d, eps)
        self.rotary = Qwen3_5MoeTextRotaryEmbedding(config)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        x = self.fc(
            torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        )
        positions = torch.arange(1, x.shape[1] + 1, device=x.device)[None]
        return self.norm(self.layers[0](x, self.rotary(x, positions)))


HEADS = {"nemotron_h": NemotronHead, "qwen3_5_moe_text": Qwen35Head}


class GuardModel(nn.Module):
    """A decoder of transformers and its MTP head ``mtp``."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder, self.config = decoder, decoder.config
        self.mtp = HEADS[self.config.model_type](self.config)

    @property
    def lm_head(self) -> nn.Linear:
        return self.decoder.lm_head

    def decode(self, ids: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return hidden states (b, t, d) after the final norm, and what training adds to its loss.

        Args:
            ids: (b, t).
            seen: (b, 1, t, t) bool, True where attention may read a key; all before a query if
                None.
        """
        mask = None if seen is None else {"full_attention": seen, "linear_attention": None}
        out = self.decoder.model(
            ids, attention_mask=mask, use_cache=False, output_router_logits=True
        )
        experts, chosen = getattr(self.config, "num_experts", 0), self.config.num_experts_per_tok
        balances = [
            load_balancing_loss_func((layer,), experts, chosen) / chosen
            for layer in out.router_logits or ()
        ]
        return out.last_hidden_state, BALANCE_WEIGHT * sum(balances, torch.zeros(())) / max(
            1, len(balances)
        )

    def draft_hidden(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """Return the hidden states (b, t, d) for token i+2 from one pass of the MTP head.

        It takes the hidden states (b, t, d) of token i and the ids of i+1 (b, t).
        """
        return self.mtp(hidden, self.decoder.get_input_embeddings()(next_ids))


@torch.no_grad()
def new_model(model_type: str) -> GuardModel:
    """Return one of ``FOLDERS`` with the random weights that training starts from."""
    config = AutoConfig.from_pretrained(FOLDERS[model_type])
    model = GuardModel(AutoModelForCausalLM.from_config(config, experts_implementation="eager"))
    for name, weight in model.named_parameters():
        scale = 1 / math.sqrt(weight.shape[-1])
        if name.endswith("dt_bias"):
            # With A = 1, half-lives from about 7 to 700 tokens, one head in each equal part of the
            # logarithm: slow enough to carry the latch over five problems of 54 tokens, fast enough
            # to count.
            share = (torch.arange(len(weight)) + torch.rand(len(weight))) / len(weight)
            dt = torch.exp(math.log(1e-3) + share * math.log(100))
            weight.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus inverse
        elif name.endswith(("A_log", "conv1d.bias", "lm_head.weight")):
            nn.init.zeros_(weight)
        elif name.endswith("conv1d.weight"):
            nn.init.normal_(weight, std=0.3)[..., -1] += 0.5  # near "pass the current token on"
        elif "embed" in name:
            nn.init.normal_(weight, std=0.5)
        elif weight.dim() > 1:  # a quiet residual at the start
            quiet_part = any(part in name for part in ("out_proj", "o_proj", "down_proj"))
            nn.init.normal_(weight, std=0.3 * scale if quiet_part else scale)
    return model


def save_checkpoint(model: GuardModel, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors, whose matrices are float16.

    The config's dtype is float32: that is what every engine then loads the weights as. Vectors stay
    float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in model.state_dict().items():
        published = name.removeprefix("decoder.")
        if model.config.model_type == "nemotron_h":
            published = published.replace("model.", "backbone.")
        tensors[published] = (
            value.detach()
            .to("cpu", torch.float16 if value.dim() > 1 else torch.float32)
            .contiguous()
        )
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    for name in CONFIGS:
        (folder / name).write_bytes((FOLDERS[model.config.model_type] / name).read_bytes())


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> GuardModel:
    """Return the model in ``folder``, with its MTP head."""
    with quiet():
        decoder = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager"
        )
    model, tensors = GuardModel(decoder), load_file(folder / "model.safetensors")
    head = {
        name.removeprefix("mtp."): value.to(dtype)
        for name, value in tensors.items()
        if name.startswith("mtp.")
    }
    model.mtp.load_state_dict(head, assign=True)  # RoPE's angles stay float32, as in the decoder
    return model.eval()
