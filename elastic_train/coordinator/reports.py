"""What workers say about themselves: where they are while they train, and what they ended with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from elastic_train.coordinator import control_pb2
from elastic_train.membership.group import Identity, View, name_slots
from elastic_train.membership.stragglers import Work

NUM_STEP_TIMES = 32
"""Over how many times of late the median step time is taken."""


@dataclass(frozen=True)
class Report:
    """The newest word of one worker. Times are seconds of the monotonic clock.

    Attributes:
      since: when it was first known to do what it does.
      heard: when this arrived.
    """

    step: int = 0
    phase: str = ""
    beats: int = 0
    work: Work = field(default_factory=Work)
    since: float = 0.0
    heard: float = 0.0


class Reports:
    """The newest report of every worker. `step` may be called from any thread."""

    def __init__(self) -> None:
        self._newest: dict[int, Report] = {}
        self._quiet_since = time.monotonic()
        self._furthest = (0, self._quiet_since)
        self._step_times: deque[float] = deque(maxlen=NUM_STEP_TIMES)

    def add(self, identity: Identity, progress: control_pb2.Progress) -> bool:
        """Returns whether the worker's step has changed."""
        now = time.monotonic()
        before = self._newest.get(identity.node)
        moves = before is None or before.beats != progress.beats
        work = Work(progress.work_s, progress.num_shards, progress.num_worked_steps)
        since = now if before is None or moves else before.since
        self._newest[identity.node] = Report(progress.step, progress.phase, progress.beats, work, since, now)
        changed = before is None or before.step != progress.step
        if changed:
            self.rest()
            self._time_steps(progress.step, now)
        return changed

    def _time_steps(self, step: int, now: float) -> None:
        before, then = self._furthest
        if step > before:
            if before:  # what lies before the first report is no step
                self._step_times.append((now - then) / (step - before))
            self._furthest = step, now

    @property
    def step_time_s(self) -> float:
        """The median step time of late; 0 if it is not known yet."""
        return median(self._step_times) if self._step_times else 0.0

    def of(self, identity: Identity) -> Report | None:
        """A worker's newest report."""
        return self._newest.get(identity.node)

    def rest(self) -> None:
        """Begins `quiet_s` anew: nothing is expected to happen now."""
        self._quiet_since = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """Seconds since any worker's step changed."""
        return time.monotonic() - self._quiet_since

    def step(self, view: View, default: int) -> int:
        """The newest step that a member of `view` has reported."""
        newest = self._newest
        return max((newest[node].step for node in view.nodes if node in newest), default=default)

    def phases(self, view: View) -> dict[int, str]:
        """What the members did last, by slot; empty if one has not said yet."""
        return {member.slot: self._newest.get(member.node, Report()).phase for member in view.members}


def phases_in_words(phases: Mapping[int, str]) -> str:
    """What slots do, those that do the same together.

    >>> phases_in_words({0: "barrier", 1: "barrier", 2: "data", 3: ""})
    "slots 0, 1 in 'barrier', slot 2 in 'data', slot 3 in no phase yet"
    """
    together: dict[str, list[int]] = {}
    for slot, phase in sorted(phases.items()):
        together.setdefault(phase, []).append(slot)
    return ", ".join(
        f"{name_slots(slots)} in {repr(phase) if phase else 'no phase yet'}" for phase, slots in together.items()
    )


def different_ends(finished: Mapping[int, control_pb2.Finished]) -> dict[int, tuple[int, str, str]]:
    """Step and digests (parameters, state) by slot if they are not all equal, as they must be; else empty."""
    ends = {
        slot: (report.step, report.params_sha256, report.state_sha256)
        for slot, report in sorted(finished.items())
        if report.status in ("done", "stopped")
    }
    return ends if len(set(ends.values())) > 1 else {}
