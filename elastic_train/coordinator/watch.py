"""The watchdog's place in the coordinator: what the members report, as the pure decisions of `membership/` need it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from elastic_train.config import FaultConfig
from elastic_train.coordinator.reports import Reports, phases_in_words
from elastic_train.membership.group import Identity
from elastic_train.membership.roster import Roster, Worker
from elastic_train.membership.roster_events import Unfit
from elastic_train.membership.stragglers import Pace, Streak, Work, follow, paces
from elastic_train.membership.watchdog import Deadlines, Judgement, Sign, Stuck, in_words, judge_members

ASLEEP_S = 3.0
"""If the last look was longer ago, this process was stopped or busy itself: what it has not heard proves nothing."""

WINDOW_STEPS = 10
"""Over how many steps the members' own work is compared."""

NUM_WINDOWS = 3
"""How many windows in a row make a straggler, and how many end it."""

Tell = Callable[[Unfit], None]
Note = Callable[..., None]
"""Called as `note(event, text to show, **fields)`."""


class Watch:
    """Finds members that hold up the others, from the event loop's thread.

    Args:
      faults: time limits.
      reports: what the workers say.
      tell: the roster, which has the worker killed.
      note: an event, and a line for the display.
    """

    def __init__(self, faults: FaultConfig, reports: Reports, tell: Tell, note: Note) -> None:
        self._deadlines = Deadlines(
            faults.step_timeout_s,
            faults.step_timeout_factor,
            faults.first_step_timeout_s,
            faults.evaluate_timeout_s,
            faults.hook_timeout_s,
            faults.save_timeout_s,
        )
        self._reports, self._tell, self._note = reports, tell, note
        self._epoch, self._epoch_step = 0, 0
        self._members: dict[Identity, tuple[float, int]] = {}  # since when, and since which step
        self._changed_at = time.monotonic()
        self._condemned: set[Identity] = set()
        self._last_condemned = -math.inf
        self._has_said_waiting = False
        self._looked = self._awake_since = time.monotonic()

    def viewed(self, epoch: int, step: int) -> None:
        """An epoch has begun after so many steps."""
        if epoch > self._epoch:
            self._epoch, self._epoch_step = epoch, step

    def look(self, roster: Roster) -> None:
        """Judges the members; has those killed that are stuck."""
        now = time.monotonic()
        if now - self._looked > ASLEEP_S:
            self._awake_since = now
        self._looked = now
        training = [worker for worker in roster.members if not worker.finished]
        self._follow(training, now)
        watched = [worker.identity for worker in training if worker.identity not in self._condemned]
        judgement = judge_members(
            [self._sign(identity, now) for identity in watched],
            self._deadlines,
            step_time_s=self._reports.step_time_s,
            unchanged_s=now - max(self._changed_at, self._awake_since),
            since_last_s=now - self._last_condemned,
            is_pending=bool(self._condemned),
        )
        self._say_who_waits(judgement, roster)
        for stuck in judgement.stuck:
            self._condemn(stuck, roster.workers[stuck.identity.slot].host, now)

    def _follow(self, training: list[Worker], now: float) -> None:
        new = (now, self._epoch_step)
        members = {worker.identity: self._members.get(worker.identity, new) for worker in training}
        if members.keys() != self._members.keys():
            self._changed_at = now
        self._members = members
        self._condemned &= members.keys()

    def _sign(self, identity: Identity, now: float) -> Sign:
        report = self._reports.of(identity)
        since, first_step = self._members[identity]
        began = max(since, self._awake_since)
        if report is None:
            return Sign(identity, 0, "ready", now - began, now - began, True, True)
        quiet_s, silent_s = now - max(report.since, began), now - max(report.heard, began)
        is_first_step, is_new = report.step <= self._epoch_step, report.step <= first_step
        return Sign(identity, report.step, report.phase, quiet_s, silent_s, is_first_step, is_new)

    def _say_who_waits(self, judgement: Judgement, roster: Roster) -> None:
        chosen = judgement.chosen
        if chosen is None or self._has_said_waiting:
            self._has_said_waiting = chosen is not None
            return
        self._has_said_waiting = True
        phases = self._reports.phases(roster.view)
        self._note(
            "all_waiting",
            f"All members wait for each other for {chosen.waited_s:.0f} s: {phases_in_words(phases)}. "
            f"If that goes on, slot {chosen.identity.slot} is replaced in {chosen.limit_s:.0f} s.",
            phases={str(slot): phase for slot, phase in phases.items()},
            waited_s=round(chosen.waited_s, 1),
            limit_s=chosen.limit_s,
            chosen=chosen.identity.slot,
        )

    def _condemn(self, stuck: Stuck, host: str, now: float) -> None:
        self._condemned.add(stuck.identity)
        self._last_condemned = now
        identity = stuck.identity
        log = f"logs/{identity.slot}-{identity.incarnation}.log"
        about = {"step": stuck.step, "phase": stuck.phase, "rule": stuck.rule, "limit_s": stuck.limit_s}
        self._note(
            "worker_stuck", "", **identity._asdict(), **about, waited_s=round(stuck.waited_s, 1), host=host, log=log
        )
        self._tell(Unfit(identity, "stuck", f"stuck: {in_words(stuck)}; its stacks go to {log} on {host}"))


class Paces:
    """Compares the members' own work, from the event loop's thread.

    Args:
      faults: says who is a straggler, and what becomes of it.
      reports: what the workers say.
      min_workers: an eviction leaves at least so many members.
      tell, note: as for `Watch`.
    """

    def __init__(self, faults: FaultConfig, reports: Reports, min_workers: int, tell: Tell, note: Note) -> None:
        self._faults, self._reports, self._min_workers = faults, reports, min_workers
        self._tell, self._note = tell, note
        self._began: dict[int, Work] = {}
        self._newest: dict[int, Pace] = {}
        self._streaks: dict[int, Streak] = {}
        self._evictions: dict[int, int] = {}  # by slot
        self._evicted: set[int] = set()

    def shard_time_s(self, identity: Identity) -> float | None:
        """Seconds that a member's own work takes per shard, if that is known. From any thread."""
        pace = self._newest.get(identity.node)
        return None if pace is None else pace.shard_s

    def look(self, roster: Roster) -> None:
        """Closes a window if enough steps were taken; reports who is slow, and has it replaced if that is wanted."""
        members = {worker.identity.node: worker for worker in roster.members if not worker.finished}
        work = {node: self._work(worker.identity) for node, worker in members.items()}
        if work.keys() != self._began.keys():
            self._began = work
            self._newest = {node: pace for node, pace in self._newest.items() if node in members}
            return
        window = {node: done.since(self._began[node]) for node, done in work.items()}
        if not window or min(done.num_steps for done in window.values()) < WINDOW_STEPS:
            return
        self._began, self._newest = work, paces(window)
        self._streaks, news = follow(self._streaks, self._newest, self._faults.straggler_factor, NUM_WINDOWS)
        for node in news:
            self._report(members[node])
        for node, streak in self._streaks.items():
            if streak.is_straggler:
                self._evict(members[node], num_left=len(members.keys() - self._evicted) - 1)

    def _work(self, identity: Identity) -> Work:
        report = self._reports.of(identity)
        return Work() if report is None else report.work

    def _report(self, worker: Worker) -> None:
        pace = self._newest[worker.identity.node]
        figures = {"shard_s": pace.shard_s, "others_s": pace.others_s, "ratio": pace.ratio}
        about = {**worker.identity._asdict(), "host": worker.host, "step": worker.step, **figures}
        if self._streaks[worker.identity.node].is_straggler:
            self._note("straggler", f"slot {worker.identity.slot} on {worker.host} is slow: {_in_words(pace)}", **about)
        else:
            show = f"slot {worker.identity.slot} on {worker.host} is slow no more: {_in_words(pace)}"
            self._note("straggler_over", show, **about)

    def _evict(self, worker: Worker, num_left: int) -> None:
        slot, node = worker.identity.slot, worker.identity.node
        count = self._evictions.get(slot, 0)
        is_wanted = self._faults.evict_stragglers and count < self._faults.max_evictions
        if not is_wanted or num_left < self._min_workers or node in self._evicted:
            return
        self._evictions[slot] = count + 1
        self._evicted.add(node)
        limit = f"eviction {count + 1} of {self._faults.max_evictions} (faults.max_evictions)"
        self._tell(Unfit(worker.identity, "slow", f"slow: {_in_words(self._newest[node])}; {limit}"))


def _in_words(pace: Pace) -> str:
    return (
        f"{pace.shard_s:.3g} s of its own for a shard, the others {pace.others_s:.3g} s (median; {pace.ratio:.1f} "
        f"times as long), which costs {pace.excess_s:.3g} s per step"
    )
