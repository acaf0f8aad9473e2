"""Cases that can be timed, whose results are checked before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ENGINE = "engine"  # the subject that rivals are compared with


class WrongResultError(AssertionError):
    """A case's result is wrong, so its time means nothing."""


def nothing() -> None:
    """Reset nothing: for a case that leaves nothing behind."""


@dataclass(frozen=True)
class TimedCase:
    """Something to time.

    Its inputs exist already; nothing but `run` may lie between two readings of a clock.

    Attributes:
        run: one call. On a GPU it only launches; `hybrid_kv.measure.timing.clock.DeviceSubject`
            synchronises.
        check: run it on fresh state; the largest error against a reference that is not the code
            timed. Raises `WrongResultError` beyond its tolerance. It may be called at any time
            between samples.
        reset: restore the state that `run` needs; called before every sample, untimed.
        max_repeats: `run` may be called this often after one `reset`.
    """

    run: Callable[[], object]
    check: Callable[[], float]
    reset: Callable[[], object] = nothing
    max_repeats: int = 1000


def checked(name: str, case: TimedCase) -> float:
    """Return the largest error of the case.

    Raises:
        WrongResultError: it is beyond the case's tolerance, or not a finite number; the message
            begins with `name`.
    """
    try:
        error = case.check()
    except WrongResultError as wrong:
        raise WrongResultError(f"{name}: {wrong}") from None
    if not 0 <= error < float("inf"):
        raise WrongResultError(f"{name}: an error of {error} proves nothing")
    return error
