"""Qwen3-Next, Qwen3.5 and its MoE: draft heads against dense ones, multimodal checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from hybrid_kv.config import ConfigError, EngineConfig
from hybrid_kv.models.loader import load_head, load_model
from hybrid_kv.models.random_checkpoint import fill
from hybrid_kv.models.registry import sizes_of
from hybrid_kv.sampling import SamplingParams
from tests.models.paged_head import CPU, check_head
from tests.models.parity import check_parity, checkpoint, load, prompts
from tests.models.qwen_head import DenseHead


@pytest.mark.parametrize(
    ("model_type", "keys", "modeling", "prefix", "grid"),
    [
        ("qwen3_5_text", {}, modeling_qwen3_5, "Qwen3_5", 4),
        ("qwen3_5_text", {}, modeling_qwen3_5, "Qwen3_5", 10**6),
        ("qwen3_5_moe_text", {}, modeling_qwen3_5_moe, "Qwen3_5Moe", 4),
        ("qwen3_5_moe_text", {}, modeling_qwen3_5_moe, "Qwen3_5Moe", 10**6),
        ("qwen3_next", {"decoder_sparse_step": 1}, modeling_qwen3_next, "Qwen3Next", 4),
        # the head has an MLP
        ("qwen3_next", {"decoder_sparse_step": 2}, modeling_qwen3_next, "Qwen3Next", 4),
    ],
)
def test_the_draft_head_equals_a_dense_one(
    tmp_path_factory: pytest.TempPathFactory,
    model_type: str,
    keys: dict[str, Any],
    modeling: ModuleType,
    prefix: str,
    grid: int,
) -> None:
    folder = checkpoint(tmp_path_factory, model_type, keys)[1]
    check_head(folder, DenseHead(folder, modeling, prefix), grid)


@pytest.mark.parametrize(
    ("model_type", "prefix"), [("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")]
)
def test_a_multimodal_checkpoint_is_run_as_its_language_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str, prefix: str
) -> None:
    text = sizes_of(f"{model_type}_text")["tiny"]
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_heads": 2,
        "out_hidden_size": 40,
    }
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    fill(model, 1)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "hybrid_kv"):
        check_parity(model, tmp_path)
    (said,) = {
        record.getMessage() for record in caplog.records if record.name == "hybrid_kv.models.loader"
    }
    assert "its language model is loaded, 21 tensors such as model.visual." in said


def test_a_multimodal_checkpoint_drafts_with_its_own_head(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Named as on the hub, where the head lies beside the language model."""
    folder = checkpoint(tmp_path_factory, "qwen3_5_text")[1]
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": config})
    )
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()},
        tmp_path / "x.safetensors",
    )
    drafted = []
    for source in (folder, tmp_path):
        llm = load(source, speculative_method="mtp", num_speculative_tokens=2)
        outputs = llm.generate(prompts(101), SamplingParams(max_tokens=8), progress=False)
        drafted.append([(output.token_ids, output.num_accepted_draft_tokens) for output in outputs])
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize(
    ("key", "value"), [("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True)]
)
def test_a_draft_head_of_another_form_is_rejected(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, key: str, value: object
) -> None:
    folder = checkpoint(tmp_path_factory, "qwen3_5_text")[1]
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{key}={value}.*draft with n-grams"):
        load_head(tmp_path, load_model(folder, EngineConfig(dtype="float32"), CPU))
