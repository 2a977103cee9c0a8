"""One thread that does all the work put into its inbox, and calls named timers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Call = Callable[[], None]


class EventLoop:
    """Runs calls one after the other in the order in which they were posted.

    Args:
      on_failure: called in the loop's thread with what a call raised; the loop goes on.
    """

    def __init__(self, name: str, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._timers: dict[str, tuple[float, Call]] = {}
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
        self._timers[name] = (time.monotonic() + delay_s, call)

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

    def _next(self) -> Call:
        """Waits for the next thing to do. Timers that are over come first: their delay is a promise."""
        while self._timers:
            name, (deadline, call) = min(self._timers.items(), key=lambda timer: timer[1][0])
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                del self._timers[name]
                return call
            try:
                return self._inbox.get(timeout=left_s)
            except queue.Empty:
                continue
        return self._inbox.get()
