"""The executions of "Formal Semantics" in JAX's document on fault tolerance, with the places its figures give them."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from elastic_train.membership.execution import Enter, Event, Exit, Fail, Process, Start
from elastic_train.membership.semantics import find_violation, without_fenced

ALL = frozenset({0, 1, 2})


def start(at: float) -> list[Event]:
    return [Start(at)]


def fail(at: float) -> list[Event]:
    return [Fail(at)]


def call(begin: float, end: float | None = None, *members: int, barrier: Hashable = None) -> list[Event]:
    """A request of `live_processes`, with its reply if there is one."""
    enter = Enter(begin, ALL, barrier)
    return [enter] if end is None else [enter, Exit(end, frozenset(members))]


def execution(*rows: list[list[Event]], clocks: str = "   ") -> list[Process]:
    """Processes 0, 1, 2. One that has no row was never started."""
    return [
        Process(name, tuple(event for part in row for event in part), clocks[name]) for name, row in enumerate(rows)
    ]


VALID = {
    # Figure 1: all three start, call, and get 0,1,2.
    "all three": execution(
        [start(25), call(50, 250, 0, 1, 2)], [start(25), call(50, 250, 0, 1, 2)], [start(25), call(50, 250, 0, 1, 2)]
    ),
    # Figure 4: process 2 is dead throughout.
    "2 is dead throughout": execution([start(25), call(50, 250, 0, 1)], [start(25), call(50, 250, 0, 1)], [fail(25)]),
    # Figure 6: process 1 calls and dies before it gets a reply; 0 gets 0.
    "1 dies in the barrier and is not in the list": execution(
        [start(25), call(50, 250, 0)], [start(25), call(50), fail(150)]
    ),
    # Figure 8: the same, but 0 gets 0,1.
    "1 dies in the barrier and is in the list": execution(
        [start(25), call(50, 250, 0, 1)], [start(25), call(50), fail(150)]
    ),
    # Figure 10: process 1 has failed before 0 starts; its failure is moved to the right.
    "the failure of 1 is noticed late": execution([start(175), call(200, 250, 0, 1)], [start(25), call(50), fail(100)]),
    # Figure 12: process 1 is cut off, and taken for dead while it lives; its failure is moved to the left.
    "1 is taken for dead while it lives": execution([start(25), call(100, 200, 0)], [start(25), call(50), fail(250)]),
    # Figure 15: "even complex executions".
    "complex": execution(
        [start(25), call(40, 150, 0), call(175, 275, 0, 2)],
        [start(50), call(65), fail(125), start(150), call(165), fail(290)],
        [start(100), call(115), fail(150)],
    ),
}

INVALID = {
    # Figure 14: process 1 has started again, so its failure cannot be moved to where process 0 is in the barrier.
    "a failure is not moved past the next start": (
        execution([start(175), call(200, 250, 0, 1)], [start(25), call(50), fail(100), start(175)]),
        "1's failure comes before 1's start at 175.000000 (a failure is not moved past another event of 1)",
    ),
    # Figure 17: process 2 must have failed early for the list of 1, and late for the list of 0.
    "one failure at two times": (
        execution(
            [start(165), call(180, 275, 0, 2)],
            [start(25), call(40, 125, 1), fail(140)],
            [start(25), call(40), fail(275)],
        ),
        "the instant of [0, 2] comes before 2's failure (in the list, so still in the barrier); "
        "2's failure comes before the instant of [1] (not in the list, so dead)",
    ),
}


@pytest.mark.parametrize("name", VALID)
def test_a_valid_execution_of_the_document(name):
    assert find_violation(VALID[name]) is None


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_execution_of_the_document(name):
    processes, reason = INVALID[name]
    found = find_violation(processes)
    assert found is not None
    assert reason in str(found)


def test_each_list_of_figure_17_is_valid_alone():
    """So it is one placement of the failures that must serve all lists."""
    row_0, row_1, row_2 = INVALID["one failure at two times"][0]
    early = Process(0, (Start(165),))
    assert find_violation([early, row_1, row_2]) is None
    assert find_violation([row_0, Process(1, (Start(25), Fail(140))), row_2]) is None


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([[start(0), call(1, 2, 0, 1)], [start(0)]], "1 never entered"),
        ([[start(0), call(1, 2, 0)], [start(0)]], "1 is missing"),
        ([[start(0), call(1, 2, 1)], [start(0), call(1), fail(3)], []], "0 is missing, and never failed"),
        ([[start(0), call(1, 2, 0, 1)], [start(0), call(3), fail(4)]], "1's entry at 3.000000"),
        ([[start(0), call(1, 2, 0)], [start(0), call(3), fail(4)]], "1's failure comes before the instant of [0]"),
        ([[start(0), call(1, 2, 0, 7)]], "[7] had not been asked for"),
    ],
)
def test_other_invalid_lists(rows, reason):
    assert reason in str(find_violation(execution(*rows)))


def test_a_request_after_which_a_process_went_on_bounds_its_failure():
    """The call was refused. Until its next event it was in the barrier; after that it was not, and lived."""
    refused = [start(0), call(1), call(5), fail(9)]
    assert find_violation(execution([start(0), call(2, 3, 0, 1)], refused)) is None
    assert find_violation(execution([start(0), call(2, 3, 0)], refused)) is not None


def test_members_of_a_named_barrier_get_the_same_list():
    rows = [[start(0), call(1, 5, 0, 1, barrier="b")], [start(0), call(1, 5, 0, barrier="b")]]
    assert "of the same barrier 0 got [0, 1]" in str(find_violation(execution(*rows)))


def test_a_call_of_another_barrier_does_not_count():
    """Without names it might: the two calls of process 1 overlap the one of process 0."""
    rows = [
        [start(0), call(1, 9, 0, 1, barrier="a")],
        [start(0), call(2, 3, 0, 1, barrier="b"), call(4, 5, 0, 1, barrier="c"), fail(6)],
    ]
    assert "1 never entered that barrier" in str(find_violation(execution(*rows)))
    unnamed = [[start(0), call(1, 9, 0, 1)], [start(0), call(2, 3, 0, 1), call(4, 5, 0, 1), fail(6)]]
    assert find_violation(execution(*unnamed)) is None


def test_without_a_common_clock_only_the_barriers_give_an_order():
    late = [[start(0), call(1, 2, 0, 1)], [start(0), call(8, 9, 0, 1)]]
    assert find_violation(execution(*late, clocks="aab")) is not None
    assert find_violation(execution(*late, clocks="abb")) is None
    # Process 1 must have entered the second barrier before process 0 got its list, and so has left the first one.
    crossed = [
        [start(0), call(1, 2, 0, 1, barrier="second"), call(3, 4, 0, 1, barrier="first")],
        [start(0), call(1, 2, 0, 1, barrier="first"), call(3, 4, 0, 1, barrier="second")],
    ]
    assert find_violation(execution(*crossed, clocks="abb")) is not None


def test_what_a_process_does_after_it_was_declared_dead_counts_in_no_barrier():
    zombie = execution([], [start(0), call(1, 2, 0, 1), call(20), fail(21)])[1]
    others = execution([start(0), call(1, 2, 0, 1), call(3, 4, 0)])[0]
    assert find_violation([others, zombie]) is not None
    assert find_violation([others, without_fenced(zombie, declared_dead=10.0)]) is None
    assert find_violation([others, without_fenced(zombie, declared_dead=30.0)]) is not None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([start(5), call(1)], "descend"),
        ([start(0), start(1)], "starts twice"),
        ([start(0), [Exit(1, frozenset())]], "had not asked for"),
    ],
)
def test_what_is_no_execution(row, reason):
    with pytest.raises(ValueError, match=reason):
        find_violation(execution(row))


def test_ten_thousands_of_barriers_take_seconds():
    """Three members, 20 000 barriers, one death; then with a list that is wrong near the end. It must not be quadratic:
    then this would not end within the time that a test has."""

    def members(wrong: frozenset[int]) -> list[Process]:
        everybody, num_barriers = frozenset(range(3)), 20_000
        rows = []
        for name in sorted(everybody):
            events: list[Event] = []
            for number in range(num_barriers if name else 10_000):
                living = everybody if number < 10_000 else everybody - {0}
                living = wrong if wrong and number == 19_990 else living
                events += [Enter(number + 0.01 * name, everybody, number), Exit(number + 0.5, living)]
            rows.append(Process(name, (*events, *([] if name else [Fail(10_000.0)]))))
        return rows

    assert find_violation(members(frozenset())) is None
    found = find_violation(members(frozenset({1})))
    assert found is not None and "2 is missing, and never failed" in found.proof


def test_who_gets_a_list_was_in_that_barrier_even_if_the_list_does_not_say_so():
    """Process 1 fails while 0 still waits, so there is an instant for the list of 0; but not within the call of 1."""
    rows = [[start(0), call(1, 10, 0)], [start(0), call(2, 3, 0), fail(5)]]
    assert find_violation(execution(*rows)) is not None
