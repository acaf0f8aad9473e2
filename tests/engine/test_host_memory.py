"""Freed memory stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from hybrid_kv.engine.host_memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
def layer():
    return [bytearray(1 << 20) for _ in range(16)]
layer(), layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _page_faults(keep: bool) -> int:
    program = PROGRAM.format(keep=keep)
    return int(
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        ).stdout
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_buffers_that_were_freed_are_not_mapped_anew() -> None:
    assert _page_faults(keep=False) > 4096, "glibc alone maps them anew, or this test sees nothing"
    assert _page_faults(keep=True) < 64
