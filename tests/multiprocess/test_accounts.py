"""What a real job says about itself: events, metrics, summary, status and the lines that a person reads."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from job import FAULTY, ROOT, Job

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """One worker is killed from outside and comes back, another one raises once; then the job is asked to stop."""
    raises = {"slot": 0, "where": "data", "step": 15, "what": "raise"}
    options = ("--steps", "100000", "--set", "log_every=1000", "--set", "eval_every=50")
    with Job(tmp_path_factory.mktemp("accounts") / "run", FAULTY, *options, workers=2, faults=[raises]) as job:
        job.wait_step(30)
        job.live = status(job)
        job.killed = job.kill(1)
        back = job.wait_event("recovered", kind="admission")
        job.wait_step(back["step"] + 60)
        job.process.terminate()
        assert job.finish() == 130, job.logs()
        yield job


def status(job: Job) -> dict:
    command = [sys.executable, "-m", "elastic_train.cli", "status", str(job.run_dir), "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60).stdout)


def test_the_summary_says_what_the_faults_cost(job):
    raised, killed = job.summary["faults"]
    assert (raised["kind"], raised["slot"], raised["step"]) == ("raised", 0, 15)
    # Its commit is in metrics.jsonl although only each thousandth is logged.
    assert 0 <= raised["total_s"] < 5
    assert (killed["kind"], killed["slot"]) == ("killed", 1)
    (after,) = (event for event in job.events("recovered") if event["kind"] == "death")
    assert killed["step"] == after["step"] - 1
    parts = [killed[name] for name in ("detect_s", "rebuild_s", "heal_s")]
    assert all(part >= 0 for part in parts)
    assert 0 < sum(parts) <= killed["total_s"] <= after["reported_time"] - job.killed


def test_the_summary_says_what_the_rejoin_cost(job):
    (rejoin,) = job.summary["rejoins"]
    (event,) = (event for event in job.events("recovered") if event["kind"] == "admission")
    assert (rejoin["slot"], rejoin["step"]) == (1, event["step"]) and event["healed"] == [1]
    assert 0 < event["heal_s"] <= rejoin["stall_s"] < rejoin["start_to_member_s"]


def test_the_figures_of_the_whole(job):
    summary, last = job.summary, job.lines("metrics.jsonl")[-1]
    assert summary["status"] == "stopped"
    assert summary["step"] == last["step"] == job.lines("ledger.jsonl")[-1]["step"]
    assert summary["final_loss"] == last["loss"] == summary["metrics"]["loss"]
    assert 0.05 < summary["goodput"] < 1
    assert summary["time_lost_s"] >= summary["faults"][1]["total_s"]


def test_evaluations_are_in_their_steps_lines(job):
    evaluated = {line["step"]: line["eval_loss"] for line in job.lines("metrics.jsonl") if "eval_loss" in line}
    assert sorted(evaluated) == list(range(50, job.summary["step"] + 1, 50))
    assert job.summary["metrics"]["eval_loss"] == evaluated[max(evaluated)]
    assert f"eval_loss {evaluated[max(evaluated)]:.4g}" in job.output


def test_every_transition_is_an_event_once(job):
    events = job.lines("events.jsonl")
    times = [event["time"] for event in events]
    assert times == sorted(times)
    counts = Counter(event["event"] for event in events)
    starts = {"worker_starting": 3, "worker_started": 3, "worker_warming": 3, "worker_ready": 3}
    ends = {"worker_died": 1, "worker_finished": 2, "worker_exited": 2, "end": 1}
    others = {"view_changed": 3, "recovered": 3, "user_code_failed": 1, "job_started": 1, "stop_asked": 1}
    expected = starts | ends | others
    assert {name: counts[name] for name in expected} == expected
    workers = [(e["event"], e["slot"], e["incarnation"]) for e in events if e["event"].startswith("worker_")]
    assert len(workers) == len(set(workers))


def test_status_tells_the_truth_while_the_job_runs_and_when_it_is_over(job):
    assert [worker["state"] for worker in job.live["workers"]] == ["member", "member"]
    assert job.live["step"] >= 30 and job.live["workers"][0]["step"] > 0
    over = status(job)
    assert [(worker["state"], worker["step"], worker["incarnation"]) for worker in over["workers"]] == [
        ("dead", over["step"], 0),
        ("dead", over["step"], 1),
    ]
    assert over["step"] == job.summary["step"]


def test_a_person_reads_few_lines(job):
    # JAX's own service writes there, too.
    lines = [line for line in job.output.splitlines() if line.startswith(("starting ", "step "))]
    assert lines[0] == "starting 2 workers (ready 0/2)"
    assert not any(line.startswith("step") and "members 0" in line for line in lines)
    epochs = [line.partition("epoch ")[2].split()[0] for line in lines if "epoch" in line]
    assert epochs == sorted(epochs) and set(epochs) == {"1", "2", "3"}
