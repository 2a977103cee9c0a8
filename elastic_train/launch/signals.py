"""Signals as values: a handler may interrupt the main thread anywhere, so it only notes what came."""

from __future__ import annotations

import queue
import signal
from types import FrameType, TracebackType
from typing import Any

POLL_S = 0.1
"""How long a main thread waits for a signal before it looks after other things; nothing else waits for it."""


class Signals:
    """While entered, collects the given signals instead of letting them act. For the main thread only.

    Attributes:
      num_stops: how many SIGINT and SIGTERM `wait` has returned.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}
        # A handler may interrupt `get` on this queue: SimpleQueue allows that, Queue would block for ever.
        self._came: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self.num_stops = 0

    def __enter__(self) -> Signals:
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, timeout_s: float) -> list[signal.Signals]:
        """The next signal, in a list; an empty one if none comes within `timeout_s`."""
        try:
            number = self._came.get(timeout=timeout_s)
        except queue.Empty:
            return []
        if number in (signal.SIGINT, signal.SIGTERM):
            self.num_stops += 1
        return [number]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.put(signal.Signals(number))
