"""Jobs that end in any way, and the same command again: the run goes on, and ends as if nothing had been.

The undisturbed run that all are compared with is one plain process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.telemetry.json_files import read_lines
from tests.multiprocess.job import FAULTY, ROOT, Job, plain_run

STEPS = 150
EVERY = 10
OPTIONS = ("--steps", str(STEPS), "--set", f"checkpoint.every_steps={EVERY}", "--set", "eval_every=25")
PACE_S = 0.02


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    plain_run(run_dir, STEPS, "--set", "eval_every=25")
    return run_dir


def job(run_dir: Path, *more: str, workers: int = 3, pace_s: float = PACE_S, **options: Any) -> Job:
    return Job(run_dir, FAULTY, *OPTIONS, *more, workers=workers, pace_s=pace_s, **options)


def kill_all(running: Job) -> None:
    """SIGKILL to the process that holds coordinator and agent; the kernel ends the workers."""
    running.note_processes()
    running.process.kill()
    running.process.wait()
    assert running.processes_left() == []


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit())


def saves(running: Job, condition: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    return [event for event in running.events("checkpoint_saved") if condition(event)]


def elastic_train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_train", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def assert_as_undisturbed(run_dir: Path, plain: Path, steps: int = STEPS) -> None:
    """Same digests; each step once in ledger and metrics; loss, learning rate and evaluations as they were."""
    summary, expected = (json.loads((path / "summary.json").read_text()) for path in (run_dir, plain))
    assert summary["status"] == "done"
    for name in ("step", "samples", "params_sha256", "state_sha256", "final_loss", "metrics"):
        assert summary[name] == expected[name], name
    assert [line["step"] for line in read_lines(run_dir / "ledger.jsonl")] == list(range(1, steps + 1))
    curves = [
        [
            {
                k: v
                for k, v in line.items()
                if k in ("step", "samples", "loss", "learning_rate") or k.startswith("eval_")
            }
            for line in read_lines(path / "metrics.jsonl")
        ]
        for path in (run_dir, plain)
    ]
    assert curves[0] == curves[1]
    proof = elastic_train("ledger", "verify", str(run_dir))
    assert proof.returncode == 0, proof.stdout


@pytest.mark.parametrize(
    ("kills", "workers_at_last"),
    [([(1, 52)], 3), pytest.param([(3, 52), (1, 57)], 4, marks=pytest.mark.soak)],
    ids=["and once more", "and twice within one pass"],
)
def test_rows_16_17_killed_as_a_whole_and_resumed_with_other_numbers_of_workers(
    tmp_path: Path, plain: Path, kills: list[tuple[int, int]], workers_at_last: int
) -> None:
    """During a save, and in the second pass (of 21 steps). Dropout and a learning rate schedule are on.

    `kills`: by how many workers it is gone on with each time, and the step after which these are killed.
    """
    run_dir = tmp_path / "run"
    with job(run_dir, workers=2, pace_s=0.1) as first:
        first.wait_event("checkpoint_saved", step=EVERY)
        first.wait_for("the next save", lambda: list((run_dir / "checkpoints").glob("*.partial-*")))
        kill_all(first)
    newest = [saved_steps(run_dir)[-1]]
    for workers, step in kills:
        hold = {"slot": 0, "incarnation": -1, "step": step, "where": "data", "what": "slow", "seconds": 600.0}
        with job(run_dir, workers=workers, faults=[hold]) as running:
            running.wait_event("run_resumed", count=len(newest))
            running.wait_event("recovered", step=newest[-1] + 1)
            running.wait_event("checkpoint_saved", step=50)
            running.wait_step(step)
            kill_all(running)
            killed = running.lines("ledger.jsonl")[-1]
            assert (killed["step"], killed["pass"]) == (step, 2)
        newest.append(saved_steps(run_dir)[-1])
    assert set(newest[1:]) == {50}
    with job(run_dir, workers=workers_at_last, pace_s=0.0) as last:
        assert last.finish() == 0, last.logs()
        resumed = last.events("run_resumed")
        assert [(event["step"], event["samples"]) for event in resumed] == [(step, 48 * step) for step in newest]
        assert f"resuming from {run_dir}/checkpoints/{newest[-1]}" in last.output
        assert last.summary["resumes"] == 1 + len(kills)
        assert [event["step"] for event in last.events("checkpoint_loaded")] == newest
        starts = [(event["slot"], event["incarnation"]) for event in last.events("worker_starting")]
        num_starts = 2 + sum(workers for workers, _ in kills) + workers_at_last
        assert len(set(starts)) == len(starts) == num_starts
    assert saved_steps(run_dir) == [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]
    assert not list((run_dir / "checkpoints").glob("*.partial-*"))
    assert_as_undisturbed(run_dir, plain)
    again = elastic_train("run", str(FAULTY), *OPTIONS, "--run-dir", str(run_dir), "--resume", "never")
    assert again.returncode == 2 and "holds a run already" in again.stderr


def test_row_18_damage_a_failing_disk_and_the_death_of_who_saves(tmp_path: Path, plain: Path) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpoints = run_dir / "checkpoints"
    with job(run_dir, workers=2, pace_s=0.1) as running:
        running.wait_event("checkpoint_saved", step=EVERY)
        # Who saves dies in the middle of it: another member does so, and nothing is lost.
        running.wait_for("a save that has begun", lambda: list(checkpoints.glob("*.partial-*")))
        running.kill(0)
        running.wait_event("recovered", kind="death")
        saved = running.wait_for("a save by another", lambda: saves(running, lambda event: event["slot"] != 0))
        # The disk fails for a while.
        checkpoints.rename(elsewhere)
        checkpoints.write_text("in the way")
        failed = running.wait_event("checkpoint_failed")
        assert failed["error"] and failed["step"] > saved[0]["step"]
        at = running.lines("ledger.jsonl")[-1]["step"]
        running.wait_step(at + 5)
        checkpoints.unlink()
        elsewhere.rename(checkpoints)
        running.wait_for("a save", lambda: saves(running, lambda event: event["step"] > failed["step"]))
        assert "could not be saved" in running.output
        running.process.send_signal(signal.SIGTERM)
        assert running.finish() == 130, running.logs()
        step = running.summary["step"]
    assert saved_steps(run_dir)[-1] == step
    # One byte of the newest checkpoint flips.
    before = saved_steps(run_dir)[-2]
    files = (path for path in (checkpoints / str(step)).rglob("*") if path.is_file())
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))
    verified = elastic_train("checkpoint", "verify", str(run_dir))
    assert verified.returncode == 1 and f"{step}: DAMAGED" in verified.stdout and f"{before}: good" in verified.stdout
    with job(run_dir, workers=2, pace_s=0.0) as resumed:
        assert resumed.finish() == 0, resumed.logs()
        assert f"checkpoint {step} is damaged" in resumed.output and "expected" in resumed.output
        assert resumed.events("run_resumed")[-1]["step"] == before
        assert resumed.events("checkpoint_damaged")
    assert (checkpoints / f"{step}.damaged-1").is_dir()
    assert_as_undisturbed(run_dir, plain)


def test_row_19_sigterm_saves_and_the_orders_of_the_command_line(tmp_path: Path, plain: Path) -> None:
    run_dir = tmp_path / "run"
    with job(run_dir) as starting:
        starting.wait_event("worker_starting")
        starting.process.send_signal(signal.SIGTERM)
        assert starting.finish() == 130
        assert starting.processes_left() == []
    with job(run_dir, "--set", "checkpoint.every_steps=0", workers=2, pace_s=0.1) as running:
        running.wait_step(2)
        asked = elastic_train("save", str(run_dir))
        assert asked.returncode == 0, asked.stderr
        step, path = asked.stdout.strip().removeprefix("step ").split(": ")
        assert saved_steps(run_dir) == [int(step)] and path == str(run_dir / "checkpoints" / step)
        assert elastic_train("drain", str(run_dir), "--worker", "7").returncode == 2
        assert elastic_train("drain", str(run_dir), "--worker", "0").returncode == 0
        running.wait_members(1)
        running.wait_event("worker_died", slot=0)
        assert elastic_train("stop", str(run_dir)).returncode == 0
        assert running.finish() == 130, running.logs()
        stopped = running.summary
        assert (stopped["status"], stopped["exit_code"]) == ("stopped", 130)
        assert saved_steps(run_dir) == [int(step), stopped["step"]]
        assert not [e for e in running.events("restart_scheduled") if e["slot"] == 0]
        assert not [e for e in running.events("worker_died") if e["slot"] != 0]
    with job(run_dir, "--resume", "must", workers=1, pace_s=0.0) as resumed:
        assert resumed.finish() == 0, resumed.logs()
        assert resumed.events("run_resumed")[-1]["step"] == stopped["step"]
    assert_as_undisturbed(run_dir, plain)


def test_a_job_that_loses_all_members_goes_on_from_the_newest_checkpoint(tmp_path: Path, plain: Path) -> None:
    run_dir = tmp_path / "run"
    with job(run_dir, workers=2) as running:
        running.wait_event("checkpoint_saved", step=2 * EVERY)
        for slot in (0, 1):
            running.kill(slot)
        running.wait_event("group_lost")
        newest = saved_steps(run_dir)[-1]
        assert running.finish() == 0, running.logs()
        assert running.events("checkpoint_loaded")[0]["step"] >= newest
        for repeated in running.events("steps_repeated"):
            assert repeated["first_step"] > newest
    assert_as_undisturbed(run_dir, plain)


def test_a_plain_process_goes_on_as_well(tmp_path: Path, plain: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, str(FAULTY), *OPTIONS, "--run-dir", str(run_dir)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PACE_S": str(PACE_S)}
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        at_least, end = (saved_steps(run_dir) or [0])[-1] + 1, time.monotonic() + 120
        while not [step for step in saved_steps(run_dir) if step >= at_least]:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGTERM else -number)
    assert subprocess.run(command, env=environment, timeout=120, check=False).returncode == 0
    assert_as_undisturbed(run_dir, plain)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_row_17_killed_at_five_random_moments(tmp_path: Path, plain: Path) -> None:
    chance = random.Random(17)
    run_dir = tmp_path / "run"
    for _ in range(5):
        with job(run_dir, workers=chance.randint(1, 4)) as running:
            began = len(running.lines("ledger.jsonl"))
            running.wait_event("job_started", count=len(running.events("job_started")) or 1)
            after = chance.randint(0, 30)
            if after:
                until = min(began + after, STEPS - 1)
                running.wait_for("steps", lambda n=until: len(running.lines("ledger.jsonl")) >= n)
            time.sleep(chance.random() / 2)
            kill_all(running)
    with job(run_dir, workers=2, pace_s=0.0) as last:
        assert last.finish() == 0, last.logs()
    assert_as_undisturbed(run_dir, plain)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_row_17_killed_exactly_at_the_boundary_of_a_pass(tmp_path: Path) -> None:
    """Samples of a pass are a multiple of the batch: a checkpoint lies exactly between two passes."""
    run_dir, other = tmp_path / "run", tmp_path / "plain"
    options = ("--set", "batch_size=50", "--set", "checkpoint.every_steps=20")
    plain_run(other, 60, *options)
    for kill_at in (20, 40):
        with Job(run_dir, FAULTY, "--steps", "60", *options, workers=3, pace_s=0.05) as running:
            running.wait_event("checkpoint_saved", step=kill_at)
            kill_all(running)
    with Job(run_dir, FAULTY, "--steps", "60", *options, workers=2) as last:
        assert last.finish() == 0, last.logs()
        assert [event["step"] for event in last.events("run_resumed")] == [20, 40]
    digests = [json.loads((path / "summary.json").read_text())["state_sha256"] for path in (run_dir, other)]
    assert digests[0] == digests[1]


STAGES = (
    "job_started",
    "worker_starting",
    "worker_started",
    "worker_warming",
    "worker_ready",
    "view_changed",
    "recovered",
)
MOMENTS = (*STAGES, "training", "evaluation", "save", "below_floor")
"""What a job is doing when it is told to stop: from the start of the command on, compilation and all."""


def wait_moment(running: Job, moment: str, steps: int, before: int) -> None:
    """Waits until this start of the job, whose events come after the first `before`, is there.

    Where it trains, it has trained so many `steps` by then.
    """
    evaluating = "'where': 'evaluate'"
    seen = running.logs().count(evaluating)

    def noted(name: str) -> list[dict[str, Any]]:
        return [event for event in running.lines("events.jsonl")[before:] if event["event"] == name]

    for stage in STAGES:
        running.wait_for(stage, lambda name=stage: noted(name))
        if stage == moment:
            return
    first = noted("recovered")[0]["step"]
    running.wait_step(first + steps)
    if moment == "below_floor":
        running.kill(1)
        running.wait_for("the pause", lambda: noted("below_floor"))
    elif moment == "evaluation":
        running.wait_for("an evaluation", lambda: running.logs().count(evaluating) > seen)
    elif moment == "save":
        running.wait_for("a save", lambda: list((running.run_dir / "checkpoints").glob("*.partial-*")))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_row_19_sigterm_at_random_moments(tmp_path: Path) -> None:
    """Start-up, compilation, evaluation and saves included: always 130, always resumable, exact."""
    chance = random.Random(19)
    run_dir, other = tmp_path / "run", tmp_path / "plain"
    options = ("--set", f"checkpoint.every_steps={EVERY}", "--set", "eval_every=5")
    moments = [*MOMENTS, *chance.sample(MOMENTS, 20 - len(MOMENTS))]
    chance.shuffle(moments)
    # Not at the sample that is tried out before a worker is ready: some of the first evaluations.
    slow = {"slot": -1, "incarnation": -1, "where": "evaluate", "what": "slow", "seconds": 1.0, "after": 400}
    for number, moment in enumerate(moments):
        faults = [slow] if moment == "evaluation" else []
        workers, steps = chance.randint(2 if moment == "below_floor" else 1, 3), chance.randint(1, 12)
        floor = ("--min-workers", str(workers)) if moment == "below_floor" else ()
        before = len(read_lines(run_dir / "events.jsonl")) if run_dir.exists() else 0
        about: dict[str, Any] = {"workers": workers, "pace_s": 0.05, "faults": faults}
        with Job(run_dir, FAULTY, "--steps", "5000", *options, *floor, **about) as running:
            wait_moment(running, moment, steps, before)
            time.sleep(chance.random() / 2)
            told = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            assert running.finish() == 130, f"{number}: {moment}\n{running.logs()}"
            print(f"{number}: {moment}, {workers} workers: ended in {time.monotonic() - told:.1f} s", flush=True)
            assert running.processes_left() == []
    steps = saved_steps(run_dir)[-1] + 10
    with Job(run_dir, FAULTY, "--steps", str(steps), *options, workers=2) as last:
        assert last.finish() == 0, last.logs()
    plain_run(other, steps, "--set", "eval_every=5")
    assert_as_undisturbed(run_dir, other, steps)
