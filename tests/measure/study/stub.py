"""A study's program: appends a row made of its words, or does as one of them says."""

import os
import sys
import time
from pathlib import Path

from hybrid_kv.measure.results import Row, append, append_rows
from hybrid_kv.measure.results.origin import Provenance

# without torch: seconds
append.provenance = lambda: Provenance(
    run_id="study",
    commit="",
    dirty=False,
    device="cpu",
    machine="stub",
    python="3",
    torch="2",
    triton="",
)

*words, option, folder = sys.argv[1:]
assert option == "--results"
if "sleep" in words:
    Path(words[-1]).write_text(str(os.getpid()))
    time.sleep(600)
if "refused" in words:
    print("error: no such thing", file=sys.stderr)
    raise SystemExit(2)
if "once" in words and not (marker := Path(words[words.index("once") + 1])).exists():
    marker.touch()
    raise SystemExit(70)
level = next((int(word.removeprefix("--n=")) for word in words if word.startswith("--n=")), 0)
append_rows(f"{folder}/made.csv", [Row("study", "stub", "squares", level**2, "", {"n": level})])
raise SystemExit(3 if "void" in words else int("failed" in words))
