"""The draft head of Qwen3-Next and Qwen3.5 without a cache."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.models.paged_head import dense_mask

NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


class DenseHead:
    """transformers' attention layer where vLLM 0.32 has it (`qwen3_next_mtp.py`, `qwen3_5_mtp.py`).

    Args:
        modeling: transformers' module, `family` what its classes begin with.
    """

    def __init__(self, folder: Path, modeling: ModuleType, family: str) -> None:
        config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
        config.layer_types[0] = "full_attention"
        tensors = load_file(folder / "model.safetensors")
        own = {
            name.removeprefix("mtp."): t for name, t in tensors.items() if name.startswith("mtp.")
        }
        self.embedding, self.head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        self.fc = own.pop("fc.weight")
        self.norms = [
            getattr(modeling, f"{family}RMSNorm")(config.hidden_size, config.rms_norm_eps)
            for _ in NAMES
        ]
        for norm, name in zip(self.norms, NAMES, strict=True):
            norm.load_state_dict({"weight": own.pop(f"{name}.weight")})
        rotary = "RotaryEmbedding" if family == "Qwen3Next" else "TextRotaryEmbedding"
        self.rotary = getattr(modeling, family + rotary)(config)
        self.layer = getattr(modeling, f"{family}DecoderLayer")(config, 0).eval()
        layer = {name.removeprefix("layers.0."): tensor for name, tensor in own.items()}
        if "mlp.gate.weight" in layer:
            each = {
                part: torch.stack(
                    [
                        layer.pop(f"mlp.experts.{i}.{part}_proj.weight")
                        for i in range(config.num_experts)
                    ]
                )
                for part in ("gate", "up", "down")
            }
            layer["mlp.experts.gate_up_proj"] = torch.cat([each["gate"], each["up"]], 1)
            layer["mlp.experts.down_proj"] = each["down"]
        self.layer.load_state_dict(layer)

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, grid: int) -> torch.Tensor:
        """Hidden states of tokens 0 … t-1 and ids of tokens 1 … t to logits of tokens 2 … t+1.

        Positions are vLLM's, those of the hidden states: one less than ours, which RoPE does not
        feel.
        """
        x = torch.cat([self.norms[0](self.embedding[ids]), self.norms[1](hidden)], -1) @ self.fc.T
        rotation = self.rotary(x[None], torch.arange(len(ids))[None])
        y = self.layer(
            x[None], position_embeddings=rotation, attention_mask=dense_mask(len(ids), grid)
        )[0]
        return self.norms[2](y) @ self.head.T
