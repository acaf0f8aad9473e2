"""The pins agree with what packages publish: a dry run, which reads metadata and installs nothing.

Metadata of a pinned version never changes, so what uv has in its cache is not fetched again.
On every machine the newest requirements of torch's CUDA build count, also where a CPU build is
installed or configured.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.pins import PINS, ROOT

UV = Path(sys.executable).parent / "uv"
NO_INDEX = re.compile(r"error sending request|dns error|\(Connect\)|timed out", re.IGNORECASE)
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"  # a folder of wheels has one Python's
INSTALLED = f"hybrid_kv[all] @ {ROOT.as_uri()}"
# as .ci/asv-environment installs it
ASV = f"hybrid_kv[engine,models,kernels,bench] @ {ROOT.as_uri()}"


def resolve(
    requirements: list[str],
    python: str = "3.13",
    cpu: bool = False,
    constraints: Path = ROOT / "constraints.txt",
) -> dict[str, str] | str:
    """Resolve versions for x86-64 Linux, or say what conflicts; skip without an index."""
    if not UV.exists():
        pytest.skip("uv is not installed")
    command = [
        UV,
        "pip",
        "compile",
        "-",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--constraints",
        constraints,
    ]
    command += ["--python-version", python, "--python-platform", "x86_64-unknown-linux-gnu"]
    if cpu:
        requirements = [*requirements, f"torch=={PINS['torch']}+cpu"]
        # Where a folder of wheels is configured, as .ci/install tries first; else where torch
        # publishes CPU builds.
        folder = os.environ.get("PIP_FIND_LINKS")
        command += ["--find-links", folder] if folder else ["--torch-backend", "cpu"]
    for more in (["--offline"], []):
        done = subprocess.run(
            command + more, input="\n".join(requirements), capture_output=True, text=True, cwd=ROOT
        )
        if done.returncode == 0:
            return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", done.stdout, re.MULTILINE))
        if "network was disabled" not in done.stderr:  # what the cache has is enough to say no
            break
    if NO_INDEX.search(done.stderr):
        pytest.skip("no package index can be reached")
    return done.stderr


CASES = [
    ([INSTALLED], "3.10", False),
    ([INSTALLED], "3.13", False),
    ([INSTALLED], HERE, True),
    ([ASV], HERE, True),
]


def test_the_pins_can_be_installed_together() -> None:
    wanted = {name: PINS[name] for name in ("torch", "triton", "numpy")}
    with ThreadPoolExecutor() as pool:  # each waits for an index
        every = list(pool.map(lambda case: resolve(*case), CASES))
    for (_, _, cpu), found in zip(CASES, every, strict=True):
        assert isinstance(found, dict), found
        assert {name: found[name].removesuffix("+cpu") for name in wanted} == wanted
        assert any(name.startswith("nvidia-") for name in found) == (not cpu)


def test_another_triton_is_refused(tmp_path: Path) -> None:
    """The dry run sees what it is there for: torch 2.13.0 requires triton 3.7.1."""
    other = tmp_path / "constraints.txt"
    text = (ROOT / "constraints.txt").read_text()
    other.write_text(re.sub(r"^triton==\S+", "triton==3.6.0", text, flags=re.MULTILINE))
    reason = resolve(["torch"], constraints=other)
    assert isinstance(reason, str) and "triton" in reason


def test_uv_is_pinned_where_it_is_installed() -> None:
    script = (ROOT / ".ci/install").read_text()
    assert "uv" in PINS
    assert re.search(r"pip install -q -c constraints\.txt uv\b", script)
    assert not re.search(r"pip install (?!-q -c constraints\.txt)[^&|\n]*\buv\b", script)
