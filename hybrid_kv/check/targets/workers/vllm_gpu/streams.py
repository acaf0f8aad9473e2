"""Streams and events of a device that computes at once, and what its host may rely on.

A stream counts what it was given. Streams, events and the host each keep how much of every stream
is ordered before what comes next: that is all a real device promises, whatever has long been
computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

_numbers = count()


class Progress(dict[int, int]):
    """The amount of work of each stream, by its number."""

    def merge(self, other: Progress) -> None:
        """Add what another one has."""
        for stream, done in other.items():
            self[stream] = max(self.get(stream, 0), done)


class Host:
    """The work that the host has waited for, and actions due once it has waited for more."""

    def __init__(self) -> None:
        self.progress = Progress()
        self._due: list[tuple[Stream, int, Callable[[], object]]] = []

    def when_done(self, stream: Stream, action: Callable[[], object]) -> None:
        """Call `action` when the host waits for what the stream was given so far."""
        self._due.append((stream, stream.given, action))

    def has_waited(self, stream: Stream, given: int) -> bool:
        """Return whether so much of a stream is known to be done."""
        return self.progress.get(stream.number, 0) >= given

    def wait(self, progress: Progress) -> None:
        """Wait for all of this."""
        self.progress.merge(progress)
        ready = [one for one in self._due if self.has_waited(one[0], one[1])]
        self._due = [one for one in self._due if one not in ready]
        for _, _, action in ready:
            action()


HOST = Host()


class Event:
    """A place in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._progress = Progress()

    def record(self, stream: Stream | None = None) -> None:
        """Mark what a stream, or the current one, was given so far."""
        self._progress = Progress(_given(stream).progress)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        HOST.wait(self._progress)

    def query(self) -> bool:
        """Return that it is over: everything here is, and a host that asks may rely on it."""
        self.synchronize()
        return True

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream, or the current one, wait for it."""
        _given(stream).progress.merge(self._progress)

    def elapsed_time(self, _: Event) -> float:
        """Return a constant, in milliseconds: nothing is timed here."""
        return 1.0


class Stream:
    """A queue of the device, which runs at once what it gets."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number, self.device, self._outer = next(_numbers), torch.device("cpu"), list[Stream]()
        self.progress = Progress({self.number: 0})

    @property
    def given(self) -> int:
        """Return the amount of work that the stream was given so far."""
        return self.progress[self.number]

    def give(self) -> int:
        """Count one more operation, and return how many there are now."""
        self.progress[self.number] += 1
        return self.given

    def wait_stream(self, other: Stream) -> None:
        """Run what comes next after all that another stream was given so far."""
        self.progress.merge(other.progress)

    def wait_event(self, event: Event) -> None:
        """Run what comes next after an event."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event, a new one if none is given, at this place."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all it was given."""
        HOST.wait(self.progress)

    def query(self) -> bool:
        """Return that it is done, see `Event.query`."""
        self.synchronize()
        return True

    def __enter__(self) -> Stream:
        self._outer.append(current())
        set_current(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_current(self._outer.pop())


MAIN = Stream()
_current = [MAIN]


def current() -> Stream:
    """Return the stream that gets what is launched now."""
    return _current[0]


def set_current(stream: Stream) -> None:
    """Let a stream get what is launched from now on."""
    _current[0] = stream


def _given(stream: Stream | None) -> Stream:
    return current() if stream is None else stream


@contextmanager
def within(stream: Stream | None) -> Iterator[Stream | None]:
    """Let a stream get what is launched as long as the context lasts."""
    outer = current()
    set_current(stream or outer)
    try:
        yield stream
    finally:
        set_current(outer)


def wait_for_all(*_: Any, **__: Any) -> None:
    """Let the host wait for every stream."""
    everything = Progress(HOST.progress)
    for stream, given, _action in HOST._due:
        everything.merge(Progress({stream.number: given}))
    everything.merge(current().progress)
    everything.merge(MAIN.progress)
    HOST.wait(everything)


def install() -> None:
    """Let `torch.cuda` and `torch.accelerator` have these."""
    names = {
        "Stream": Stream,
        "Event": Event,
        "stream": within,
        "current_stream": lambda *_: current(),
        "default_stream": lambda *_: MAIN,
        "set_stream": set_current,
        "synchronize": wait_for_all,
    }
    for name, value in names.items():
        setattr(torch.cuda, name, value)
    setattr(torch.accelerator, "synchronize", wait_for_all)  # noqa: B010  (other types)
    setattr(torch.accelerator, "current_stream", lambda *_: current())  # noqa: B010
    torch.Event, torch.Stream = Event, Stream  # type: ignore[misc,assignment]
