"""Benchmarks that are right, and one that is right only so many times."""

from bench.harness.cells import Case, Cell, WrongResultError


def cell(make, tier="cpu", promise=None, **params):
    return Cell(
        "offload",
        "b",
        params,
        tier,
        make,
        quick=True,
        promise=promise,
        units={"blocks": "blocks"} if tier == "count" else {},
    )


def steady(error=0.0):
    return Case(lambda: None, lambda: error)


def failing_after(count, error=None):
    """Right `count` times; then beyond its tolerance, or with this error."""
    left = [count]

    def check():
        left[0] -= 1
        if left[0] >= 0:
            return 0.0
        if error is None:
            raise WrongResultError("the injected mistake")
        return error

    return Case(lambda: None, check)
