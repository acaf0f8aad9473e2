"""A checkout of a toy package whose commits say what `guard --replay` prints, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.harness.toy import git

# A commit's answer is the text in hybrid_kv/ANSWER: a rule that is broken, or none.
MAIN = """
import sys
from pathlib import Path

rule = (Path(__file__).parents[1] / "ANSWER").read_text()
if rule == "raise":
    raise ImportError("half a change")
print("scenario 0\\nstep 0: request 0")
print(f"broken rule: {rule}" if rule else "no rule is broken")
sys.exit(bool(rule))
"""


def commit(root: Path, files: Mapping[str, str], title: str = "commit") -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", title)
    return git(root, "rev-parse", "HEAD")


def checkout(root: Path, answers: Sequence[str]) -> list[str]:
    """A repository with a commit for each answer; the first one has the package."""
    git(root, "init", "-q", "-b", "main")
    package = {
        "hybrid_kv/__init__.py": "",
        "hybrid_kv/cli/__init__.py": "",
        "hybrid_kv/cli/__main__.py": MAIN,
    }
    made = []
    for number, answer in enumerate(answers):
        files = {
            "hybrid_kv/ANSWER": answer,
            "hybrid_kv/NUMBER": str(number),
            "constraints.txt": f"torch=={number}\n",
        }
        made.append(
            commit(root, {**files, **(package if number == 0 else {})}, f"toy: number {number}")
        )
    return made
