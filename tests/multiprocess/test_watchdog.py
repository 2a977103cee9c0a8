"""Workers that live, answer, and hold up all others: found from outside, their stacks written, replaced; exact."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from job import FAULTY, ROOT, Job
from test_faults import assert_exact, endless, fault, healed, kinds, run, stop_and_compare, undisturbed

__all__ = ["undisturbed"]

pytestmark = pytest.mark.timeout(300)

WATCHFUL = (
    "--set",
    "faults.keepalive_s=1.0",
    "faults.doubt_timeout_s=2.5",
    "faults.step_timeout_s=5.0",
    "faults.first_step_timeout_s=60.0",
)


def assert_found_stuck(job: Job, slot: int, phases: tuple[str, ...], frame: str) -> dict:
    """The slot's first worker, and nobody else, was found stuck; its stacks are where the event says."""
    (stuck,) = job.events("worker_stuck")
    assert (stuck["slot"], stuck["incarnation"]) == (slot, 0), job.logs()
    assert stuck["phase"] in phases
    assert kinds(job) == [("stuck", slot)]
    log = (job.run_dir / stuck["log"]).read_text()
    assert "(most recent call first):" in log
    assert frame in log
    assert "in run_member" in log  # the main thread, too
    assert f"worker {slot} (incarnation 0): stuck: " in job.output
    assert stuck["log"] in job.output
    return stuck


@pytest.mark.parametrize(
    "prefetch", [pytest.param(0, marks=pytest.mark.soak), 2], ids=["in the step", "in the thread that reads ahead"]
)
def test_row_12_python_deadlock_in_the_data_source(tmp_path, undisturbed, prefetch):
    options = (*WATCHFUL, "--set", f"prefetch={prefetch}")
    deadlock = fault(1, "data", step=20, what="deadlock")
    with run(tmp_path, deadlock, options=options) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        stuck = assert_found_stuck(job, 1, ("data",), "in strike")
        assert stuck["rule"] == "works"
        assert "faulty.py" in job.events("worker_died")[0]["reason"]


def test_row_12_c_code_that_keeps_the_interpreters_lock(tmp_path, undisturbed):
    """Its connection lives: gRPC answers without the interpreter. Its reports stop."""
    with run(tmp_path, fault(0, "data", step=20, what="hold"), options=WATCHFUL) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert kinds(job) == [("stuck", 0)]
        assert job.events("worker_stuck")[0]["rule"] == "silent"
        assert "in strike" in (job.run_dir / "logs" / "0-0.log").read_text()


@pytest.mark.soak
def test_row_12_python_deadlock_of_the_only_worker(tmp_path):
    """Nobody waits for it, and its state is lost with it: the run begins again."""
    deadlock = fault(0, "hook", step=5, what="deadlock")
    options = (*WATCHFUL, "--set", "faults.hook_timeout_s=5.0")
    with run(tmp_path, deadlock, workers=1, options=options) as job:
        assert job.finish() == 0, job.logs()
        assert_found_stuck(job, 0, ("hook",), "in strike")
        assert job.summary["steps_lost"] > 0


@pytest.mark.soak
def test_row_12_python_deadlock_in_an_evaluation(tmp_path, undisturbed):
    options = (*WATCHFUL, "--set", "faults.evaluate_timeout_s=5.0")
    with run(tmp_path, fault(2, "evaluate", step=60, what="deadlock"), options=options) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert_found_stuck(job, 2, ("evaluate",), "in strike")


@pytest.mark.soak
def test_row_13_endless_kernel(tmp_path, undisturbed):
    with run(tmp_path, fault(1, "shard", step=20, what="endless"), options=WATCHFUL) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert_found_stuck(job, 1, ("compute",), "in _begin")


@pytest.mark.soak
@pytest.mark.parametrize("slot", [2, pytest.param(0, marks=pytest.mark.soak)], ids=["the one chosen", "another"])
def test_a_collective_that_hangs_is_broken(tmp_path, undisturbed, slot):
    """All seem to wait for each other. Replacing the wrong one first throws those out that are not to blame."""
    with run(tmp_path, fault(slot, "exchange", step=20, what="deadlock"), options=WATCHFUL) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        found = [(stuck["slot"], stuck["rule"], stuck["phase"]) for stuck in job.events("worker_stuck")]
        others = [] if slot == 2 else [(2, "wait", "exchange")]
        assert found == [*others, (slot, "wait", "exchange")]
        assert "All members wait for each other" in job.output


SLOW = fault(2, "data", what="slow", always=True) | {"seconds": 0.03}
"""0.18 s for each shard of six samples, which else takes a millisecond."""


@pytest.mark.soak
def test_row_14_straggler(tmp_path, undisturbed):
    with run(tmp_path, SLOW) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        (straggler,) = job.events("straggler")
        assert straggler["slot"] == 2
        assert straggler["ratio"] > 3
        assert straggler["shard_s"] > 0.15
        assert "slot 2 on " in job.output and "is slow: " in job.output
        assert kinds(job) == []


@pytest.mark.soak
def test_row_14_straggler_is_evicted(tmp_path):
    with endless(tmp_path, SLOW, options=("--set", "faults.evict_stragglers=true")) as job:
        evicted = job.wait_event("worker_killed", slot=2, kind="slow")
        job.wait_step(healed(job, 2, after=evicted["time"])["step"] + 5)
        stop_and_compare(job)
        assert kinds(job) == [("slow", 2)]


@pytest.mark.soak
def test_row_07_short_stop_is_no_fault(tmp_path):
    """SIGSTOP, and SIGCONT before the deadline."""
    with endless(tmp_path) as job:
        job.wait_step(10)
        pid = job.worker_pid(1)
        os.kill(pid, signal.SIGSTOP)
        job.wait_for("the worker to be stopped", lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        os.kill(pid, signal.SIGCONT)  # at once: whatever takes long on a busy machine makes it a long stop
        stopped_at = job.lines("ledger.jsonl")[-1]["step"]
        job.wait_step(stopped_at + 5)
        stop_and_compare(job)
        assert kinds(job) == []


@pytest.mark.soak
def test_row_07_zombie_whose_agent_is_stopped_with_it(tmp_path):
    """As when a host hangs: nobody can kill the worker before it is declared dead. It wakes up when others have gone
    on without it, commits nothing, and exits; its slot returns as new."""
    with endless(tmp_path, options=("--slots", "0-1", "--set", "faults.keepalive_s=1.0")) as job:
        job.wait_for("the coordinator's address", lambda: (job.run_dir / "job.json").exists())
        with second_agent(job) as agent:
            job.wait_members(0, 1, 2)
            zombie = psutil.Process(job.worker_pid(2))
            agent.suspend()
            zombie.suspend()
            died = job.wait_event("worker_died", slot=2, incarnation=0)
            assert died["exit_code"] is None  # nobody has seen its end
            without_it = job.wait_members(0, 1)["step"]
            job.wait_step(without_it + 5)
            zombie.resume()
            job.wait_for("the zombie to exit", lambda: zombie.status() == psutil.STATUS_ZOMBIE)
            agent.resume()
            back = healed(job, 2, after=died["time"])
            between = [line for line in job.lines("ledger.jsonl") if without_it <= line["step"] < back["step"]]
            assert between and all(line["workers"] == [0, 1] for line in between), job.logs()
            job.wait_step(back["step"] + 5)
            stop_and_compare(job)
            assert agent.wait(60) == 130


class second_agent:
    """`elastic-train run --coordinator` for slot 2 of the job, as on another host."""

    def __init__(self, job: Job) -> None:
        address = json.loads((job.run_dir / "job.json").read_text())["address"]
        command = [sys.executable, "-m", "elastic_train.cli", "run", str(FAULTY), "--coordinator", address]
        command += ["--workers", "3", "--slots", "2", "--run-dir", str(job.run_dir)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PACE_S": "0.03", "JAX_PLATFORMS": "cpu"}
        environment["ELASTIC_TRAIN_TRACE_BLOCKS"] = "1"
        self._output = open(job.run_dir.with_suffix(".agent"), "a")  # noqa: SIM115
        self.process = psutil.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=environment)

    def __enter__(self) -> psutil.Popen:
        return self.process

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._output.close()
