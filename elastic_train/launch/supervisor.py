"""Keeps a coordinator running for as long as the job goes on: one that dies is started again, within a budget."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from elastic_train.config import FaultConfig
from elastic_train.errors import ElasticTrainError, GaveUpError
from elastic_train.launch.coordinator_process import EXIT_NEXT, CoordinatorProcess, Task
from elastic_train.launch.signals import POLL_S
from elastic_train.membership.group import Identity

RETRY_S = 1.0
"""Pause before a coordinator is started again that has died before it began."""

BEGIN_LIMIT_S = 120.0
"""How long a coordinator may take until it serves; then it is killed."""

MAX_TICK_S = 1.0
"""So much of a pause between two looks counts as the coordinator's silence. The rest is our own: we were stopped."""


class Refused(ElasticTrainError):
    """The coordinator cannot begin."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Restarts:
    """The budget: at most `most` within any `window_s` seconds. Pure, but for what it remembers."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most, self._window_s = most, window_s
        self._times: deque[float] = deque()

    def allow(self, now: float) -> bool:
        """Whether one more may be made now; if so, it is counted."""
        while self._times and self._times[0] <= now - self._window_s:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """How the job has ended: the exit code, and what a person is told."""

    exit_code: int
    text: str


class Supervisor:
    """Called from one thread, several times a second. See `CoordinatorProcess` for whose thread that must be.

    Args:
      first: a process that has no task yet.
      task: that of the first coordinator. The port of its address is kept for those that follow.
      faults: budgets and limits.
      show, note: told what is to be shown.

    Attributes:
      address: of the control plane; empty until the first coordinator serves.
      on_ending: called when the job has ended, before its summary is written; it may write events.
      step, members: as last told; members are those that have a state, in the view's order.
    """

    def __init__(
        self,
        first: CoordinatorProcess,
        task: Task,
        faults: FaultConfig,
        show: Callable[[dict[str, Any]], None],
        note: Callable[[str], None],
    ) -> None:
        self._process: CoordinatorProcess | None = first
        self._task, self._faults, self._show, self._note = task, faults, show, note
        self._restarts = Restarts(faults.max_coordinator_restarts, faults.coordinator_restart_window_s)
        self._stop: dict[str, Any] | None = None
        self._evidence = ""
        self._serves = False
        self._silent_s, self._looked, self._retry_at = 0.0, time.monotonic(), 0.0
        self._lost_at = 0.0  # Unix time of its last sign, if it was killed for its silence
        self.address = ""
        self.step = 0
        self.members: tuple[Identity, ...] = ()
        self.end: JobEnd | None = None
        self.on_ending: Callable[[], None] = lambda: None
        first.begin(task)

    def wait_begun(self) -> None:
        """Returns when the first coordinator serves. Raises as `tick`."""
        while not self.address and self.end is None:
            self.tick()
            time.sleep(POLL_S / 10)

    def tick(self) -> None:
        """Looks after the coordinator; after the end, too, for as long as others are to be told of it.

        Raises:
          GaveUpError: the budget is spent.
          Refused: the first coordinator cannot begin.
        """
        now = time.monotonic()
        self._silent_s += min(now - self._looked, MAX_TICK_S)
        self._looked = now
        if self._process is None:
            if now >= self._retry_at:
                self._start()
            return
        for message in self._process.messages():
            self._silent_s = 0.0
            if message is None:
                self._died(self._process.kill())
                return
            self._take(message)
        limit_s = 3 * self._faults.keepalive_s if self._serves else BEGIN_LIMIT_S
        if self._silent_s > limit_s:
            self._evidence = f"it was silent for {limit_s:g} s, and was killed"
            self._lost_at = time.time() - self._silent_s
            self._process.kill()  # its end comes as a message

    def stop(self, now: bool, reason: str) -> None:
        """Asks for an agreed stop, or a stop at once. A coordinator that comes later is asked again."""
        self._stop = {"now": now, "reason": reason}
        self._order({"stop": self._stop})

    def event(self, name: str, /, **fields: Any) -> None:
        """Writes an event into the run's records."""
        self._order({"event": [name, fields]})

    def close(self) -> None:
        """Ends the coordinator. Worker processes must be gone before: JAX aborts them."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _order(self, order: dict[str, Any]) -> None:
        if self._process is not None:
            self._process.order(order)

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"note": text}:
                self._note(text)
            case {"show": shown}:
                self.step = shown["step"]
                self.members = tuple(Identity(*member) for member in shown.pop("able"))
                self._show(shown)
            case {"started": {"address": address}}:
                self._serves = True
                self.address = address
                port = address.rpartition(":")[2]
                bind = f"{self._task.bind.rpartition(':')[0]}:{port}"
                self._task = dataclasses.replace(self._task, bind=bind, continues=True, resume=None)
                if self._stop is not None and self._stop["now"]:
                    self._order({"stop": self._stop})
            case {"ending": _}:
                self.on_ending()
                self._order({"finish": True})
            case {"ended": end} if self.end is None:
                self.end = JobEnd(end["exit_code"], end["text"])
            case {"refused": refusal}:
                if not self.address:
                    raise Refused(refusal["message"], refusal["exit_code"])
                self._evidence = refusal["message"]

    def _died(self, exit_code: int) -> None:
        self._process = None
        on_purpose = exit_code == EXIT_NEXT
        evidence = self._evidence or (f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}")
        self._evidence = ""
        self._retry_at = time.monotonic() + (0.0 if self._serves else RETRY_S)
        # Until one has noted it, it is the first of several deaths that counts.
        lost = {} if on_purpose else self._task.lost if not self._serves else {}
        found = {} if on_purpose else {"exit_code": exit_code, "time": self._lost_at or time.time()}
        self._task = dataclasses.replace(self._task, lost=lost or found)
        self._serves, self._lost_at = False, 0.0
        if on_purpose:
            return
        if not self._restarts.allow(time.monotonic()):
            if self.end is not None:
                self._retry_at = float("inf")
                return
            faults = self._faults
            raise GaveUpError(
                f"gave up: the coordinator has died again ({evidence}), after {faults.max_coordinator_restarts} "
                f"restarts within {faults.coordinator_restart_window_s:g} s (faults.max_coordinator_restarts, "
                "faults.coordinator_restart_window_s). All workers were ended. Look for the reason above; the same "
                "command then goes on from the newest checkpoint."
            )
        self._note(
            f"the coordinator has died ({evidence}): it is started again"
            + (", to tell of the end" if self.end else ", and the workers bring their state back" if self.step else "")
        )

    def _start(self) -> None:
        self._silent_s = 0.0
        if self._stop is not None:
            self._task = dataclasses.replace(self._task, stop_wanted=self._stop["reason"])
        self._process = CoordinatorProcess()
        self._process.begin(self._task)
