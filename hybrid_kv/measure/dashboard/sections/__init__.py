"""The sections of the page.

A section is a function that takes the report and returns its finding with HTML, or None without
rows. Adding one is a function and a line of `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable

from hybrid_kv.measure.dashboard.report import Report, Section
from hybrid_kv.measure.dashboard.sections.checks import accuracy, drafts_and_hits, swarms
from hybrid_kv.measure.dashboard.sections.expansion import kernel_blocks
from hybrid_kv.measure.dashboard.sections.history import history
from hybrid_kv.measure.dashboard.sections.status import commits, failing_now, suites
from hybrid_kv.measure.dashboard.sections.times import (
    comparison,
    gpu,
    operating_curve,
    other_engines,
    static_kernel_metrics,
)

# In the order of the page, each with the command that measures it; empty: not listed where rows are
# missing.
SECTIONS: dict[Callable[[Report], Section | None], str] = {
    failing_now: "",
    suites: "hybrid-kv guard --record",
    history: "make history",
    commits: "",
    swarms: "",
    comparison: "hybrid-kv compare HEAD~1 HEAD --record",
    other_engines: "make bench",
    kernel_blocks: "make bench",
    gpu: "make gpu-bench",
    accuracy: "hybrid-kv accuracy --record",
    drafts_and_hits: "hybrid-kv guard --record",
    static_kernel_metrics: "hybrid-kv kernels --update",
    operating_curve: "hybrid-kv compare --self-test --record",
}
