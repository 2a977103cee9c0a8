"""What faults have cost so far, while a job runs. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from elastic_train.telemetry.faults import find_faults, find_rejoins, time_lost

STEP_TIMES = 101
"""From how many steps the median is taken that the cost of a fault is computed with."""

_COSTLY = frozenset(
    {
        "coordinator_lost",
        "generation_began",
        "worker_started",
        "worker_killed",
        "worker_died",
        "worker_finished",
        "user_code_failed",
        "gradient_not_finite",
        "state_differs",
        "steps_repeated",
        "abort_sent",
        "view_changed",
        "recovered",
    }
)
"""The events that the cost is computed from."""


class Costs:
    """Keeps count of it.

    Attributes:
      time_lost_s: seconds lost to faults and rejoins; brought up to date at each recovery.
    """

    def __init__(self) -> None:
        self.time_lost_s = 0.0
        self._step_times: deque[float] = deque(maxlen=STEP_TIMES)
        self._events: list[dict[str, Any]] = []

    def step(self, step_time_s: float) -> None:
        """A step was committed, and took so long. An epoch's first step is none of those."""
        self._step_times.append(step_time_s)

    def event(self, line: Mapping[str, Any]) -> list[str]:
        """A line of events.jsonl. Returns what a person should know at once: who is a member again, and what that cost
        the others."""
        if line["event"] in _COSTLY:
            self._events.append({key: value for key, value in line.items() if key != "traceback"})
        if line["event"] != "recovered":
            return []
        step_time_s = statistics.median(self._step_times) if self._step_times else None
        rejoins = find_rejoins(self._events, step_time_s)
        self.time_lost_s = time_lost(find_faults(self._events, (), step_time_s), rejoins)
        if line["kind"] == "formed":
            return []
        notes = []
        for rejoin in rejoins[len(rejoins) - len(line["came"]) :]:
            start = "" if rejoin.incarnation is None else f" (incarnation {rejoin.incarnation})"
            again = " again" if rejoin.incarnation else ""
            notes.append(
                f"worker {rejoin.slot}{start} is a member{again} at step {rejoin.step}; "
                f"the others waited {rejoin.stall_s:.1f} s"
            )
        return notes
