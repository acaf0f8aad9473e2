"""Faults of a night, and how the night ends with each."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass

from rehearsal.github import git
from rehearsal.night import Night
from rehearsal.tools import RUN_ID

NUM_COLUMNS = 22  # of a row


@dataclass(frozen=True)
class Promise:
    """The end of a night.

    Attributes:
        failed: the steps that fail.
        alarm: what the alarm says.
        is_published: whether rows and pages are.
        log: of the step that says `message`, once.
    """

    failed: tuple[str, ...]
    alarm: tuple[str, ...]
    is_published: bool
    log: str = ""
    message: str = ""


PROMISES = {
    "step": Promise(
        failed=("gpu: make gpu-guard",),
        alarm=("failed: gpu-guard --", "\nmake gpu-guard\n"),
        is_published=True,
    ),
    "no-gpu": Promise(
        failed=("gpu: make gpu-test", "gpu: make gpu-guard", "gpu: make gpu-bench"),
        alarm=("failed: gpu-test, gpu-guard, gpu-bench --", "\nmake gpu-test\n"),
        is_published=True,
    ),
    "disk": Promise(
        failed=("gpu: make gpu-bench",),
        alarm=("failed: gpu-bench --",),
        is_published=True,
        log="gpu-4",
        message="File too large",
    ),
    "token": Promise(
        failed=("push: make push-results",),
        alarm=("failed: a job died --",),
        is_published=False,
        log="push-2",
        message="no right",
    ),
    "force-push": Promise(
        failed=("push: make push-results",),
        alarm=("failed: a job died --",),
        is_published=False,
        log="push-2",
        message="the beginning",
    ),
}


def differences(night: Night) -> Iterator[str]:
    """Yield where a night with a fault did not end as promised."""
    promise = PROMISES[night.fault]
    github = night.github
    if tuple(night.failed) != promise.failed:
        yield f"failed were {night.failed}"
    alarm = github.calls.read_text() if github.calls.exists() else ""
    for text in promise.alarm:
        if text not in alarm:
            yield f"the alarm lacks {text!r}"
    if (
        promise.log
        and (github.folder / f"{promise.log}.log").read_text().count(promise.message) != 1
    ):
        yield f"{promise.log} must say {promise.message!r} once"
    yield from published_differences(night, promise)


def published_differences(night: Night, promise: Promise) -> Iterator[str]:
    """Yield what of rows and pages is not as promised."""
    github = night.github
    files = github.branch()
    is_pushed = git("rev-parse", "results", at=github.remote) != github.unchanged
    if not is_pushed == github.site.exists() == promise.is_published:
        yield f"rows and pages must {'' if promise.is_published else 'not '}be published"
    has_row = any(RUN_ID in line for line in files["results/guard.csv"])
    if night.fault != "no-gpu" and has_row != promise.is_published:
        yield "rows of this night"
    for name, lines in files.items():
        if {len(cells) for cells in csv.reader(lines)} != {NUM_COLUMNS}:
            yield f"{name} has a torn row"
