"""What faults and rejoins cost, and the figures of a whole job, from events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_train.telemetry.faults import find_faults, find_rejoins, time_lost
from elastic_train.telemetry.report import format_summary
from elastic_train.telemetry.summary import summarize

END = {"status": "done", "exit_code": 0, "time": 200.0, "step": 10, "samples": 100}


def started(time: float, slot: int, incarnation: int = 0) -> dict[str, Any]:
    return {"event": "worker_started", "time": time, "slot": slot, "incarnation": incarnation}


def died(time: float, slot: int, **fields: Any) -> dict[str, Any]:
    base = {"incarnation": 0, "node": slot + 1, "exit_code": -9, "step": 4, "state": "member"}
    return {"event": "worker_died", "time": time, "slot": slot, **base, **fields}


def killed(time: float, slot: int, kind: str | None = None) -> dict[str, Any]:
    about = {"event": "worker_killed", "time": time, "slot": slot, "incarnation": 0, "node": slot + 1}
    return about | ({} if kind is None else {"kind": kind})


def abort(time: float, slot: int, node: int | None = None) -> dict[str, Any]:
    return {"event": "abort_sent", "time": time, "slot": slot, "node": node or slot + 1}


def view(time: float, epoch: int, members: list[int], came: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    base = {"epoch": epoch, "members": members, "came": came, "step": 4}
    return {"event": "view_changed", "time": time, **base, **fields}


def recovered(time: float, epoch: int, kind: str = "death", **fields: Any) -> dict[str, Any]:
    base = {"step": 5, "gone": [], "came": [], "rebuild_s": 0.2, "heal_s": 0.1}
    return {"event": "recovered", "time": time, "epoch": epoch, "kind": kind, **base, **fields}


def commit(step: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"step": step, "samples": step * 10, "loss": 1 / step, "time": time, "step_time_s": 0.5, **fields}


def fault(kind: str, slot: int, step: int, *times: float | None, cause: str | None = None) -> dict[str, Any]:
    names = ("detect_s", "rebuild_s", "heal_s", "total_s")
    approximate = [None if time is None else pytest.approx(time) for time in times]
    return {"kind": kind, "slot": slot, "step": step, "cause": cause, **dict(zip(names, approximate, strict=True))}


def faults_of(*events: dict[str, Any], commits: tuple = ()) -> list[dict[str, Any]]:
    return [fault.as_json() for fault in find_faults(events, commits)]


def test_a_death_of_a_member():
    events = [
        view(90, 1, [0, 1, 2], (0, 1, 2), step=0),
        died(100, 1, step=1),  # workers tell their step twice a second; the view knows better
        abort(100.02, 1),
        view(100.1, 2, [0, 2]),
        recovered(100.5, 2, gone=[1]),
        recovered(120, 3, "admission", came=[1]),
    ]
    assert faults_of(*events) == [fault("killed", 1, 4, 0.02, 0.2, 0.1, 0.5)]


def test_the_abort_may_be_written_first_and_times_may_come_from_the_witness():
    events = [
        view(90, 1, [0, 1], (0, 1)),
        abort(100.03, 1),
        died(100.04, 1, reported_time=100.0),
        view(100.06, 2, [0], reported_time=100.05),
        recovered(100.7, 2, gone=[1], reported_time=100.5),
    ]
    assert faults_of(*events) == [fault("killed", 1, 4, 0.03, 0.2, 0.1, 0.5)]


def test_a_death_without_recovery_yet():
    assert faults_of(died(100, 1)) == [fault("killed", 1, 4, 0.0, None, None, None)]


def test_a_death_that_nobody_was_left_to_be_told_of():
    assert faults_of(died(100, 1, reported_time=99.9)) == [fault("killed", 1, 4, 0.1, None, None, None)]


def test_a_recovery_of_an_earlier_epoch_settles_nothing():
    events = [
        view(90, 1, [0, 1, 2], (2,)),
        died(100, 1),
        recovered(100.1, 1, "admission", came=[2]),
        view(100.2, 2, [0, 2]),
    ]
    assert faults_of(*events) == [fault("killed", 1, 4, 0.0, None, None, None)]


def test_a_second_death_before_the_first_is_recovered():
    events = [
        view(90, 1, [0, 1, 2], (0, 1, 2)),
        died(100, 1),
        view(100.1, 2, [0, 2]),
        died(100.2, 2),
        view(100.3, 3, [0]),
        recovered(100.8, 3, gone=[2]),
    ]
    assert faults_of(*events) == [
        fault("killed", 1, 4, 0.0, 0.2, 0.1, 0.8),
        fault("killed", 2, 4, 0.0, 0.2, 0.1, 0.6),
    ]
    assert time_lost(find_faults(events), []) == pytest.approx(0.8)


def test_the_same_slot_twice():
    events = [
        view(90, 1, [0, 1], (0, 1)),
        died(100, 1),
        view(100.1, 2, [0]),
        recovered(100.5, 2, gone=[1]),
        view(109, 3, [0, 1], (1,)),
        recovered(110, 3, "admission", came=[1]),
        died(120, 1, incarnation=1, node=7),
        abort(120.1, 1, node=7),
        view(120.1, 4, [0]),
        recovered(121, 4, gone=[1]),
    ]
    assert [f["total_s"] for f in faults_of(*events)] == [pytest.approx(0.5), pytest.approx(1.0)]
    assert faults_of(*events)[1]["detect_s"] == pytest.approx(0.1)


def test_all_members_die_and_a_new_group_is_formed():
    events = [
        view(90, 1, [0, 1, 2], (0, 1, 2), step=0),
        died(100, 0),
        died(100, 1),
        died(100, 2),
        view(129, 2, [0, 1], (0, 1), step=0),
        recovered(130, 2, "formed", came=[0, 1]),
    ]
    assert [(f["step"], f["total_s"]) for f in faults_of(*events)] == [(4, 30)] * 3
    repeated = {"event": "steps_repeated", "time": 130.1, "first_step": 1, "last_step": 7, "epoch": 2}
    assert [f["step"] for f in faults_of(*events, repeated)] == [7] * 3
    assert find_rejoins(events, 0.5) == []


@pytest.mark.parametrize("exit_code", [-9, None])  # None: its agent is gone
def test_a_silent_worker_costs_the_time_since_the_last_commit(exit_code):
    events = [
        view(90, 1, [0, 1, 2], (0, 1, 2)),
        *([killed(110, 1)] if exit_code else []),
        died(110.01, 1, exit_code=exit_code),
        abort(110.02, 1),
        view(110.1, 2, [0, 2]),
        recovered(110.5, 2, gone=[1], step_time_s=11.0),
    ]
    (found,) = find_faults(events, (), 0.5)
    assert found.began == pytest.approx(100)  # the last commit, 99.5, and a step
    assert (found.detect_s, found.total_s) == (pytest.approx(10.02), pytest.approx(10.5))
    assert time_lost([found], []) == pytest.approx(10.5)


def test_what_made_a_worker_exit():
    failed = {"event": "user_code_failed", "time": 99, "slot": 1, "step": 4, "traceback": "..."}
    events = [
        view(90, 1, [0, 1], (0, 1)),
        failed,
        {**failed, "time": 99.5},
        {**failed, "time": 100, "fatal": True},
        view(100.1, 2, [0]),
        died(100.2, 1, exit_code=13),
        recovered(100.5, 2, gone=[1]),
    ]
    assert faults_of(*events)[-1] == fault("exited", 1, 4, 0.0, 0.2, 0.1, 0.4, cause="raised")
    text = format_summary(summarize(events, [commit(4, 98.5), commit(5, 100.5)], END), Path("r"))
    (line,) = (line for line in text.splitlines() if line.startswith("fault"))
    assert line.startswith("fault       worker 1 exited after step 4 because its code raised, 3 times in a row: 0.40 s")


def test_a_stop_is_said_in_one_place():
    for message in ("stopped after a commit", "stopped at once, not after a commit: SIGINT"):
        end = {**END, "status": "stopped", "message": message}
        text = format_summary(summarize([], [commit(1, 1.0)], end), Path("r"))
        assert text.startswith(f"status      {message}\n") and text.count("stopped") == 1


def test_kinds():
    events = [
        died(100, 0, exit_code=1),
        killed(101, 1),
        died(101, 1),
        died(102, 2, exit_code=-9),
        died(103, 3, exit_code=None),
        killed(104.2, 4),
        died(104.3, 4, reported_time=104.0),  # its silence was noticed before its exit
        killed(105, 5, kind="stuck"),
        died(105.1, 5, exit_code=-12),
        killed(106, 6, kind="slow"),
        died(106.1, 6),
    ]
    kinds = ["exited", "stopped", "killed", "killed", "killed", "stuck", "slow"]
    assert [f["kind"] for f in faults_of(*events)] == kinds


def test_a_worker_that_was_no_member_cost_no_step():
    assert faults_of(died(100, 1, state="warming")) == [fault("killed", 1, 4, 0.0, 0.0, 0.0, 0.0)]


def test_a_joiner_that_died_as_it_was_admitted_did_cost():
    events = [
        view(99.9, 2, [0, 1], (1,)),
        died(100, 1, state="ready", step=0),
        view(100.1, 3, [0]),
        recovered(100.4, 3, gone=[1]),
    ]
    assert faults_of(*events) == [fault("killed", 1, 4, 0.0, 0.2, 0.1, 0.4)]


def test_a_worker_that_left_by_agreement():
    events = [
        view(90, 1, [0, 1], (0, 1)),
        view(100, 2, [0]),
        recovered(100.3, 2, "leave", gone=[1]),
        died(101, 1, exit_code=1),
    ]
    assert faults_of(*events) == [fault("exited", 1, 4, 0.0, 0.2, 0.1, 0.3)]


def test_workers_that_end_with_the_job_are_no_faults():
    events = [
        {"event": "worker_finished", "time": 100, "slot": 0, "incarnation": 0},
        {"event": "worker_finished", "time": 100, "slot": 1, "incarnation": 0},
        died(101, 0, exit_code=0),
        died(101, 2, state="ready"),
        {"event": "end", "time": 101},
        died(102, 1),
    ]
    assert faults_of(*events) == []


def test_user_code_that_raised_once():
    event = {"event": "user_code_failed", "time": 100, "slot": 1, "step": 4, "traceback": "..."}
    commits = (commit(4, 99.5), commit(5, 100.25), commit(6, 101))
    assert faults_of(event, commits=commits) == [fault("raised", 1, 4, 0.0, 0.0, 0.0, 0.25)]
    assert faults_of({**event, "time": 100.5}, commits=commits) == [fault("raised", 1, 4, 0.0, 0.0, 0.0, 0.0)]
    assert faults_of(event, commits=()) == [fault("raised", 1, 4, 0.0, 0.0, 0.0, None)]
    assert faults_of({**event, "fatal": True}) == []


def test_rejoins():
    events = [
        started(50, 1),
        recovered(60, 1, "formed", came=[0, 1]),
        started(101, 1, 1),
        view(110.0, 3, [0, 1], (1,)),
        recovered(110.95, 3, "admission", came=[1], step=9, reported_time=110.9),
        # Another member died while it joined.
        recovered(120, 4, gone=[0], came=[2], step=12),
    ]
    first, second = (rejoin.as_json() for rejoin in find_rejoins(events, 0.5))
    expected = {"slot": 1, "step": 9, "stall_s": 0.4, "start_to_member_s": 9.9}
    assert first == pytest.approx(expected)
    assert second == {"slot": 2, "step": 12, "stall_s": pytest.approx(0.3), "start_to_member_s": None}


def test_figures_of_a_job():
    commits = [commit(step, 100 + step) for step in range(1, 11)]
    commits[3]["step_time_s"] = 50.0
    summary = summarize([{"event": "job_started", "time": 90.0}], commits, END)
    assert summary["step_time_s"] == 0.5
    assert summary["goodput"] == 1.0
    assert summary["wall_s"] == 110
    assert summary["final_loss"] == 0.1


def test_goodput_lacks_what_faults_rejoins_and_repeated_steps_cost():
    events = [
        died(80, 0, state="member"),
        recovered(90, 1, "formed", came=[0, 1]),  # before the first commit
        view(99, 2, [0, 1], (0, 1)),
        died(103, 1),
        view(103.1, 3, [0]),
        recovered(104, 3, gone=[1]),
        view(106, 4, [0, 1], (1,)),
        recovered(107, 4, "admission", came=[1]),
        {"event": "steps_repeated", "time": 107.0, "first_step": 3, "last_step": 4, "epoch": 5},
    ]
    commits = [commit(1, 100), commit(9, 109.5)]
    summary = summarize(events, commits, END)
    assert summary["time_lost_s"] == pytest.approx(10 + 1 + 0.5)
    assert summary["goodput"] == pytest.approx(1 - (1 + 0.5 + 2 * 0.5) / 10)


def test_final_loss_is_that_of_the_last_step_even_if_its_record_is_lost():
    metrics = {"loss": 0.05, "accuracy": 0.5, "eval_loss": 0.07}
    summary = summarize([], [commit(9, 109.0)], {**END, "metrics": metrics})
    assert (summary["final_loss"], summary["metrics"]) == (0.05, metrics)


def test_a_job_without_a_commit():
    summary = summarize([], [], {"status": "failed", "exit_code": 3, "time": 10.0, "message": "no"})
    assert summary["step"] == summary["samples"] == summary["wall_s"] == 0
    assert summary["final_loss"] is summary["goodput"] is summary["step_time_s"] is None
    text = format_summary(summary, Path("run"))
    assert "failed" in text and text.endswith("\nno")
    summary = summarize([], [], {"status": "failed", "exit_code": 3, "time": 10.0, "message": "no", "traceback": "T"})
    assert (summary["message"], summary["traceback"]) == ("no", "T")
    assert format_summary(summary, Path("run")).endswith("\nno\nIts traceback is above, and in run/summary.json.")


def test_steps_lost_and_final_metrics():
    events = [{"event": "steps_repeated", "time": 1.0, "first_step": 3, "last_step": 5, "epoch": 2}]
    summary = summarize(events, [commit(1, 1.0, eval_accuracy=0.5), commit(2, 2.0)], END)
    assert summary["steps_lost"] == 3
    assert summary["metrics"] == {"eval_accuracy": 0.5}


def test_report_says_what_each_fault_cost():
    events = [
        {"event": "job_started", "time": 90.0},
        view(95, 1, [0, 1, 2], (0, 1, 2)),
        died(100, 1),
        abort(100.02, 1),
        view(100.1, 2, [0, 2]),
        recovered(100.5, 2, gone=[1]),
        started(100.1, 1, 1),
        died(103, 1, state="warming", incarnation=1, node=9),
        view(110.0, 3, [0, 1, 2], (1,)),
        recovered(110.9, 3, "admission", came=[1], step=9),
        {"event": "user_code_failed", "time": 109.75, "slot": 2, "step": 9, "traceback": ""},
        died(112, 0),
    ]
    end = {
        **END,
        "params_sha256": "ab" * 32,
        "state_sha256": "cd" * 32,
        "metrics": {"accuracy": 0.5, "eval_accuracy": 0.9612345},
    }
    summary = summarize(events, [commit(step, 100 + step) for step in range(1, 11)], end)
    text = format_summary(summary, Path("runs/one"))
    assert text.splitlines() == [
        "status      done",
        "steps       10 (100 samples)",
        "loss        0.1",
        "evaluation  accuracy 0.9612",
        "step time   0.50 s (median)",
        "time        110.00 s in total; 97.4% of the time between first and last step was not lost",
        "            ending 81.8%, starting 9.1%, productive 8.4%, recovering 0.7%",
        "fault       worker 1 was killed after step 4: 0.50 s to the next step "
        "(detect 20.0 ms, rebuild 0.20 s, heal 0.10 s)",
        "fault       worker 1 was killed after step 4: no step had to wait",
        "fault       worker 2 raised an exception after step 9: the step was tried again, 0.25 s until it committed",
        "fault       worker 0 was killed after step 4: no step was committed afterwards",
        "rejoin      worker 1 joined at step 9: the others waited 0.40 s; 10.80 s from its start",
        "lost        0 steps; 1.15 s of time",
        "digests     parameters abababababab, state cdcdcdcdcdcd",
        "files       runs/one (workers' output in runs/one/logs)",
    ]


def test_gradients_that_are_not_finite_and_states_that_differ_are_faults():
    events = [
        {"event": "gradient_not_finite", "time": 104.5, "step": 4, "slots": [1, 2], "action": "retry"},
        {"event": "gradient_not_finite", "time": 106.0, "step": 6, "slots": [], "action": "skip"},
        {"event": "state_differs", "time": 107.25, "step": 7, "slots": [0], "why": "fingerprints"},
        {"event": "state_differs", "time": 107.3, "step": 7, "slots": [0], "why": "transfer"},
        {"event": "user_code_failed", "time": 110.5, "slot": 2, "step": 10, "traceback": ""},
    ]
    summary = summarize(events, [commit(step, 100 + step) for step in range(1, 11)], END)
    found = [(fault["kind"], fault["slot"], fault["step"], fault["total_s"]) for fault in summary["faults"]]
    assert found == [
        ("nonfinite", 1, 4, 0.5),
        ("nonfinite", 2, 4, 0.5),
        ("nonfinite", None, 6, 1.0),
        ("differs", 0, 7, 0.75),
        ("raised", 2, 10, None),
    ]
    lines = [line for line in format_summary(summary, Path("r")).splitlines() if line.startswith("fault")]
    assert lines == [
        "fault       the gradient of worker 1 was not finite after step 4, 0.50 s until it committed",
        "fault       the gradient of worker 2 was not finite after step 4, 0.50 s until it committed",
        "fault       the gradient summed over all workers was not finite after step 6: the step was skipped",
        "fault       worker 0 held another state after step 7 and was healed, 0.75 s until it committed",
        "fault       worker 2 raised an exception after step 10",
    ]


def test_injected_faults_that_found_no_occasion_are_told():
    events = [
        {
            "event": "faults_missed",
            "time": 9.0,
            "faults": [
                {"kind": "kill", "where": "heal", "step": 5, "slot": 0},
                {"kind": "leave", "where": "anywhere", "after_s": 90.0, "slot": "first"},
            ],
        }
    ]
    summary = summarize(events, [commit(1, 1.0)], END)
    assert summary["faults_missed"] == events[0]["faults"]
    lines = [line for line in format_summary(summary, Path("r")).splitlines() if line.startswith("not tried")]
    assert lines == [
        "not tried   the fault kill (slot 0, heal, due at step 5) found no occasion before the end",
        "not tried   the fault leave (the first slot, anywhere, due at 90 s after the first step) found no occasion "
        "before the end",
    ]


def test_report_of_a_quiet_run():
    text = format_summary(summarize([], [commit(1, 1.0)], {**END, "time": 7300.0}), Path("r"))
    assert "faults      none" in text and "lost        nothing" in text
