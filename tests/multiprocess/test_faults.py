"""Workers die, raise and stop for real; the job goes on, and ends with the state of a run without faults.

JAX's own heartbeat timeout is 60 s in all of these: only our own detection can make them pass in time.
"""

import itertools
import re
import signal

import pytest
from job import FAULTY, UNSAVED, Job, undisturbed_after

pytestmark = pytest.mark.timeout(300)

STEPS = "60"
FAST_RESTARTS = ("--set", "faults.first_backoff_s=0.1")


@pytest.fixture(scope="session")
def undisturbed() -> dict[str, str]:
    """Digests that all runs must come to."""
    return undisturbed_after(int(STEPS))


def assert_exact(job: Job, undisturbed: dict) -> None:
    """The job ended well, as if nothing had happened, and left no process behind."""
    summary = job.summary
    assert summary["status"] == "done", job.logs()
    assert summary["params_sha256"] == undisturbed["params_sha256"], job.logs()
    assert summary["state_sha256"] == undisturbed["state_sha256"]
    assert job.events("digests_differ") == []
    steps = [line["step"] for line in job.lines("ledger.jsonl")]
    assert steps == list(range(1, int(STEPS) + 1))
    assert job.processes_left() == []


def fault(slot: int, where: str, step: int = -1, what: str = "kill", **more) -> dict:
    return {"slot": slot, "where": where, "step": step, "what": what, **more}


def run(
    tmp_path, *faults: dict, workers: int = 3, options: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> Job:
    arguments = ("--steps", STEPS, *FAST_RESTARTS, *UNSAVED, *options)
    return Job(tmp_path / "run", FAULTY, *arguments, workers=workers, faults=faults, environ=environ)


def kinds(job: Job) -> list[tuple[str, int]]:
    return [(found["kind"], found["slot"]) for found in job.summary["faults"]]


@pytest.mark.parametrize(
    ("slot", "where"),
    [
        (2, "barrier"),
        pytest.param(2, "data", marks=pytest.mark.soak),
        pytest.param(0, "hook", marks=pytest.mark.soak),
    ],
    ids=["2 before the barrier", "2 in compute", "0 after a commit"],
)
def test_row_01_sigkill_of_one_worker(tmp_path, undisturbed, slot, where):
    with run(tmp_path, fault(slot, where, step=20)) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert kinds(job) == [("killed", slot)]


def test_row_01_sigkill_in_the_exchange_after_which_no_shard_is_computed_again(tmp_path, undisturbed):
    """Slot 0's: all gradients of that step are there, and only those of its shards are missing."""
    with run(tmp_path, fault(0, "exchange", step=20), environ={"NOTE_READS": "1"}) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert kinds(job) == [("killed", 0)]
        reads = {slot: reads_of(job, slot, step=20) for slot in (1, 2)}
        # Shards 0-2 were slot 0's, 3-5 slot 1's, 6 and 7 slot 2's; then 0-3 are slot 1's and 4-7 slot 2's.
        per_shard = 48 // 8
        assert [len(reads[slot]) for slot in (1, 2)] == [(3 + 3) * per_shard, (2 + 2) * per_shard]
        assert all(len(set(ids)) == len(ids) for ids in reads.values()), "a sample was read twice for one step"
        (recovered,) = (event for event in job.events("recovered") if event["kind"] == "death")
        assert recovered["shards_reused"] == 1  # of slot 1, which tells of it: shard 3


def reads_of(job: Job, slot: int, step: int) -> list[int]:
    """Ids of the training samples that the first worker of a slot has read after the commit of `step`."""
    found = re.findall(rf"^read (\d+) after step {step}$", (job.run_dir / "logs" / f"{slot}-0.log").read_text(), re.M)
    return [int(index) for index in found]


def test_row_01_exchange_that_is_broken_off_without_an_error(tmp_path, undisturbed):
    """What it gives then is taken for nothing: not for votes, and not for a sum."""
    with run(tmp_path, fault(2, "exchange", step=20), environ={"QUIET": "1"}) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert kinds(job) == [("killed", 2)]
        logs = [(job.run_dir / "logs" / f"{slot}-0.log").read_text() for slot in (0, 1)]
        assert any("broken off without an error" in log for log in logs), job.logs()


def test_row_04_sigkill_of_all_but_one_in_the_same_step(tmp_path, undisturbed):
    with run(tmp_path, fault(0, "exchange", step=20), fault(1, "exchange", step=20)) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert sorted(kinds(job)) == [("killed", 0), ("killed", 1)]


def test_rows_01_04_sigkill_in_compute_and_a_second_while_the_survivors_rebuild(tmp_path, undisturbed):
    """Slot 1 dies as soon as it has learned that slot 0 is gone, before its first collective of the new epoch."""
    with run(tmp_path, fault(0, "data", step=20), fault(1, "gather", step=20)) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert kinds(job) == [("killed", 0), ("killed", 1)]


def test_row_02_sigkill_during_the_very_first_exchange(tmp_path, undisturbed):
    with run(tmp_path, fault(1, "gather", step=0)) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)


def endless(tmp_path, *faults: dict, options: tuple[str, ...] = ()) -> Job:
    """A job of three workers that goes on until it is asked to stop."""
    arguments = ("--steps", "1000000", *FAST_RESTARTS, *UNSAVED, *options)
    return Job(tmp_path / "run", FAULTY, *arguments, faults=faults, pace_s=0.03)


def healed(job: Job, slot: int, after: float) -> dict:
    """The event that tells that a slot's new worker has its state from its peers."""

    def found() -> dict | None:
        events = [e for e in job.events("recovered") if e["time"] > after and slot in e["healed"]]
        return events[0] if events else None

    return job.wait_for(f"slot {slot} to be healed", found)


def stop_and_compare(job: Job) -> None:
    """Stops the job after a commit. All members must hold the state of an undisturbed run of as many steps."""
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.logs()
    assert sorted(event["slot"] for event in job.events("worker_finished")) == [0, 1, 2]
    assert job.events("digests_differ") == []
    assert job.processes_left() == []
    summary = job.summary
    steps = [line["step"] for line in job.lines("ledger.jsonl")]
    assert steps == list(range(1, summary["step"] + 1))
    alone = undisturbed_after(summary["step"])
    assert summary["params_sha256"] == alone["params_sha256"]
    assert summary["state_sha256"] == alone["state_sha256"]


@pytest.mark.parametrize("slots", [(0,), pytest.param((2, 0, 1), marks=pytest.mark.soak)], ids=["slot 0", "all three"])
def test_row_03_killed_workers_rejoin_with_the_right_state(tmp_path, slots):
    """Each is killed once the one before is back."""
    with endless(tmp_path) as job:
        job.wait_step(10)
        for slot in slots:
            back = healed(job, slot, after=job.kill(slot))
            job.wait_step(back["step"] + 5)
        stop_and_compare(job)


@pytest.mark.soak
def test_row_04_all_but_one_killed_and_both_rejoin(tmp_path):
    with endless(tmp_path) as job:
        job.wait_step(10)
        first, second = job.kill(0), job.kill(2)
        job.wait_step(max(healed(job, 0, after=first)["step"], healed(job, 2, after=second)["step"]) + 5)
        stop_and_compare(job)


def test_row_05_joiner_and_then_a_donor_killed_while_the_joiner_is_healed(tmp_path):
    """Slot 1's second worker dies in the transfer to it, slot 0 in that to the third one; slot 2 is left as donor."""
    with endless(tmp_path, fault(1, "heal", incarnation=1), fault(0, "heal", incarnation=0, after=1)) as job:
        job.wait_step(10)
        killed = job.kill(1)
        job.wait_event("worker_died", slot=1, incarnation=1)
        died = job.wait_event("worker_died", slot=0)
        job.wait_step(max(healed(job, 0, after=died["time"])["step"], healed(job, 1, after=killed)["step"]) + 5)
        stop_and_compare(job)
        assert [(event["slot"], event["incarnation"]) for event in job.events("worker_died")] == [
            (1, 0),
            (1, 1),
            (0, 0),
        ]


@pytest.mark.soak
def test_row_05_joiner_killed_while_it_is_healed_tries_again(tmp_path):
    with endless(tmp_path, fault(1, "heal", incarnation=1)) as job:
        job.wait_step(10)
        killed = job.kill(1)
        job.wait_event("worker_died", slot=1, incarnation=1)
        job.wait_step(healed(job, 1, after=killed)["step"] + 5)
        stop_and_compare(job)


@pytest.mark.soak
def test_row_05_donor_killed_while_it_heals_a_joiner(tmp_path):
    """Slot 0 dies in the transfer to slot 1; slot 2 is left as donor."""
    with endless(tmp_path, fault(0, "heal", incarnation=0)) as job:
        job.wait_step(10)
        killed = job.kill(1)
        job.wait_event("worker_died", slot=0)
        job.wait_step(max(healed(job, 0, after=killed)["step"], healed(job, 1, after=killed)["step"]) + 5)
        stop_and_compare(job)


@pytest.mark.soak
def test_row_02_joiner_killed_before_it_meets_the_members(tmp_path):
    """Admitted by a committed step, and dead before its first collective: the others go on without it."""
    with endless(tmp_path, fault(1, "gather", incarnation=1)) as job:
        job.wait_step(10)
        killed = job.kill(1)
        job.wait_event("worker_died", slot=1, incarnation=1)
        job.wait_step(healed(job, 1, after=killed)["step"] + 5)
        stop_and_compare(job)


@pytest.mark.soak
def test_workers_that_all_die_at_the_same_step_are_given_up(tmp_path):
    options = ("--set", "faults.max_restarts=1", "faults.forgive_after_steps=5")
    with run(tmp_path, fault(-1, "data", step=12, what="die", always=True, incarnation=-1), options=options) as job:
        assert job.finish() == 4, job.logs()


def test_exchange_that_fails_on_one_member_alone_costs_that_worker_only(tmp_path, undisturbed):
    """Nobody has died, so the others may have committed: the worker must not guess, and comes back as new."""
    alone = fault(2, "exchange", step=20, what="raise")
    with run(tmp_path, alone, options=("--set", "faults.doubt_timeout_s=3.0", "faults.keepalive_s=1.0")) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert [(kind, slot) for kind, slot in kinds(job)] == [("exited", 2)]


@pytest.mark.soak
def test_row_07_stopped_worker_is_replaced_and_the_zombie_does_no_harm(tmp_path):
    """SIGSTOP: the process lives and holds its sockets, but answers nobody."""
    with endless(tmp_path, options=("--set", "faults.keepalive_s=1.0")) as job:
        job.wait_step(10)
        back = healed(job, 1, after=job.kill(1, signal.SIGSTOP))
        job.wait_step(back["step"] + 5)
        stop_and_compare(job)
        assert ("stopped", 1) in kinds(job)


@pytest.mark.soak
def test_row_16_killed_agent_leaves_no_process_behind(tmp_path):
    with Job(tmp_path / "run", FAULTY, "--steps", "100000", workers=3) as job:
        job.wait_step(5)
        job.process.kill()
        job.process.wait()
        assert len(job._seen) >= 3
        assert job.processes_left() == []


def test_row_20_below_the_floor_the_job_waits_for_the_missing_worker(tmp_path, undisturbed):
    with run(tmp_path, fault(2, "data", step=20), options=("--min-workers", "3")) as job:
        assert job.finish() == 0, job.logs()
        assert_exact(job, undisturbed)
        assert {tuple(line["workers"]) for line in job.lines("ledger.jsonl")} == {(0, 1, 2)}
        assert job.events("below_floor") and job.events("floor_reached")


@pytest.mark.soak
def test_row_20_ten_flaps_compile_the_same_each_time(tmp_path):
    """Below the floor and back, ten times: every flap compiles what crosses its members, and nothing else."""
    options = ("--steps", "100000", "--min-workers", "2", *FAST_RESTARTS, "faults.max_restarts=100")
    options += ("--set", "faults.compile_ahead=0")  # how much of that there is depends on the time between flaps
    with Job(tmp_path / "run", FAULTY, *options, workers=2, pace_s=0.02, environ={"JAX_LOG_COMPILES": "1"}) as job:
        log = job.run_dir / "logs" / "0-0.log"
        counts = []
        for flap in range(10):
            job.wait_event("recovered", count=flap + 1)  # of the epoch below the floor no step is committed
            job.wait_members(0, 1)
            counts.append(log.read_text().count("Finished XLA compilation"))
            job.kill(1)
            job.wait_event("below_floor", count=flap + 1)
            job.wait_event("floor_reached", count=flap + 1)
        per_flap = [after - before for before, after in itertools.pairwise(counts)]
        assert set(per_flap[1:]) == {per_flap[-1]}, per_flap
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 130, job.logs()
        assert all(line["workers"] == [0, 1] for line in job.lines("ledger.jsonl"))


def test_row_19_worker_that_is_asked_to_leave_goes_without_a_failed_step_and_comes_back(tmp_path):
    with endless(tmp_path) as job:
        job.wait_step(10)
        asked = job.kill(2, signal.SIGTERM)
        job.wait_event("worker_died", slot=2, exit_code=0)
        job.wait_event("recovered", kind="leave", gone=[2])
        job.wait_step(healed(job, 2, after=asked)["step"] + 5)
        stop_and_compare(job)
        assert job.events("worker_killed") == []  # as one that hangs would be


def test_row_19_the_evaluation_of_the_step_after_which_the_first_member_leaves_is_told(tmp_path):
    with endless(tmp_path, options=("--set", "eval_every=1")) as job:
        job.wait_step(5)
        asked = job.kill(0, signal.SIGTERM)
        job.wait_event("recovered", kind="leave", gone=[0])
        job.wait_step(healed(job, 0, after=asked)["step"] + 5)
        stop_and_compare(job)
        assert all("eval_loss" in line for line in job.lines("metrics.jsonl"))
