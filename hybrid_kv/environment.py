"""Environment variables: the only module that reads or sets them."""

from __future__ import annotations

import os
from collections.abc import Mapping

API_KEY = "HYBRID_KV_API_KEY"
# Defaults of the processes that run another engine.
WORKER_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    # What vLLM compiles for n-grams and log-probabilities takes longer than small models run.
    "NUMBA_DISABLE_JIT": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes every core
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a step returns when its tokens are there
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_INTERPRET = "TRITON_INTERPRET"


def sanitizes() -> bool:
    """Return whether engines run the sanitizer by default."""
    return os.environ.get("HYBRID_KV_SANITIZE", "0") not in ("", "0")


def machine() -> str | None:
    """Return the name that results give this machine, if it is set."""
    return os.environ.get("HYBRID_KV_MACHINE") or None


def api_key() -> str | None:
    """Return the key that clients of our server must send, if there is one."""
    return os.environ.get(API_KEY) or None


def target_key() -> str | None:
    """Return the key that a server under test requires, if there is one."""
    return os.environ.get("HYBRID_KV_TARGET_KEY") or None


def runs_on_github() -> bool:
    """Return whether this is a step of a GitHub workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def step_summary() -> str | None:
    """Return the file whose Markdown GitHub shows on a run's page, if there is one."""
    return os.environ.get("GITHUB_STEP_SUMMARY") or None


def interprets_triton() -> bool:
    """Return whether Triton interprets kernels in this process."""
    return os.environ.get(_INTERPRET) == "1"


def interpret_triton() -> None:
    """Let Triton interpret kernels; before it is imported."""
    os.environ[_INTERPRET] = "1"


def child_environment(defaults: Mapping[str, str] | None = None, **extra: str) -> dict[str, str]:
    """Return a copy of the environment for a child process.

    `extra` overrides it, it overrides `defaults`.
    """
    # PYTEST_CURRENT_TEST is new for each test.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**(defaults or {}), **inherited, **extra}
