"""A family is a module that registers itself; others learn of it by its `model_type` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hybrid_kv
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models import registry
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.shapes import model_shape
from tests.models.tiny_nemotron import Characters

CONFIG = {
    **{
        "model_type": "tiny_mamba",
        "num_hidden_layers": 2,
        "dtype": "float64",
        "heads": 2,
        "head_dim": 4,
        "state": 3,
    },
    **{"groups": 1, "taps": 4, "hidden_size": 8, "vocab_size": 11},
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint folder of the documentation's family, which lies outside the package."""
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    page = (Path(__file__).parents[2] / "docs" / "adding-a-family.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = ConfigFile.read(tmp_path)
    model = registry.family_of(file).build(file, model_shape(file).layers)
    g = torch.Generator().manual_seed(0)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    tensors = {
        name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder, tokenizer=Characters(), device="cpu", max_model_len=64, max_num_seqs=2, **options
    )


def test_its_config_is_checked_like_any_other(tiny: Path) -> None:
    (tiny / "config.json").write_text(json.dumps({**CONFIG, "heads": "two"}))
    with pytest.raises(ConfigError, match=r"heads='two' must be an integer >= 1"):
        engine(tiny)


def test_a_family_without_a_head_says_so(tiny: Path) -> None:
    message = "tiny_mamba checkpoints have no draft head that can be run; draft with n-grams"
    with pytest.raises(ConfigError, match=message):
        engine(tiny, speculative_method="mtp", num_speculative_tokens=1)


def test_a_model_type_has_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    family = registry.family_of(ConfigFile({"model_type": "bamba"}, "config.json"))
    with pytest.raises(ValueError, match="model_type 'bamba' is registered already"):
        registry.register(family, "new", "bamba")
    assert "new" not in registry.FAMILIES


def test_engine_cache_sanitizer_and_loader_name_no_family() -> None:
    package = Path(hybrid_kv.__file__).parent
    rooms = (
        "engine/**/*.py",
        "cache/**/*.py",
        "attention/**/*.py",
        "sanitizer*/**/*.py",
        "sanitizer*.py",
    )
    files = [path for room in rooms for path in package.glob(room)]
    files += [
        package / "models" / name for name in ("loader.py", "registry.py", "layers.py", "specs.py")
    ]
    assert len(files) > 15
    words = ["nemotron_h", "NemotronH", "qwen3", "bamba", "zamba", "falcon_h1", '"mtp.']
    named = {
        path.name: [word for word in words if word in path.read_text(encoding="utf-8")]
        for path in files
    }
    assert {name: found for name, found in named.items() if found} == {}
