"""`hybrid-kv` itself: its version, shell completion, and what options mean in every command that has them."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs=0 must be an integer >= 1"),
        (["--mamba-cache-mode", "some"], "Invalid value for '--mamba-cache-mode'"),
        (["--no-enable-prefix-caching", "--mamba-cache-mode", "all"], "enable_prefix_caching=False turns off"),
        (["--speculative-method", "mtp"], "speculative_method='mtp' needs num_speculative_tokens >= 1"),
        (["--tensor-parallel-size", "2"], "No such option"),
    ],
)
def test_a_setting_reaches_the_configuration(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in refused(capsys, "generate", "a", *words)
