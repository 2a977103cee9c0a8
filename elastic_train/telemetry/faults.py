"""What each fault and each rejoin cost, read from the events of a job. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Event = Mapping[str, Any]


def moment(event: Event) -> float:
    """When it happened, in Unix time: by the clock of who saw it, else the time of the note."""
    return event.get("reported_time", event["time"])


@dataclass(frozen=True)
class Fault:
    """One fault. Times are seconds; None where the job ended before the value was known.

    Attributes:
      kind: "killed" (by a signal), "exited" (by itself), "stopped" (alive but silent, so it was killed), "stuck" (it
        held up the others for too long, so it was killed), "slow" (a straggler that was replaced), "raised" (user code
        raised, the step was tried again, nobody died), "nonfinite" (its gradient was not finite: the step was tried
        again or skipped), "differs" (it held another state than the others, and received theirs) or "coordinator" (that
        one died; the workers went on with the next one).
      slot: whose; None if a sum was not finite although every worker's part was, and of the coordinator.
      step: the completed steps of the members at that time; the last step known of a worker that was no member.
      began: Unix time at which the agent saw the exit, or the raise was noted. Nobody sees when a worker falls
        silent; for one that did, it is the time of the last commit before, and a median step more.
      cause: "raised" if a worker exited because its code kept raising, "refused" if because it ran something else than
        the members, "skipped" if a step was skipped because of it, else None.
      detect_s: from `began` until the members were told, or until it was noted where there was nobody to tell.
      rebuild_s: how long it took to compile and connect the next members' programs.
      heal_s: how long it took until all of them had the state.
      ended: Unix time of the next committed step. For a worker that was no member it equals `began`: no step
        had to wait.
    """

    kind: str
    slot: int | None
    step: int | None
    began: float
    detect_s: float | None = None
    rebuild_s: float | None = None
    heal_s: float | None = None
    ended: float | None = None
    cause: str | None = None

    @property
    def total_s(self) -> float | None:
        return None if self.ended is None else max(0.0, self.ended - self.began)

    def as_json(self) -> dict[str, Any]:
        """As in summary.json."""
        times = {"detect_s": self.detect_s, "rebuild_s": self.rebuild_s, "heal_s": self.heal_s}
        about = {"kind": self.kind, "slot": self.slot, "step": self.step, "cause": self.cause}
        return {**about, **times, "total_s": self.total_s}


@dataclass(frozen=True)
class Rejoin:
    """A worker that became a member of a running group.

    Attributes:
      slot: whose.
      step: the first step that was committed with it.
      stall_s: how long the others waited: from the change of the view to the next committed step, less one
        median step, which would have been taken anyway.
      start_to_member_s: from the start of its process to that step.
      ended: Unix time of that step.
      incarnation: which start of its slot this was; None if its start is not among the events.
    """

    slot: int
    step: int | None
    stall_s: float
    start_to_member_s: float | None
    ended: float
    incarnation: int | None = None

    def as_json(self) -> dict[str, Any]:
        """As in summary.json."""
        times = {"stall_s": self.stall_s, "start_to_member_s": self.start_to_member_s}
        return {"slot": self.slot, "step": self.step, **times}


def find_faults(
    events: Sequence[Event], commits: Sequence[Event] = (), step_time_s: float | None = None
) -> list[Fault]:
    """All faults, in the order of the events.

    A death is settled by the first recovery of the epoch in which the slot was missing, or of a later one, if
    that epoch never committed a step. Workers that end because the job ends are no faults.

    Args:
      events: lines of events.jsonl.
      commits: lines of metrics.jsonl; they give a retried step its cost.
      step_time_s: the median step time.
    """
    departures = _departures(events)
    finished: set[tuple[int, int]] = set()
    silenced: dict[tuple[int, int], Event] = {}
    causes: dict[tuple[int, int], str] = {}
    deaths: dict[int, list[int]] = {}
    for index, event in enumerate(events):
        if event["event"] == "worker_died":
            deaths.setdefault(event["slot"], []).append(index)
    faults = []
    for index, event in enumerate(events):
        name = event["event"]
        if name == "end":
            break
        if name == "worker_finished":
            finished.add(_worker(event))
        elif name == "worker_killed":
            silenced.setdefault(_worker(event), event)
        elif name == "user_code_failed" and (event.get("fatal") or event.get("startup")):
            causes[_worker(event)] = "raised"
        elif name == "worker_refused":
            causes[_worker(event)] = "refused"
        elif name == "user_code_failed":
            faults.append(_retried("raised", event["slot"], event, commits))
        elif name == "gradient_not_finite":
            skipped = "skipped" if event["action"] == "skip" else None
            found = [_retried("nonfinite", slot, event, commits) for slot in event["slots"] or [None]]
            faults += [replace(fault, cause=skipped) for fault in found]
        elif name == "coordinator_lost":
            faults.append(_coordinator(events[index:], event))
        elif name == "state_differs" and event.get("why") != "transfer":
            faults += [_retried("differs", slot, event, commits) for slot in event["slots"]]
        elif name == "worker_died":
            is_member = event.get("state", "member") == "member"
            # Once a member has finished, the others are told to end.
            if _worker(event) in finished or (finished and not is_member):
                continue
            killed = silenced.get(_worker(event))
            # A worker may have been dead already when its silence was noticed.
            was_silenced = killed is not None and moment(event) >= killed["time"]
            kind = killed.get("kind", "stopped") if killed and was_silenced else _kind(event)
            departure = _claim(departures, event["slot"], index, deaths[event["slot"]])
            # Neither of a worker that did not answer nor of one whose agent is gone does anybody know since when.
            is_silent = (was_silenced and kind != "slow") or event.get("exit_code") is None
            began = _last_sign(events, departure, step_time_s) if is_silent and departure else None
            fault = _death(events, index, kind, departure, is_member, began)
            faults.append(replace(fault, cause=causes.get(_worker(event))))
    return faults


def find_rejoins(events: Sequence[Event], step_time_s: float | None) -> list[Rejoin]:
    """All admissions to a running group. `step_time_s` is the median step time."""
    started: dict[int, Event] = {}
    changed: dict[int, float] = {}
    rejoins = []
    for event in events:
        if event["event"] == "worker_started":
            started[event["slot"]] = event
        elif event["event"] == "view_changed":
            changed.setdefault(event["epoch"], moment(event))
        elif event["event"] == "recovered" and event["kind"] != "formed":
            ended = moment(event)
            waited = (event.get("rebuild_s") or 0.0) + (event.get("heal_s") or 0.0)
            if event["epoch"] in changed:
                waited = max(0.0, ended - changed[event["epoch"]] - (step_time_s or 0.0))
            for slot in event["came"]:
                start = started.get(slot)
                to_member = ended - start["time"] if start else None
                incarnation = start.get("incarnation", 0) if start else None
                rejoins.append(Rejoin(slot, event.get("step"), waited, to_member, ended, incarnation))
    return rejoins


def time_lost(
    faults: Sequence[Fault], rejoins: Sequence[Rejoin], since: float = -math.inf, until: float = math.inf
) -> float:
    """Seconds in which no step was taken because of a fault or a rejoin; what overlaps counts once.

    Only what lies between `since` and `until`, in Unix time, counts.
    """
    spans = [(fault.began, fault.ended) for fault in faults if fault.ended is not None]
    spans += [(rejoin.ended - rejoin.stall_s, rejoin.ended) for rejoin in rejoins]
    total, reached = 0.0, since
    for began, ended in sorted(spans):
        total += max(0.0, min(ended, until) - max(began, reached))
        reached = max(reached, ended)
    return total


@dataclass
class _Departure:
    """A change of the view that left a slot out. `step`: completed steps of the others."""

    index: int
    slot: int
    epoch: int
    step: int | None
    time: float
    claimed: bool = False


def _departures(events: Sequence[Event]) -> list[_Departure]:
    found: list[_Departure] = []
    newest, members = 0, frozenset[int]()
    for index, event in enumerate(events):
        if event["event"] != "view_changed" or event["epoch"] <= newest:
            continue
        before, newest, members = members, event["epoch"], frozenset(event["members"])
        if members <= set(event["came"]):
            continue  # nobody was left: a new group was formed
        step, time = event.get("step"), moment(event)
        found += [_Departure(index, slot, newest, step, time) for slot in sorted(before - members)]
    return found


def _claim(departures: Sequence[_Departure], slot: int, index: int, deaths: Sequence[int]) -> _Departure | None:
    """The departure that belongs to the death of `slot` at `index`, one of its `deaths`.

    It lies between the slot's death before and the one after: before this death, if the worker left by
    agreement and ended later; after it otherwise.
    """
    before = max((death for death in deaths if death < index), default=-1)
    after = min((death for death in deaths if death > index), default=None)
    for departure in departures:
        fits = before < departure.index and (after is None or departure.index < after)
        if departure.slot == slot and fits and not departure.claimed:
            departure.claimed = True
            return departure
    return None


def _recovery(events: Sequence[Event], departure: _Departure) -> Event | None:
    settling = (event for event in events if event["event"] == "recovered" and event["epoch"] >= departure.epoch)
    return next(settling, None)


def _last_sign(events: Sequence[Event], departure: _Departure, step_time_s: float | None) -> float | None:
    """When a step should have been committed that was not, because a worker was silent. None if that is unknown."""
    recovery = _recovery(events, departure)
    if recovery is None or recovery["kind"] == "formed" or recovery.get("step_time_s") is None:
        return None
    return moment(recovery) - recovery["step_time_s"] + (step_time_s or 0.0)


def _death(
    events: Sequence[Event],
    index: int,
    kind: str,
    departure: _Departure | None,
    is_member: bool,
    silent_since: float | None,
) -> Fault:
    event = events[index]
    slot, step, began = event["slot"], event.get("step"), moment(event)
    if silent_since is not None:
        began = min(began, silent_since)
    told = (moment(e) for e in events if e["event"] == "abort_sent" and e.get("node") == event.get("node"))
    detect_s = max(0.0, next(told, event["time"]) - began)
    if departure is None and not is_member:
        return Fault(kind, slot, step, began, detect_s, 0.0, 0.0, began)
    if departure:
        step = departure.step
        if departure.index < index:
            began, detect_s = min(began, departure.time), 0.0
    if departure:
        recovery = _recovery(events, departure)
    else:  # nobody was left to change the view
        later = (e for e in events[index:] if e["event"] == "recovered" and e["kind"] == "formed")
        recovery = next(later, None)
        # Its own last report is older than its last commit.
        step = next((e["last_step"] for e in events[index:] if e["event"] == "steps_repeated"), step)
    if recovery is None:
        return Fault(kind, slot, step, began, detect_s)
    rebuild_s, heal_s = recovery.get("rebuild_s"), recovery.get("heal_s")
    return Fault(kind, slot, step, began, detect_s, rebuild_s, heal_s, moment(recovery))


def _coordinator(later: Sequence[Event], event: Event) -> Fault:
    """It is over with the first commit in a later generation."""
    began = moment(event)
    detect_s = next((e["time"] - began for e in later if e["event"] == "generation_began"), None)
    recovery = next((e for e in later if e["event"] == "recovered"), None)
    if recovery is None:
        return Fault("coordinator", None, None, began, detect_s)
    times = detect_s, recovery.get("rebuild_s"), recovery.get("heal_s")
    return Fault("coordinator", None, recovery["step"] - 1, began, *times, moment(recovery))


def _retried(kind: str, slot: int | None, event: Event, commits: Sequence[Event]) -> Fault:
    """The cost of a retry is the time to the commit of the step that failed, which is the one after `step`."""
    step, began = event["step"], moment(event)
    times = [commit["time"] for commit in commits if commit["step"] == step + 1]
    # The note may arrive after the commit of the retry.
    ended = next((time for time in times if time >= began), max(times[-1], began) if times else None)
    return Fault(kind, slot, step, began, 0.0, 0.0, 0.0, ended)


def _kind(event: Event) -> str:
    exit_code = event.get("exit_code")
    # No exit code: its agent is gone, and has taken the worker with it.
    return "killed" if event.get("signal") or exit_code is None or exit_code < 0 else "exited"


def _worker(event: Event) -> tuple[int, int]:
    return event["slot"], event.get("incarnation", 0)
