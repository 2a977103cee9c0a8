"""Every second of a job is in one account."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.telemetry.faults import find_faults, find_rejoins
from elastic_train.telemetry.phase_times import PhaseTimes, added
from elastic_train.telemetry.report import format_summary
from elastic_train.telemetry.summary import summarize
from elastic_train.telemetry.time_account import ACCOUNTS, Span, account, with_shares


def event(name: str, time: float, **fields) -> dict:
    return {"event": name, "time": time, **fields}


def commit(step: int, time: float, **fields) -> dict:
    return {"step": step, "samples": 8 * step, "loss": 1.0, "time": time, "step_time_s": 1.0, **fields}


def recovered(time: float, epoch: int, kind: str, came=(), compile_s: float = 0.0) -> dict:
    about = {"epoch": epoch, "kind": kind, "came": came, "gone": [], "heal_s": 0.0, "rebuild_s": 0.1, "step": epoch}
    return event("recovered", time, **about, phases={"compile": compile_s, "exchange": 0.1})


def died(time: float, slot: int) -> dict:
    return event("worker_died", time, slot=slot, incarnation=0, node=slot + 1, exit_code=-9, step=4, state="member")


def view(time: float, epoch: int, members: list[int], came=()) -> dict:
    return event("view_changed", time, epoch=epoch, members=members, came=came, step=4)


def test_where_a_run_spent_its_time():
    events = [
        event("job_started", 100.0),
        view(107.0, 1, [0, 1], [0, 1]),
        recovered(111.0, 1, "formed", [0, 1], compile_s=5.0),  # in `starting`
        event("checkpoint_saved", 115.0, step=3, seconds=2.0, stall_s=0.5),
        died(120.0, 1),
        view(120.5, 2, [0]),
        event("below_floor", 121.0, members=1, missing=1, min_workers=2),
        event("floor_reached", 127.0, members=2),
        view(127.0, 3, [0, 1], [1]),
        recovered(130.0, 3, "admission", [1], compile_s=1.5),
        event("checkpoint_saved", 153.0, step=30, seconds=2.5, stall_s=0.0),  # the last one: training is over
    ]
    commits = [
        commit(1, 111.0, phases={}),
        commit(9, 119.0, phases={"data": 0.75, "compute": 6.0, "compile": 0.25}),
        commit(30, 150.0, phases={"data": 1.0}),
    ]
    summary = summarize(events, commits, {"status": "done", "exit_code": 0, "time": 155.0})
    seconds = {name: each["seconds"] for name, each in summary["time_accounts"].items()}
    assert seconds == pytest.approx(
        {
            "starting": 10.0,  # to the beginning of the first step, which took one second
            "waiting_for_members": 6.0,
            "compiling": 1.5 + 0.25,
            "recovering": 10.0 - 6.0 - 1.5,  # from the death to the next commit
            "saving": 0.5 + 2.5,
            "waiting_for_data": 1.75,
            "ending": 2.5,
            "productive": 55 - 10 - 6 - 1.75 - 2.5 - 3 - 1.75 - 2.5,
        }
    )
    assert sum(seconds.values()) == pytest.approx(summary["wall_s"]) == pytest.approx(55.0)
    text = " ".join(format_summary(summary, __import__("pathlib").Path("run")).split())
    assert "productive 50.0%, starting 18.2%, waiting for members 10.9%" in text


def test_a_resumed_run_adds_up_its_parts_and_leaves_out_the_time_between():
    first = [event("job_started", 0.0), recovered(3.0, 1, "formed", [0])]
    second = [event("job_started", 100.0), recovered(105.0, 2, "formed", [0])]
    repeats = [event("steps_repeated", 101.0, first_step=8, last_step=9, epoch=2)]
    commits = [commit(1, 3.0), commit(7, 9.0), commit(8, 105.0), commit(20, 117.0)]
    summary = summarize(
        [*first, *second[:1], *repeats, *second[1:]], commits, {"status": "done", "exit_code": 0, "time": 118.0}
    )
    seconds = {name: each["seconds"] for name, each in summary["time_accounts"].items()}
    assert seconds["starting"] == pytest.approx(2.0 + 4.0)
    assert seconds["recovering"] == pytest.approx(2.0)  # the two steps that were taken again
    assert sum(seconds.values()) == pytest.approx(summary["wall_s"]) == pytest.approx(9.0 + 18.0)


def test_a_job_without_a_step_has_only_started():
    found = account(Span(5.0, 12.0), [event("job_started", 5.0)], [], None, [], [])
    assert found == dict.fromkeys(ACCOUNTS, 0.0) | {"starting": 7.0}
    assert with_shares(found)["starting"] == {"seconds": 7.0, "share": 1.0}


moments = st.floats(-5.0, 60.0)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Span, list[dict], list[dict]]:
    """Any events in any order of clocks: witnesses may be wrong about the time."""
    span = Span(0.0, draw(st.floats(1.0, 50.0)))
    made = {
        "died": lambda t: died(t, draw(st.integers(0, 3))),
        "view": lambda t: view(t, draw(st.integers(1, 9)), [0, 1]),
        "recovered": lambda t: recovered(t, draw(st.integers(1, 9)), "death", (), draw(st.floats(0, 9))),
        "saved": lambda t: event("checkpoint_saved", t, step=1, seconds=draw(st.floats(0, 9)), stall_s=draw(moments)),
        "below": lambda t: event("below_floor", t),
        "floor": lambda t: event("floor_reached", t),
        "again": lambda t: event("steps_repeated", t, first_step=1, last_step=draw(st.integers(1, 9)), epoch=2),
    }
    names = draw(st.lists(st.sampled_from(sorted(made)), max_size=12))
    events = [made[name](draw(moments)) for name in names]
    times = sorted(draw(st.lists(moments, max_size=6)))
    phases = st.fixed_dictionaries({"data": st.floats(0, 20), "compile": st.floats(0, 20)})
    return span, events, [commit(step + 1, time, phases=draw(phases)) for step, time in enumerate(times)]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(jobs(), st.floats(0.001, 5.0))
def test_accounts_are_never_negative_and_add_up_whatever_the_lines_say(job, step_time_s):
    span, events, commits = job
    faults, rejoins = find_faults(events, commits, step_time_s), find_rejoins(events, step_time_s)
    found = account(span, events, commits, step_time_s, faults, rejoins)
    assert set(found) == set(ACCOUNTS)
    assert min(found.values()) >= -1e-9
    assert sum(found.values()) == pytest.approx(span.ended - span.began)


def test_phases_are_all_of_the_time():
    times = iter([0.0, 1.0, 3.0, 3.5, 10.0, 10.25])
    phases = PhaseTimes(lambda: next(times))
    phases.enter("data")
    phases.enter("compute")
    phases.enter("data")
    assert phases.take() == {"prepare": 1.0, "data": 2.0 + 6.5, "compute": 0.5}
    assert phases.take() == {"data": 0.25}
    assert added({"data": 1.0}, {"data": 2.0, "hook": 3.0}) == {"data": 3.0, "hook": 3.0}
