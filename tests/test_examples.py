"""The example configs are what documentation, benchmarks and kernel shapes say of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench._shapes import MODELS, NANO, LayerShape
from hybrid_kv.check.probes.reproducer import from_json
from hybrid_kv.check.probes.script import script_of
from tests.cli.run import printed

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*/config.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_every_example_can_be_planned(
    path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(
        capsys, "plan", path, "--gpu-memory", "60GiB", "--mamba-cache-mode", mode, "--json"
    )
    assert json.loads(out)["longest_request"] > 0


def test_the_example_and_the_kernels_shapes_of_nemotron_3_nano_agree() -> None:
    config = json.loads((ROOT / "examples" / "nemotron-3-nano" / "config.json").read_text())
    names = (
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "n_groups",
        "num_attention_heads",
    )
    names += ("num_key_value_heads", "chunk_size", "conv_kernel", "head_dim")
    assert MODELS[NANO] == LayerShape(*(config[name] for name in names))


def test_a_config_that_the_documentation_names_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"[\w./-]+/config\.json", page.read_text(encoding="utf-8"))
    }
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


FOUND = sorted((ROOT / "examples" / "found").glob("*.py"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_reproducer_is_named_where_it_is_explained_and_needs_nothing_of_ours(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    compile(text, path.name, "exec")
    assert not re.search(r"^(from|import) hybrid_kv", text, re.MULTILINE)
    assert f"`{path.name}`" in (ROOT / "docs" / "found.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "found").glob("*.json")), ids=lambda path: path.stem
)
def test_a_case_is_named_where_it_is_explained_and_becomes_a_script(path: Path) -> None:
    compile(script_of(from_json(path.read_text(encoding="utf-8"), path.name)), path.name, "exec")
    assert f"`{path.name}`" in (ROOT / "docs" / "found.md").read_text(encoding="utf-8")
