"""A job under patient faults, without processes: its workers come and go, step, and carry out orders.

Conductor and injector are the real ones. What is left to chance is how fast everybody is: the workers that come back,
the news of them, and the conductor.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from elastic_train.chaos.conductor import Conductor
from elastic_train.chaos.faults import Fault
from elastic_train.chaos.inject import Injector
from elastic_train.chaos.orders import Orders
from elastic_train.chaos.schedule import Planned
from elastic_train.membership.group import Identity, View

ROUNDS = 600
"""So many attempts at a step are enough for every fault that finds an occasion."""


class Struck(NamedTuple):
    """A strike: whom, after how many completed steps, and what."""

    worker: Identity
    step: int
    fault: Fault


class ChaosJob:
    """The job; `members` and `step` are what the conductor knows of it, as old as the last `report`.

    Args:
      num_workers: slots.
      directory: where orders are given.
      chance: decides how long a worker takes to come back.
    """

    def __init__(self, num_workers: int, directory: Path, chance: random.Random) -> None:
        self._directory, self._chance = directory, chance
        self._completed = self._epoch = self._last_node = 0
        self._workers: dict[Identity, Injector] = {}  # members, the oldest first
        self._doomed: set[Identity] = set()
        self._stopped: set[Identity] = set()
        self._away = dict.fromkeys(range(num_workers), 0)  # for how many attempts, by slot
        self.members: tuple[Identity, ...] = ()
        self.step = 0
        self.struck: list[Struck] = []

    def report(self) -> None:
        self.step = self._completed
        self.members = tuple(self._workers) if self._completed else ()

    def signal(self, identity: Identity, number: signal.Signals) -> bool:
        if number == signal.SIGCONT:
            self._stopped.discard(identity)
        elif identity in self._workers:
            (self._stopped if number == signal.SIGSTOP else self._doomed).add(identity)
        return identity in self._workers

    def event(self, name: str, /, **fields: Any) -> None:
        if name == "fault_injected" and fields["where"] == "anywhere":
            worker = Identity(fields["slot"], fields["incarnation"], fields["node"])
            self.struck.append(Struck(worker, self._completed, Fault(**fields["fault"])))

    def attempt(self) -> None:
        """One attempt at a step. All commit it, unless one of them dies, is stopped, or raises."""
        if self._doomed or 0 in self._away.values():
            self._change_members()
        self._away = {slot: attempts - 1 for slot, attempts in self._away.items()}
        if self._stopped & set(self._workers):
            return
        places = [self._is_struck(where) for where in ("data", "compute", "exchange", "barrier")]
        if any(places) or self._doomed:
            return
        self._completed += 1
        self._committed()
        self._is_struck("hook")

    def _is_struck(self, where: str, donors: frozenset[Identity] = frozenset()) -> bool:
        """Whether anybody is struck there."""
        number = len(self.struck)
        for worker, injector in self._workers.items():
            if worker in self._doomed or worker in self._stopped:
                continue
            role = "" if where != "heal" else "donor" if worker in donors else "joiner"
            for fault in injector.due(where, role):
                self.struck.append(Struck(worker, self._completed, fault))
                if fault.kind == "stop":
                    self._stopped.add(worker)
                elif fault.is_lethal:
                    self._doomed.add(worker)
        return len(self.struck) > number

    def _change_members(self) -> None:
        for worker in self._doomed & set(self._workers):
            del self._workers[worker]
            self._away[worker.slot] = self._chance.choice((0, 1, 5, 30))
        self._doomed.clear()
        donors = frozenset(self._workers)
        for slot in [slot for slot, attempts in self._away.items() if attempts <= 0]:
            del self._away[slot]
            self._last_node += 1
            worker = Identity(slot, self._last_node, self._last_node)
            self._workers[worker] = Injector(worker, Orders(self._directory))
        self._epoch += 1
        for injector in self._workers.values():
            injector.viewed(View.of(self._epoch, tuple(self._workers)))
        self._is_struck("gather")
        self._is_struck("heal", donors)
        self._committed()

    def _committed(self) -> None:
        for injector in self._workers.values():
            injector.committed(self._completed)


def play(faults: Iterable[Fault], num_workers: int, chance: random.Random) -> list[Struck]:
    """A job under these patient faults, until all have struck or nothing more can be expected; the strikes."""
    planned = [Planned((fault,), waits=True) for fault in faults]
    now = time.time()  # workers note when they strike by that clock
    with tempfile.TemporaryDirectory() as made:
        job = ChaosJob(num_workers, Path(made) / "chaos", chance)
        conductor = Conductor(planned, num_workers, 0, Path(made) / "chaos", job, lambda: now)
        pace, delay = chance.choice((0.1, 0.5, 1.0)), chance.choice((0.1, 0.5, 1.0))
        for _ in range(ROUNDS):
            now += 0.1
            job.attempt()
            if chance.random() < delay:
                job.report()
            if chance.random() < pace:
                conductor.tick()
            if len(job.struck) == len(planned):
                break
    return job.struck
