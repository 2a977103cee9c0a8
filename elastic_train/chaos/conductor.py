"""The part of chaos in the job's own process: gives orders when they are due, sends signals, keeps the record."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from elastic_train.chaos.faults import Fault, to_toml
from elastic_train.chaos.orders import Order, Orders, Strike
from elastic_train.chaos.schedule import SURVIVED, Planned, aim, num_taken, schedule_toml
from elastic_train.chaos.turns import is_spaced, may_begin
from elastic_train.membership.group import Identity

SETTLE_LIMIT_S = 120.0
"""How long a worker that was struck may stay a member until the next random fault no longer waits for its death."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}


class Job(Protocol):
    """What the conductor sees of the job, and can do to it."""

    @property
    def members(self) -> tuple[Identity, ...]:
        """Those that have taken a step, so that they have a state. In the view's order: the oldest first."""
        ...

    @property
    def step(self) -> int: ...

    def signal(self, identity: Identity, number: signal.Signals) -> bool:
        """Sends a signal to a worker; whether it was still there."""
        ...

    def event(self, name: str, /, **fields: Any) -> None: ...

    def note(self, text: str) -> None:
        """Shows a line to a person."""
        ...

    def stop(self, reason: str) -> None:
        """Asks the members to stop after a commit."""
        ...


@dataclass
class _Given:
    """A fault that is due; `strike` tells of the first worker it has struck. `number` is None before it is given."""

    order: Order
    planned: Planned
    strike: Strike | None = None


class Conductor:
    """Carries out a schedule. `tick` is called several times a second by one thread, `finish` by any.

    Args:
      planned: all faults.
      workers, max_down: see `turns.may_begin`.
      directory: `chaos/` in the run directory.
      job: the job.
      clock: gives Unix time.
      stop_after_steps: see `Schedule`. If it is given, a person is told how far the schedule is.

    Raises OSError.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        workers: int,
        max_down: int,
        directory: Path,
        job: Job,
        clock: Callable[[], float] = time.time,
        stop_after_steps: int | None = None,
    ) -> None:
        self._workers, self._max_down, self._job, self._clock = workers, max_down, job, clock
        self._orders = Orders(directory)
        self._orders.create()
        (directory / "schedule.toml").write_text(schedule_toml(planned), encoding="utf-8")
        self._injected = directory / "injected.toml"
        self._written = [each for each in planned if not each.waits]
        self._waiting = [each for each in planned if each.waits]
        self._given: dict[int, _Given] = {}
        self._outside: list[_Given] = []
        self._strikes: dict[str, Strike] = {}
        self._to_wake: list[tuple[float, Identity]] = []
        self._struck_at = -1  # completed steps at the newest strike
        self._first_step_at: float | None = None
        self._stop_after_steps, self._num_faults = stop_after_steps, sum(len(each.faults) for each in planned)
        self._survived_at: int | None = None  # completed steps when nothing was left to strike or to come back
        self._lock = threading.Lock()
        self._finished = False
        # Workers know their step better than this process: they get these at once, and strike exactly there.
        for each in [each for each in self._written if _is_exact(each.faults[0])]:
            self._written.remove(each)
            self._give(each, None)

    def tick(self) -> None:
        """Does what is due now; nothing once it has finished."""
        with self._lock:
            if not self._finished:
                self._tick()

    def _tick(self) -> None:
        now = self._clock()
        step = self._job.step
        if self._first_step_at is None and step > 0:
            self._first_step_at = now
        self._collect()
        if any(identity in self._job.members for _, identity in self._to_wake):
            self._struck_at = max(self._struck_at, step)  # a stop is a strike for as long as it lasts
        for _, identity in [each for each in self._to_wake if each[0] <= now]:
            self._job.signal(identity, signal.SIGCONT)
        self._to_wake = [each for each in self._to_wake if each[0] > now]
        for each in [each for each in self._written if self._is_time(each, step, now)]:
            self._written.remove(each)
            self._give(each, step)
        # In their order, one at a time: each begins only when the one before has settled.
        if (
            self._waiting
            and self._is_time(self._waiting[0], step, now)
            and (aimed := self._begins(self._waiting[0], now))
        ):
            del self._waiting[0]
            self._give(aimed, step)
        for given in list(self._outside):
            self._strike_from_outside(given, step, now)
        if self._stop_after_steps is not None:
            self._stop_when_survived(self._stop_after_steps, step, now)

    def _stop_when_survived(self, stop_after_steps: int, step: int, now: float) -> None:
        if not self._is_survived(now):
            self._survived_at = None
        elif self._survived_at is None:
            self._survived_at = step
            self._job.note(f"{SURVIVED}: the job stops after {stop_after_steps} more steps")
        elif step >= self._survived_at + stop_after_steps:
            self._stop_after_steps = None
            self._job.stop(SURVIVED)

    def _is_survived(self, now: float) -> bool:
        """Whether all faults have struck, those who are gone because of them are back, and a step was taken since."""
        has_struck = not self._written and not self._waiting and all(given.strike for given in self._given.values())
        are_back = self._is_settled(now) and len(self._job.members) >= self._workers
        is_awake = not any(identity in self._job.members for _, identity in self._to_wake)
        return has_struck and are_back and is_awake and self._job.step > self._struck_at

    def finish(self) -> None:
        """Notes the last strikes, and the faults that found no occasion. Does nothing the second time."""
        with self._lock:
            if not self._finished:
                self._finished = True
                self._tell_missed()

    def _tell_missed(self) -> None:
        self._collect()
        missed = [given.order.fault for given in self._given.values() if given.strike is None]
        missed += [fault for each in (*self._written, *self._waiting) for fault in each.faults]
        if missed:
            self._job.event("faults_missed", faults=[fault.as_table() for fault in missed])

    def _is_time(self, planned: Planned, step: int, now: float) -> bool:
        if planned.step is not None:
            return step >= planned.step
        if self._first_step_at is None or planned.after_s is None:
            return False
        return now >= self._first_step_at + planned.after_s

    def _begins(self, planned: Planned, now: float) -> Planned | None:
        """The faults, aimed at members, if they may strike now."""
        slots = sorted(member.slot for member in self._job.members)
        pending = [given.order.fault for given in self._given.values() if given.strike is None]
        if self._is_patient(planned) and not is_spaced(pending, self._struck_at, self._job.step):
            return None
        settled = self._is_settled(now)
        if not may_begin(planned, slots, self._workers, self._max_down, num_taken(pending), settled):
            return None
        return aim(planned, slots)

    def _is_patient(self, planned: Planned) -> bool:
        return planned.waits and self._max_down == 0

    def _is_settled(self, now: float) -> bool:
        members = set(self._job.members)
        doomed = (given.strike for given in self._given.values() if given.strike and given.order.fault.is_lethal)
        return not any(strike.identity in members and now - strike.time < SETTLE_LIMIT_S for strike in doomed)

    def _give(self, planned: Planned, step: int | None) -> None:
        for fault in planned.faults:
            if step is not None:  # now, or as soon as the worker is at that place
                fault = replace(fault, step=step, after_s=None)
            given = _Given(Order(len(self._given), fault, alone=self._is_patient(planned)), planned)
            self._given[given.order.number] = given
            if fault.is_outside:
                self._outside.append(given)
            else:
                self._orders.give(given.order)

    def _strike_from_outside(self, given: _Given, step: int, now: float) -> None:
        fault = given.order.fault
        members = self._job.members
        if step < (fault.step or 0) or not members:
            return
        by_slot = {member.slot: member for member in members}
        roles = {"first": members[0], "last": members[-1]}
        identity = by_slot.get(fault.slot) if isinstance(fault.slot, int) else roles[fault.slot]
        if identity is not None and self._job.signal(identity, SIGNALS[fault.kind]):
            self._outside.remove(given)
            strike = Strike(given.order.number, identity, step, now)
            self._note(f"{given.order.number}.outside", strike)

    def _collect(self) -> None:
        for name, strike in self._orders.strikes(self._strikes).items():
            self._note(name, strike)

    def _note(self, name: str, strike: Strike) -> None:
        self._strikes[name] = strike
        given = self._given[strike.number]
        fault = given.order.fault
        if given.strike is None:
            given.strike = strike
            self._tell_progress(fault, strike)
        if fault.kind == "stop":
            self._to_wake.append((strike.time + (fault.duration_s or 0.0), strike.identity))
        # Written so that it strikes there again. A worker without a state knows neither its step nor, in another
        # run, its slot: it is the one that comes after the step at which this fault was due.
        slot = "joiner" if fault.slot == "joiner" else strike.identity.slot
        exact = replace(fault, step=fault.step if fault.strikes_new else strike.step, slot=slot)
        with self._injected.open("a", encoding="utf-8") as file:
            file.write(to_toml(exact) + "\n")
        about = {"number": strike.number, "scenario": given.planned.name, **strike.identity._asdict()}
        about["step"] = self._job.step if fault.strikes_new else strike.step
        self._struck_at = max(self._struck_at, about["step"])
        about |= {"kind": fault.kind, "where": fault.where, "lethal": fault.is_lethal}
        self._job.event("fault_injected", **about, fault=exact.as_table(), reported_time=strike.time)

    def _tell_progress(self, fault: Fault, strike: Strike) -> None:
        if self._stop_after_steps is None:
            return
        number = sum(given.strike is not None for given in self._given.values())
        step = self._job.step if fault.strikes_new else strike.step
        place = f"{fault.kind}, {fault.where}, slot {strike.identity.slot}, after step {step}"
        self._job.note(f"fault {number} of {self._num_faults} has struck ({place})")


def _is_exact(fault: Fault) -> bool:
    """Whether a worker can tell by itself when it is due: by its step."""
    return fault.step is not None and not fault.is_outside and (not fault.strikes_new or fault.step == 0)
