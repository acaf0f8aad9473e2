"""Plans of public checkpoints, cut down to the keys that decide, with vLLM 0.32's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import run


def kimi(num_heads: int) -> dict[str, Any]:
    """Three layers with a state [128, 128] for each head, and one with latent attention."""
    return {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "model_max_length": 1048576,
        "num_hidden_layers": 4,
        "num_attention_heads": num_heads,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "num_heads": num_heads,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    }


KIMI_LINEAR = kimi(32)
# A vision model's, around those of its language model.
KIMI_K3 = {"model_type": "kimi_k3", "text_config": kimi(96)}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
QWEN3_5_27B = QWEN3_5 | {
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
    "mtp_num_hidden_layers": 1,
}
QWEN3_5_0_8B = QWEN3_5 | {
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
}
# Theirs are not printed by vLLM 0.32, which has neither family: by its rules, computed by hand.
LARA_4_MINI = {
    "model_type": "lara_mini",
    "dtype": "bfloat16",
    "max_position_embeddings": 131072,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 512,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
LFM3_1_7B = {
    "model_type": "lfm3",
    "dtype": "bfloat16",
    "max_position_embeddings": 128000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 256,
    "conv_L_cache": 7,
}
GLM_5_3_FLASH = {
    "model_type": "glm5_next_text",
    "dtype": "bfloat16",
    "max_position_embeddings": 1048576,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "linear_num_heads": 64,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 0,
}
LING_3_FLASH = {
    "model_type": "bailing_hybrid",
    "dtype": "bfloat16",
    "max_position_embeddings": 262144,
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "head_dim": 128,
    "layer_group_size": 6,
    "short_conv_kernel_size": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
ZAMBA2_2_7B = {
    "model_type": "zamba2",
    "dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "hidden_size": 2560,
    "num_hidden_layers": 54,
    "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51],
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "attention_head_dim": 160,
    "n_mamba_heads": 80,
    "mamba_headdim": 64,
    "mamba_d_state": 64,
    "mamba_ngroups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def plan_of(
    config: dict[str, Any], flags: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    code, out, err = run(capsys, "plan", folder, *flags.split(), "--json")
    assert (code, err) == (0, "")
    return json.loads(out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("config", "flags", "block_size", "padding"),
    [
        (KIMI_K3, "--tensor-parallel-size 8", 768, 8.68),
        (KIMI_LINEAR, "--tensor-parallel-size 8", 256, 8.68),
        (KIMI_LINEAR, "", 1920, 1.89),
        (QWEN3_5_0_8B, "--platform cpu --attention-backend CPU_ATTN", 640, 20.75),
        (ZAMBA2_2_7B, "", 48, 43.12),
        # Latents without a rotated part, 1,024 B a token.
        (GLM_5_3_FLASH, "--tensor-parallel-size 8", 640, 20.75),
        (GLM_5_3_FLASH, "--tensor-parallel-size 4", 1152, 8.68),
        (GLM_5_3_FLASH, "--tensor-parallel-size 2", 2176, 2.64),
        (GLM_5_3_FLASH, "", 4352, 2.64),
        # Heads, kernel and latent cache are Kimi-Linear's: so are a state and its vectors.
        (LING_3_FLASH, "--tensor-parallel-size 4", 512, 8.68),
        (LING_3_FLASH, "", 1920, 1.89),
        # 2,048 B of K and V a token; a state has 3 * 4,096 and 16 * 128 * 128 numbers.
        (LARA_4_MINI, "", 272, 1.49),
        # A window of six inputs: 24,576 B beside pages of at least 16 tokens.
        (LFM3_1_7B, "", 16, 33.33),
    ],
    ids=[
        *("kimi_k3", "kimi_linear", "kimi_linear_alone", "qwen3_5_on_a_cpu", "zamba2"),
        *("glm_at_8", "glm_at_4", "glm_at_2", "glm_alone", "ling_3", "ling_3_alone"),
        *("lara_mini", "lfm3"),
    ],
)
def test_block_sizes_and_padding_are_those_of_vllm(
    config: dict[str, Any],
    flags: str,
    block_size: int,
    padding: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_of(config, flags, tmp_path, capsys)
    assert (plan["block_size"], plan["mamba_padding_percent"]) == (block_size, padding)


def test_the_layer_of_a_draft_head_joins_the_attention_of_qwen3_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """164 blocks of 1,600 tokens, and in each of three groups two states and one for each draft."""
    flags = "--mamba-cache-mode align --kv-cache-dtype fp8 --tensor-parallel-size 2"
    flags += " --num-speculative-tokens 3 --speculative-method mtp"
    plan = plan_of(QWEN3_5_27B, flags, tmp_path, capsys)
    assert plan["cached_layers"] == {"gdn_attention": 48, "attention": 17}
    groups = [(group["kind"], group["num_layers"]) for group in plan["groups"]]
    assert sorted(groups) == [("attention", 17), *[("gdn_attention", 16)] * 3]
    assert (plan["block_size"], plan["max_model_len"]) == (1600, 262144)
    assert plan["blocks_per_request"] == 164 + 3 * (2 + 3) == 179
    staged = plan_of(QWEN3_5_27B, f"{flags} --pipeline-parallel-size 2", tmp_path, capsys)
    has_head = ["mtp.layers.0" in stage["layers"] for stage in staged["stages"]]
    assert has_head == [False, True]


@pytest.mark.parametrize(
    ("config", "window", "counts", "blocks"),
    [
        (LARA_4_MINI, "window 512", {"gdn_attention": 14, "window 512": 13, "attention": 7}, 11),
        (LFM3_1_7B, "window 256", {"short_conv": 13, "attention": 6, "window 256": 5}, 145),
    ],
    ids=["lara_mini", "lfm3"],
)
def test_a_window_next_to_states_takes_the_blocks_of_a_step(
    config: dict[str, Any],
    window: str,
    counts: dict[str, int],
    blocks: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It holds `window - 1` tokens and those of a step, 2,048 by default, on any boundary."""
    plan = plan_of(config, "--mamba-cache-mode align", tmp_path, capsys)
    assert plan["cached_layers"] == counts
    of_window = {group["blocks_per_request"] for group in plan["groups"] if group["kind"] == window}
    assert of_window == {blocks}
    flags = "--mamba-cache-mode align --max-num-batched-tokens 8192"
    longer = plan_of(config, flags, tmp_path, capsys)
    step = (longer["blocks_per_request"] - plan["blocks_per_request"]) * plan["block_size"]
    num_groups = sum(group["kind"] == window for group in plan["groups"])
    assert abs(step - num_groups * (8192 - 2048)) < num_groups * plan["block_size"]
