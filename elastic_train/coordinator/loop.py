"""One thread that does all the work put into its inbox, and calls named timers."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable

Call = Callable[[], None]

MIN_STALE = 64
"""So many deadlines of timers that were replaced or dropped may be left before they are cleared away."""


class EventLoop:
    """Runs calls one after the other in the order in which they were posted.

    Args:
      on_failure: called in the loop's thread with what a call raised; the loop goes on.
    """

    def __init__(self, name: str, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        # Deadlines in a heap; an entry counts while its number is still that of its name's timer.
        self._timers: dict[str, tuple[int, Call]] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Call) -> None:
        """Queues `call`. From any thread; never blocks."""
        self._inbox.put(call)

    def stop(self) -> None:
        """Returns when everything posted before is done; drops the timers. Not from the loop's thread."""
        self._inbox.put(self._stop)
        self._thread.join()

    # From the loop's thread only:

    def after(self, name: str, delay_s: float, call: Call) -> None:
        """Calls `call` in `delay_s` seconds; replaces a timer of the same name."""
        number = next(self._numbers)
        self._timers[name] = number, call
        heapq.heappush(self._deadlines, (time.monotonic() + delay_s, number, name))
        if len(self._deadlines) > 2 * len(self._timers) + MIN_STALE:
            self._deadlines = [each for each in self._deadlines if self._counts(each)]
            heapq.heapify(self._deadlines)

    def waits_for(self, name: str) -> bool:
        return name in self._timers

    def cancel(self, name: str) -> None:
        """Drops the timer `name`, if there is one."""
        self._timers.pop(name, None)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._next()()
            except Exception as error:
                self._on_failure(error)

    def _counts(self, deadline: tuple[float, int, str]) -> bool:
        _, number, name = deadline
        return self._timers.get(name, (None,))[0] == number

    def _next(self) -> Call:
        """Waits for the next thing to do. Timers that are over come first: their delay is a promise."""
        while self._deadlines:
            deadline, _, name = self._deadlines[0]
            is_stale = not self._counts(self._deadlines[0])
            left_s = deadline - time.monotonic()
            if is_stale or left_s <= 0:
                heapq.heappop(self._deadlines)
                if is_stale:
                    continue
                return self._timers.pop(name)[1]
            try:
                return self._inbox.get(timeout=left_s)
            except queue.Empty:
                continue
        return self._inbox.get()
