"""`hybrid-kv` itself: its version, shell completion, and options that several commands share."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.metadata import version

import pytest

from hybrid_kv.config import PARTS, EngineConfig
from tests.cli.run import commands, refused, run


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"hybrid-kv {version('hybrid_kv')}\n", "")


def test_every_setting_of_an_engine_is_an_option_of_the_commands_that_start_one() -> None:
    """One name, type and help, written in `hybrid_kv.config`."""
    names = {field.name for config in (*PARTS.values(), EngineConfig) for field in fields(config)}
    names -= {*PARTS, "captured_batch_sizes"}
    found = commands()
    helps: dict[str, set[str]] = {}
    for name in ("generate", "serve", "accuracy", "plan"):
        given = {one.name: one for one in found[name].params}
        assert name == "plan" or names <= given.keys(), name
        for option in names & given.keys() - {"seed", "platform", "max_model_len"}:
            assert given[option].opts == [f"--{option.replace('_', '-')}"]
            helps.setdefault(option, set()).add(given[option].help)
    assert len(helps) > 20 and all(len(texts) == 1 for texts in helps.values())


def test_help_groups_commands_by_what_one_wants(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--help")[1]
    panels = {title: names for title, names in re.findall(r"╭─ (\w+).*?╮\n(.*?)╰", out, re.DOTALL)}
    first = {
        title: re.findall(r"^│ (\w+) ", names, re.MULTILINE) for title, names in panels.items()
    }
    assert list(first) == ["Options", "Check", "Measure", "Plan", "Run"]
    assert first["Check"] == ["guard", "check", "replay", "fuzz", "export", "mutants"]
    assert {*first["Plan"]} == {"plan", "predict", "families"}
    assert sum(map(len, first.values())) == len(commands())


def test_help_names_types_as_click_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert not {name for name in commands() if re.search(r"<\w+", run(capsys, name, "--help")[1])}
    words = [
        " ".join(line.strip("│ ").split())
        for line in run(capsys, "guard", "--help")[1].splitlines()
    ]
    assert any(line.startswith("--jobs INTEGER [x>=1] Processes") for line in words)
    assert any(line.startswith("--quick A minute") for line in words)
    assert any(line.startswith("--device [cpu|cuda] Device") for line in words)
    assert any(line.startswith("--results PATH Folder") for line in words)
    assert any(line.startswith("-k TEXT Only") for line in words)


def test_help_of_guard_lists_no_older_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "guard", "--help")[1]
    older = ("--target", "--replay", "--swarm", "--ray", "--model", "--publish")
    assert not [option for option in older if option in out]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs=0 must be an integer >= 1"),
        (["--mamba-cache-mode", "some"], "Invalid value for '--mamba-cache-mode'"),
        (
            ["--no-enable-prefix-caching", "--mamba-cache-mode", "all"],
            "enable_prefix_caching=False turns off",
        ),
        (
            ["--speculative-method", "mtp"],
            "speculative_method='mtp' needs num_speculative_tokens >= 1",
        ),
        (["--tensor-parallel-size", "2"], "No such option"),
    ],
)
def test_a_setting_reaches_the_configuration(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(capsys, "generate", "a", *words)
