"""What must hold of the repository itself."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.options import check_options
from tests.support.pins import PINS, ROOT


def files() -> list[Path]:
    """Tracked and new files, or, without git, everything outside hidden folders."""
    try:
        command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        names = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_no_file_names_a_package_registry() -> None:
    hosts = [
        "pypi" + ".org",
        "python" + "hosted.org",
        "download." + "pytorch.org",
        "registry." + "npmjs",
        "index" + "-url",
    ]
    pattern = re.compile("|".join(map(re.escape, hosts)).encode())
    found = [str(path.relative_to(ROOT)) for path in files() if pattern.search(path.read_bytes())]
    assert not found


def test_what_moves_a_number_is_pinned() -> None:
    names = (
        "torch triton numpy scipy pandas datasets transformers tokenizers safetensors "
        "huggingface_hub lm-eval asv"
    )
    assert {*names.split(), "asv_runner", "pytest", "ruff", "mypy"} <= PINS.keys()


def test_ruff_is_the_same_everywhere() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["rev"] for repo in config["repos"] if "ruff" in repo["repo"]] == [
        f"v{PINS['ruff']}"
    ]


def test_asv_has_no_versions_of_its_own() -> None:
    """Its environments come from constraints.txt, see .ci/asv-environment."""
    config = (ROOT / "asv.conf.json").read_text()
    assert not re.search(r"\d+\.\d+\.\d+", config) and "matrix" not in config


def test_a_citation_names_the_version_that_is_built() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[
        1
    ]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version


@pytest.mark.parametrize(
    "hook",
    yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()),
    ids=lambda hook: hook["id"],
)
def test_a_hook_is_a_command_with_options_that_it_has(hook: dict[str, Any]) -> None:

    check_options(hook["entry"].split()[1:], hook["entry"])


def test_the_license_is_the_whole_apache_license() -> None:
    # The digest of apache.org's text, which 17 of the installed packages bring along, too.
    digest = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == digest


def test_spelling_is_not_checked_in_what_a_build_leaves(tmp_path: Path) -> None:
    """`make lint` after `make docs`: site/ is git's to ignore, and holds minified words."""
    codespell = Path(sys.executable).parent / "codespell"
    if not codespell.exists():
        pytest.skip("codespell is not installed")
    wrong = "".join("the"[i] for i in (0, 2, 1))
    for folder, code in (("site/docs", 0), ("out", 0), ("docs", 65)):
        file = tmp_path / folder / "page.html"
        file.parent.mkdir(parents=True)
        file.write_text(f"<p>{wrong} page</p>\n", encoding="utf-8")
        if folder == "site/docs":
            subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
        done = subprocess.run(
            ["bash", ROOT / ".ci/words", "0", codespell],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, wrong in done.stdout) == (code, bool(code)), folder
