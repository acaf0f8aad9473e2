"""Plans against block sizes, paddings and bytes that vLLM printed in public logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import run

FILE = Path(__file__).parents[2].parent / "shared" / "data" / "printed_by_vllm.json"
ENTRIES: list[dict[str, Any]] = (
    json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
)
NAMES = {"padding_percent": "mamba_padding_percent"}  # what a plan calls them

pytestmark = pytest.mark.skipif(
    not ENTRIES, reason=f"no {FILE.name} in ../shared/data: the logs are not distributed"
)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry["id"]))
def test_a_plan_has_the_numbers_that_vllm_printed(
    entry: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(entry["config"]), encoding="utf-8")
    # On a CPU vLLM has an attention of its own; the default here is what the engine of this package
    # runs.
    backend = ["--attention-backend", "CPU_ATTN"] if "cpu" in entry["flags"] else []
    code, out, _ = run(capsys, "plan", str(file), *entry["flags"], *backend, "--json")
    assert code == 0
    document = json.loads(out)
    wanted = ("block_size", "padding_percent", "bytes_per_request")
    printed = {name: entry[name] for name in wanted if entry.get(name) is not None}
    assert {name: document[NAMES.get(name, name)] for name in printed} == printed


def test_every_log_has_a_number() -> None:
    assert len(ENTRIES) == 21
    assert all(entry.get("block_size") or entry.get("bytes_per_request") for entry in ENTRIES)
