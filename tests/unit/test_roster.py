"""The roster, one rule at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from elastic_train.config import FaultConfig
from elastic_train.membership.group import Identity, View
from elastic_train.membership.roster import Limits, Roster, WorkerState, apply, beginning, refuse_drain
from elastic_train.membership.roster_events import (
    Abort,
    Action,
    AgentJoined,
    AgentLeaving,
    AgentLost,
    Announce,
    AskLeave,
    AskStop,
    DrainAsked,
    End,
    Event,
    Evict,
    Exited,
    Failed,
    Finished,
    Form,
    Hello,
    Kill,
    Note,
    Ready,
    Refuse,
    RefuseWorker,
    SetTimer,
    Silent,
    Start,
    Started,
    Stepped,
    StopAsked,
    TimerOver,
    Tombstone,
    Unfit,
    Viewed,
)

A, B, C = Identity(0, 0, 1), Identity(1, 0, 2), Identity(2, 0, 3)
"""The first starts of slots 0, 1 and 2."""

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no\nwhile reading'

FAULTS = FaultConfig(max_restarts=3, forgive_after_steps=20, start_grace_s=60.0)
LIMITS = Limits(num_slots=3, faults=FAULTS)
Kind = TypeVar("Kind")


def play(roster: Roster, *events: Event) -> tuple[Roster, tuple[Action, ...]]:
    """Applies events; returns the actions of the last one."""
    actions: tuple[Action, ...] = ()
    for event in events:
        roster, actions = apply(roster, event)
    return roster, actions


def those(actions: tuple[Action, ...], *kinds: type[Kind]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kinds)]


def quiet(actions: tuple[Action, ...]) -> list[Action]:
    """All actions but notes."""
    return [action for action in actions if not isinstance(action, Note)]


def notes(actions: tuple[Action, ...]) -> dict[str, Note]:
    return {note.event: note for note in those(actions, Note)}


def started(limits: Limits = LIMITS) -> Roster:
    """All three workers are warming."""
    roster = apply(Roster(limits), AgentJoined("host", (0, 1, 2)))[0]
    for worker in (A, B, C):
        roster, _ = play(roster, Started(worker, 100), Hello(worker, 100, "host"))
    return roster


def training(limits: Limits = LIMITS) -> Roster:
    """All three workers are members of epoch 1."""
    return play(started(limits), Ready(A), Ready(B), Ready(C))[0]


def with_joiner(roster: Roster) -> tuple[Roster, Identity]:
    """C died, the others went on, and its next start is ready."""
    roster, _ = play(roster, Exited(C, -9, ""), Viewed(A, View(2, (A, B)), 5), TimerOver("restart/2"))
    joiner = roster.workers[2].identity
    return play(roster, Hello(joiner, 1, "host"), Ready(joiner))[0], joiner


# Starting -------------------------------------------------------------------------------------------------


def test_an_agent_starts_its_slots_with_fresh_nodes() -> None:
    roster, actions = play(Roster(LIMITS), AgentJoined("host", (0, 1, 2)))
    assert quiet(actions) == [Start("host", A), Start("host", B), Start("host", C), SetTimer("floor", 3600.0)]
    assert roster.next_node == 4


def test_apply_does_not_change_its_argument() -> None:
    roster = training()
    before = replace(roster, workers=dict(roster.workers), slots=dict(roster.slots))
    apply(roster, Exited(A, 1, "boom"))
    assert roster == before


def test_slots_that_the_job_has_not_or_another_agent_fills_are_refused() -> None:
    roster, actions = play(Roster(LIMITS), AgentJoined("one", (0, 1)), AgentJoined("two", (1, 2, 3)))
    assert those(actions, Start) == [Start("two", Identity(2, 0, 3))]
    unknown, taken = those(actions, Refuse)
    assert (unknown.agent, unknown.slots) == ("two", (3,)) and "slots 0 to 2" in unknown.reason
    assert (taken.agent, taken.slots) == ("two", (1,)) and "agent one" in taken.reason
    assert roster.agents == {"one": (0, 1), "two": (2,)}


def test_a_refused_agent_takes_over_when_the_first_is_lost() -> None:
    """As when an agent is started anew before the loss of the old one was noticed."""
    roster, actions = play(training(), AgentJoined("again", (0, 1, 2)))
    assert those(actions, Start) == []
    roster, actions = play(roster, AgentLost("host"))
    assert [action.identity for action in those(actions, Tombstone)] == [A, B, C]
    assert those(actions, Start) == [Start("again", Identity(slot, 1, 4 + slot)) for slot in range(3)]
    assert notes(actions)["slots_taken_over"].fields == {"agent": "again", "slots": (0, 1, 2)}
    assert (roster.agents, roster.standby) == ({"again": (0, 1, 2)}, {})


def test_a_standby_that_is_lost_first_gets_nothing() -> None:
    roster, actions = play(training(), AgentJoined("again", (0,)), AgentLost("again"), AgentLost("host"))
    assert (those(actions, Start), roster.agents, roster.standby) == ([], {}, {})


def two_hosts() -> Roster:
    """Slots 0 and 1 on one host, 2 on the other; all are members."""
    roster, _ = play(Roster(LIMITS), AgentJoined("one", (0, 1)), AgentJoined("two", (2,)))
    for worker in (A, B, C):
        roster, _ = play(roster, Started(worker, 100), Hello(worker, 100, "host"), Ready(worker))
    return roster


def test_workers_of_an_agent_that_leaves_are_not_restarted_there() -> None:
    roster, actions = play(two_hosts(), AgentLeaving("two", "SIGTERM"))
    assert quiet(actions) == []  # the member leaves by itself
    assert notes(actions)["agent_leaving"].fields["slots"] == (2,)
    roster, actions = play(roster, Viewed(A, View(2, (A, B)), 5), Exited(C, 0, ""))
    assert those(actions, SetTimer) == [SetTimer("restart/2", 0.0)]
    roster, actions = play(roster, TimerOver("restart/2"))
    assert those(actions, Start) == []
    assert roster.slots[2].failures == 0
    roster, actions = play(roster, AgentLost("two"))
    assert notes(actions)["agent_lost"].show == "agent two has left"
    roster, actions = play(roster, AgentJoined("three", (2,)))
    assert those(actions, Start) == [Start("three", Identity(2, 1, 4))]


def test_a_standby_follows_an_agent_that_leaves_once_its_workers_are_gone() -> None:
    roster, actions = play(two_hosts(), AgentJoined("three", (2,)), AgentLeaving("two", "SIGTERM"))
    assert (roster.agents, those(actions, Start)) == ({"one": (0, 1), "two": (), "three": (2,)}, [])
    _, actions = play(roster, Viewed(A, View(2, (A, B)), 5), Exited(C, 0, ""), TimerOver("restart/2"))
    assert those(actions, Start) == [Start("three", Identity(2, 1, 4))]


def test_workers_that_are_no_members_are_killed_when_their_agent_leaves() -> None:
    roster, _ = play(Roster(LIMITS), AgentJoined("one", (0, 1, 2)), Started(A, 1), Hello(A, 1, "h"), Ready(A))
    _, actions = play(roster, AgentLeaving("one", "SIGTERM"))
    assert [action.identity for action in those(actions, Kill)] == [A, B, C]


def test_a_worker_goes_from_starting_to_member() -> None:
    roster, actions = play(Roster(replace(LIMITS, num_slots=1)), AgentJoined("host", (0,)))
    assert roster.workers[0].state is WorkerState.STARTING
    roster, actions = play(roster, Started(A, 17))
    assert quiet(actions) == [SetTimer("start/0/0", 600.0)]
    roster, _ = play(roster, Hello(A, 17, "host"))
    assert roster.workers[0].state is WorkerState.WARMING
    roster, actions = play(roster, Ready(A))
    assert roster.workers[0].state is WorkerState.MEMBER
    assert quiet(actions) == [Form(View(1, (A,)), (1,))]


def test_a_hello_may_overtake_started() -> None:
    roster, actions = play(Roster(LIMITS), AgentJoined("host", (0,)), Hello(A, 17, "host"), Ready(A), Started(A, 17))
    assert roster.workers[0].state is WorkerState.READY
    assert quiet(actions) == []


def test_a_worker_that_takes_too_long_to_start_is_killed() -> None:
    roster, actions = play(started(), TimerOver("start/1/0"))
    (kill,) = those(actions, Kill)
    assert kill.identity == B
    assert "slot 1 was not ready 600 s after its start" in kill.reason
    assert roster.workers[1].state is WorkerState.WARMING, "dead only once it has exited"
    _, actions = play(training(), TimerOver("start/1/0"))
    assert actions == ()


def test_events_of_an_old_incarnation() -> None:
    roster, _ = play(training(), Exited(C, -9, ""), TimerOver("restart/2"))
    view = View(9, (A, C))
    told = (Hello(C, 1, "h"), Ready(C), Viewed(C, view, 1), Stepped(C, 1), Finished(C, "done"))
    for event in told:
        after, actions = apply(roster, event)
        assert after == roster
        (evict,) = actions
        assert isinstance(evict, Evict)
        assert evict.identity == C
        assert "slot 2 has incarnation 1 (node 4); you are incarnation 0 (node 3)" in evict.reason
    for event in (Exited(C, -9, ""), Silent(C, "gone"), Started(C, 1)):
        assert apply(roster, event) == (roster, ())


def test_unknown_timers_are_an_error() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        apply(training(), TimerOver("nonsense"))


# Forming --------------------------------------------------------------------------------------------------


def test_the_first_group_forms_when_all_are_ready() -> None:
    roster, actions = play(started(), Ready(A), Ready(B))
    assert those(actions, Form) == []
    _, actions = play(roster, Ready(C))
    assert those(actions, Form) == [Form(View(1, (A, B, C)), (1, 2, 3))]


def test_the_grace_timer_is_set_once_and_forms_with_those_ready() -> None:
    limits = replace(LIMITS, min_workers=2)
    roster, actions = play(started(limits), Ready(C))
    assert quiet(actions) == []
    roster, actions = play(roster, Ready(A))
    assert quiet(actions) == [SetTimer("grace", 60.0)]
    assert "waiting up to 60 s for slot 1" in notes(actions)["waiting"].show
    same, actions = play(roster, Stepped(A, 0))
    assert quiet(actions) == []
    _, actions = play(same, TimerOver("grace"))
    assert quiet(actions) == [Form(View(1, (A, C)), (1, 3))]


def test_the_grace_timer_waits_again_if_too_few_are_left() -> None:
    limits = replace(LIMITS, min_workers=2)
    roster, _ = play(started(limits), Ready(A), Ready(C), Exited(C, 1, ""))
    roster, actions = play(roster, TimerOver("grace"))
    assert quiet(actions) == []
    _, actions = play(roster, Ready(B))
    assert quiet(actions) == [SetTimer("grace", 60.0)]


def test_a_slot_that_was_given_up_is_not_waited_for() -> None:
    roster, _ = play(started(replace(LIMITS, faults=replace(FAULTS, max_restarts=0))), Ready(A), Ready(B))
    _, actions = play(roster, Exited(C, 1, ""))
    assert those(actions, Form) == [Form(View(1, (A, B)), (1, 2))]


# Views ----------------------------------------------------------------------------------------------------


def test_a_ready_joiner_is_announced_and_told_once_the_members_have_agreed() -> None:
    roster, _ = play(training(), Exited(C, -9, ""), Viewed(A, View(2, (A, B)), 5), TimerOver("restart/2"))
    joiner = Identity(2, 1, 4)
    roster, actions = play(roster, Hello(joiner, 1, "host"), Ready(joiner))
    assert quiet(actions) == [Announce((1, 2), (joiner,))], "and no grace timer: there are members"
    view = View(3, (A, B, joiner))
    roster, actions = play(roster, Viewed(B, view, 9))
    assert quiet(actions) == [Form(view, (4,)), Announce((1, 2, 4), ())]
    assert roster.workers[2].state is WorkerState.MEMBER
    _, actions = play(roster, Viewed(A, view, 9))
    assert quiet(actions) == [], "an equal epoch is old news"


def test_a_view_that_the_reporter_is_not_in_is_ignored() -> None:
    roster = training()
    assert apply(roster, Viewed(A, View(7, (B, C)), 3)) == (roster, ())


def test_a_view_of_one_that_is_no_member_is_ignored() -> None:
    """Neither one that the members have left behind nor one that they have not admitted speaks for them."""
    roster, _ = play(training(), Viewed(A, View(2, (A, B)), 5))
    assert roster.is_living(C)
    assert apply(roster, Viewed(C, View(9, (C,)), 8)) == (roster, ())
    roster, joiner = with_joiner(training())
    assert apply(roster, Viewed(joiner, View(9, (joiner,)), 8)) == (roster, ())


def test_a_joiner_that_died_after_its_admission_is_reported_to_each_reporter() -> None:
    roster, joiner = with_joiner(training())
    roster, actions = play(roster, Exited(joiner, -9, ""))
    told = [action for action in quiet(actions) if not isinstance(action, SetTimer)]
    assert told == [Tombstone(joiner), Abort(joiner, (1, 2)), Announce((1, 2), ())]
    view = View(3, (A, B, joiner))
    roster, actions = play(roster, Viewed(A, view, 9))
    assert quiet(actions) == [Announce((1, 2), ()), Abort(joiner, (1,))]
    _, actions = play(roster, Viewed(B, view, 9))
    assert quiet(actions) == [Abort(joiner, (2,))]


def test_other_joiners_of_a_view_hear_of_the_dead_in_it() -> None:
    roster, _ = play(training(), Exited(B, -9, ""), Exited(C, -9, ""), Viewed(A, View(2, (A,)), 5))
    roster, _ = play(roster, TimerOver("restart/1"), TimerOver("restart/2"))
    b, c = (roster.workers[slot].identity for slot in (1, 2))
    view = View(3, (A, b, c))
    _, actions = play(roster, Ready(b), Ready(c), Exited(c, -9, ""), Viewed(A, view, 9))
    assert quiet(actions) == [Form(view, (b.node,)), Announce((1, b.node), ()), Abort(c, (1, b.node))]


def test_a_member_that_the_others_left_behind_has_to_exit() -> None:
    roster, actions = play(training(), Viewed(A, View(2, (A, B)), 5))
    assert notes(actions)["view_changed"].show == "going on after step 5 without slot 2"
    assert quiet(actions) == [SetTimer("leave/2/0", 30.0), Announce((1, 2), ())]
    assert [worker.identity for worker in roster.members] == [A, B]
    _, actions = play(roster, TimerOver("leave/2/0"))
    assert [kill.identity for kill in those(actions, Kill)] == [C]
    _, actions = play(roster, Exited(C, 75, ""), TimerOver("leave/2/0"))
    assert quiet(actions) == []


# Death ----------------------------------------------------------------------------------------------------


def test_a_death_in_order() -> None:
    roster, actions = play(training(), Stepped(B, 7), Exited(B, -9, ""))
    assert quiet(actions) == [Tombstone(B), Abort(B, (1, 3)), SetTimer("restart/1", 0.0)]
    fields = notes(actions)["worker_died"].fields
    assert (fields["slot"], fields["incarnation"]) == (1, 0)
    assert (fields["exit_code"], fields["step"], fields["state"]) == (-9, 7, "member")
    _, actions = play(roster, TimerOver("restart/1"))
    assert those(actions, Start) == [Start("host", Identity(1, 1, 4))]


def test_back_off_doubles_up_to_a_limit_and_the_budget_ends() -> None:
    limits = replace(LIMITS, faults=replace(FAULTS, max_restarts=5, first_backoff_s=0.5, max_backoff_s=3.0))
    roster, delays = training(limits), []
    for _ in range(5):
        roster, actions = play(roster, Exited(roster.workers[2].identity, 1, "boom"))
        delays += [timer.delay_s for timer in those(actions, SetTimer) if timer.name == "restart/2"]
        roster, _ = play(roster, TimerOver("restart/2"))
    assert delays == [0.0, 0.5, 1.0, 2.0, 3.0]
    roster, actions = play(roster, Exited(roster.workers[2].identity, 1, "boom"))
    assert "gave up slot 2" in notes(actions)["slot_given_up"].show
    assert those(actions, End, SetTimer) == [], "two slots are left, one is enough"
    _, actions = play(roster, TimerOver("restart/2"), AgentJoined("host", (0, 1, 2)))
    assert those(actions, Start) == []


def test_given_up_slots_end_the_job_below_min_workers() -> None:
    limits = replace(LIMITS, faults=replace(FAULTS, max_restarts=0), min_workers=2)
    roster, _ = play(training(limits), Exited(C, -9, ""))
    roster, actions = play(roster, Exited(B, 1, TRACEBACK))
    (end,) = those(actions, End)
    assert (end.exit_code, end.status) == (4, "gave_up")
    for words in (
        "slot 1: last exit code 1",
        "slot 2: last exit code -9",
        "The first error, on slot 1: ValueError: no",
    ):
        assert words in end.message
    assert end.traceback == TRACEBACK
    assert apply(roster, Exited(A, 1, "")) == (roster, ())


def test_steps_forgive_earlier_failures() -> None:
    roster, joiner = with_joiner(training())
    roster, _ = play(roster, Viewed(A, View(3, (A, B, joiner)), 9), Stepped(joiner, 10), Stepped(joiner, 28))
    assert roster.slots[2].failures == 1, "19 steps"
    roster, _ = play(roster, Stepped(joiner, 29))
    assert roster.slots[2].failures == 0, "20 steps"
    _, actions = play(roster, Exited(joiner, -9, ""))
    assert SetTimer("restart/2", 0.0) in actions


def test_steps_that_are_taken_again_forgive_nothing() -> None:
    roster, _ = play(training(), *(Stepped(worker, 40) for worker in (A, B, C)))
    roster, _ = play(roster, *(Exited(worker, 1, "") for worker in (A, B, C)))
    assert [roster.slots[n].failures for n in range(3)] == [1, 1, 1]
    roster, _ = play(roster, *(TimerOver(f"restart/{n}") for n in range(3)))
    again = [roster.workers[n].identity for n in range(3)]
    roster, _ = play(roster, *(Ready(worker) for worker in again))
    roster, _ = play(roster, *(Stepped(worker, step) for worker in again for step in (1, 40)))
    assert [roster.slots[n].failures for n in range(3)] == [1, 1, 1]
    roster, _ = play(roster, *(Stepped(worker, step) for worker in again for step in (41, 60)))
    assert [roster.slots[n].failures for n in range(3)] == [0, 0, 0]


def test_a_silent_worker_is_killed_before_it_is_declared_dead() -> None:
    roster, actions = play(training(), Silent(B, "keepalive ran out"))
    assert quiet(actions) == [Kill("host", B, "keepalive ran out")]
    _, actions = play(roster, Exited(B, -9, ""))
    assert quiet(actions)[:2] == [Tombstone(B), Abort(B, (1, 3))]


@pytest.mark.parametrize(("kind", "dumps"), [("stuck", True), ("slow", False)])
def test_an_unfit_worker_is_killed_like_a_silent_one(kind: str, dumps: bool) -> None:
    roster, actions = play(training(), Unfit(B, kind, "too long in 'data'"))
    assert quiet(actions) == [Kill("host", B, "too long in 'data'", dump_stacks=dumps)]
    assert notes(actions)["worker_killed"].fields["kind"] == kind
    roster, actions = play(roster, Exited(B, -12, "", stuck_at="loss.py:7 in load"))
    assert quiet(actions)[:2] == [Tombstone(B), Abort(B, (1, 3))]
    assert notes(actions)["worker_died"].fields["reason"] == "exit code -12, stuck at loss.py:7 in load"
    assert quiet(play(roster, Unfit(B, kind, "again"))[1]) == []


def test_a_worker_that_is_not_ready_in_time_dumps_its_stacks() -> None:
    _, actions = play(started(), TimerOver("start/1/0"))
    (kill,) = quiet(actions)
    assert isinstance(kill, Kill) and kill.identity == B and kill.dump_stacks


def test_a_lost_agent_takes_its_workers_with_it_until_it_comes_back() -> None:
    limits = replace(LIMITS, min_workers=2)
    roster, _ = play(Roster(limits), AgentJoined("one", (0,)), AgentJoined("two", (1, 2)))
    roster, _ = play(roster, Ready(A), Ready(B), Ready(C))
    roster, actions = play(roster, AgentLost("two"))
    assert quiet(actions) == [
        Tombstone(B),
        Tombstone(C),
        Abort(B, (1,)),
        Abort(C, (1,)),
        SetTimer("floor", 3600.0),
    ]
    same, actions = play(roster, TimerOver("restart/1"))
    assert (same, actions) == (roster, ())
    roster, actions = play(roster, Ready(B))
    assert [evict.identity for evict in those(actions, Evict)] == [B], "it may live on, cut off"
    _, actions = play(roster, AgentJoined("two", (1, 2)))
    assert those(actions, Start) == [Start("two", Identity(1, 1, 4)), Start("two", Identity(2, 1, 5))]


def test_without_agents_the_floor_timer_ends_the_job() -> None:
    roster, actions = play(training(), AgentLost("host"))
    assert SetTimer("floor", 3600.0) in actions
    _, actions = play(roster, TimerOver("floor"))
    assert [end.exit_code for end in those(actions, End)] == [4]


def test_when_all_members_died_a_new_group_forms_from_the_start() -> None:
    roster, joiner = with_joiner(training())
    roster, actions = play(roster, Exited(A, -9, ""), Exited(B, -9, ""))
    assert "the state in memory is lost" in notes(actions)["group_lost"].show
    assert SetTimer("grace", 60.0) in actions
    _, actions = play(roster, TimerOver("grace"))
    assert those(actions, Form) == [Form(View(3, (joiner,)), (joiner.node,))]


# User code ------------------------------------------------------------------------------------------------


def failure(worker: Identity, *, startup: bool = True, text: str = "") -> Failed:
    return Failed(worker, 4, fatal=startup, startup=startup, traceback=text or f"Traceback of {worker.slot}")


def test_a_bug_at_start_up_ends_the_job_once_every_slot_has_met_it() -> None:
    roster, actions = play(started(), failure(B), Exited(B, 1, ""), TimerOver("restart/1"), failure(C))
    assert those(actions, End) == []
    _, actions = play(roster, failure(A))
    (end,) = those(actions, End)
    assert (end.exit_code, end.status) == (3, "failed")
    assert "The first error, on slot 1: Traceback of 1" in end.message and end.traceback == "Traceback of 1"


def test_an_error_of_ours_at_start_up_is_not_taken_for_one_of_the_users_code() -> None:
    text = "elastic_train.errors.UsageError: no room"
    roster, actions = play(started(), failure(B, text=text))
    assert notes(actions)["user_code_failed"].show == f"worker 1 (incarnation 0) cannot start: {text}"
    _, actions = play(roster, failure(C, text=text))
    assert notes(actions)["user_code_failed"].show == f"worker 2 (incarnation 0) cannot start: as on slot 1: {text}"


def test_a_worker_whose_code_raised_at_start_up_is_not_started_again_at_once():
    _, actions = play(started(), failure(B), Exited(B, 13, ""))
    assert SetTimer("restart/1", 5.0) in actions
    assert "because its code raised" in notes(actions)["worker_died"].show


def test_the_same_error_is_shown_in_full_once():
    text = TRACEBACK
    roster, actions = play(started(), failure(B, text=text))
    assert text in notes(actions)["user_code_failed"].show
    roster, actions = play(roster, failure(C, text=text))
    assert notes(actions)["user_code_failed"].show.endswith("while starting:\nas on slot 1: ValueError: no")
    _, actions = play(roster, Exited(A, 1, text.replace("no", "other")))
    assert notes(actions)["worker_died"].show.endswith("ValueError: other\nwhile reading")


def test_a_failure_counts_even_if_the_exit_and_the_restart_came_first() -> None:
    roster, _ = play(started(), failure(A), failure(B), Exited(C, 1, ""), TimerOver("restart/2"))
    _, actions = play(roster, failure(C))
    assert [end.exit_code for end in those(actions, End)] == [3]


def test_a_failure_at_start_up_is_a_death_like_others_once_a_worker_was_ready() -> None:
    roster, _ = play(started(), Ready(A), failure(B), failure(C), Exited(A, 1, ""), TimerOver("restart/0"))
    _, actions = play(roster, failure(roster.workers[0].identity))
    assert those(actions, End) == []


def test_failures_in_training_are_shown_and_the_first_is_kept() -> None:
    header = "Traceback (most recent call last):\n  line\n"
    roster, actions = play(training(), failure(B, startup=False, text=header + "ValueError: one"))
    show = notes(actions)["user_code_failed"].show
    assert "worker 1 (incarnation 0): user code raised at step 5:\nTraceback" in show
    roster, actions = play(roster, failure(B, startup=False, text=header + "ValueError: two"))
    assert notes(actions)["user_code_failed"].show.endswith("at step 5:\nagain ValueError: two")
    roster, actions = play(roster, failure(B, startup=False, text=header + "KeyError: three"))
    assert notes(actions)["user_code_failed"].show.endswith("at step 5:\n" + header + "KeyError: three")
    _, actions = play(roster, Stepped(A, 2), Finished(A, "failed", step=4))
    (end,) = those(actions, End)
    assert (end.exit_code, end.status) == (3, "failed")
    assert "failed on every worker at step 5" in end.message  # its last report of progress was older
    assert "ValueError: one" in end.message and "\n" not in end.message
    assert end.traceback == header + "ValueError: one"


# Floor ----------------------------------------------------------------------------------------------------


def test_below_the_floor_and_back() -> None:
    roster, actions = play(training(replace(LIMITS, min_workers=3)), Exited(C, -9, ""))
    assert SetTimer("floor", 3600.0) in actions
    assert "2 members, min_workers is 3" in notes(actions)["below_floor"].show
    assert notes(actions)["below_floor"].fields["missing"] == [2]
    below = roster
    roster, _ = play(roster, Viewed(A, View(2, (A, B)), 5), TimerOver("restart/2"))
    joiner = roster.workers[2].identity
    roster, actions = play(roster, Ready(joiner), Viewed(A, View(3, (A, B, joiner)), 5))
    assert "floor_reached" in notes(actions)
    assert apply(roster, TimerOver("floor")) == (roster, ())
    _, actions = play(below, TimerOver("floor"))
    (end,) = those(actions, End)
    assert (end.exit_code, end.status) == (4, "gave_up")
    assert "missing: slot 2" in end.message


# The end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "exit_code"), [("done", 0), ("stopped", 130)])
def test_the_job_ends_when_every_living_member_has_finished(status: str, exit_code: int) -> None:
    roster, actions = play(training(), Finished(A, status), Finished(B, status))
    assert those(actions, End) == []
    roster, actions = play(roster, Finished(C, status))
    assert quiet(actions)[0] == AskStop((1, 2, 3), True, status)
    assert [(end.exit_code, end.status) for end in those(actions, End)] == [(exit_code, status)]


def test_a_death_after_a_finish_neither_blocks_the_end_nor_leads_to_a_restart() -> None:
    roster, actions = play(training(), Finished(A, "done"), Exited(B, -9, ""))
    assert quiet(actions) == [Tombstone(B), Abort(B, (1, 3))]
    roster, actions = play(roster, Exited(A, 0, ""))
    assert those(actions, End) == []
    _, actions = play(roster, Exited(C, -9, ""))
    assert [end.exit_code for end in those(actions, End)] == [0]


def test_after_a_finish_joiners_are_withdrawn_and_not_announced() -> None:
    roster, joiner = with_joiner(training())
    roster, actions = play(roster, Finished(A, "done"))
    assert quiet(actions) == [Announce((1, 2), ())]
    roster, _ = play(training(), Exited(C, -9, ""), TimerOver("restart/2"), Finished(A, "done"))
    _, actions = play(roster, Ready(joiner))
    assert quiet(actions) == []


def test_stop_asks_the_members_and_restarts_nobody() -> None:
    roster, actions = play(training(), StopAsked(False, "SIGINT"))
    assert quiet(actions) == [AskStop((1, 2, 3), False, "SIGINT")]
    roster, actions = play(roster, Exited(B, -9, ""))
    assert quiet(actions) == [Tombstone(B), Abort(B, (1, 3))]
    _, actions = play(roster, Finished(A, "stopped"), Finished(C, "stopped"))
    assert [(end.exit_code, end.status) for end in those(actions, End)] == [(130, "stopped")]


def test_a_joiner_admitted_while_stopping_is_asked_too() -> None:
    roster, joiner = with_joiner(training())
    view = View(3, (A, B, joiner))
    _, actions = play(roster, StopAsked(False, "SIGINT"), Viewed(A, view, 9))
    assert quiet(actions)[:2] == [Form(view, (4,)), AskStop((4,), False, "the job is stopping")]


def test_stop_without_members_or_a_second_time_is_at_once() -> None:
    for roster, event in [
        (started(), StopAsked(False, "SIGINT")),
        (training(), StopAsked(True, "SIGINT")),
        (play(training(), StopAsked(False, "SIGINT"))[0], StopAsked(False, "SIGINT")),
    ]:
        _, actions = apply(roster, event)
        (end,) = those(actions, End)
        assert (end.exit_code, end.status) == (130, "stopped")
        assert ("before training began" if roster.view.epoch == 0 else "at once") in end.message


def test_all_members_dead_while_stopping_ends_the_job() -> None:
    roster, _ = play(training(), StopAsked(False, "SIGINT"), Exited(A, -9, ""), Exited(B, -9, ""))
    _, actions = play(roster, Exited(C, -9, ""))
    (end,) = those(actions, End)
    assert (end.exit_code, end.status) == (130, "stopped")
    assert "newest checkpoint" in end.message


# Who runs something else ----------------------------------------------------------------------------------

SCHEMA = {"config/width": "32", "code/recipe.py": "aa"}
EDITED = {"config/width": "32", "code/recipe.py": "bb"}


def test_a_joiner_that_differs_never_is_a_candidate() -> None:
    roster, _ = play(started(), Ready(A, SCHEMA), Ready(B, SCHEMA), Ready(C, SCHEMA))
    roster, actions = play(roster, Exited(C, -9, ""), TimerOver("restart/2"))
    (start,) = those(actions, Start)
    joiner = start.identity
    roster, actions = play(roster, Hello(joiner, 1, "host"), Ready(joiner, EDITED))
    assert those(actions, Announce) == []
    (refusal,) = those(actions, RefuseWorker)
    assert refusal.identity == joiner and "code/recipe.py: aa with the members, bb here" in refusal.reason
    note = notes(actions)["worker_refused"]
    assert note.fields["differences"] == {"code/recipe.py": ["aa", "bb"]} and note.fields["num_differences"] == 1
    assert "undo the change" in note.show
    roster, actions = play(roster, Exited(joiner, 75, ""), TimerOver("restart/2"))
    assert roster.slots[2].failures == 2  # it has a budget, as after any failure
    (start,) = those(actions, Start)
    roster, actions = play(roster, Hello(start.identity, 1, "host"), Ready(start.identity, EDITED))
    assert notes(actions)["worker_refused"].show.endswith("was refused again, as before")
    roster, actions = play(roster, TimerOver(f"leave/2/{start.identity.incarnation}"))
    assert "slot 2 was refused 30 s ago and has not exited" in those(actions, Kill)[0].reason
    roster, actions = play(roster, Exited(start.identity, -9, ""), TimerOver("restart/2"))
    (start,) = those(actions, Start)
    _, actions = play(roster, Hello(start.identity, 1, "host"), Ready(start.identity, SCHEMA))
    assert those(actions, Announce)[-1].joiners == (start.identity,)


def test_the_first_group_is_formed_by_those_that_run_what_most_run() -> None:
    _, actions = play(started(), Ready(A, EDITED), Ready(B, SCHEMA), Ready(C, SCHEMA))
    assert [refusal.identity for refusal in those(actions, RefuseWorker)] == [A]
    (form,) = those(actions, Form)
    assert form.view.members == (B, C)
    _, actions = play(started(replace(LIMITS, min_workers=3)), Ready(A, EDITED), Ready(B, SCHEMA), Ready(C, SCHEMA))
    assert those(actions, Form) == []


def test_a_reason_given_with_the_end_is_the_job_s() -> None:
    _, actions = play(training(), Finished(A, "failed", "step 3: not finite"))
    assert [(end.exit_code, end.status, end.message) for end in those(actions, End)] == [
        (3, "failed", "step 3: not finite")
    ]
    _, actions = play(training(), Finished(A, "gave_up", "nobody knows"))
    assert [(end.exit_code, end.status) for end in those(actions, End)] == [(4, "gave_up")]


def test_one_worker_of_each_slot_that_left_for_the_same_step_ends_the_job() -> None:
    def left(identity: Identity, step: int) -> Failed:
        return Failed(identity, step, True, False, "Traceback (most recent call last):\nValueError: sample 7")

    roster, actions = play(training(), left(A, 4), Exited(A, 13, ""), left(B, 4), Exited(B, 13, ""))
    assert those(actions, End) == []
    _, actions = play(roster, left(C, 5))
    assert those(actions, End) == []  # another step
    _, actions = play(roster, left(C, 4))
    (end,) = those(actions, End)
    assert end.exit_code == 3 and "on every worker at step 5" in end.message and "sample 7" in end.message


# Draining, and going on -----------------------------------------------------------------------------------


def test_a_drained_member_leaves_after_a_commit_and_is_not_started_again() -> None:
    roster, actions = play(training(), DrainAsked(1, "for repair"))
    assert quiet(actions) == [AskLeave(B)]
    assert notes(actions)["drain_asked"].fields["slot"] == 1
    roster, actions = play(roster, Viewed(A, View(2, (A, C)), 7), Exited(B, 0, ""))
    assert "restart_scheduled" not in notes(actions)
    assert not those(actions, SetTimer, End)
    assert roster.coming == (0, 2)


def test_a_drained_worker_that_is_no_member_is_killed() -> None:
    roster, actions = play(started(), DrainAsked(1, "for repair"))
    assert those(actions, Kill)[0].identity == B
    roster, _ = play(roster, Exited(B, -9, ""))
    roster, actions = play(roster, Ready(A), Ready(C))
    assert those(actions, Form)[0].view.members == (A, C)  # nobody waits for the drained slot


def test_a_drain_below_the_floor_is_refused() -> None:
    roster = training(replace(LIMITS, min_workers=2))
    assert refuse_drain(roster, 0) == ""
    roster, _ = play(roster, DrainAsked(0, ""))
    assert "2 workers" not in refuse_drain(roster, 1) and "min_workers is 2" in refuse_drain(roster, 1)
    assert "not filled any more" in refuse_drain(roster, 0)
    assert "slots 0 to 2" in refuse_drain(roster, 3)


def test_a_job_that_goes_on_counts_epochs_and_starts_on_but_not_nodes() -> None:
    roster = beginning(LIMITS, epoch=7, starts={0: 2, 1: 1, 5: 1})
    assert roster.coming == (0, 1, 2)
    roster, actions = play(roster, AgentJoined("host", (0, 1, 2)))
    workers = [start.identity for start in those(actions, Start)]
    assert workers == [Identity(0, 2, 1), Identity(1, 1, 2), Identity(2, 0, 3)]
    roster, actions = play(roster, *(event for w in workers for event in (Started(w, 1), Hello(w, 1, "h"))))
    roster, actions = play(roster, *map(Ready, workers))
    assert those(actions, Form)[0].view.epoch == 8
