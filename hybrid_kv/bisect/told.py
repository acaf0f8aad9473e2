"""What a bisect found, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hybrid_kv.bisect.history import Culprit, History, describe
from hybrid_kv.bisect.run import Finding
from hybrid_kv.results.origin import provenance


def document(history: History, finding: Finding) -> dict[str, Any]:
    """All of it, ready for JSON; `culprit` and `between` as git describes them."""
    here = provenance()
    parts = asdict(finding)
    parts["culprit"] = asdict(describe(history.root, finding.culprit)) if finding.culprit else None
    parts["between"] = [asdict(describe(history.root, commit)) for commit in finding.between]
    parts["measured_on"] = {"machine": here.machine, "python": here.python, "torch": here.torch, "triton": here.triton}
    return {
        "good": history.good.commit, "bad": history.bad.commit, "commits": len(history.commits), **parts
    }  # fmt: skip


def print_finding(history: History, finding: Finding) -> None:
    """The verdict first, then the commit, the evidence, and what else differed."""
    row = f"{len(history.commits)} commits that change hybrid_kv/, {finding.asked} asked, {finding.skipped} skipped"
    if finding.verdict == "nothing":
        print(f"nothing to blame: {finding.evidence.detail}")
        return
    culprit = describe(history.root, finding.culprit)
    if finding.verdict == "undecided":
        print(f"undecided: {culprit.line}, asked again, is not shown to be the one ({row})")
        print(f"evidence  {finding.evidence.detail}")
        return
    suspects = [describe(history.root, commit) for commit in finding.between]
    if suspects:
        print(f"one of {len(suspects) + 1} commits, the last of which is bad for sure ({row})")
        for suspect in suspects:
            print(f"  or {suspect.line}, which did not say")
    else:
        print(f"{culprit.commit[:9]} is the first bad commit ({row})")
    _print_commit(culprit)
    print(f"evidence  {finding.evidence.detail}")
    for line in finding.evidence.figures.get("story", ()):
        print(f"          {line}")
    print(f"packages  {', '.join(culprit.packages) or 'constraints.txt is the same before and after'}")
    here = provenance()
    print(f"asked on  {here.machine}, Python {here.python}, torch {here.torch}, the same for every commit")


def _print_commit(culprit: Culprit) -> None:
    print(f"commit    {culprit.commit}")
    print(f"author    {culprit.author}, {culprit.date}")
    print(f"title     {culprit.title}")
    for line in culprit.stat.splitlines():
        print(f"         {line}")
