"""vLLM in an environment of its own, which makes nothing of it a dependency here.

This is the other end of `vllm_worker`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any

from bench.harness.pairs import ENVIRONMENT
from hybrid_kv.config import ConfigError, HybridKVError

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
WORKER = Path(__file__).with_name("vllm_worker.py")


def check_installed() -> None:
    """Raise ConfigError where there is no environment with vLLM."""
    if not PYTHON.exists():
        raise ConfigError(
            f"no {PYTHON.parents[1].name}: run `make peers`, "
            "or compare with --rival transformers alone"
        )


class VLLMProcess:
    """vLLM with one checkpoint, until the end of a `with`.

    Raises:
        ConfigError: there is no environment with vLLM.
        HybridKVError: vLLM cannot load the checkpoint, in its own words.

    Attributes:
        version: of vLLM.
    """

    def __init__(
        self, folder: str | Path, max_num_seqs: int, max_model_len: int, dtype: str = "float32"
    ) -> None:
        check_installed()
        self.output = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [str(PYTHON), str(WORKER), str(folder), str(max_num_seqs), str(max_model_len), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.output,
            env=os.environ | ENVIRONMENT,  # freed memory stays with it, as with the engine
            encoding="utf-8",
        )
        try:
            self.version: str = self._answer()["version"]
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> tuple[list[list[int]], float]:
        """Return greedy tokens of each prompt, and the CPU seconds of vLLM's thread.

        Raises:
            HybridKVError: vLLM failed or ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(
                json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n"
            )
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and `_answer` says how
        answer = self._answer()
        return answer["tokens"], answer["seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.output.seek(0)
            last = next(
                (text for text in reversed(self.output.read().splitlines()) if text.strip()),
                "said nothing",
            )
            raise HybridKVError(f"its process ended with code {code}: {last.strip()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise HybridKVError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self.output.close()

    def __enter__(self) -> VLLMProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
