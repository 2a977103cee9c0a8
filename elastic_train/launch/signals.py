"""Signals as values: a handler may interrupt the main thread anywhere, so it only notes what came."""

from __future__ import annotations

import os
import queue
import signal
from types import FrameType, TracebackType
from typing import Any

POLL_S = 0.1
"""How long a main thread waits for a signal before it looks after other things; nothing else waits for it."""

ON_TSTP = (
    "SIGTSTP (Ctrl-Z): not stopped. Workers end when this process does not answer for longer than twice "
    "faults.keepalive_s. `elastic-train stop` stops the run after a commit; the same command goes on with it later."
)
"""What is said instead of stopping. SIGSTOP cannot be refused."""


class Signals:
    """While entered, collects the given signals instead of letting them act. For the main thread only.

    Args:
      numbers: what to collect.
      last: so many SIGINT and SIGTERM end the process at once with exit code 130, whatever it does; 0 for never.

    Attributes:
      num_stops: how many SIGINT and SIGTERM `wait` has returned.
    """

    def __init__(self, *numbers: signal.Signals, last: int = 0) -> None:
        self._numbers = numbers
        self._last = last
        self._stops_left = last
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
        if self._last and number in (signal.SIGINT, signal.SIGTERM):
            self._stops_left -= 1
            if self._stops_left == 0:
                # Not an exception: where a callback of the garbage collector is interrupted, it would be ignored.
                os.write(2, b"stopped at once, without a summary\n")
                os._exit(130)
