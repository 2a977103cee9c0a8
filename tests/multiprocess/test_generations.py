"""The coordinator dies, runs out of node ids, or is told another number of workers: the job goes on, exactly.

The undisturbed run that all are compared with is one plain process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job import FAULTY, ROOT, UNSAVED, Job, plain_run

from elastic_train.config import FaultConfig
from elastic_train.errors import GaveUpError
from elastic_train.launch.coordinator_process import CoordinatorProcess, Task
from elastic_train.launch.supervisor import Supervisor
from elastic_train.telemetry.json_files import read_lines

pytestmark = pytest.mark.timeout(600)

STEPS = 120
OPTIONS = ("--steps", str(STEPS), "--set", "eval_every=20", "--set", "faults.first_backoff_s=0.1")
PACE_S = 0.05


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    plain_run(run_dir, STEPS, "--set", "eval_every=20")
    return run_dir


def job(run_dir: Path, *more: str, workers: int = 3, pace_s: float = PACE_S, **options: Any) -> Job:
    return Job(run_dir, FAULTY, *OPTIONS, *more, workers=workers, pace_s=pace_s, **options)


def kill_coordinator(running: Job, generation: int = 0) -> None:
    os.kill(running.wait_event("generation_began", generation=generation)["pid"], signal.SIGKILL)


def task_of(run_dir: Path, faults: FaultConfig) -> Task:
    """What the coordinator of a job of two workers is told."""
    recipe = {"recipe": "r", "trainer": "T", "platform": "cpu", "config_toml": "", "steps": 9}
    size = {"workers": 2, "workers_asked": 2, "alone": False, "chaos": False, "min_workers": 1, "max_workers": 8}
    new = {"resume": None, "continues": False, "lost": {}, "stop_wanted": "", "has_checkpoints": False}
    server = {"bind": "127.0.0.1:0", "host": "127.0.0.1", "secret": "s", "tls": {}, "jax_tls": False}
    shown = {"log_every": 1, "tensorboard": False, "versions": {}, "pid": os.getpid()}
    about = {"faults": dataclasses.asdict(faults), **shown}
    return Task(run_dir=str(run_dir), **recipe, **size, **new, **server, **about)


def wait_until(job: Supervisor, condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        job.tick()
        time.sleep(0.02)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "elastic_train", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def assert_as_undisturbed(running: Job, plain: Path) -> None:
    """Same digests, losses and evaluations; every step once, and none taken again."""
    assert running.finish() == 0, running.logs()
    summary, expected = running.summary, json.loads((plain / "summary.json").read_text())
    assert summary["status"] == "done"
    for name in ("step", "samples", "params_sha256", "state_sha256", "final_loss", "metrics", "steps_lost"):
        assert summary[name] == expected[name], name
    assert running.events("steps_repeated") == running.events("ledger_gap") == running.events("digests_differ") == []
    assert [line["step"] for line in running.lines("ledger.jsonl")] == list(range(1, STEPS + 1))
    curves = [
        [{k: v for k, v in line.items() if k in ("step", "loss") or k.startswith("eval_")} for line in lines]
        for lines in (running.lines("metrics.jsonl"), read_lines(plain / "metrics.jsonl"))
    ]
    assert curves[0] == curves[1]
    assert running.processes_left() == []


def test_row_15_coordinator_killed_loses_no_step(tmp_path: Path, plain: Path) -> None:
    """While an evaluation is due every 20 steps. Without any checkpoint: the state comes from the members."""
    with job(tmp_path / "run", *UNSAVED) as running:
        running.wait_step(30)
        kill_coordinator(running)
        lost = running.wait_event("coordinator_lost")
        assert lost["exit_code"] == -signal.SIGKILL
        running.wait_event("recovered", kind="generation")
        shown = json.loads(command("status", str(running.run_dir), "--json").stdout)
        assert (shown["generation"], shown["status"]) == (1, "running")
        assert_as_undisturbed(running, plain)
        (fault,) = running.summary["faults"]
        assert (fault["kind"], fault["slot"]) == ("coordinator", None) and fault["total_s"] > 0
        assert "the coordinator has died (signal 9)" in running.output


@pytest.mark.soak
def test_row_15_coordinator_that_cannot_be_restarted_ends_the_job(tmp_path: Path) -> None:
    events = tmp_path / "run" / "events.jsonl"
    restarts = ("--set", "faults.max_coordinator_restarts=2")
    with job(tmp_path / "run", *restarts, workers=2) as running:
        running.wait_step(5)
        pid = running.wait_event("generation_began")["pid"]
        events.rename(tmp_path / "events")
        events.mkdir()
        os.kill(pid, signal.SIGKILL)
        assert running.finish() == 4, running.logs()
        assert "gave up: the coordinator has died again" in running.output and "Is a directory" in running.output
        assert "after 2 restarts within 600 s" in running.output
        assert running.processes_left() == []
        events.rmdir()
        (tmp_path / "events").rename(events)


@pytest.mark.parametrize(
    ("first", "then", "node_ids"),
    [(1, 2, 1), pytest.param(2, 4, 0, marks=pytest.mark.soak)],
    ids=["node ids run out", "room enough"],
)
def test_resized_up_and_down(tmp_path: Path, plain: Path, first: int, then: int, node_ids: int) -> None:
    """In the first case there is no node id left for the new worker: the next generation begins."""
    with job(tmp_path / "run", "--set", f"faults.node_ids={node_ids}", *UNSAVED, workers=first) as running:
        running.wait_step(5)
        run_dir = str(running.run_dir)
        refused = command("resize", run_dir, "--workers", "9")
        assert refused.returncode == 2 and "shards = 8" in refused.stderr
        assert command("resize", run_dir, "--workers", str(then)).returncode == 0
        running.wait_members(*range(then))
        assert command("resize", run_dir, "--workers", "1").returncode == 0
        running.wait_members(0)
        assert_as_undisturbed(running, plain)
        # Workers that left on request are all that there is.
        assert {fault["kind"] for fault in running.summary["faults"]} <= {"exited"}
        assert running.events("user_code_failed") == running.events("restart_scheduled") == []
        assert [event["workers"] for event in running.events("resized")] == [then, 1]
        assert running.json("job.json")["workers"] == 1
        ended = [event["reason"] for event in running.events("generation_ended")]
        assert len(ended) == (1 if node_ids else 0) and all("node ids" in reason for reason in ended)


def test_resized_while_the_worker_that_stays_is_on_its_way(tmp_path: Path, plain: Path) -> None:
    """The only member is to leave: it hands the state on before, and the job does not end by that."""
    slow = {"slot": 0, "incarnation": 1, "where": "start", "what": "slow", "seconds": 3}
    with job(tmp_path / "run", *UNSAVED, workers=2, faults=[slow]) as running:
        running.wait_step(10)
        running.kill(0)
        running.wait_members(1)
        assert command("resize", str(running.run_dir), "--workers", "1").returncode == 0
        assert not [event for event in running.events("worker_ready") if event["incarnation"] == 1], "too late"
        running.wait_members(0)
        assert_as_undisturbed(running, plain)
        assert [event["left"] for event in running.events("view_changed") if event["left"]] == [[1]]


def test_row_15_coordinators_follow_one_another_within_a_budget(tmp_path: Path) -> None:
    """Without workers: the same address, what was asked for, and the end when none can begin any more."""
    faults = FaultConfig(max_coordinator_restarts=2, node_ids=2)
    events, aside, said = tmp_path / "run" / "events.jsonl", tmp_path / "events.jsonl", list[str]()
    job = Supervisor(CoordinatorProcess(), task_of(tmp_path / "run", faults), faults, lambda _: None, said.append)
    try:
        job.wait_begun()
        address = job.address
        for generation in (0, 1):
            (began,) = [e for e in read_lines(events) if e.get("generation") == generation and "pid" in e]
            if generation == 1:
                events.rename(aside)
                events.mkdir()
            os.kill(began["pid"], signal.SIGKILL)
            if generation == 0:
                wait_until(job, lambda: [e for e in read_lines(events) if e.get("generation") == 1])
                assert job.address == address == json.loads((tmp_path / "run" / "job.json").read_text())["address"]
        with pytest.raises(GaveUpError, match=r"Is a directory.*after 2 restarts within 600 s"):
            wait_until(job, lambda: False)
    finally:
        job.close()
    assert said[0].startswith("the coordinator has died (signal 9)") and len(said) == 2
    names = [event["event"] for event in read_lines(aside)]
    assert names == ["job_started", "generation_began", "coordinator_lost", "generation_began"]


@pytest.mark.soak
def test_row_15_coordinator_killed_twice_and_with_a_worker(tmp_path: Path, plain: Path) -> None:
    with job(tmp_path / "run", pace_s=0.1) as running:
        running.wait_step(20)
        kill_coordinator(running)
        running.wait_event("recovered", kind="generation")
        running.wait_step(50)
        running.kill(0)
        kill_coordinator(running, generation=1)
        running.wait_event("generation_began", generation=2)
        assert_as_undisturbed(running, plain)
        assert [fault["kind"] for fault in running.summary["faults"]].count("coordinator") == 2


@pytest.mark.soak
@pytest.mark.parametrize("where", ["start", "ready", "heal"])
def test_row_15_coordinator_killed_while_a_worker_comes_back(tmp_path: Path, plain: Path, where: str) -> None:
    """It is starting, waits to be admitted, or is being healed."""
    slow = {"slot": 1, "incarnation": 1, "where": "heal", "what": "slow", "seconds": 2}
    with job(tmp_path / "run", pace_s=0.1, faults=[slow] if where == "heal" else []) as running:
        running.wait_step(10)
        running.kill(1)
        if where == "start":
            running.wait_event("worker_started", slot=1, incarnation=1)
        elif where == "ready":
            running.wait_event("worker_ready", slot=1, incarnation=1)
        else:
            running.wait_event("view_changed", came=[1])
        kill_coordinator(running)
        assert_as_undisturbed(running, plain)


def test_row_15_coordinator_killed_while_the_last_workers_exit(tmp_path: Path, plain: Path) -> None:
    """The end is written, and the agent has not been told: the next one is there to tell it."""
    with job(tmp_path / "run", *UNSAVED, workers=2, pace_s=0.0) as running:
        running.wait_event("worker_finished", slot=1)
        running.kill(1, signal.SIGSTOP)  # the coordinator waits some seconds for its exit
        running.wait_event("end")
        kill_coordinator(running)
        running.kill(1, signal.SIGCONT)
        assert_as_undisturbed(running, plain)
        assert len(running.events("end")) == len(running.events("generation_began")) == 1
        assert "the coordinator has died (signal 9)" in running.output and "Traceback" not in running.output


@pytest.mark.soak
def test_row_15_coordinator_alone_is_started_again_by_hand(tmp_path: Path, plain: Path) -> None:
    """The command itself dies with its coordinator. The same command, and the hosts that wait for it, go on."""
    run_dir = tmp_path / "run"
    alone = ("--bind", "127.0.0.1:0")
    with job(run_dir, *alone, command="coordinator") as first:
        address = first.wait_for("job.json", lambda: first.json("job.json").get("address"))
        line = [sys.executable, "-m", "elastic_train", "run", str(FAULTY), *OPTIONS, "--workers", "3"]
        line += ["--coordinator", address, "--run-dir", str(run_dir)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PACE_S": str(PACE_S), "ELASTIC_TRAIN_TRACE_BLOCKS": "1"}
        host = subprocess.Popen(line, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            first.wait_step(30)
            first.process.kill()
            first.process.wait()
            with job(run_dir, "--bind", address, command="coordinator") as second:
                second.wait_event("recovered", kind="generation")
                assert_as_undisturbed(second, plain)
                assert host.wait(60) == 0
        finally:
            if host.poll() is None:
                host.kill()
            host.wait()


@pytest.mark.soak
def test_rows_16_17_first_host_killed_and_resumed_while_the_second_one_waits(tmp_path: Path, plain: Path) -> None:
    """The second one cannot tell this coordinator from the next of its job. The checkpoint counts, not what it kept."""
    run_dir = tmp_path / "run"
    (tmp_path / "second").symlink_to(run_dir)
    common = {"workers": 2, "environ": {"ELASTIC_TRAIN_SECRET": "what both hosts know"}}
    saved = ("--set", "checkpoint.every_steps=20")
    with job(run_dir, *saved, "--slots", "0", **common) as first:
        address = first.wait_for("job.json", lambda: first.json("job.json").get("address"))
        with job(tmp_path / "second", *saved, "--coordinator", address, "--slots", "1", **common) as second:
            first.wait_members(0, 1)
            first.wait_event("checkpoint_saved", step=40)
            first.wait_step(50)
            first.process.kill()
            first.process.wait()
            second.wait_for("the state that is kept", lambda: "Kept: the state of slot 1" in second.output)
            with job(run_dir, *saved, "--bind", address, "--slots", "0", **common) as again:
                resumed = again.wait_event("run_resumed")
                again.wait_members(0, 1)
                assert again.finish() == second.finish() == 0, again.logs()
                assert again.events("checkpoint_loaded")[-1]["step"] == resumed["step"] < STEPS
                assert again.events("ledger_gap") == again.events("state_carried") == []
                assert [line["step"] for line in again.lines("ledger.jsonl")] == list(range(1, STEPS + 1))
                expected = json.loads((plain / "summary.json").read_text())
                for name in ("step", "params_sha256", "state_sha256", "final_loss", "metrics"):
                    assert again.summary[name] == expected[name], name
