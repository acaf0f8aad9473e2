"""Tiny random NemotronH checkpoints, written by transformers."""

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

VOCAB = 101
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


class Characters:
    """One character per token: enough of a tokenizer for engine tests."""

    eos_token_id = None

    def __init__(self, eos_token_id=None):
        self.eos_token_id = eos_token_id

    def encode(self, text):
        return [ord(letter) - 33 for letter in text]

    def decode(self, token_ids):
        return "".join(chr(token + 33) for token in token_ids)


def randomise(model, seed):
    """Weights with healthy margins between the best two tokens; the library's own start gives nearly flat logits."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if "A_log" in name:
            value = (torch.rand(p.shape, generator=g) * 3.5 + 0.5).log()
        elif "dt_bias" in name:
            value = torch.rand(p.shape, generator=g) * 2 - 2
        elif name.endswith(".D") or ("norm" in name and p.dim() == 1):
            value = 1 + 0.1 * noise
        elif "conv1d" in name:
            value = 0.5 * noise
        elif "embeddings" in name:
            value = noise
        elif p.dim() == 2:
            value = noise * 1.2 / p.shape[1] ** 0.5
        else:
            value = 0.1 * noise
        p.data.copy_(value)


def build(pattern="M-M*", seed=1, **overrides):
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers_block_type": [KINDS[letter] for letter in pattern],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "use_conv_bias": True,
        "time_step_min": 1e-9,  # the library clamps dt from below in a chunk only; see the model's docstring
        "tie_word_embeddings": False,
        **overrides,
    }
    model = NemotronHForCausalLM(NemotronHConfig(**values)).eval()
    randomise(model, seed)
    return model
