"""Hybrid caches with an exact model on a CPU: a wrong page or state is a wrong token.

The model computes integers modulo a prime, over SGLang's own scheduler, pools, radix
tree and metadata, so its tokens are equal, not close. Requests and tokens, what plays
them, and what that replaces, are in the folder next to this file. Each setting has a
process of its own.
"""

import json
import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=520, suite="base-a-test-cpu")

FOLDER = Path(__file__).parent / "exact_hybrid"
TIMEOUT = 600  # seconds of a setting


class TestExactHybridCache(unittest.TestCase):
    """One test a setting."""


def _test_of(name: str) -> Callable[[unittest.TestCase], None]:
    def test(self: unittest.TestCase) -> None:
        command = [sys.executable, str(FOLDER / "run.py"), name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        words = (done.stdout + done.stderr)[-2000:]
        self.assertEqual(done.returncode, 0, f"{name}: {words}")

    return test


for _name in json.loads((FOLDER / "cases.json").read_text())["settings"]:
    _words = "_".join(_name.replace("=", "_").replace(":", "_").split())
    setattr(TestExactHybridCache, f"test_{_words}", _test_of(_name))

if __name__ == "__main__":
    unittest.main()
