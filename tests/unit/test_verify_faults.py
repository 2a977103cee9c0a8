"""The standard schedule, and the verdict on two runs; made up, but for the ledger's proof."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train import cli
from elastic_train.chaos.schedule import LONG_STOP_S, SURVIVED, read_schedule
from elastic_train.chaos.standard import (
    Disturbed,
    Pace,
    Verdict,
    fits,
    format_verdict,
    gap_within,
    has_ended,
    judge,
    pace,
    standard_faults,
    steps_needed,
)
from elastic_train.config import FaultConfig
from elastic_train.data.ledger import Report, verify
from elastic_train.launch import verify as verify_module
from elastic_train.launch.options import JobOptions
from elastic_train.launch.verify import Verified
from elastic_train.telemetry.barriers import BarrierReport
from elastic_train.telemetry.compare import Comparison
from elastic_train.telemetry.records import RunDirectory


@given(st.integers(2, 9), st.integers(1, 5000))
def test_standard_faults_fit_into_the_steps_they_need(workers: int, gap: int) -> None:
    faults = standard_faults(workers, gap)
    steps = [fault.step for fault in faults if fault.step is not None]
    assert len(steps) == 5 and steps == sorted(set(steps))
    assert steps[-1] + gap <= steps_needed(gap)
    assert steps_needed(gap) >= 4 * gap  # four of them cost a worker
    assert {fault.kind for fault in faults} == {"kill", "raise", "stop", "leave"}
    assert {fault.slot for fault in faults} == {0, workers - 1}


@given(st.integers(20, 100_000))
def test_the_gap_for_given_steps_is_the_widest_that_fits(steps: int) -> None:
    gap = gap_within(steps)
    assert steps_needed(gap) <= steps or gap == 1
    assert steps_needed(gap + 2) > steps


@given(st.integers(2, 9), st.integers(1, 10_000), st.integers(1, 5000))
def test_steps_that_fit_have_room_for_every_fault(workers: int, steps: int, gap: int) -> None:
    faults = standard_faults(workers, min(gap, gap_within(steps)))
    assert not fits(workers, steps) or all(fault.step is not None and fault.step < steps for fault in faults)
    assert fits(workers, steps) == (steps >= 15)


def test_faults_are_near_each_other_however_long_a_worker_takes_to_come_back() -> None:
    """They wait for it anyway, and the run ends soon after the last one was survived."""
    for gap in (300, 10_000):
        assert [fault.step for fault in standard_faults(3, gap)] == [10, 30, 50, 70, 90]


def test_pace_of_a_run() -> None:
    events = [
        {"event": "worker_starting", "time": 10.0, "slot": 0},
        {"event": "worker_starting", "time": 10.0, "slot": 1},
        {"event": "worker_ready", "time": 16.0, "slot": 0},
        {"event": "worker_ready", "time": 18.0, "slot": 1},
    ]
    commits = [{"step_time_s": took} for took in (9.0, 0.1, 0.2, 0.1)]
    assert pace(events, commits) == Pace(0.1, 8.0)
    assert Pace(0.1, 8.0).gap(keepalive_s=5.0) == 260
    assert Pace(0.1, 8.0).disturbed_s(keepalive_s=5.0) == 4 * 9 + 10 + 100 * 0.1
    with pytest.raises(ValueError, match="no step after the first"):
        pace(events, commits[:1])


SUMMARY = {"status": "done", "message": "done", "steps_lost": 0, "faults": [], "rejoins": [], "time_lost_s": 0.0}


def lines(members: int = 2) -> list[dict[str, Any]]:
    return [
        {"step": step, "time": float(step), "step_time_s": 1.0, "workers": list(range(members)), "epoch": 1}
        for step in range(1, 30)
    ]


def proof(proven: bool = True) -> Report:
    return verify(
        (
            '{"step": 1, "pass": 0, "first_sample": 0, "num_samples": 2, "pass_size": 10, "workers": [0]}\n',
            *([] if proven else ["no line of a ledger\n"]),
        ),
        seed=0,
        first_step=1,
        witnesses={},
        end=None,
    )


def verdict(
    same: bool = True,
    events: tuple[dict[str, Any], ...] = (),
    members: int = 2,
    promised: bool = True,
    proven: bool = True,
    barriers: tuple[str, ...] = (),
    comparable: bool = True,
    **summary: Any,
) -> Verdict:
    comparison = Comparison(same, (same, same), None, 29, [], None, (29, 29))
    report = BarrierReport(30, 60, 2, 29, 0, barriers)
    disturbed = Disturbed(events, lines(members), lines(members), {**SUMMARY, **summary}, proof(proven), report)
    return judge([], lines(), disturbed, comparison, 2, promised, comparable)


WORKER = {"slot": 0, "incarnation": 0, "node": 1}
RAISED = {"event": "user_code_failed", **WORKER, "step": 3, "startup": False}
DIED = {"event": "worker_died", **WORKER}


def injected(kind: str, where: str, step: int = 3) -> dict[str, Any]:
    fault = {"kind": kind, "where": where, "step": step, "slot": 0}
    about = {"kind": kind, "where": where, "step": step, "lethal": kind in ("kill", "leave"), "fault": fault}
    return {"event": "fault_injected", **WORKER, **about}


def test_equal_digests_and_no_loss_pass() -> None:
    found = verdict(events=(injected("raise", "compute"), RAISED))
    assert found.passed and found.back and found.num_injected == 1
    assert found.kept.share == pytest.approx(1.0)
    assert "PASSED" in format_verdict(found, "same: a and b")


@pytest.mark.parametrize(
    ("about", "exact", "reason"),
    [
        ({"same": False}, False, "the digests differ"),
        ({"proven": False}, False, "the ledger is not proven"),
        ({"barriers": ("no",)}, False, "what the barriers gave is not proven"),
        ({"comparable": False, "proven": False}, False, "the ledger is not proven"),
        ({"steps_lost": 3}, False, "3 steps were lost"),
        ({"events": ({"event": "digests_differ"},)}, False, "members ended with different states"),
        ({"status": "failed", "message": "no"}, True, "the run ended as failed: no"),
        ({"events": ({"event": "slot_given_up", "slot": 1},)}, True, "given up: slots 1"),
    ],
)
def test_what_fails(about: dict[str, Any], exact: bool, reason: str) -> None:
    found = verdict(**about)
    assert not found.passed and found.exact is exact
    assert any(reason in each for each in found.reasons)
    assert reason in format_verdict(found, "different: a and b")


STOPPED = {"event": "stop_asked", "reason": SURVIVED}


@pytest.mark.parametrize(
    ("events", "summary", "expected"),
    [
        ((), {"status": "done"}, True),
        ((STOPPED,), {"status": "stopped", "state_sha256": "a"}, True),
        ((STOPPED,), {"status": "stopped", "state_sha256": None}, False),  # at once, not after a commit
        ((), {"status": "stopped", "state_sha256": "a"}, False),
        (({**STOPPED, "reason": "SIGINT"},), {"status": "stopped", "state_sha256": "a"}, False),
        (({**STOPPED, "reason": "SIGINT"}, STOPPED), {"status": "stopped", "state_sha256": "a"}, False),
        ((STOPPED,), {"status": "failed", "state_sha256": None}, False),
    ],
)
def test_a_stop_since_all_was_survived_is_the_end_of_a_run(
    events: tuple[dict[str, Any], ...], summary: dict[str, Any], expected: bool
) -> None:
    assert has_ended(events, summary) is expected
    found = verdict(events=events, **summary)
    assert found.survived is expected and found.passed is expected


def test_a_fault_without_an_occasion_was_not_tried() -> None:
    fault = {"kind": "kill", "where": "barrier", "step": 9, "slot": 0}
    found = verdict(events=({"event": "faults_missed", "faults": [fault]},))
    assert found.exact and found.survived and not found.passed
    text = format_verdict(found, "same: a and b")
    assert "verify-faults: INCOMPLETE" in text
    assert "not tried   the fault kill (slot 0, barrier, due at step 9) found no occasion before the end; use" in text


@pytest.mark.parametrize(
    ("events", "untold"),
    [
        ((injected("raise", "compute"), injected("kill", "barrier"), DIED), ["raise"]),  # it was killed in that step
        ((injected("raise", "compute"), RAISED, injected("kill", "barrier", 9), DIED), []),
        ((injected("raise", "compute", 4), RAISED), ["raise"]),
        ((injected("raise", "compute"), {**RAISED, "incarnation": 1, "node": 9}), ["raise"]),
        ((injected("kill", "barrier"), injected("leave", "anywhere"), DIED), ["leave"]),
        ((injected("kill", "barrier"), {**DIED, "slot": 1, "node": 2}), ["kill"]),
        ((injected("kill", "hook"), {**DIED, "event": "worker_exited", "exit_code": -9}), []),
        ((injected("stop", "compute"),), []),  # a short one
    ],
)
def test_a_fault_that_no_event_tells_of_does_not_count_as_survived(
    events: tuple[dict[str, Any], ...], untold: list[str]
) -> None:
    found = verdict(events=events)
    assert [fault["kind"] for fault in found.untold] == untold
    assert found.passed is not bool(untold) and not found.is_incomplete
    text = format_verdict(found, "same: a and b")
    assert ("verify-faults: FAILED" in text) is bool(untold)
    for kind in untold:
        assert f"no effect   the fault {kind} (slot 0, " in text and "struck, but no event tells of it" in text


def test_a_worker_that_finished_before_it_could_leave_was_struck_too_late() -> None:
    finished = {"event": "worker_finished", **WORKER, "status": "done"}
    ended = {"event": "worker_exited", **WORKER, "exit_code": 0}
    found = verdict(events=(injected("leave", "anywhere", 28), finished, ended))
    assert found.is_incomplete and found.num_injected == 0
    text = format_verdict(found, "same: a and b")
    assert (
        "verify-faults: INCOMPLETE" in text and "not tried   the fault leave (slot 0, anywhere, due at step 28)" in text
    )


def test_a_worker_is_stopped_for_longer_than_it_takes_to_find_it_silent() -> None:
    for keepalive_s in (5.0, 60.0):
        (stop,) = (fault for fault in standard_faults(3, 10, keepalive_s) if fault.kind == "stop")
        assert stop.is_lethal and (stop.duration_s or 0.0) >= max(LONG_STOP_S, 4 * keepalive_s)


def test_digests_need_not_be_equal_where_the_batch_depends_on_the_members() -> None:
    found = verdict(same=False, comparable=False)
    assert found.passed and found.exact is None
    text = format_verdict(found, "different: a and b")
    assert "PASSED" in text and 'not promised: with batch_policy = "per_worker"' in text and "different" not in text


def test_gpus_promise_equal_bits_only_when_asked_to() -> None:
    assert "--set deterministic=true" in format_verdict(verdict(same=False, promised=False), "different")
    assert "--set deterministic=true" not in format_verdict(verdict(same=False), "different")


def test_a_worker_that_is_not_back_is_told() -> None:
    assert "not every worker was back" in format_verdict(verdict(members=1), "same")


@pytest.mark.parametrize(("told", "expected"), [(None, [100, 200, 400]), (100, [100])])
def test_runs_are_repeated_and_longer_until_every_fault_was_tried(
    told: int | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times at most; as long as somebody wants them, and not longer, if that was said."""
    steps_tried: list[int] = []
    missed = verdict(events=({"event": "faults_missed", "faults": [{"kind": "kill", "step": 9, "slot": 0}]},))

    def attempt(options: JobOptions, steps: int, *_: Any) -> Verified:
        steps_tried.append(steps)
        return Verified(missed, "", 1)

    checked = SimpleNamespace(batch_policy="fixed", faults=FaultConfig(), deterministic=False)
    monkeypatch.setattr(verify_module, "check", lambda *_: checked)
    monkeypatch.setattr(verify_module, "_run", lambda *_: tmp_path)
    monkeypatch.setattr(verify_module, "_pace", lambda _: Pace(1.0, 1.0))
    monkeypatch.setattr(verify_module, "steps_needed", lambda _: 100)
    monkeypatch.setattr(verify_module, "_attempt", attempt)
    options = cli._job_options(cli.Run(recipe="r.py", workers=2, steps=told, run_dir=tmp_path / "runs"), "", None)
    (tmp_path / "runs").mkdir()
    assert verify_module.verify_faults(options, {"JAX_PLATFORMS": "cpu"}).exit_code == 1
    assert steps_tried == expected


class Jobs:
    """In place of `run_job`: notes what is run, and leaves what is read of it."""

    def __init__(self, patch: pytest.MonkeyPatch, stopped_at: int, exit_code: int, reason: str = SURVIVED) -> None:
        self.stopped_at, self.exit_code, self.reason = stopped_at, exit_code, reason
        self.ran: list[tuple[str, int | None, int, int | None]] = []
        checked = SimpleNamespace(batch_policy="fixed", faults=FaultConfig(), deterministic=False)
        patch.setattr(verify_module, "check", lambda *_: checked)
        patch.setattr(verify_module, "_pace", lambda _: Pace(0.01, 5.0))
        patch.setattr(verify_module, "run_job", self)
        patch.setattr(verify_module, "_verdict", lambda *_: Verified(verdict(), "", 0))

    def __call__(self, options: JobOptions, environ: Any) -> int:
        schedule = read_schedule(options.chaos) if options.chaos is not None else None
        stops = None if schedule is None else schedule.stop_after_steps
        self.ran.append((options.run_dir.name, options.steps, options.last_step, stops))
        is_disturbed = schedule is not None
        step = (self.stopped_at if is_disturbed else options.last_step) or options.steps
        is_short = step != options.steps
        ended = {"status": "stopped" if is_short else "done", "exit_code": 0, "step": step, "state_sha256": "a"}
        with RunDirectory(options.run_dir) as run:
            if schedule is not None:
                run.event("stop_asked", reason=self.reason)
            run.summary(ended)
        (options.run_dir / "ledger.jsonl").write_text(f'{{"step": {step}, "workers": [0]}}\n')
        return (self.exit_code if is_disturbed else 130) if is_short else 0


def verified(path: Path, *options: str) -> tuple[int, Path]:
    runs = path / "runs"
    argv = ["verify-faults", "r.py", "--workers", "2", "--run-dir", str(runs), *options]
    return cli.main(argv), runs


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_the_run_without_faults_ends_where_the_one_with_faults_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = Jobs(monkeypatch, stopped_at=321, exit_code=130)
    assert verified(tmp_path)[0] == 0
    steps = steps_needed(Pace(0.01, 5.0).gap(FaultConfig().keepalive_s))
    assert jobs.ran == [
        ("measure", 40, 0, None),
        ("disturbed", steps, 0, 10),
        ("undisturbed", steps, 321, None),
    ]
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("verify-faults: ")]
    assert told[0].startswith("verify-faults: first 40 steps without faults") and "5 faults" in told[0]
    assert told[1].startswith(
        "verify-faults: a step takes 0.01 s here, and a worker 5.0 s to start: the run with faults"
    )
    assert "takes about 40 s" in told[1] and "so that both take 70 s at most" in told[1]
    assert told[2].startswith(f"verify-faults: disturbed: at most {steps} steps with 2 workers and 5 faults (")
    assert told[3].startswith("verify-faults: undisturbed: the same 321 steps without faults, in about ")


def test_steps_that_are_asked_for_are_those_of_both_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch, stopped_at=0, exit_code=0)
    assert verified(tmp_path, "--steps", "500")[0] == 0
    assert jobs.ran == [("disturbed", 500, 0, None), ("undisturbed", 500, 0, None)]


def test_a_person_who_stops_it_has_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = Jobs(monkeypatch, stopped_at=50, exit_code=130, reason="SIGINT at the job's process")
    code, runs = verified(tmp_path)
    assert code == 130 and "verify-faults: stopped" in capsys.readouterr().out
    assert [name for name, *_ in jobs.ran] == ["measure", "disturbed"]
    assert verified(tmp_path)[0] == 2
    assert f"{runs} holds runs already" in capsys.readouterr().err


def test_a_run_that_failed_is_compared_as_far_as_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch, stopped_at=7, exit_code=4)
    verified(tmp_path)
    assert jobs.ran[-1][0] == "undisturbed" and jobs.ran[-1][2] == 10
