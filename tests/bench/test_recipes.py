"""`python -m bench.recipes`: vLLM's recipes in the plan and in the engine, and the page of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.recipes import (
    HEAD,
    Ran,
    Recipe,
    check,
    plan_of,
    read_recipes,
    run_exact,
    run_tiny,
    small_options,
    with_table,
)
from hybrid_kv.cli.vllm_flags import VLLMFlags
from hybrid_kv.config import ConfigError
from hybrid_kv.models.random_checkpoint import write_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
RECIPES = read_recipes()


def recipe(model: str, *words: str) -> Recipe:
    (found,) = (
        each
        for each in RECIPES
        if each.model == model and all(word in each.flags for word in words)
    )
    return found


def table() -> list[list[str]]:
    """The cells of each recipe's line on the page."""
    found = re.search(r"<!-- recipes -->\n(.*)<!-- /recipes -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    head, lines = found[1][: len(HEAD)], found[1][len(HEAD) :].strip().splitlines()
    assert head == HEAD
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_every_recipe_and_all_are_right() -> None:
    lines = table()
    assert [(line[0], line[1]) for line in lines] == [
        (each.model, f"`{each.flags}`" if each.flags else "none") for each in RECIPES
    ]
    assert {right for line in lines for right in line[3:5]} == {"10 of 10"}


@pytest.mark.parametrize("place", range(len(RECIPES)), ids=lambda place: RECIPES[place].model)
def test_the_plan_takes_a_recipe_as_the_page_says(place: int, tmp_path: Path) -> None:
    planned = plan_of(RECIPES[place], tmp_path)
    *_, left_out = line = table()[place]
    assert (line[2], planned.refused) == (str(planned), "")
    assert all(note in left_out for note in planned.notes)


def test_a_recipe_without_a_draft_head_runs_exactly(tmp_path: Path) -> None:
    """Drafts of eight tokens by a block drafter, rounded states, hits inside blocks."""
    chosen = recipe("Nemotron-3.5-Super-VL-120B", "--prefix-match-unit 16")
    options = small_options(chosen.flags)
    assert (options["prefix_match_unit"], options["num_speculative_tokens"]) == (4, 8)
    assert options["enable_mamba_cache_stochastic_rounding"] is True
    assert run_exact(chosen) == Ran(10, 10)


def test_recipes_run_on_a_checkpoint_with_its_head(tmp_path: Path) -> None:
    chosen = recipe("Qwen3.6-27B", '"num_speculative_tokens":3')
    write_checkpoint(chosen.family, tmp_path)
    assert run_tiny(chosen, tmp_path) == Ran(10, 10)


def test_what_is_refused_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.recipes.run_exact", lambda _: Ran(10, 9, "other tokens"))
    chosen = recipe("LFM2.5")
    wrong = Recipe(
        chosen.model, "--prefix-match-unit 7", chosen.shape, chosen.family, chosen.layers, "a part"
    )
    monkeypatch.setattr("bench.recipes.UNIT", 7)
    (found,) = check([wrong])
    assert not found.is_right
    assert "prefix_match_unit=7 does not divide the block sizes [16]" in found.planned.refused
    assert found.tiny.problem.startswith("refused: prefix_match_unit=7 does not divide")
    cells = found.line.split(" | ")
    assert cells[3] == "9 of 10: other tokens" and cells[5] == "not here: a part |"


def test_a_table_goes_where_the_page_has_a_place_for_it() -> None:
    page = "a\n<!-- recipes -->\nold\n<!-- /recipes -->\nb\n"
    assert with_table(page, r"new \1") == "a\n<!-- recipes -->\nnew \\1\n<!-- /recipes -->\nb\n"
    with pytest.raises(ConfigError, match="no place"):
        with_table("a page", "new")


def test_flags_of_vllm_are_options_here() -> None:
    flags = VLLMFlags.read(
        "-tp 8 --kv-cache-dtype=fp8_e4m3 --no-enable-prefix-caching --reasoning-parser kimi "
        "--enable-expert-parallel --num-gpu-blocks-override 90 --mamba-backend flashinfer "
        """-sc '{"method": "qwen3_5_mtp", "num_speculative_tokens": 3, "model": "a/b"}'"""
    )
    assert flags.options == {
        "tensor_parallel_size": 8,
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": False,
        "num_blocks": 90,
        "speculative_method": "mtp",
        "num_speculative_tokens": 3,
    }
    assert flags.left_out == {
        "--reasoning-parser": "it says nothing about the cache",
        "--enable-expert-parallel": "it says nothing about the cache",
        "--mamba-backend": "it chooses the kernel of the states",
        "--speculative-config model": "the layers of a drafter of its own are not counted",
    }


def test_drafts_can_be_flags_of_their_own() -> None:
    options = VLLMFlags.read("--spec-method dspark --spec-tokens 7").options
    assert (options["speculative_method"], options["num_speculative_tokens"]) == ("dflash", 7)


def test_hybrids_have_vllms_defaults() -> None:
    assert VLLMFlags.read("").options == {
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        "prefix_cache_retention_interval": 0,
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--max-num-seqs", "--max-num-seqs has no value"),
        ("--max-num-seqs many", "--max-num-seqs many is no number"),
        ("model --max-num-seqs 8", "'model' belongs to no flag"),
        ("--speculative-config '{", "No closing quotation"),
        ("--speculative-config 3", "give a JSON object"),
        ("""--speculative-config '{"method": "suffix"}'""", "method 'suffix' is unknown here"),
    ],
)
def test_flags_that_cannot_be_read_are_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        VLLMFlags.read(text)
