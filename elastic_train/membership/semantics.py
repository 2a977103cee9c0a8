"""Whether every member list that a barrier handed out is valid: the linearizability semantics of `live_devices`. Pure.

A list is valid if there is an instant at which everybody in it was in the barrier, and everybody else who was asked
for was dead. Nobody can tell when exactly a process failed, so a failure may be moved, earlier or later, but not past
another event of the same process. All lists of an execution must be valid with the same moved failures.

**What is known of time.** Processes with the same `clock` are compared by their times. Between processes with different
clocks (two hosts) no order is known but the one that the barriers themselves make: whoever is in a list had entered
before anybody got it. So with several clocks fewer executions can be refuted; none is that may have been in order.

**How it is decided.** What must come before what is a graph: the events of one process, those of one clock, and, for
each list, its instant: after the entries of all members, before the returns and the failures of those who were in the
barrier, after the failures of those who are missing. Instants and failures can be put in time exactly if the graph has
no cycle; a cycle is the proof that they cannot. This takes time linear in the events where each call names its
barrier. Where calls name none, any call of a member may be the one that counts; then all ways are tried, which is meant
for executions of a page.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from elastic_train.membership.order import Edge, Order


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


@dataclass(frozen=True)
class Violation:
    """A list that cannot be valid.

    Attributes:
      process: who got it; the first one, if several did.
      members: the list.
      barrier: which barrier gave it.
      proof: why there is no such instant, in one or a few sentences.
    """

    process: Hashable
    members: frozenset[Hashable]
    barrier: Hashable
    proof: str

    def __str__(self) -> str:
        return f"the list {_names(self.members)} that {self.process} got {_of(self.barrier)}is not valid: {self.proof}"


def without_fenced(process: Process, declared_dead: float) -> Process:
    """Leaves out what a process did after it was declared dead: it was fenced, and counted in no barrier any more.

    This is the one place where the semantics above is made wider. A process that is cut off or was stopped can be
    declared dead, and only later send a request, or read a reply that had long been on its way.
    """
    kept = tuple(event for event in process.events if isinstance(event, Fail) or event.time <= declared_dead)
    return replace(process, events=kept)


def find_violation(processes: Sequence[Process]) -> Violation | None:
    """The first thing wrong with an execution, or None if all lists in it are valid.

    Calls that name the same barrier must also have asked for the same processes, and have got the same list.

    Raises:
      ValueError: the events are no execution: times that descend, a reply without a request, two starts without a
        failure between them, two processes of one name.
    """
    execution = _Execution(processes)
    if found := execution.find_disagreement():
        return found
    several = []
    for call in execution.answered():
        ways = execution.ways(call)
        if not ways:
            return call.violation(execution.why_impossible(call))
        if len(ways) == 1:
            execution.order.add(ways[0])
        else:
            several.append((call, ways))
    if cycle := execution.find_cycle():
        return execution.explain(cycle)
    return execution.search(several)


@dataclass
class _Call:
    """One request, and what came of it."""

    process: Hashable
    enter: Enter
    enter_node: int
    next_node: int | None = None  # the next event of the process, or its failure; until then it is in the barrier
    exit: Exit | None = None
    instant: int = -1

    def violation(self, proof: str) -> Violation:
        assert self.exit is not None
        return Violation(self.process, self.exit.members, self.enter.barrier, proof)


@dataclass
class _Life:
    start_node: int | None
    failure_node: int | None = None
    calls: list[_Call] = field(default_factory=list)


class _Execution:
    """The processes, their calls, and the graph of what must come before what."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.order = Order()
        self._meaning: list[tuple[Event | frozenset[Hashable] | None, Hashable]] = []
        self._lives: dict[Hashable, list[_Life]] = {}
        self._clocks = {process.name: process.clock for process in processes}
        self._barriers: dict[Hashable, list[_Call]] = defaultdict(list)
        self._by_instant: dict[int, _Call] = {}
        timed: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for process in processes:
            if process.name in self._lives:
                raise ValueError(f"two processes are called {process.name}")
            timed[process.clock] += self._read(process)
        for events in timed.values():
            self._order(events)
        self._add_instants()

    def _read(self, process: Process) -> Iterator[tuple[float, int]]:
        """Adds a process's events in its order; yields (time, node) of those that have a place in time."""
        lives = self._lives[process.name] = []
        previous, time, open_call = None, None, None
        for event in process.events:
            if isinstance(event, Start) or not lives:
                if lives and lives[-1].failure_node is None:
                    raise ValueError(f"{process.name} starts twice without having failed")
                lives.append(_Life(None))
            node = self._node(event, process.name)
            if previous is not None:
                self.order.add([(previous, node)])
            if open_call is not None:
                open_call.next_node = node
            match event:
                case Start():
                    lives[-1].start_node = node
                case Enter():
                    call = _Call(process.name, event, node)
                    lives[-1].calls.append(call)
                    if event.barrier is not None:
                        self._barriers[event.barrier].append(call)
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
        self._meaning.append((meaning, name))
        return self.order.node()

    def find_cycle(self) -> list[int]:
        """See `Order.find_cycle`. Times ascend, so a cycle goes through an instant; it begins with it."""
        cycle = self.order.find_cycle(self._by_instant)
        return [node for node in cycle if self._meaning[node][0] is not None]

    def _add_instants(self) -> None:
        """Equal lists of one barrier have one instant, since it must lie within the calls of all members anyway."""
        shared: dict[tuple[Hashable, frozenset[Hashable]], int] = {}
        for call in self.answered():
            assert call.exit is not None
            key = (call.enter.barrier, call.exit.members)
            if call.enter.barrier is None or key not in shared:
                shared[key] = self._node(call.exit.members, None)
                self._by_instant[shared[key]] = call
            call.instant = shared[key]

    def answered(self) -> Iterator[_Call]:
        """The calls that got a list."""
        for lives in self._lives.values():
            for life in lives:
                yield from (call for call in life.calls if call.exit is not None)

    def find_disagreement(self) -> Violation | None:
        """Members of one barrier that asked differently or got different lists."""
        for calls in self._barriers.values():
            first = calls[0]
            answered = [call for call in calls if call.exit is not None]
            for call in calls:
                if call.enter.asked != first.enter.asked and answered:
                    return answered[0].violation(
                        f"{first.process} asked for {_names(first.enter.asked)}, "
                        f"{call.process} for {_names(call.enter.asked)}."
                    )
            for call in answered:
                assert call.exit is not None and answered[0].exit is not None
                if call.exit.members != answered[0].exit.members:
                    return call.violation(
                        f"of the same barrier {answered[0].process} got {_names(answered[0].exit.members)}."
                    )
        return None

    def ways(self, call: _Call) -> list[list[Edge]]:
        """The ways in which a list can be valid, each as what must then come before what."""
        assert call.exit is not None
        if not call.exit.members <= call.enter.asked:
            return []
        choices = [
            self._present(call, name) if name in call.exit.members else self._absent(call, name)
            for name in sorted(call.enter.asked, key=str)
        ]
        # Whoever got it was in the barrier then, even if the list does not say so.
        choices.append([self._within(call, call)])
        return [list(itertools.chain.from_iterable(way)) for way in itertools.product(*choices)]

    def _present(self, call: _Call, name: Hashable) -> list[list[Edge]]:
        """`name` is in the barrier: one choice for each of its calls that may count."""
        if name == call.process:
            return [[]]
        if call.enter.barrier is not None:
            candidates = [other for other in self._barriers[call.enter.barrier] if other.process == name]
        else:
            candidates = [other for life in self._lives.get(name, ()) for other in life.calls]
        return [self._within(call, other) for other in self._overlapping(call, candidates)]

    def _within(self, call: _Call, other: _Call) -> list[Edge]:
        """The instant of `call` lies within `other`."""
        after = [] if other.next_node is None else [(call.instant, other.next_node)]
        return [(other.enter_node, call.instant), *after]

    def _overlapping(self, call: _Call, others: list[_Call]) -> list[_Call]:
        """Leaves out calls that were over before this one, or began after it; not the last that is left to blame."""
        assert call.exit is not None
        overlap = [
            other
            for other in others
            if self._clocks[other.process] != self._clocks[call.process]
            or (other.enter.time <= call.exit.time and (other.exit is None or other.exit.time >= call.enter.time))
        ]
        return overlap or others[:1]

    def _absent(self, call: _Call, name: Hashable) -> list[list[Edge]]:
        """`name` is dead: before its first start, or between a failure and the next start."""
        lives = self._lives.get(name)
        if not lives:
            return [[]]
        choices = []
        if lives[0].start_node is not None and not self._had_started(call, name, lives[0]):
            choices.append([(call.instant, lives[0].start_node)])
        for life, following in itertools.zip_longest(lives, lives[1:]):
            if life.failure_node is None or (following is not None and self._had_started(call, name, following)):
                continue
            edges = [(life.failure_node, call.instant)]
            if following is not None and following.start_node is not None:
                edges.append((call.instant, following.start_node))
            choices.append(edges)
        return choices

    def _had_started(self, call: _Call, name: Hashable, life: _Life) -> bool:
        """Whether a life had begun when the call began, as far as a common clock can tell."""
        if life.start_node is None or self._clocks[name] != self._clocks[call.process]:
            return False
        started = self._meaning[life.start_node][0]
        return isinstance(started, Start) and started.time < call.enter.time

    def why_impossible(self, call: _Call) -> str:
        assert call.exit is not None
        if extra := call.exit.members - call.enter.asked:
            return f"{_names(extra)} had not been asked for."
        for name in sorted(call.enter.asked, key=str):
            if name in call.exit.members and not self._present(call, name):
                return f"{name} never entered that barrier."
            if name not in call.exit.members and not self._absent(call, name):
                return f"{name} is missing, and never failed."
        raise AssertionError("there is a way")

    def search(self, several: list[tuple[_Call, list[list[Edge]]]]) -> Violation | None:
        """Tries the ways in turn. The violation is that of the list up to which the most could be satisfied."""
        deepest = -1
        found: Violation | None = None

        def satisfied(depth: int) -> bool:
            nonlocal deepest, found
            if depth == len(several):
                return True
            call, ways = several[depth]
            for way in ways:
                self.order.add(way)
                cycle = self.find_cycle()
                if not cycle and satisfied(depth + 1):
                    return True
                self.order.remove(way)
                if cycle and depth > deepest:
                    deepest = depth
                    found = call.violation(f"each of {len(ways)} ways fails, such as: {self._prove(cycle)}")
            return False

        return None if satisfied(0) else found

    def explain(self, cycle: Sequence[int]) -> Violation:
        call = next(self._by_instant[node] for node in cycle if node in self._by_instant)
        return call.violation(self._prove(cycle))

    def _prove(self, cycle: Sequence[int]) -> str:
        """The cycle in words. It begins with an instant."""
        parts = []
        for node, following in itertools.pairwise([*cycle, cycle[0]]):
            parts.append(f"{self._title(node)} comes before {self._title(following)} ({self._why(node, following)})")
        return "; ".join(parts) + "."

    def _title(self, node: int) -> str:
        event, name = self._meaning[node]
        match event:
            case Start():
                return f"{name}'s start at {event.time:.6f}"
            case Enter():
                return f"{name}'s entry {_of(event.barrier)}at {event.time:.6f}"
            case Exit():
                return f"{name}'s return with {_names(event.members)} at {event.time:.6f}"
            case Fail():
                return f"{name}'s failure"
            case frozenset():
                return f"the instant of {_names(event)} {_of(self._by_instant[node].enter.barrier)}".rstrip()
            case None:
                raise AssertionError("such nodes are not shown")

    def _why(self, node: int, following: int) -> str:
        (one, _), (other, name) = self._meaning[node], self._meaning[following]
        if isinstance(other, frozenset):
            return "not in the list, so dead" if isinstance(one, Fail) else "in the list, so in the barrier"
        if isinstance(one, frozenset):
            return "not in the list" if isinstance(other, Start) else "in the list, so still in the barrier"
        if isinstance(one, Fail) or isinstance(other, Fail):
            return f"a failure is not moved past another event of {name}"
        return "as the clock says"


def _names(names: Iterable[Hashable]) -> str:
    return "[" + ", ".join(sorted(map(str, names), key=lambda text: (len(text), text))) + "]"


def _of(barrier: Hashable) -> str:
    return "" if barrier is None else f"of {barrier} "
