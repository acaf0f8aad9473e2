"""Known bugs as patches of vLLM's own source, `mutants/vllm/*.patch`, and what finds them.

    python -m mutants.runner.vllm --python PYTHON [--weights released|exported|random|designed]
        [--out FILE.csv] [NAME ...]
    python -m mutants.runner.vllm --table

The exact model inside it, or the probes with random weights, or with those of a checkpoint whose
every operation is exact (`designed`: without a tolerance); the sanitizer plays again what failed of
the first. `--table` writes the tables of `mutants/vllm/README.md` from `mutants/vllm/found.csv`.
"""

from __future__ import annotations

from pathlib import Path

from hybrid_kv.check.exports.vllm import write_test
from hybrid_kv.check.probes.guarded import Guarded
from hybrid_kv.check.probes.reproducer import case_of, wrong_read
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.targets.exact import VOCABULARY
from mutants.runner.exported import EXPORTED, ExportedSearch
from mutants.runner.patched import RELEASED, PatchedEngine, main


def _wrong_read(guarded: Guarded, outcome: Outcome) -> str:
    """Return what the sanitizer saw first; "not async" and "not on a GPU" where it cannot run."""
    if not outcome.failures or guarded.vocab_size != VOCABULARY:
        return ""
    if outcome.settings.get("runner") != "cpu":
        return "not on a GPU"
    if outcome.settings.get("async") == "on":
        return "not async"
    case = case_of(outcome.failures[-1], "vllm", guarded.version, "exact", 0.0)
    return wrong_read(guarded, case) or "nothing"


VLLM = PatchedEngine(
    "vllm",
    "vLLM",
    levels={"runner": "cpu"},  # patches of the runners of GPUs name theirs
    variants={RELEASED: {}, EXPORTED: {}},
    checkpoints={"random": "small", "designed": "exact"},
    # A delta net on a CPU takes no other dtype.
    families={"qwen3_5_text": {"dtype": "bfloat16"}, "granitemoehybrid": {}},
    # n-grams change these models' answers as it is: `examples/found/vllm_no_drafts.py`.
    without=("spec=", "not run: with drafts it is wrong without the patch, too"),
    wrong_read=_wrong_read,
)


def _exported(python: str, folder: Path) -> ExportedSearch:
    write_test(folder)
    return ExportedSearch(VLLM, python, folder, "runner=v1")  # the test has no runner of CPUs


if __name__ == "__main__":
    main(VLLM, {EXPORTED: _exported})
