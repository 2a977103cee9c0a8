"""How long a worker was in which phase of its work. Pure, but for the clock that it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class PhaseTimes:
    """Seconds by phase, from one `take` to the next. Used from one thread.

    Args:
      clock: seconds that only ascend.
      phase: the one that the worker is in now.
      since: when it began; now, if that is not said.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, phase: str = "prepare", since: float | None = None
    ) -> None:
        self._clock, self._phase, self._since = clock, phase, clock() if since is None else since
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """Another phase begins; naming the same one again changes nothing."""
        now = self._clock()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """The time since the last call, to the microsecond: its parts are all of it. The phase goes on."""
        self.enter(self._phase)
        taken, self._seconds = self._seconds, {}
        return {phase: round(seconds, 6) for phase, seconds in taken.items()}


def added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Both together, phase by phase."""
    return {phase: first.get(phase, 0.0) + second.get(phase, 0.0) for phase in {**first, **second}}
