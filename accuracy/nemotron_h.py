"""The first guard model as a trainable module: NemotronH blocks and an MTP head, in plain torch.

It computes what transformers' ``NemotronHForCausalLM`` computes (float32), and its parameters
carry the names of a published NemotronH checkpoint, so ``state_dict()`` *is* the checkpoint.

Layer: ``x = x + mixer(rmsnorm(x))`` with one mixer per layer: Mamba-2 (``M``), attention (``*``,
causal, grouped query heads, no position encoding of any kind) or squared-ReLU MLP (``-``). The
head is untied and reads ``norm_f`` of the last layer.

MTP head, by the convention of vLLM's ``nemotron_h_mtp``. To draft the token after next at
position i (token i+1 is known):

* input: ``h_i`` is the model's output hidden state AFTER ``norm_f`` (what ``lm_head`` reads), and
  ``e = embeddings(token i+1)``, of the shared embedding;
* ``u = eh_proj(concat[enorm(e), hnorm(h_i)])``: the embedding comes first;
* ``u = u + attention(norm_0(u))`` with keys and values of its own (``mtp.layers.0``);
* ``u = u + mlp(norm_1(u))`` (``mtp.layers.1``), then ``final_layernorm``;
* logits = the shared ``lm_head`` of that. For a further token the same layers run again, with the
  ``final_layernorm`` output in the place of ``h`` and the drafted token in the place of i+1.

Shapes: b batch, t tokens, d hidden, h heads, p head size, n state size.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accuracy.parts import SHARED_KEYS, DepthwiseConv, GuardModel, PathDropout, Projections, attend

LAYER_NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


@dataclass(frozen=True)
class NemotronHConfig:
    """Sizes of the model; ``to_hf`` gives the published config.json."""

    vocab_size: int
    pattern: str = "M-M*-M*-"
    hidden_size: int = 128
    intermediate_size: int = 384
    mamba_num_heads: int = 8
    mamba_head_dim: int = 32
    ssm_state_size: int = 32
    conv_kernel: int = 4
    chunk_size: int = 32
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    layer_norm_epsilon: float = 1e-5

    @property
    def mamba_size(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    def to_hf(self) -> dict[str, Any]:
        """The config.json of the checkpoint, for transformers and vLLM."""
        sizes = asdict(self)
        sizes.pop("pattern")
        return {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            **sizes,
            "layers_block_type": [LAYER_NAMES[c] for c in self.pattern],
            "num_hidden_layers": len(self.pattern),
            "num_nextn_predict_layers": 1,
            "mtp_layers_block_type": ["full_attention", "mlp"],
            "n_groups": 1,
            "expand": self.mamba_size // self.hidden_size,
            "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2",
            "use_conv_bias": True,
            "use_bias": False,
            "mlp_bias": False,
            "mamba_proj_bias": False,
            "mamba_ssm_cache_dtype": "float32",
            # transformers clamps dt from below by this in its chunked form but not in its
            # one-token form; a bound below every dt keeps the two equal.
            "time_step_min": 1e-30,
            "time_step_max": 0.1,
            "residual_in_fp32": False,
            **SHARED_KEYS,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "NemotronHConfig":
        """The sizes in a config.json that ``to_hf`` wrote."""
        letters = {name: letter for letter, name in LAYER_NAMES.items()}
        sizes = {k: v for k, v in config.items() if k in cls.__dataclass_fields__}
        pattern = "".join(letters[name] for name in config["layers_block_type"])
        return cls(pattern=pattern, **sizes)


def ssd_scan(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Mamba-2's recurrence for a whole sequence, chunk by chunk.

    Computes ``S_t = exp(log_decay_t) S_{t-1} + x_t b_t^T`` and ``y_t = S_t c_t`` per head.

    Args:
        x: (b, t, h, p), already multiplied by dt.
        log_decay: (b, t, h), dt * A, at most 0.
        b, c: (b, t, n), shared by all heads.

    Returns:
        y (b, t, h, p).
    """
    batch, t, heads, size = x.shape
    n = b.shape[-1]
    pad = -t % chunk
    if pad:  # a padded step has x = 0 and decay 1: it leaves the state alone
        x, log_decay = F.pad(x, (0, 0, 0, 0, 0, pad)), F.pad(log_decay, (0, 0, 0, pad))
        b, c = F.pad(b, (0, 0, 0, pad)), F.pad(c, (0, 0, 0, pad))
    count = x.shape[1] // chunk
    x = x.reshape(batch, count, chunk, heads, size)
    b, c = b.reshape(batch, count, chunk, n), c.reshape(batch, count, chunk, n)
    total = log_decay.reshape(batch, count, chunk, heads).cumsum(2)
    # Inside a chunk: score[l, s] = (c_l . b_s) * decay from s to l, for s <= l.
    by_head = total.transpose(2, 3)  # (b, count, h, chunk)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    decay = (by_head[..., :, None] - by_head[..., None, :]).masked_fill(later, -1e9).exp()
    scores = (c @ b.transpose(2, 3))[:, :, None] * decay  # (b, count, h, chunk, chunk)
    inside = (scores @ x.transpose(2, 3)).transpose(2, 3)
    # Across chunks: what each adds to the state, kept as (b, n, h * p) for wide products.
    end = total[:, :, -1:]
    kept = (x * (end - total).exp()[..., None]).reshape(batch, count, chunk, heads * size)
    added = b.transpose(2, 3) @ kept  # (b, count, n, h * p)
    chunk_decay = end.exp().repeat_interleave(size, -1)  # (b, count, 1, h * p)
    running = x.new_zeros(batch, n, heads * size)
    starts = []
    for i in range(count):
        starts.append(running)
        running = torch.addcmul(added[:, i], running, chunk_decay[:, i])
    carried = (c @ torch.stack(starts, 1)).reshape(batch, count, chunk, heads, size)
    y = inside + carried * total.exp()[..., None]
    return y.reshape(batch, count * chunk, heads, size)[:, :t]


class Mamba2(nn.Module):
    """Mamba-2 mixer with gated RMSNorm, one group."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.config = config
        d, inner, heads = config.hidden_size, config.mamba_size, config.mamba_num_heads
        channels = inner + 2 * config.ssm_state_size
        self.in_proj = nn.Linear(d, inner + channels + heads, bias=False)
        self.conv1d = DepthwiseConv(channels, config.conv_kernel, bias=True)
        # Half-lives log-uniform between about 7 and 700 tokens (A = 1, dt 0.1 to 0.001): slow
        # enough to carry the latch over five problems of 54 tokens, fast enough to count.
        dt = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus inverse
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(inner, config.layer_norm_epsilon)
        self.out_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x: Tensor, dropout: PathDropout | None = None) -> Tensor:
        cfg = self.config
        batch, t, _ = x.shape
        inner, n, heads = cfg.mamba_size, cfg.ssm_state_size, cfg.mamba_num_heads
        gate, mixed, dt = self.in_proj(x).split([inner, inner + 2 * n, heads], -1)
        mixed = F.silu(self.conv1d(mixed))
        values, b, c = mixed.split([inner, n, n], -1)
        values = values.reshape(batch, t, heads, cfg.mamba_head_dim)
        dt = F.softplus(dt + self.dt_bias)
        y = ssd_scan(values * dt[..., None], -dt * self.A_log.exp(), b, c, cfg.chunk_size)
        y = (y + values * self.D[:, None]).reshape(batch, t, inner)
        return self.out_proj(self.norm(y * F.silu(gate)))


class Attention(Projections):
    """Causal grouped-query attention without position encoding."""

    def forward(self, x: Tensor, dropout: PathDropout | None = None) -> Tensor:
        return self.o_proj(attend(*self.project(x), dropout))


class MLP(nn.Module):
    """Squared-ReLU MLP."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, dropout: PathDropout | None = None) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


MIXERS = {"M": Mamba2, "*": Attention, "-": MLP}


class Block(nn.Module):
    def __init__(self, config: NemotronHConfig, letter: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MIXERS[letter](config)

    def forward(self, x: Tensor, dropout: PathDropout | None = None) -> Tensor:
        return x + self.mixer(self.norm(x), dropout)


class Backbone(nn.Module):
    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, letter) for letter in config.pattern)
        self.norm_f = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, ids: Tensor, dropout: PathDropout | None = None) -> Tensor:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x, dropout)
        return self.norm_f(x)


class MTP(nn.Module):
    """The first layer's parts join embedding and hidden state, the last one's norm is in front of the shared head."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.layer_norm_epsilon
        first = Block(config, "*")
        first.enorm, first.hnorm = nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)
        first.eh_proj = nn.Linear(2 * d, d, bias=False)
        last = Block(config, "-")
        last.final_layernorm = nn.RMSNorm(d, eps)
        self.layers = nn.ModuleList([first, last])

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """hidden (b, t, d) at i and embedding (b, t, d) of i+1 -> hidden (b, t, d) for i+2."""
        first, last = self.layers
        return last.final_layernorm(last(first(self.join(hidden, embedding))))

    def join(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        first = self.layers[0]
        return first.eh_proj(torch.cat([first.enorm(embedding), first.hnorm(hidden)], -1))


class NemotronH(GuardModel):
    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MTP(config)
        self.init_matrices()

    def hidden(self, ids: Tensor, dropout: PathDropout | None = None) -> Tensor:
        return self.backbone(ids, dropout)

    def draft_hidden(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        return self.mtp(hidden, self.backbone.embeddings(next_ids))
