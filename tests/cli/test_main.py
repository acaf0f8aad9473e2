"""`hybrid-kv` itself: its version, shell completion, and what options mean in every command that has them."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import typer

from hybrid_kv.cli import app
from tests.cli.run import run


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"hybrid-kv {version('hybrid_kv')}\n", "")


def test_a_shell_can_complete_options(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "--install-completion" in out


def test_options_of_one_name_mean_the_same_everywhere() -> None:
    """A command that prints JSON can also write it; the shared options have one help text."""
    found: dict[str, set[str]] = {}

    def look(command: typer.core.TyperCommand) -> None:
        own = {option: parameter for parameter in command.params for option in parameter.opts}
        if "--json" in own:
            assert own["--json"].is_flag and "--out" in own, command.name
        for option in {"--json", "-k", "--record"} & set(own):
            found.setdefault(option, set()).add(own[option].help)
        for inner in getattr(command, "commands", {}).values():
            look(inner)

    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        look(command)
    assert {option: len(texts) for option, texts in found.items()} == {"--json": 1, "-k": 1, "--record": 1}
