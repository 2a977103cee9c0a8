"""What outlives a generation, generations that end on purpose, and other numbers of slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.membership.group import Identity, View
from elastic_train.membership.roster import Limits, Roster, apply, beginning
from elastic_train.membership.roster_events import (
    Action,
    AgentJoined,
    AgentLost,
    AskLeave,
    AskStop,
    End,
    Event,
    Exited,
    Form,
    Hello,
    NextGeneration,
    Ready,
    ResizeAsked,
    Start,
    Started,
    Stepped,
    StopAsked,
    TimerOver,
    Viewed,
)
from elastic_train.membership.roster_generations import refuse_resize

LIMITS = Limits(num_slots=2, max_slots=8)
A, B = Identity(0, 0, 1), Identity(1, 0, 2)


def play(roster: Roster, *events: Event) -> tuple[Roster, list[Action]]:
    actions: list[Action] = []
    for event in events:
        roster, found = apply(roster, event)
        actions += found
    return roster, actions


def made_ready(*workers: Identity) -> list[Event]:
    return [e for w in workers for e in (Started(w, 1), Hello(w, 1, "h"), Ready(w))]


def training(limits: Limits = LIMITS, spare: int = 0) -> Roster:
    return play(Roster(limits), AgentJoined("host", (0, 1), spare=spare), *made_ready(A, B))[0]


def starts(actions: list[Action]) -> list[Start]:
    return [action for action in actions if isinstance(action, Start)]


def test_a_new_generation_begins_with_the_states_that_agents_hold() -> None:
    roster = beginning(LIMITS, epoch=4, starts={0: 1, 1: 3})
    roster, actions = play(roster, AgentJoined("host", (0, 1), {0: 20, 1: 19}, epoch=5))
    zero, one = Identity(0, 1, 1), Identity(1, 3, 2)
    assert starts(actions) == [Start("host", zero, restore=True), Start("host", one, restore=True)]
    roster, actions = play(roster, *made_ready(zero, one))
    # Members may have seen an epoch that the last coordinator had not heard of.
    assert [a.view for a in actions if isinstance(a, Form)] == [View(6, (zero, one))]
    # From here on the members' state counts, and whoever is started again is healed.
    _, actions = play(roster, Exited(one, 1, ""), TimerOver("restart/1"))
    assert starts(actions) == [Start("host", Identity(1, 4, 3))]


def test_states_from_before_do_not_count_while_there_are_members() -> None:
    _, actions = play(
        play(Roster(LIMITS), AgentJoined("one", (0,)), AgentJoined("two", (1,)), *made_ready(A, B))[0],
        AgentLost("two"),
        AgentJoined("two", (1,), {1: 99}, epoch=50),
    )
    assert [start.restore for start in starts(actions)] == [False]


def test_a_stop_waits_for_members_that_bring_their_state_back() -> None:
    roster = beginning(LIMITS, epoch=4, starts={0: 1, 1: 1}, stop_wanted="SIGTERM")
    roster, _ = play(roster, AgentJoined("host", (0, 1), {0: 20, 1: 20}))
    workers = (Identity(0, 1, 1), Identity(1, 1, 2))
    _, actions = play(roster, *made_ready(*workers))
    assert [a for a in actions if isinstance(a, AskStop)] == [AskStop((1, 2), now=False, reason="SIGTERM")]
    early = beginning(LIMITS, epoch=4, starts={}, returning=True)
    assert not [a for a in play(early, StopAsked(False, "once"))[1] if isinstance(a, End)]
    nobody_had_a_state = beginning(LIMITS, epoch=0, starts={0: 1}, returning=True)
    assert [a for a in play(nobody_had_a_state, StopAsked(False, "once"))[1] if isinstance(a, End)]
    waiting, actions = play(replace(roster, stop_wanted=""), StopAsked(False, "once"))
    assert not [a for a in actions if isinstance(a, End)]
    assert [a.exit_code for a in play(waiting, StopAsked(False, "twice"))[1] if isinstance(a, End)] == [130]


def test_the_next_generation_begins_after_a_commit_when_node_ids_run_out() -> None:
    roster = training(replace(LIMITS, num_nodes=3))
    roster, actions = play(roster, Exited(B, -9, ""), Viewed(A, View(2, (A,)), 7), TimerOver("restart/1"))
    assert starts(actions) == [] and not [a for a in actions if isinstance(a, NextGeneration | End)]
    assert "all 2 node ids" in roster.renewing
    roster, actions = play(roster, Stepped(A, 8))
    (change,) = [a for a in actions if isinstance(a, NextGeneration)]
    assert "slot 1 needs another" in change.reason
    assert play(roster, Stepped(A, 9), StopAsked(True, ""))[1] == []


@pytest.mark.parametrize("how", ["time", "floor", "start"])
def test_the_next_generation_does_not_wait_for_a_commit_that_does_not_come(how: str) -> None:
    limits = replace(LIMITS, num_nodes=3, min_workers=2 if how == "floor" else 1)
    roster = training(limits) if how != "start" else play(Roster(limits), AgentJoined("host", (0, 1)))[0]
    actions = play(roster, Exited(B, -9, ""), TimerOver("restart/1"), *([TimerOver("renew")] if how == "time" else []))[
        1
    ]
    assert len([a for a in actions if isinstance(a, NextGeneration)]) == 1


def test_a_job_grows_where_there_is_room_and_shrinks_from_the_top() -> None:
    roster = training(spare=1)
    assert refuse_resize(roster, 3) == ""
    assert "slot 3" in refuse_resize(roster, 4)
    roster, actions = play(roster, ResizeAsked(3, "asked"))
    assert starts(actions) == [Start("host", Identity(2, 0, 3))] and roster.spare == {"host": 0}
    roster, actions = play(roster, ResizeAsked(1, "asked"))
    assert [a for a in actions if isinstance(a, AskLeave)] == [AskLeave(B)]
    assert roster.coming == (0,)
    roster, actions = play(roster, Viewed(A, View(2, (A,)), 5), Exited(B, 0, ""), Exited(Identity(2, 0, 3), -9, ""))
    assert not [a for a in actions if type(a).__name__ == "SetTimer" and a.name.startswith("restart")]
    _, actions = play(roster, ResizeAsked(2, "asked"))
    assert starts(actions) == [Start("host", Identity(1, 1, 4))]


def test_slots_of_which_the_agent_has_not_heard_yet_are_given_to_it_in_the_next_generation() -> None:
    grown = beginning(replace(LIMITS, num_slots=4), epoch=4, starts={0: 1, 1: 1})
    _, actions = play(grown, AgentJoined("host", (0, 1), {0: 20}, spare=7))
    assert [start.identity.slot for start in starts(actions)] == [0, 1, 2, 3]


def test_an_agent_with_slots_that_the_job_lacks_stands_by_until_it_grows() -> None:
    roster, actions = play(training(), AgentJoined("other", (2, 3)))
    assert starts(actions) == []
    _, actions = play(roster, ResizeAsked(3, "asked"))
    assert starts(actions) == [Start("other", Identity(2, 0, 3))]


def test_a_job_that_outgrows_its_coordinator_gets_another() -> None:
    roster, _ = play(training(replace(LIMITS, capacity=2), spare=5), ResizeAsked(3, "asked"))
    actions = play(roster, Stepped(A, 8))[1]
    assert [a for a in actions if isinstance(a, NextGeneration)]


@pytest.mark.parametrize(
    ("workers", "why"), [(2, "2 workers already"), (1, "min_workers is 2"), (9, "shards = 8"), (3, "no host has room")]
)
def test_resizes_that_are_refused(workers: int, why: str) -> None:
    assert why in refuse_resize(training(replace(LIMITS, min_workers=2)), workers)
