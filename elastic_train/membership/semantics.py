"""Whether every member list that a barrier handed out is valid: the linearizability semantics of `live_devices`. Pure.

A list is valid if there is an instant at which everybody in it was in the barrier, and everybody else who was asked
for was dead. Nobody can tell when exactly a process failed, so a failure may be moved, earlier or later, but not past
another event of the same process. All lists of an execution must be valid with the same moved failures.

**What is known of time.** Processes with the same `clock` are compared by their times. Between processes with different
clocks (two hosts) no order is known but the one that the barriers themselves make: whoever is in a list had entered
before anybody got it. So with several clocks fewer executions can be refuted; none is that may have been in order.

**How it is decided.** What must come before what is a graph: the events of one process and those of one clock, which
`execution` reads into it, and, for each list, its instant: after the entries of all members, before the returns and the
failures of those who were in the barrier, after the failures of those who are missing. Instants and failures can be put
in time exactly if the graph has no cycle; a cycle is the proof that they cannot. This takes time linear in the events
where each call names its barrier. Where calls name none, any call of a member may be the one that counts; then all ways
are tried, which is meant for executions of a page.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from elastic_train.membership.execution import Call, Enter, Execution, Exit, Fail, Life, Process, Start
from elastic_train.membership.order import Edge


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
      ValueError: the events are no execution; see `Execution`.
    """
    execution = Execution(processes)
    lists = _Lists(execution)
    if found := lists.find_disagreement():
        return found
    several = []
    for call in execution.answered():
        ways = lists.ways(call)
        if not ways:
            return _violation(call, lists.why_impossible(call))
        if len(ways) == 1:
            execution.order.add(ways[0])
        else:
            several.append((call, ways))
    if cycle := lists.find_cycle():
        return lists.explain(cycle)
    return lists.search(several)


class _Lists:
    """The lists of an execution: what must come before what if they are valid, and in words why that cannot be."""

    def __init__(self, execution: Execution) -> None:
        self._order, self._meaning, self._by_instant = execution.order, execution.meaning, execution.by_instant
        self._lives, self._clocks, self._barriers = execution.lives, execution.clocks, execution.barriers

    def find_cycle(self) -> list[int]:
        """See `Order.find_cycle`. Times ascend, so a cycle goes through an instant; it begins with it."""
        cycle = self._order.find_cycle(self._by_instant)
        return [node for node in cycle if self._meaning[node][0] is not None]

    def find_disagreement(self) -> Violation | None:
        """Members of one barrier that asked differently or got different lists."""
        for calls in self._barriers.values():
            first = calls[0]
            answered = [call for call in calls if call.exit is not None]
            for call in calls:
                if call.enter.asked != first.enter.asked and answered:
                    return _violation(
                        answered[0],
                        f"{first.process} asked for {_names(first.enter.asked)}, "
                        f"{call.process} for {_names(call.enter.asked)}.",
                    )
            for call in answered:
                assert call.exit is not None and answered[0].exit is not None
                if call.exit.members != answered[0].exit.members:
                    return _violation(
                        call, f"of the same barrier {answered[0].process} got {_names(answered[0].exit.members)}."
                    )
        return None

    def ways(self, call: Call) -> list[list[Edge]]:
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

    def _present(self, call: Call, name: Hashable) -> list[list[Edge]]:
        """`name` is in the barrier: one choice for each of its calls that may count."""
        if name == call.process:
            return [[]]
        if call.enter.barrier is not None:
            candidates = [other for other in self._barriers[call.enter.barrier] if other.process == name]
        else:
            candidates = [other for life in self._lives.get(name, ()) for other in life.calls]
        return [self._within(call, other) for other in self._overlapping(call, candidates)]

    def _within(self, call: Call, other: Call) -> list[Edge]:
        """The instant of `call` lies within `other`."""
        after = [] if other.next_node is None else [(call.instant, other.next_node)]
        return [(other.enter_node, call.instant), *after]

    def _overlapping(self, call: Call, others: list[Call]) -> list[Call]:
        """Leaves out calls that were over before this one, or began after it; not the last that is left to blame."""
        assert call.exit is not None
        overlap = [
            other
            for other in others
            if self._clocks[other.process] != self._clocks[call.process]
            or (other.enter.time <= call.exit.time and (other.exit is None or other.exit.time >= call.enter.time))
        ]
        return overlap or others[:1]

    def _absent(self, call: Call, name: Hashable) -> list[list[Edge]]:
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

    def _had_started(self, call: Call, name: Hashable, life: Life) -> bool:
        """Whether a life had begun when the call began, as far as a common clock can tell."""
        if life.start_node is None or self._clocks[name] != self._clocks[call.process]:
            return False
        started = self._meaning[life.start_node][0]
        return isinstance(started, Start) and started.time < call.enter.time

    def why_impossible(self, call: Call) -> str:
        """Why there is no way, in words."""
        assert call.exit is not None
        if extra := call.exit.members - call.enter.asked:
            return f"{_names(extra)} had not been asked for."
        for name in sorted(call.enter.asked, key=str):
            if name in call.exit.members and not self._present(call, name):
                return f"{name} never entered that barrier."
            if name not in call.exit.members and not self._absent(call, name):
                return f"{name} is missing, and never failed."
        raise AssertionError("there is a way")

    def search(self, several: list[tuple[Call, list[list[Edge]]]]) -> Violation | None:
        """Tries the ways in turn. The violation is that of the list up to which the most could be satisfied."""
        deepest = -1
        found: Violation | None = None

        def satisfied(depth: int) -> bool:
            nonlocal deepest, found
            if depth == len(several):
                return True
            call, ways = several[depth]
            for way in ways:
                self._order.add(way)
                cycle = self.find_cycle()
                if not cycle and satisfied(depth + 1):
                    return True
                self._order.remove(way)
                if cycle and depth > deepest:
                    deepest = depth
                    found = _violation(call, f"each of {len(ways)} ways fails, such as: {self._prove(cycle)}")
            return False

        return None if satisfied(0) else found

    def explain(self, cycle: Sequence[int]) -> Violation:
        """The violation that a cycle proves."""
        call = next(self._by_instant[node] for node in cycle if node in self._by_instant)
        return _violation(call, self._prove(cycle))

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


def _violation(call: Call, proof: str) -> Violation:
    assert call.exit is not None
    return Violation(call.process, call.exit.members, call.enter.barrier, proof)


def _names(names: Iterable[Hashable]) -> str:
    return "[" + ", ".join(sorted(map(str, names), key=lambda text: (len(text), text))) + "]"


def _of(barrier: Hashable) -> str:
    return "" if barrier is None else f"of {barrier} "
