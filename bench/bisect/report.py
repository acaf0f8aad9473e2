"""The result of a bisect, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.bisect.find import Finding
from bench.bisect.history import History, describe
from hybrid_kv.measure.results.origin import provenance


def document(history: History, finding: Finding) -> dict[str, Any]:
    """Return all of it for JSON, with `first_bad` and `between` as git describes them."""
    here = provenance()
    parts = asdict(finding)
    parts["first_bad"] = (
        asdict(describe(history.root, finding.first_bad)) if finding.first_bad else None
    )
    parts["between"] = [asdict(describe(history.root, commit)) for commit in finding.between]
    parts["measured_on"] = {
        "machine": here.machine,
        "python": here.python,
        "torch": here.torch,
        "triton": here.triton,
    }
    return {
        "good": history.good.commit,
        "bad": history.bad.commit,
        "commits": len(history.commits),
        **parts,
    }


def print_finding(history: History, finding: Finding) -> None:
    """Print the verdict, the commit, the evidence, and what else differed."""
    commits = f"{len(history.commits)} commits that change hybrid_kv/"
    row = f"{commits}, {finding.tested} tested, {finding.skipped} skipped"
    if finding.verdict == "nothing":
        print(f"nothing to bisect: {finding.evidence.detail}")
        return
    found = describe(history.root, finding.first_bad)
    if finding.verdict == "undecided":
        print(f"undecided: another test does not confirm {found.line} ({row})")
        print(f"evidence  {finding.evidence.detail}")
        return
    if finding.between:
        print(
            f"the first bad commit is one of {len(finding.between) + 1}, "
            f"of which the last is bad ({row})"
        )
        for commit in finding.between:
            print(f"  or {describe(history.root, commit).line}, which was skipped")
    else:
        print(f"{found.commit[:9]} is the first bad commit ({row})")
    print(f"commit    {found.commit}")
    print(f"author    {found.author}, {found.date}")
    print(f"title     {found.title}")
    for line in found.stat.splitlines():
        print(f"         {line}")
    print(f"evidence  {finding.evidence.detail}")
    for line in finding.evidence.metrics.get("story", ()):
        print(f"          {line}")
    print(
        f"packages  {', '.join(found.packages) or 'constraints.txt is the same before and after'}"
    )
    here = provenance()
    print(
        f"tested on {here.machine}, Python {here.python}, torch {here.torch}, "
        "the same for every commit"
    )
