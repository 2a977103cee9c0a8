"""The checker of barriers against an oracle that tries every order of events, and against a service that is right."""

from __future__ import annotations

import random
from collections.abc import Hashable

from hypothesis import event, given
from hypothesis import strategies as st

from elastic_train.membership.execution import Enter, Event, Exit, Fail, Process, Start
from elastic_train.membership.semantics import find_violation
from tests.property.examples import examples

NAMES = (0, 1, 2)
ALL = frozenset(NAMES)
MAX_EVENTS = 18

seeds = st.integers(0, 2**32 - 1)


# The oracle: what the document says, word for word, by trying everything -------------------------------------


def valid_by_trying_all_orders(processes: list[Process]) -> bool:
    """Moves along every order of all events that keeps the order of each process and of each clock."""
    rows = [process.events for process in processes]
    lists = [(p, i) for p, row in enumerate(rows) for i, each in enumerate(row) if isinstance(each, Exit)]
    seen: set[tuple[tuple[int, ...], frozenset[tuple[int, int]]]] = set()

    def may_be_next(done: tuple[int, ...], p: int) -> bool:
        coming = rows[p][done[p]]
        if isinstance(coming, Fail):
            return True
        return not any(
            processes[q].clock == processes[p].clock and not isinstance(other, Fail) and other.time < coming.time
            for q, row in enumerate(rows)
            for other in row[done[q] :]
        )

    def call_of(done: tuple[int, ...], p: int) -> Enter | None:
        last = rows[p][done[p] - 1] if done[p] else None
        return last if isinstance(last, Enter) else None

    def dead(done: tuple[int, ...], p: int) -> bool:
        if not done[p]:
            return not rows[p] or isinstance(rows[p][0], Start)
        return isinstance(rows[p][done[p] - 1], Fail)

    def holds_now(done: tuple[int, ...], p: int, i: int) -> bool:
        mine, got = call_of(done, p), rows[p][i]
        if done[p] != i or mine is None or not isinstance(got, Exit) or not got.members <= mine.asked:
            return False
        for q, process in enumerate(processes):
            theirs = call_of(done, q)
            if process.name in got.members and (theirs is None or theirs.barrier != mine.barrier):
                return False
            if process.name in mine.asked - got.members and not dead(done, q):
                return False
        return True

    def go_on(done: tuple[int, ...], held: frozenset[tuple[int, int]]) -> bool:
        held |= {(p, i) for p, i in lists if holds_now(done, p, i)}
        if len(held) == len(lists):
            return True
        # A list must have been valid before it is received.
        if (done, held) in seen or any(done[p] > i and (p, i) not in held for p, i in lists):
            return False
        seen.add((done, held))
        return any(
            go_on((*done[:p], done[p] + 1, *done[p + 1 :]), held)
            for p, row in enumerate(rows)
            if done[p] < len(row) and may_be_next(done, p)
        )

    return go_on((0,) * len(rows), frozenset())


def equal_in_each_barrier(processes: list[Process]) -> bool:
    asked: dict[Hashable, set[frozenset]] = {}
    lists: dict[Hashable, set[frozenset]] = {}
    for process in processes:
        barrier: Hashable = None
        for each in process.events:
            if isinstance(each, Enter):
                barrier = each.barrier
                asked.setdefault(barrier, set()).add(each.asked)
            if isinstance(each, Exit):
                lists.setdefault(barrier, set()).add(each.members)
    named = [barrier for barrier in lists if barrier is not None]
    return all(len(lists[barrier]) == len(asked[barrier]) == 1 for barrier in named)


# Executions --------------------------------------------------------------------------------------------------


def anything(chance: random.Random, named: bool, clocks: str) -> list[Process]:
    """Events of any kind that a process can have one after the other, with lists that are anything."""
    rows: list[list[str]] = []
    for _ in NAMES:
        row: list[str] = ["start"] if chance.random() < 0.7 else []
        for _ in range(chance.randrange(5)):
            last = row[-1] if row else "start"
            row.append(
                chance.choice(
                    {"fail": ["start"], "enter": ["exit", "exit", "fail", "enter"]}.get(
                        last, ["enter", "enter", "fail"]
                    )
                )
            )
        if chance.random() < 0.5 and row and row[-1] != "fail":
            row.append("fail")
        rows.append(row)
    order = [p for p, row in enumerate(rows) for _ in row]
    chance.shuffle(order)
    times: dict[int, list[int]] = {p: [] for p in NAMES}
    for time, p in enumerate(order):
        times[p].append(time)
    processes = []
    for p, row in enumerate(rows):
        barriers = chance.sample(range(4), 4)  # no process has more calls
        events: list[Event] = []
        for kind, time in zip(row, times[p], strict=True):
            if kind == "enter":
                events.append(Enter(time, ALL, barriers.pop() if named else None))
            elif kind == "exit":
                events.append(Exit(time, frozenset(q for q in NAMES if chance.random() < (0.95 if q == p else 0.5))))
            else:
                events.append(Start(time) if kind == "start" else Fail(time))
        processes.append(Process(p, tuple(events), clocks[p]))
    return processes


class Service:
    """A coordination service that believes what it likes about failures, and answers as it must.

    Requests and replies take their time; a process that is believed dead gets no answer any more.
    """

    def __init__(self, chance: random.Random, named: bool, clocks: str) -> None:
        self.chance, self.named, self.clocks = chance, named, clocks
        self.rows: dict[int, list[Event]] = {p: [] for p in NAMES}
        self.time = 0
        self.alive: set[int] = set()
        self.believed: set[int] = set()
        self.fenced: set[int] = set()  # believed dead, but alive
        self.waiting: set[int] = set()
        self.replies: dict[int, frozenset[int]] = {}
        self.inside: set[int] = set()
        self.number = 0

    def move(self) -> None:
        """One move of all that can happen now; failures are rarer."""
        moves: list[tuple[str, int]] = []
        for p in NAMES:
            alive = p in self.alive
            if not alive and p not in self.believed:
                moves.append(("start", p))
            if p in self.alive - self.inside - self.fenced:
                moves += [("enter", p)] * 3
            if p in self.inside and p in self.believed and p not in self.replies and p not in self.waiting:
                moves += [("arrive", p)] * 3
            if alive and p in self.replies:
                moves += [("reply", p)] * 3
            if alive:
                moves.append(("fail", p))
            # Too early, if it lives: then it is fenced, and does nothing any more until it fails.
            if p in self.believed and p not in self.replies and (not alive or self.chance.random() < 0.2):
                moves.append(("notice", p))
        kind, p = self.chance.choice(moves or [("none", 0)])
        self.time += 1
        match kind:
            case "start":
                self.alive.add(p)
                self.believed.add(p)
                self.rows[p].append(Start(self.time))
            case "enter":
                self.inside.add(p)
                # With a name: the barrier that is open now, so it must be counted in that one.
                self.rows[p].append(Enter(self.time, ALL, self.number if self.named else None))
                if self.named and p in self.believed:
                    self.waiting.add(p)
            case "arrive":
                self.waiting.add(p)
            case "reply":
                self.inside.discard(p)
                self.rows[p].append(Exit(self.time, self.replies.pop(p)))
            case "fail":
                for group in (self.alive, self.fenced, self.inside):
                    group.discard(p)
                self.replies.pop(p, None)
                self.rows[p].append(Fail(self.time))
            case "notice":
                self.believed.discard(p)
                self.waiting.discard(p)
                if p in self.alive:
                    self.fenced.add(p)
        self.answer()

    def answer(self) -> None:
        if self.waiting and self.waiting == self.believed:
            members = frozenset(self.waiting)
            self.replies |= {p: members for p in members if p in self.alive}
            self.waiting.clear()
            self.number += 1

    def execution(self, num_moves: int) -> list[Process]:
        for _ in range(num_moves):
            self.move()
        for p in self.fenced:
            self.rows[p].append(Fail(self.time))
        return [Process(p, tuple(row), self.clocks[p]) for p, row in self.rows.items()]


@given(seeds, st.booleans(), st.sampled_from(["aaa", "aab", "abc"]))
@examples(3000)
def test_the_checker_finds_what_trying_all_orders_finds(seed: int, named: bool, clocks: str) -> None:
    processes = anything(random.Random(seed), named, clocks)
    expected = equal_in_each_barrier(processes) and valid_by_trying_all_orders(processes)
    event(f"valid: {expected}")
    assert (find_violation(processes) is None) == expected


@given(seeds, st.booleans(), st.sampled_from(["aaa", "aab", "abc"]), st.integers(0, 60))
@examples(1500)
def test_a_right_service_gives_valid_lists(seed: int, named: bool, clocks: str, num_moves: int) -> None:
    processes = Service(random.Random(seed), named, clocks).execution(num_moves)
    event(f"lists: {sum(isinstance(each, Exit) for process in processes for each in process.events)}")
    assert find_violation(processes) is None


@given(seeds, st.booleans(), st.sampled_from(["aaa", "aab"]))
@examples(1500)
def test_one_wrong_list_of_a_right_service_is_judged_as_by_trying_all_orders(
    seed: int, named: bool, clocks: str
) -> None:
    chance = random.Random(seed)
    processes = Service(chance, named, clocks).execution(18)
    places = [(p, i) for p in NAMES for i, each in enumerate(processes[p].events) if isinstance(each, Exit)]
    if not places or sum(len(process.events) for process in processes) > MAX_EVENTS:
        return
    p, i = chance.choice(places)
    events = list(processes[p].events)
    got = events[i]
    assert isinstance(got, Exit)
    events[i] = Exit(got.time, got.members ^ {chance.choice([q for q in NAMES if q != p])})
    processes[p] = Process(p, tuple(events), clocks[p])
    expected = equal_in_each_barrier(processes) and valid_by_trying_all_orders(processes)
    event(f"valid: {expected}")
    assert (find_violation(processes) is None) == expected
