"""The draft head of Qwen3-Next and Qwen3.5 on a paged cache against a dense one."""

from itertools import pairwise

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from hybrid_kv.config import EngineConfig
from hybrid_kv.models.loader import load_head, load_model
from tests.models.paged_head import CPU, Paged, pairs
from tests.models.parity import TOLERANCE

NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


class DenseHead:
    """transformers' attention layer in the place that vLLM 0.32 (`qwen3_next_mtp.py`, `qwen3_5_mtp.py`) gives it.

    Args:
        modeling: transformers' module, `family` what its classes begin with.
    """

    def __init__(self, folder, modeling, family):
        config = AutoConfig.from_pretrained(folder)
        config.layer_types[0], config._attn_implementation = "full_attention", "eager"
        tensors = load_file(folder / "model.safetensors")
        own = {name.removeprefix("mtp."): t for name, t in tensors.items() if name.startswith("mtp.")}
        self.embedding, self.head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        self.fc = own.pop("fc.weight")
        self.norms = [getattr(modeling, f"{family}RMSNorm")(config.hidden_size, config.rms_norm_eps) for _ in NAMES]
        for norm, name in zip(self.norms, NAMES, strict=True):
            norm.load_state_dict({"weight": own.pop(f"{name}.weight")})
        rotary = "RotaryEmbedding" if family == "Qwen3Next" else "TextRotaryEmbedding"
        self.rotary = getattr(modeling, family + rotary)(config)
        self.layer = getattr(modeling, f"{family}DecoderLayer")(config, 0).eval()
        layer = {name.removeprefix("layers.0."): tensor for name, tensor in own.items()}
        if "mlp.gate.weight" in layer:
            each = {
                part: torch.stack([layer.pop(f"mlp.experts.{i}.{part}_proj.weight") for i in range(config.num_experts)])
                for part in ("gate", "up", "down")
            }
            layer["mlp.experts.gate_up_proj"] = torch.cat([each["gate"], each["up"]], 1)
            layer["mlp.experts.down_proj"] = each["down"]
        self.layer.load_state_dict(layer)

    @torch.no_grad()
    def __call__(self, hidden, ids, grid):
        """Hidden states of tokens 0 … t-1 and ids of tokens 1 … t to logits of tokens 2 … t+1.

        Positions are vLLM's, those of the hidden states: one less than ours, which RoPE does not feel.
        """
        x = torch.cat([self.norms[0](self.embedding[ids]), self.norms[1](hidden)], -1) @ self.fc.T
        token = torch.arange(len(ids))
        hides = (token[:, None] < token) | ((token + 1) % grid == 0)
        mask = torch.zeros(hides.shape).masked_fill(hides, torch.finfo(torch.float32).min)
        rotation = self.rotary(x[None], token[None])
        y = self.layer(x[None], position_embeddings=rotation, attention_mask=mask[None, None])[0]
        return self.norms[2](y) @ self.head.T


def check_head(folder, modeling, family, grid):
    """In chunks and token by token; `Paged` fills what no pair has written with NaN."""
    target = load_model(folder, EngineConfig(dtype="float32"), CPU)
    head = load_head(folder, target)
    head.grid = grid
    g = torch.Generator().manual_seed(2)
    size = target.embed_tokens.embedding_dim
    request = torch.randint(0, target.vocab_size, (21,), generator=g), torch.randn(21, size, generator=g)
    expected = DenseHead(folder, modeling, family)(request[1][:-1], request[0][1:], grid)
    paged = Paged(head, 1, dtype=torch.float32)
    cuts = pairwise((0, 1, 7, 8, 9, 20, 21))
    outputs = [paged.step([(0, start, *pairs(request, start, stop))])[0] for start, stop in cuts]
    logits = head.compute_logits(torch.cat(outputs)[1:])
    assert float((logits - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())
