# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hybrid caches with an exact model: a wrong block, slot or state is a wrong token.

The model computes integers modulo a prime, over vLLM's own scheduler, block pool,
tables, metadata and state copies, so its tokens are equal, not close. Both model
runners run unmodified, without a GPU: Triton interprets, CUDA graphs are recorded.
Requests and tokens, what plays them, and what that replaces, are in the folder next to
this file; `step.yaml` there is a step of CI with the sources on which it depends.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_test

FOLDER = Path(__file__).parent / "exact_hybrid"
SETTINGS = [*json.loads((FOLDER / "cases.json").read_text())["settings"]]
TIMEOUT = 900  # seconds of all settings


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest) -> dict[str, str]:
    """Play the settings that were selected.

    Returns:
        What is wrong in each setting that was played to its end.
    """
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    command = [sys.executable, str(FOLDER / "run.py"), *chosen]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["setting"]: line["problem"] for line in lines}


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_the_exact_model(
    name: str, problems: dict[str, str]
) -> None:
    assert problems.get(name, "its process died") == ""
