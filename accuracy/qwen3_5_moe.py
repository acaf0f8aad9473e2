"""The second guard model as a trainable module: Qwen3.5's decoder and draft head, in plain torch.

It computes what transformers' ``Qwen3_5MoeForCausalLM`` computes (float32), and its parameters
carry the names of a published checkpoint, so ``state_dict()`` *is* the checkpoint.

Layer: ``x += mixer(norm(x))``, then ``x += experts(norm(x))``. The mixer is a gated delta net
(Yang et al., 2024, arXiv 2412.06464) or gated attention with RoPE of a quarter of the channels.
The experts are a softmax router's two best of four, renormalised, beside one that sees every token
behind a gate of its own. Norms of hidden states, queries and keys keep their weight as its
distance from 1.

MTP head, by the convention of vLLM's ``qwen3_5_mtp``: ``norm(layer(fc([norm(embedding), norm(h)])))``
with one attention layer and its own experts; ``h`` is the hidden state after the final norm.

Shapes: b batch, t tokens, d hidden, h value heads, K and V sizes of a key and a value.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accuracy.parts import SHARED_KEYS, DepthwiseConv, GuardModel, PathDropout, Projections, attend

BALANCE_WEIGHT = 0.01  # of the loss that keeps a router from leaving experts unused
LENGTH_EPS = 1e-6  # under the root of a squared length, as in flash-linear-attention


@dataclass(frozen=True)
class Qwen35MoeConfig:
    """Sizes of the model; ``to_hf`` gives the published config.json."""

    vocab_size: int
    layer_types: tuple[str, ...] = (
        "linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention",
    )  # fmt: skip
    hidden_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 3
    linear_num_value_heads: int = 6
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    num_experts: int = 4
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 48
    shared_expert_intermediate_size: int = 48
    rms_norm_eps: float = 1e-4  # a head's output is small where nothing was stored: 1e-6 magnifies rounding

    chunk = 32  # tokens that the scan takes at a time; no part of the checkpoint
    rope_theta = 10_000.0
    rope_share = 0.25

    def to_hf(self) -> dict[str, Any]:
        """The config.json of the checkpoint, for transformers and vLLM."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta, "partial_rotary_factor": self.rope_share}
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            **asdict(self),
            "layer_types": list(self.layer_types),
            "chunk_size": self.chunk,
            "num_hidden_layers": len(self.layer_types),
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rope_parameters": rope,
            "mamba_ssm_dtype": "float32",
            **SHARED_KEYS,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Qwen35MoeConfig:
        """The sizes in a config.json that ``to_hf`` wrote."""
        sizes = {k: v for k, v in config.items() if k in cls.__dataclass_fields__}
        return cls(**sizes | {"layer_types": tuple(config["layer_types"])})


class RMSNorm(nn.Module):
    """With the weight as its distance from 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), 1 + self.weight, self.eps)


def delta_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """The gated delta rule for a whole sequence, chunk by chunk (WY form).

    Computes per head ``S_t = exp(g_t) S_{t-1} + k_t u_t^T`` with
    ``u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)`` and ``y_t = S_t^T q_t``.

    Args:
        q, k: (b, t, h, K), of length 1 (q times K**-0.5); v: (b, t, h, V).
        log_decay: (b, t, h), at most 0; beta: (b, t, h).

    Returns:
        y (b, t, h, V).
    """
    batch, t, heads, _ = v.shape
    pad = -t % chunk
    count = (t + pad) // chunk

    def cut(x: Tensor) -> Tensor:
        """(b, t, h, n) to (count, b * h, chunk, n); a padded token has k = 0 and decay 1."""
        x = F.pad(x, (0, 0, 0, 0, 0, pad)) if pad else x
        return x.view(batch, count, chunk, heads, -1).permute(1, 0, 3, 2, 4).reshape(count, batch * heads, chunk, -1)

    q, k, v, beta = cut(q), cut(k), cut(v), cut(beta[..., None])
    total = cut(log_decay[..., None]).cumsum(2)  # (count, b * h, chunk, 1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = (total - total.mT).masked_fill(later, -1e9).exp()
    grown, end = total.exp(), total[:, :, -1:]
    # Inside a chunk: what token i adds, from the values alone and from the state before the chunk.
    system = k @ k.mT * (decay * beta)
    right = torch.cat([v * beta, k * (beta * grown)], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = q @ k.mT * decay
    # Across chunks: out = left @ S + scores @ u with u = own - read @ S, and S goes on to the next.
    inside = scores @ own
    left = q * grown - scores @ read
    kept = (k * (end - total).exp()).mT
    added, moved = kept @ own, kept @ read
    shrink = end.exp()
    state = q.new_zeros(batch * heads, k.shape[-1], v.shape[-1])
    starts = []
    for i in range(count):
        starts.append(state)
        if i + 1 < count:
            state = torch.baddbmm(torch.addcmul(added[i], state, shrink[i]), moved[i], state, alpha=-1)
    y = inside + left @ torch.stack(starts)
    return y.view(count, batch, heads, chunk, -1).permute(1, 0, 3, 2, 4).reshape(batch, count * chunk, heads, -1)[:, :t]


class DeltaNet(nn.Module):
    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__()
        self.config = config
        d, heads = config.hidden_size, config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = heads * config.linear_value_head_dim
        self.widths = [keys, keys, values]
        self.in_proj_qkv = nn.Linear(d, sum(self.widths), bias=False)
        self.in_proj_z = nn.Linear(d, values, bias=False)
        self.in_proj_b = nn.Linear(d, heads, bias=False)
        self.in_proj_a = nn.Linear(d, heads, bias=False)
        self.conv1d = DepthwiseConv(sum(self.widths), config.linear_conv_kernel_dim, bias=False)
        # Half-lives from about 7 to 700 tokens (A = 1, dt 0.1 to 0.001), one head in each equal part
        # of the logarithm: slow enough to carry the latch over five problems of 54 tokens.
        share = (torch.arange(heads) + torch.rand(heads)) / heads
        dt = torch.exp(math.log(1e-3) + share * math.log(100))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus inverse
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = nn.RMSNorm(config.linear_value_head_dim, config.rms_norm_eps)  # with a plain weight
        self.out_proj = nn.Linear(values, d, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], dropout: PathDropout | None) -> Tensor:
        cfg, (batch, t, _) = self.config, x.shape
        heads, key_dim = cfg.linear_num_value_heads, cfg.linear_key_head_dim
        parts = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        wide = F.linear(x, torch.cat([part.weight for part in parts]))
        mixed, gate, raw_beta, raw_dt = wide.split([part.out_features for part in parts], -1)
        mixed = F.silu(self.conv1d(mixed))
        q, k, v = mixed.split(self.widths, -1)
        q, k = (self._unit(part.reshape(batch, t, -1, key_dim)) for part in (q, k))
        shared = heads // cfg.linear_num_key_heads
        q, k = (part.repeat_interleave(shared, 2) for part in (q * key_dim**-0.5, k))
        v = v.reshape(batch, t, heads, -1)
        log_decay = -self.A_log.exp() * F.softplus(raw_dt + self.dt_bias)
        y = delta_scan(q, k, v, log_decay, raw_beta.sigmoid(), cfg.chunk)
        return self.out_proj(self.norm(y).flatten(2) * F.silu(gate))

    @staticmethod
    def _unit(x: Tensor) -> Tensor:
        return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()


class Attention(Projections):
    """Causal, grouped query heads, a gate of each query channel in front of the output."""

    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__(config, per_query=2)
        self.q_norm = RMSNorm(self.size, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], dropout: PathDropout | None) -> Tensor:
        both, k, v = self.project(x)
        q, gate = both.unflatten(2, (-1, 2)).unbind(3)
        q, k = self._rotated(self.q_norm(q), rotation), self._rotated(self.k_norm(k), rotation)
        y = attend(q, k, v, dropout)
        return self.o_proj(y * gate.flatten(2).sigmoid())

    @staticmethod
    def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = rotation
        half = cos.shape[-1]
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class _Expert(nn.Module):
    def __init__(self, d: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, size, bias=False)
        self.up_proj = nn.Linear(d, size, bias=False)
        self.down_proj = nn.Linear(size, d, bias=False)


class _Experts(nn.Module):
    def __init__(self, count: int, d: int, size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, d))
        self.down_proj = nn.Parameter(torch.empty(count, d, size))


class MixtureOfExperts(nn.Module):
    """All experts run on all tokens in one product; the weights of those not chosen are zero.

    ``balance``: of the last forward pass in training, about 1 where the router uses all experts alike and
    up to their number where not (Fedus et al., 2021, arXiv 2101.03961, equation 4).
    """

    balance: Tensor

    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__()
        d, self.count, self.chosen = config.hidden_size, config.num_experts, config.num_experts_per_tok
        self.gate = nn.Linear(d, self.count, bias=False)
        self.experts = _Experts(self.count, d, config.moe_intermediate_size)
        self.shared_expert = _Expert(d, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(d, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self._route(x)
        gate, up = self.experts.gate_up_proj.chunk(2, 1)
        shared, experts = self.shared_expert, self.count * gate.shape[1]
        all_gates = torch.cat([gate.flatten(0, 1), shared.gate_proj.weight])
        all_ups = torch.cat([up.flatten(0, 1), shared.up_proj.weight])
        wide = F.silu(F.linear(x, all_gates)) * F.linear(x, all_ups)
        own, common = wide.split([experts, wide.shape[-1] - experts], -1)
        own = own.unflatten(-1, (self.count, -1)) * weights[..., None]
        common = common * self.shared_expert_gate(x).sigmoid()
        down = self.experts.down_proj.transpose(0, 1).flatten(1)
        return F.linear(torch.cat([own.flatten(-2), common], -1), torch.cat([down, shared.down_proj.weight], 1))

    def _route(self, x: Tensor) -> Tensor:
        """(b, t, d) to the weight of every expert (b, t, experts)."""
        scores = self.gate(x).softmax(-1)
        best, ids = scores.topk(self.chosen, -1)
        weights = torch.zeros_like(scores).scatter(-1, ids, best / best.sum(-1, keepdim=True))
        if self.training:
            used = (weights.detach() > 0).float().mean((0, 1)) / self.chosen
            self.balance = self.count * (used * scores.mean((0, 1))).sum()
        return weights


class Layer(nn.Module):
    def __init__(self, config: Qwen35MoeConfig, kind: str) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d, eps), RMSNorm(d, eps)
        if kind == "linear_attention":
            self.linear_attn = DeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MixtureOfExperts(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], dropout: PathDropout | None = None) -> Tensor:
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        x = x + mixer(self.input_layernorm(x), rotation, dropout)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MTP(nn.Module):
    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(d, eps), RMSNorm(d, eps)
        self.fc = nn.Linear(2 * d, d, bias=False)
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = RMSNorm(d, eps)


class Qwen35Moe(GuardModel):
    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MTP(config)
        self.init_matrices()

    def _rotation(self, positions: range, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (t, 1, channels / 2)."""
        cfg = self.config
        size = int(cfg.head_dim * cfg.rope_share) // 2 * 2
        frequencies = cfg.rope_theta ** (-torch.arange(0, size, 2, device=like.device).float() / size)
        place = torch.arange(positions.start, positions.stop, device=like.device).float()
        angles = (place[:, None] * frequencies)[:, None]
        return angles.cos().to(like), angles.sin().to(like)

    def hidden(self, ids: Tensor, dropout: PathDropout | None = None) -> Tensor:
        x = self.model.embed_tokens(ids)
        rotation = self._rotation(range(ids.shape[1]), x)
        for layer in self.model.layers:
            x = layer(x, rotation, dropout)
        out: Tensor = self.model.norm(x)
        return out

    def draft_hidden(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        head, embedding = self.mtp, self.model.embed_tokens(next_ids)
        x = head.fc(torch.cat([head.pre_fc_norm_embedding(embedding), head.pre_fc_norm_hidden(hidden)], -1))
        out: Tensor = head.norm(head.layers[0](x, self._rotation(range(1, x.shape[1] + 1), x)))
        return out

    def auxiliary_loss(self) -> Tensor:
        mixtures = [part for part in self.model.modules() if isinstance(part, MixtureOfExperts)]
        return BALANCE_WEIGHT * torch.stack([mixture.balance for mixture in mixtures]).mean()
