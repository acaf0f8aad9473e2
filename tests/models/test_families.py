"""Every family with random weights against transformers: variants, engines, refusals.

With `rms_norm_eps` as published, 1e-6, transformers is up to 3e-5 of max|logit| off its own
equations in float64: heads of random queries and keys give small outputs, whose norm magnifies
rounding. Where that counts it is 1e-4 here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hybrid_kv.models.registry import sized
from tests.models.parity import check_parity, check_refused, checkpoint, compare, load

Tiny = Callable[[str], tuple[torch.nn.Module, Path]]

LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "partial_rotary_factor": 0.5},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True)

# The keys that replace some of the tiny size's, by variant. Every family has the tiny size itself
# as well.
VARIANTS = {
    "bailing_hybrid": {
        "unbounded": {
            **{"kda_safe_gate": False, "attention_bias": True, "q_lora_rank": 18},
            **{"n_shared_experts": 2, "norm_topk_prob": False},
        },
        "near_bound": {
            **{"kda_lower_bound": -0.5, "mlp_layer_types": ["dense"] * 6},
            **{"short_conv_kernel_size": 2, "rope_parameters": {**YARN, "rope_theta": 500.0}},
        },
    },
    "bamba": {
        "biased_and_tied": {
            **{
                "attention_bias": True,
                "mlp_bias": True,
                "mamba_proj_bias": True,
                "mamba_conv_bias": False,
            },
            **{"tie_word_embeddings": True, "rope_parameters": LLAMA3, "mamba_n_groups": 2},
        },
        "one_group_no_kv_groups": {
            **{
                "mamba_n_groups": 1,
                "num_key_value_heads": 4,
                "mamba_d_conv": 3,
                "attn_layer_indices": [0],
            },
            **{
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 900.0,
                    "partial_rotary_factor": 1.0,
                }
            },
        },
    },
    "dory": {
        "three_passes": {
            **{"n_recurrent_loops": 3, "attention_bias": True, "mlp_bias": True},
            **{"tie_word_embeddings": True, "num_key_value_heads": 4, "sliding_window": 1},
        },
        "one_pass": {
            **{"n_recurrent_loops": 1, "n_input_layers": 2, "num_key_value_heads": 1},
            "rope_parameters": {
                "sliding_attention": {**YARN, "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 77.0},
            },
        },
    },
    "falcon_h1": {
        "gate_before_norm": {
            **{"mamba_norm_before_gate": False, "mamba_n_groups": 4},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e11}},
        },
        "no_norm_biased": {"mamba_rms_norm": False, "mamba_n_groups": 1, **BIASES},
        "expanded_tied": {
            **{
                "mamba_d_ssm": None,
                "mamba_expand": 2,
                "tie_word_embeddings": True,
                "projectors_bias": True,
            },
            **{
                "num_key_value_heads": 4,
                "mamba_conv_bias": False,
                "mamba_d_conv": 3,
                "mlp_multipliers": None,
            },
        },
    },
    "falcon_mamba": {
        "untied": {
            "tie_word_embeddings": False,
            "use_bias": True,
            "use_conv_bias": False,
            "mixer_rms_eps": 1e-2,
        },
        # The RMS norm of B and C over one number is its sign: near 0 rounding would decide.
        "short_window": {
            **{"conv_kernel": 2, "expand": 3, "time_step_rank": "auto", "state_size": 1},
            "mixer_rms_eps": 1e-2,
        },
    },
    "granite_swa": {
        "one_base": {
            **{
                "layer_rope_theta": None,
                "rope_parameters": {**YARN, "rope_theta": 1e4},
                "attention_bias": True,
                "mlp_bias": True,
            },
            **{"tie_word_embeddings": False, "num_key_value_heads": 6, "sliding_window": 1},
        },
        "scaled": {
            **{"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 77.0}},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
            **{"layer_rope_theta": [1e4, 0, 500, 1e6], "num_key_value_heads": 1},
        },
    },
    "granitemoe_swa": {
        "no_shared_expert": {
            **{"shared_intermediate_size": 0, "tie_word_embeddings": True},
            **{"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 40},
        },
    },
    "granitemoehybrid": {
        "dense_rotated": {
            **{
                "num_local_experts": 0,
                "position_embedding_type": "rope",
                "attention_bias": True,
                "mamba_n_groups": 2,
            }
        },
        "tied_one_group": {
            **{
                "tie_word_embeddings": True,
                "mamba_n_groups": 1,
                "mamba_conv_bias": False,
                "mamba_proj_bias": True,
            },
            **{"num_key_value_heads": 1, "embedding_multiplier": 1.0, "logits_scaling": 16.0},
        },
        "all_experts": {
            **{
                "num_local_experts": 3,
                "num_experts_per_tok": 3,
                "mamba_d_conv": 2,
                "attention_multiplier": 1.0,
            }
        },
    },
    "inkling_text": {
        "dense": {
            **{"log_scaling_n_floor": None, "mlp_layer_types": ["dense"] * 4, "rel_extent": 200},
            **{"conv_kernel_size": 2, "num_key_value_heads": 4, "logits_mup_width_multiplier": 2.0},
        },
        "window_of_one": {
            **{"sliding_window_size": 1, "n_shared_experts": 1, "d_rel": 1, "swa_head_dim": 16},
            **{"layer_types": None, "local_layer_ids": [1, 3], "num_experts_per_tok": 6},
        },
    },
    "jamba": {
        "dense": {
            "num_experts": 1,
            "tie_word_embeddings": True,
            "attn_layer_offset": 2,
            "num_key_value_heads": 1,
        },
        "many_experts": {
            **{
                "expert_layer_period": 1,
                "expert_layer_offset": 0,
                "num_experts_per_tok": 3,
                "mamba_expand": 3,
            }
        },
        "biased": {
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 2,
            "mamba_dt_rank": "auto",
        },
    },
    "kimi_linear": {
        "dense": {"mlp_layer_types": ["dense"] * 5, "linear_conv_kernel_dim": 2},
        "latent_queries": {
            "q_lora_rank": 18,
            "attention_bias": True,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
        "one_group": {
            **{
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 1,
                "first_k_dense_replace": 0,
                "chunk_size": 5,
            }
        },
    },
    "lara_mini": {
        "window_of_one": {
            **{"sliding_window": 1, "attention_bias": True, "tie_word_embeddings": False},
            **{"norm_topk_prob": False, "linear_num_value_heads": 2, "num_key_value_heads": 4},
        },
        "window_of_all": {
            **{"sliding_window": 200, "linear_conv_kernel_dim": 2, "num_experts_per_tok": 3},
            **{"layer_types": ["sliding_attention", "linear_attention"], "num_hidden_layers": 2},
            **{"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
        },
    },
    "lfm2": {
        "untied_bias": {
            **{"tie_word_embeddings": False, "conv_bias": True},
            **{"block_ffn_dim_multiplier": 1.5, "num_key_value_heads": 1},
        },
        "yarn": {
            **{"block_auto_adjust_ff_dim": False, "conv_L_cache": 2},
            **{"rope_parameters": {**YARN, "rope_theta": 1e4}},
        },
    },
    "lfm2_moe": {
        "no_bias": {
            **{"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
            **{"num_dense_layers": 0, "num_experts_per_tok": 1},
        },
    },
    "lfm3": {
        "plain": {
            **{"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True},
            **{"conv_L_cache": 2, "tie_word_embeddings": False, "attention_bias": True},
        },
        "ropes": {
            **{"sliding_window": 17, "num_key_value_heads": 4},
            "rope_parameters": {
                "sliding_attention": {**YARN, "rope_theta": 500.0},
                "full_attention": {
                    **{"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
                    "rope_theta": 900.0,
                },
            },
        },
    },
    "mamba2": {
        "tied_biased": {
            "tie_word_embeddings": True,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
        },
        "short_window": {
            "conv_kernel": 2,
            "num_heads": 4,
            "head_dim": 20,
            "chunk_size": 5,
            "n_groups": 4,
        },
    },
    "nemotron_h": {
        "dense": {
            "layers_block_type": [
                "linear_attention",
                "mlp",
                "linear_attention",
                "full_attention",
                "mlp",
            ],
            **{"n_groups": 1, "num_key_value_heads": 1, "num_nextn_predict_layers": 0},
        },
        "groups": {
            "layers_block_type": [
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
            **{
                "n_groups": 4,
                "use_conv_bias": False,
                "head_dim": 24,
                "num_nextn_predict_layers": 0,
            },
        },
        "odd": {
            "layers_block_type": ["full_attention", "linear_attention"],
            **{
                "conv_kernel": 3,
                "chunk_size": 5,
                "num_key_value_heads": 4,
                "num_nextn_predict_layers": 0,
            },
        },
        "latent_biased": {
            **{
                "moe_latent_size": 12,
                "mlp_bias": True,
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": False,
            }
        },
        "one_group": {
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 0.5,
        },
        "more_experts_than_tokens": {
            **{"n_routed_experts": 48, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 5}
        },
    },
    "olmo_hybrid": {
        "rope": {
            **{
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                "tie_word_embeddings": True,
            },
            **{"num_key_value_heads": 4, "linear_conv_kernel_dim": 3, "linear_num_value_heads": 2},
        },
        "positive": {
            **{
                "linear_allow_neg_eigval": False,
                "attention_bias": True,
                "rms_norm_eps": 1e-3,
                "chunk_size": 5,
            }
        },
    },
    "qwen3_5_moe_text": {
        "tied": {
            **{
                "tie_word_embeddings": True,
                "num_experts": 9,
                "num_experts_per_tok": 3,
                "linear_num_value_heads": 2,
            },
            # the latter of Qwen3-Next; without effect here
            **{"num_attention_heads": 6, "norm_topk_prob": False},
        },
    },
    "qwen3_5_text": {
        "tied": {
            **{"tie_word_embeddings": True, "attention_bias": True},
            **{"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
        },
        "wide": {
            **{
                "head_dim": 24,
                "num_key_value_heads": 4,
                "linear_num_value_heads": 8,
                "linear_key_head_dim": 9,
            },
            **{
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            **{"chunk_size": 5},
        },
        "attention_first": {
            **{
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                "num_hidden_layers": 3,
            },
            **{"num_attention_heads": 6, "head_dim": 8, "rms_norm_eps": 1e-6},
            **{"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
        },
    },
    "qwen3_next": {
        "all_sparse_but_one": {
            **{
                "decoder_sparse_step": 1,
                "mlp_only_layers": [1],
                "norm_topk_prob": False,
                "attention_bias": True,
            }
        },
        "yarn": {
            **{
                "decoder_sparse_step": 1,
                "num_experts": 5,
                "num_experts_per_tok": 4,
                "linear_num_value_heads": 4,
            },
            **{
                "linear_num_key_heads": 4,
                "linear_conv_kernel_dim": 2,
                "head_dim": 24,
                "tie_word_embeddings": True,
            },
            **{"rope_parameters": {**YARN, "rope_theta": 1000.0, "partial_rotary_factor": 0.5}},
            **{"max_position_embeddings": 64},
        },
        "dense": {"num_experts": 0},
    },
    "zamba2": {
        "one_block_plain_attention": {
            **{
                "num_mem_blocks": 1,
                "use_shared_attention_adapter": False,
                "num_key_value_heads": 2,
            },
            **{"use_mem_rope": False},
        },
        "biased": {
            "add_bias_linear": True,
            "mamba_ngroups": 1,
            "mamba_d_conv": 3,
            "num_mem_blocks": 3,
        },
    },
}
OLD = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason=(
        "transformers before 5.23 norms all groups of this family as one; vLLM and the "
        "engine norm each"
    ),
)
WITH_GROUPS = {"bamba-biased_and_tied", "granitemoehybrid-dense_rotated", "mamba2-short_window"}
CASES = [
    pytest.param(
        name,
        keys,
        id=f"{name}-{variant}",
        marks=[OLD] if f"{name}-{variant}" in WITH_GROUPS else [],
    )
    for name in sorted(sized())
    for variant, keys in {"tiny": {}, **VARIANTS.get(name, {})}.items()
]

# A changed config.json, and what the engine says of it in one line.
REFUSED = {
    "bailing_hybrid": [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"kda_lower_bound": 0}, "kda_lower_bound=0 must be a number below 0"),
        ({"kda_lower_bound": "-5"}, "kda_lower_bound='-5' must be a number below 0"),
        ({"kda_safe_gate": 1}, "kda_safe_gate=1 must be true or false"),
        ({"layer_types": None, "layer_group_size": 4}, "not a multiple of layer_group_size=4"),
        ({"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 can't be run, 4 can"),
    ],
    "bamba": [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' can't be run, 'silu' can"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit=\[0.001, 0.1\] can't be run"),
        ({"attn_rotary_emb": 12}, "attn_rotary_emb=12, but 6 channels are rotated"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type='dynamic' is not supported",
        ),
    ],
    "dory": [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        (
            {"recurrent_kv_cache_mode": "last_loop"},
            "recurrent_kv_cache_mode='last_loop' can't be run, 'per_loop' can",
        ),
        ({"n_input_layers": 4}, "n_input_layers=4, n_recurrent_layers=6 and n_output_layers=2"),
        ({"n_recurrent_layers": None, "n_input_layers": 3}, "are not the 10 layers"),
        ({"n_recurrent_layers": None, "n_input_layers": 10}, "are not the 10 layers"),
        ({"n_recurrent_loops": 0}, "n_recurrent_loops=0 must be an integer >= 1"),
        ({"layer_types": ["mlp", "full_attention"] * 5}, "an mlp after each attention layer"),
        ({"rope_parameters": [3]}, r"rope_parameters=\[3\] must have an object"),
    ],
    "falcon_h1": [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' can't be run, 'silu' can"),
        (
            {"ssm_multipliers": [1.0, 1.0]},
            r"ssm_multipliers=\[1.0, 1.0\] must be a list of 5 numbers",
        ),
        (
            {"ssm_multipliers": [1.0, 1.0, 0, 1.0, 1.0]},
            "ssm_multipliers=0 must be a number above 0",
        ),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit=\[0.0, 0.1\] can't be run"),
        ({"mamba_d_ssm": 96}, "mamba_n_heads=8 times mamba_d_head=10 is not the inner size 96"),
    ],
    "falcon_mamba": [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"time_step_rank": 0}, "time_step_rank=0 must be an integer >= 1"),
    ],
    "granite_swa": [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"layer_rope_theta": [1e4]}, r"layer_rope_theta=\[10000.0\] must be a list of 5 numbers"),
        ({"layer_rope_theta": [1, 2, 3, 4, -5]}, "layer_rope_theta=-5 must be a number above 0"),
        ({"layer_rope_theta": 5}, "layer_rope_theta=5 must be a list of 5 numbers"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"sliding_window": 0}, "sliding_window=0 must be an integer >= 1"),
        ({"layer_types": ["mamba"] * 5}, "a granite_swa model has no layers of kind mamba"),
        ({"rope_parameters": [3]}, r"rope_parameters=\[3\] must be an object"),
    ],
    "granitemoe_swa": [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at most 6"),
        ({"shared_intermediate_size": -1}, "shared_intermediate_size=-1 must be an integer >= 0"),
    ],
    "granitemoehybrid": [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"num_local_experts": -1}, "num_local_experts=-1 must be an integer >= 1"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at most 6"),
        ({"logits_scaling": 0}, "logits_scaling=0 must be a number above 0"),
    ],
    "inkling_text": [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"unpadded_vocab_size": 100}, "unpadded_vocab_size=100 can't be run, 101 can"),
        ({"shared_expert_sink": False}, "shared_expert_sink=False can't be run, True can"),
        ({"conv_kernel_size": 1}, "conv_kernel_size=1 leaves a convolution nothing to keep"),
        ({"swa_head_dim": None}, "swa_head_dim is missing"),
        ({"layer_types": ["full_attention"] * 4}, "no layers of kind attention"),
        ({"layer_types": None, "local_layer_ids": 3}, "local_layer_ids=3 must list layers"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at most 6"),
        ({"swa_num_key_value_heads": 3}, "=8 is not a multiple of num_key_value_heads=3"),
    ],
    "jamba": [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False can't be run"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok=6 must be at most 5"),
        ({"sliding_window": 8}, "sliding_window=8 can't be run"),
        ({"attn_layer_offset": 3}, "attn_layer_offset=3 must be below attn_layer_period=3"),
        ({"expert_layer_offset": -1}, "expert_layer_offset=-1 must be an integer >= 0"),
    ],
    "kimi_linear": [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"mla_use_nope": False}, "mla_use_nope=False can't be run"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 can't be run, 4 can"),
        ({"mlp_layer_types": ["dense"]}, "must name 5 layers"),
        ({"mlp_layer_types": [["dense"]] * 5}, "must name 5 layers, each dense or sparse"),
        ({"num_experts_per_token": 9}, "num_experts_per_token=9 must be at most 8"),
        ({"topk_group": 5}, "topk_group=5 must be at most 4"),
        ({"n_group": 3}, "8 experts cannot be in 3 groups"),
        ({"linear_attn_config": 3}, "linear_attn_config=3 must be an object"),
        (
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [0]}},
            r"full_attn_layers=\[0\] must list layers from 1 to 5",
        ),
    ],
    "lara_mini": [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' can't be run, 'silu' can"),
        ({"sliding_window": 0}, "sliding_window=0 must be an integer >= 1"),
        ({"sliding_window": None}, "sliding_window is missing; a lara_mini config must give it"),
        ({"layer_types": ["mlp"] * 5}, "no layers of kind mlp"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at most 6"),
    ],
    "lfm2": [
        ({"conv_L_cache": 1}, "conv_L_cache=1"),
        (
            {"layer_types": None, "full_attn_idxs": [9]},
            r"full_attn_idxs=\[9\] must list layers from 0 to 4",
        ),
        ({"layer_types": ["conv", "sliding_attention"]}, "sliding_attention"),
    ],
    "lfm2_moe": [
        ({"num_dense_layers": -1}, "num_dense_layers=-1 must be an integer >= 0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at most 6"),
    ],
    "lfm3": [
        ({"conv_L_cache": 1}, "conv_L_cache=1"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "must have an object for full_attention"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "rope_type='dynamic' is not supported",
        ),
        ({"use_sandwich_norm": False}, "post_norm"),
        ({"use_attention_gate": "no"}, "use_attention_gate='no' must be true or false"),
    ],
    "mamba2": [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"num_heads": 4}, "num_heads=4 times head_dim=10 is not the inner size 80"),
        ({"time_step_limit": [0.0, 1]}, "can't be run"),
    ],
    "nemotron_h": [
        ({"n_shared_experts": 2}, "n_shared_experts=2 can't be run, 1 can"),
        (
            {"topk_group": 4},
            "num_experts_per_tok=2 of topk_group=4 out of n_group=3 groups can't be chosen",
        ),
        (
            {"num_experts_per_tok": 5},
            "num_experts_per_tok=5 of topk_group=2 out of n_group=3 groups can't be chosen",
        ),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' can't be run, 'relu2' can"),
        ({"moe_latent_size": 0}, "moe_latent_size=0 must be an integer >= 1"),
    ],
    "qwen3_5_text": [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' can't be run, 'silu' can"),
        ({"attn_output_gate": False}, "attn_output_gate=False can't be run, True can"),
        ({"layer_types": ["full_attention", "mlp", "moe", "mlp"]}, "no layers of kind mlp, moe"),
        ({"linear_num_value_heads": 5}, "not a multiple of 2 key heads"),
        ({"linear_value_head_dim": 21}, "has shape .* config.json says"),
    ],
    "qwen3_next": [
        ({"mlp_only_layers": 3}, "mlp_only_layers=3 must list layers"),
        ({"mlp_only_layers": ["1"]}, "must list layers by their number"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at most 6"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an integer >= 1"),
        (
            {"num_experts": 7},
            r"layers\.1\.mlp\.gate\.weight has shape \(6, 40\), config.json says \(7, 40\)",
        ),
        (
            {"decoder_sparse_step": 1},
            r"lacks 12 tensors, the first is layers\.0\.mlp\.experts\.down_proj",
        ),
    ],
    "zamba2": [
        ({"hidden_act": "silu"}, "hidden_act='silu' can't be run, 'gelu' can"),
        ({"use_long_context": True}, "use_long_context=True can't be run, False can"),
        ({"use_conv_bias": False}, "use_conv_bias=False can't be run, True can"),
        (
            {"num_key_value_heads": 2},
            "num_key_value_heads=2 must be 4 where attention has adapters",
        ),
        ({"num_mem_blocks": 0}, "num_mem_blocks=0 must be an integer >= 1"),
    ],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """transformers' model and its folder by `model_type`, each written once: change a copy."""
    written = {}

    def get(model_type: str) -> tuple[torch.nn.Module, Path]:
        if model_type not in written:
            written[model_type] = checkpoint(tmp_path_factory, model_type)
        return written[model_type]

    return get


def copied(folder: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint with the same config.json and other tensors."""
    shutil.copy(folder / "config.json", tmp_path)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    return tmp_path


@pytest.mark.parametrize(("model_type", "keys"), CASES)
def test_every_logit_equals_transformers(
    tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, model_type: str, keys: dict[str, Any]
) -> None:
    check_parity(*(checkpoint(tmp_path_factory, model_type, keys) if keys else tiny(model_type)))


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "float64")], ids="-".join)
def test_states_of_another_dtype_than_the_model(tiny: Tiny, dtypes: tuple[str, str]) -> None:
    model, folder = tiny("nemotron_h")
    compare(
        model,
        load(folder, dtype=dtypes[0], mamba_ssm_cache_dtype=dtypes[1], max_num_batched_tokens=17),
    )


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        pytest.param(name, keys, message, id=f"{name}-{','.join(keys)}-{i}")
        for name, cases in REFUSED.items()
        for i, (keys, message) in enumerate(cases)
    ],
)
def test_what_cannot_be_run_is_refused(
    tiny: Tiny, model_type: str, keys: dict[str, Any], message: str
) -> None:
    check_refused(tiny(model_type)[1], keys, message)


@pytest.mark.parametrize(
    ("model_type", "hub"),
    [
        ("bailing_hybrid", ".attention.dense."),
        ("dory", "backbone.embeddings.weight"),
        ("granitemoehybrid", "model.layers.0.block_sparse_moe.input_linear.weight"),
        ("jamba", ".experts.0.gate_proj."),
        ("kimi_linear", ".block_sparse_moe."),
        ("lara_mini", ".linear_attn.in_proj.weight"),
        ("lfm2_moe", ".experts.0.w1."),
        ("lfm3", ".self_attn.gate_proj.weight"),
        ("nemotron_h", "backbone.layers.4.mixer.experts.0.up_proj.weight"),
        ("olmo_hybrid", "q_conv1d"),
        ("qwen3_5_moe_text", ".experts.0.gate_proj."),
    ],
)
def test_the_names_that_transformers_has_in_memory_are_read_too(
    tiny: Tiny, tmp_path: Path, model_type: str, hub: str
) -> None:
    """`save_pretrained` and the hub store other names: one tensor for all experts, or one each."""
    model, folder = tiny(model_type)
    stored = load_file(folder / "model.safetensors")
    assert any(hub in name for name in stored)
    own = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not model.config.tie_word_embeddings or name != "lm_head.weight"
    }
    head = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    check_parity(model, copied(folder, tmp_path, own | head))


def roll(tensor: torch.Tensor) -> torch.Tensor:
    return torch.roll(tensor, 1, 0)


def flip(tensor: torch.Tensor) -> torch.Tensor:
    return torch.flip(tensor, [-1])


@pytest.mark.parametrize(
    ("model_type", "part", "change"),
    [
        ("dory", "sqk", roll),
        ("granite_swa", "sinks", roll),
        ("granitemoehybrid", "router", roll),
        ("nemotron_h", "gate.weight", roll),
        ("nemotron_h", "e_score_correction_bias", roll),
        ("inkling_text", "r_proj", roll),
        ("inkling_text", "v_sconv", flip),
        ("inkling_text", "shared_experts.down_proj", roll),
        ("mamba2", "conv1d.weight", flip),
        ("zamba2", "linear_q_adapter_list.0.1", roll),
        ("zamba2", "gate_up_proj_adapter_list.2.0", roll),
    ],
)
def test_a_wrong_weight_is_seen(
    tiny: Tiny,
    tmp_path: Path,
    model_type: str,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """The parity test can fail: swapped rows of experts, taps in reverse order."""
    model, folder = tiny(model_type)
    tensors = load_file(folder / "model.safetensors")
    wrong = {name: change(tensor) if part in name else tensor for name, tensor in tensors.items()}
    with pytest.raises(AssertionError):
        check_parity(model, copied(folder, tmp_path, wrong))


SANITIZED = [
    "bailing_hybrid",
    "dory",
    "granite_swa",
    "inkling_text",
    "kimi_linear",
    "lara_mini",
    "lfm2",
]


@pytest.mark.parametrize("model_type", SANITIZED)
def test_the_sanitizer_finds_nothing(tiny: Tiny, model_type: str) -> None:
    options = {
        "mamba_cache_mode": "all",
        "speculative_method": "ngram",
        "num_speculative_tokens": 2,
    }
    llm = load(tiny(model_type)[1], sanitize=True, **options)
    outputs = llm.generate([[7, 8, 9, 7, 8, 9, 7, 8], [7, 8, 9, 7, 8]], progress=False)
    assert all(output.error is None for output in outputs)


def test_every_multiplier_of_falcon_h1_counts(tiny: Tiny, tmp_path: Path) -> None:
    """Each of them doubled is seen: none is left out, and none stands twice."""
    model, folder = tiny("falcon_h1")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    names = [name for name in config if "multiplier" in name]
    assert len(names) == 9
    for name in names:
        value = config[name]
        changes = (
            [value * 2]
            if isinstance(value, float)
            else [[v * (1 + (i == j)) for i, v in enumerate(value)] for j in range(len(value))]
        )
        for change in changes:
            (tmp_path / "config.json").write_text(json.dumps(config | {name: change}))
            with pytest.raises(AssertionError):
                check_parity(model, tmp_path)
