"""What processes did at barriers, and what must come before what by that alone. Pure.

Nothing here asks whether the lists that they got are valid: that is `semantics`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic_train.membership.order import Order


class Start(NamedTuple):
    """The process starts. Before its first start it is dead; without any start it lives from the beginning."""

    time: float


class Enter(NamedTuple):
    """It sends its request: it is in the barrier until its next event."""

    time: float
    asked: frozenset[Hashable]  # names of processes
    barrier: Hashable = None  # which one, if that is known; equal on all members


class Exit(NamedTuple):
    """It receives the reply."""

    time: float
    members: frozenset[Hashable]


class Fail(NamedTuple):
    """It is dead, until it starts again. The time says little and is not used."""

    time: float


Event = Start | Enter | Exit | Fail


@dataclass(frozen=True)
class Process:
    """What one process did, in its own order; its times ascend.

    Attributes:
      name: what lists call it.
      clock: times of processes with equal clocks can be compared.
    """

    name: Hashable
    events: tuple[Event, ...]
    clock: str = ""


@dataclass
class Call:
    """One request, and what came of it."""

    process: Hashable
    enter: Enter
    enter_node: int
    next_node: int | None = None  # the next event of the process, or its failure; until then it is in the barrier
    exit: Exit | None = None
    instant: int = -1


@dataclass
class Life:
    """From a start of a process, or from the beginning, to its failure."""

    start_node: int | None
    failure_node: int | None = None
    calls: list[Call] = field(default_factory=list)


class Execution:
    """The processes, their calls, and the graph of what must come before what.

    Args:
      processes: each with its events.

    Attributes:
      order: the graph. Its nodes are events, the instants of lists, and some that only join events to later ones.
      meaning: for each node, the event and the name of its process, or the list whose instant it is and None; twice
        None for those that only join.
      lives, clocks: by the process's name.
      barriers: the calls of each barrier that has a name.
      by_instant: for each instant a call that got its list; nodes ascend.

    Raises:
      ValueError: the events are no execution: times that descend, a reply without a request, two starts without a
        failure between them, two processes of one name.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self.order = Order()
        self.meaning: list[tuple[Event | frozenset[Hashable] | None, Hashable]] = []
        self.lives: dict[Hashable, list[Life]] = {}
        self.clocks = {process.name: process.clock for process in processes}
        self.barriers: dict[Hashable, list[Call]] = defaultdict(list)
        self.by_instant: dict[int, Call] = {}
        timed: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for process in processes:
            if process.name in self.lives:
                raise ValueError(f"two processes are called {process.name}")
            timed[process.clock] += self._read(process)
        for events in timed.values():
            self._order(events)
        self._add_instants()

    def _read(self, process: Process) -> Iterator[tuple[float, int]]:
        """Adds a process's events in its order; yields (time, node) of those that have a place in time."""
        lives = self.lives[process.name] = []
        previous, time, open_call = None, None, None
        for event in process.events:
            if isinstance(event, Start) or not lives:
                if lives and lives[-1].failure_node is None:
                    raise ValueError(f"{process.name} starts twice without having failed")
                lives.append(Life(None))
            node = self._node(event, process.name)
            if previous is not None:
                self.order.add([(previous, node)])
            if open_call is not None:
                open_call.next_node = node
            match event:
                case Start():
                    lives[-1].start_node = node
                case Enter():
                    call = Call(process.name, event, node)
                    lives[-1].calls.append(call)
                    if event.barrier is not None:
                        self.barriers[event.barrier].append(call)
                case Exit():
                    if open_call is None:
                        raise ValueError(f"{process.name} got a reply at {event.time} that it had not asked for")
                    open_call.exit = event
                case Fail():
                    lives[-1].failure_node = node
            open_call = lives[-1].calls[-1] if isinstance(event, Enter) else None
            previous = node
            if isinstance(event, Fail):
                continue
            if time is not None and event.time < time:
                raise ValueError(f"the times of {process.name} descend: {event.time} after {time}")
            time = event.time
            yield time, node

    def _order(self, events: list[tuple[float, int]]) -> None:
        """Events of one clock: each time comes after all earlier ones; equal times are in no order."""
        earlier: int | None = None
        for _, group in itertools.groupby(sorted(events), key=lambda event: event[0]):
            nodes = [node for _, node in group]
            tick = self._node(None, None)
            self.order.add((node, tick) for node in nodes)
            if earlier is not None:
                self.order.add((earlier, node) for node in nodes)
                self.order.add([(earlier, tick)])
            earlier = tick

    def _node(self, meaning: Event | frozenset[Hashable] | None, name: Hashable) -> int:
        """A node for an event of a process, for the instant of a list, or only to join events to later ones."""
        self.meaning.append((meaning, name))
        return self.order.node()

    def _add_instants(self) -> None:
        """Equal lists of one barrier have one instant, since it must lie within the calls of all members anyway."""
        shared: dict[tuple[Hashable, frozenset[Hashable]], int] = {}
        for call in self.answered():
            assert call.exit is not None
            key = (call.enter.barrier, call.exit.members)
            if call.enter.barrier is None or key not in shared:
                shared[key] = self._node(call.exit.members, None)
                self.by_instant[shared[key]] = call
            call.instant = shared[key]

    def answered(self) -> Iterator[Call]:
        """The calls that got a list."""
        for lives in self.lives.values():
            for life in lives:
                yield from (call for call in life.calls if call.exit is not None)
