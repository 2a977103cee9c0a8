"""Faults on real GPUs, with a state of several gigabytes: every run ends with the digests of an undisturbed one.

    python -m pytest tests/gpu -m gpu

One worker per GPU; with `CUDA_VISIBLE_DEVICES=0,0,0,0` four share one. `deterministic` is on, and all runs use the
programs that the undisturbed one has compiled.
"""

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from job import FAULTY, Job

from elastic_train.launch.devices import visible_gpus

MAX_WORKERS = 4
WORKERS = min(len(visible_gpus(os.environ)), MAX_WORKERS)
STEPS = 400
DEADLINE_S = 600.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(WORKERS < 2, reason="needs 2 GPUs, or one named twice in CUDA_VISIBLE_DEVICES"),
]

OPTIONS = ("--steps", str(STEPS), "--set", "deterministic=true", "ballast_gb=4", "faults.first_backoff_s=0.1")
WATCHFUL = (
    "--set",
    "faults.keepalive_s=2.0",
    "faults.doubt_timeout_s=10.0",
    "faults.step_timeout_s=20.0",
    "faults.first_step_timeout_s=300.0",
)
PACE_S = 0.1
"""A worker takes some twenty seconds to come back; the job must not have ended by then."""


def start(run_dir: Path, *faults: dict, compiled: Path | None = None, options: tuple[str, ...] = ()) -> Job:
    if compiled is not None:
        shutil.copytree(compiled, run_dir / "compiled")
    gpus = {"JAX_PLATFORMS": "cuda"}
    arguments = (*OPTIONS, *options)
    return Job(run_dir, FAULTY, *arguments, workers=WORKERS, faults=faults, pace_s=PACE_S, environ=gpus)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, dict]:
    """The programs and the summary of the run that all others must equal."""
    with start(tmp_path_factory.mktemp("undisturbed") / "run") as job:
        assert job.finish(DEADLINE_S) == 0, job.logs()
        assert job.summary["faults"] == []
        return job.run_dir / "compiled", job.summary


def assert_exact(job: Job, undisturbed: tuple[Path, dict]) -> None:
    assert job.finish(DEADLINE_S) == 0, job.logs()
    for digest in ("params_sha256", "state_sha256"):
        assert job.summary[digest] == undisturbed[1][digest], job.logs()
    assert job.events("digests_differ") == []
    assert [line["step"] for line in job.lines("ledger.jsonl")] == list(range(1, STEPS + 1))
    assert job.processes_left() == []


def wait_healed(job: Job, slot: int, after: float) -> None:
    """The slot's new worker has received its state."""

    def found() -> bool:
        return any(event["time"] > after and slot in event["healed"] for event in job.events("recovered"))

    job.wait_for(f"slot {slot} to be healed", found, DEADLINE_S)


def kinds(job: Job) -> list[tuple[str, int]]:
    return [(found["kind"], found["slot"]) for found in job.summary["faults"]]


def fault(slot: int, where: str, what: str, **more) -> dict:
    return {"slot": slot, "where": where, "what": what, **more}


def test_row_07_sigstop_of_a_worker_then_sigcont(tmp_path, undisturbed):
    """First shorter than the deadline, which is no fault, then for as long as it lives."""
    with start(tmp_path / "run", compiled=undisturbed[0], options=WATCHFUL) as job:
        job.wait_step(20)
        pid = job.worker_pid(1)
        os.kill(pid, signal.SIGSTOP)
        job.wait_for("the worker to be stopped", lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        os.kill(pid, signal.SIGCONT)
        job.wait_step(40)
        assert job.events("worker_died") == []
        zombie = psutil.Process(pid)
        stopped = job.kill(1, signal.SIGSTOP)
        job.wait_event("worker_died", slot=1, incarnation=0)
        if zombie.is_running():
            zombie.resume()
        wait_healed(job, 1, after=stopped)
        assert_exact(job, undisturbed)
        assert kinds(job) == [("stopped", 1)]


def test_row_13_endless_kernel(tmp_path, undisturbed):
    endless = fault(1, "shard", "endless", step=20)
    with start(tmp_path / "run", endless, compiled=undisturbed[0], options=WATCHFUL) as job:
        stuck = job.wait_event("worker_stuck", slot=1)
        assert stuck["phase"] == "compute"
        wait_healed(job, 1, after=stuck["time"])
        assert_exact(job, undisturbed)
        assert kinds(job) == [("stuck", 1)]
        assert "(most recent call first):" in (job.run_dir / stuck["log"]).read_text()


def test_row_08_worker_that_raises(tmp_path, undisturbed):
    """In Python, and in a callback from the device, when the exchange is queued behind it already."""
    raises = (
        fault(1, "data", "raise", step=20),
        fault(0, "hook", "raise", step=30),
        fault(1, "shard", "callback", step=40),
    )
    with start(tmp_path / "run", *raises, compiled=undisturbed[0]) as job:
        assert_exact(job, undisturbed)
        assert kinds(job) == [("raised", 1), ("raised", 0), ("raised", 1)]
        assert len(job.events("worker_started")) == WORKERS


@pytest.mark.skipif(WORKERS < 3, reason="a joiner and two donors need 3 GPUs, or one named three times")
def test_row_05_donor_killed_in_the_middle_of_a_transfer(tmp_path, undisturbed):
    """Slot 1 comes back; slot 0 dies when it has sent ten stripes of 64 MiB. The other donors are left."""
    dies = fault(0, "stripe", "kill", after=10)
    with start(tmp_path / "run", dies, compiled=undisturbed[0]) as job:
        job.wait_step(20)
        killed = job.kill(1)
        job.wait_event("worker_died", slot=0, incarnation=0)
        for slot in (0, 1):
            wait_healed(job, slot, after=killed)
        assert_exact(job, undisturbed)
        assert sorted(kinds(job)) == [("killed", 0), ("killed", 1)]
