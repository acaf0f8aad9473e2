"""Commands that need a checkout: found in one, and one line where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hybrid_kv.cli import checkout, help
from tests.cli.run import commands, run


def test_outside_a_checkout_a_command_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkout, "__file__", str(tmp_path / "packages/hybrid_kv/cli/checkout.py"))
    monkeypatch.chdir(tmp_path)
    for name in checkout.COMMANDS:
        line = f"error: `hybrid-kv {name}` needs a checkout of hybrid-kv: run it inside one\n"
        assert run(capsys, name, "--help") == (2, "", line)
    assert not commands().keys() & checkout.COMMANDS
    assert run(capsys, "--help")[0] == 0


def test_a_checkout_is_found_from_a_folder_inside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkout, "__file__", str(tmp_path / "packages/hybrid_kv/cli/checkout.py"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(checkout.COMMANDS, "toy", ("checkout_toy", help.RUN))
    (tmp_path / "bench").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "hybrid_kv"\n')
    (tmp_path / "checkout_toy.py").write_text('def toy(number: int = 3) -> None:\n    "Count."\n')
    inside = tmp_path / "docs" / "deep"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert checkout.checkout_root() == tmp_path
    (number,) = commands()["toy"].params
    assert number.default == 3
