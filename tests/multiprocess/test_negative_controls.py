"""Each mechanism taken away in turn: the check that its test makes must then fail, and in the way that was expected.

The product has no switch for this. Workers take a mechanism away from themselves because the recipe `faulty.py` finds
`DISARM` in its environment; the coordinator's process is started with a patch before the command. The control of the
coordinator's own fence is in `test_fencing.py`.
"""

from __future__ import annotations

import pytest
from job import FAULTY, Job
from test_faults import STEPS, assert_exact, fault, run, undisturbed

from elastic_train.telemetry.blocks import DIRECTORY

__all__ = ["undisturbed"]  # a fixture

pytestmark = pytest.mark.timeout(300)

GOES_ON_S = 45.0
"""In which survivors must have committed a step. It takes them about a second on a machine that is not busy."""

NEVER = "faults.jax_heartbeat_timeout_s=600"
"""So that JAX's own detection does not do in time what our mechanism would have done."""

WITHOUT_TOMBSTONE = """
import subprocess, sys
from elastic_train.cli import main

PATCHED = '
import runpy
from elastic_train.coordinator.jax_service import JaxService
JaxService.tombstone = lambda self, node: None
runpy.run_module("elastic_train.launch.coordinator_process", run_name="__main__", alter_sys=True)
'
start = subprocess.Popen

def patched(command, *args, **kwargs):
    if command[1:3] == ["-m", "elastic_train.launch.coordinator_process"]:
        command = [sys.executable, "-c", PATCHED, *command[3:]]
    return start(command, *args, **kwargs)

subprocess.Popen = patched
sys.exit(main())
""".replace("'", "'''")
"""The coordinator is a process that the command starts."""


def assert_goes_on(job: Job, dead: int, *survivors: int) -> None:
    """The survivors commit steps soon after a death was declared."""
    job.wait_event("abort_sent", slot=dead)
    job.wait_members(*survivors, deadline_s=GOES_ON_S)


def test_without_the_vote_a_step_is_committed_that_lacks_a_part(tmp_path, undisturbed, monkeypatch):
    """As `test_worker_that_raises_once_is_retried`, but the flag that says so is not heeded."""
    monkeypatch.setenv("DISARM", "vote")
    with run(tmp_path, fault(1, "data", step=20, what="raise")) as job:
        assert job.finish() == 0, job.logs()
        with pytest.raises(AssertionError):
            assert_exact(job, undisturbed)
        # All members are wrong in the same way, so the digests of the run alone would not tell.
        assert job.events("digests_differ") == []
        assert [line["step"] for line in job.lines("ledger.jsonl")] == list(range(1, int(STEPS) + 1))
        assert job.summary["params_sha256"] != undisturbed["params_sha256"]


def test_without_the_fence_members_conclude_differently(tmp_path, monkeypatch):
    """As `test_exchange_that_fails_on_one_member_alone_costs_that_worker_only`, but that worker does not leave.

    The others have committed the step; it has not. What the harness makes of every job's barriers must say so.
    """
    monkeypatch.setenv("DISARM", "fence")
    differ = (
        r"NOT VALID: after barrier \d+ of epoch 1 node 1 .* concluded commit of step 21, then epoch 1 of nodes "
        r"\[1, 2, 3\], node 3 .* shrink of step 21, then epoch 2 of nodes \[1, 2, 3\]\."
    )
    with pytest.raises(AssertionError, match=differ), run(tmp_path, fault(2, "barrier", step=20, what="raise")) as job:
        job.wait_for("slot 2 to go on", lambda: ("shrink", 21) in verdicts(job, 2))
        job.wait_for("the others to commit", lambda: ("commit", 21) in verdicts(job, 0))


def verdicts(job: Job, slot: int) -> list[tuple[str, int | None]]:
    lines = job.lines(f"{DIRECTORY}/{slot}-0.jsonl")
    return [(line["verdict"], line["step"]) for line in lines if line["line"] == "concluded"]


@pytest.mark.soak
@pytest.mark.parametrize("armed", [True, False], ids=["with it", "without it"])
@pytest.mark.parametrize("mechanism", ["tombstone", "gloo abort"])
def test_a_death_is_survived_with_the_mechanism_and_not_without(tmp_path, monkeypatch, mechanism, armed):
    """The tombstone lets the barrier go on, the abort the collective that some of the survivors are in."""
    program = ("-m", "elastic_train.cli")
    if not armed and mechanism == "tombstone":
        program = ("-c", WITHOUT_TOMBSTONE)
    elif not armed:
        monkeypatch.setenv("DISARM", mechanism)
    options = ("--steps", "1000000", "--set", NEVER, "faults.doubt_timeout_s=300", "faults.step_timeout_s=400")
    options = (*options, "eval_every=10")
    # In the exchange all talk to all, so each sees that the dead one is gone. An evaluation's gather is a ring.
    killed = fault(0, "evaluate" if mechanism == "gloo abort" else "exchange", step=10)
    with Job(tmp_path / "run", FAULTY, *options, workers=4, faults=[killed], program=program) as job:
        if armed:
            assert_goes_on(job, 0, 1, 2, 3)
        else:
            with pytest.raises(AssertionError, match=rf"waited {GOES_ON_S:g} s for a step committed by slots"):
                assert_goes_on(job, 0, 1, 2, 3)
            assert [event["slot"] for event in job.events("worker_died")] == [0]
            # All wait in the barrier, or at least one of them still in the collective before it.
            last = {job.lines(f"{DIRECTORY}/{slot}-0.jsonl")[-1]["line"] for slot in (1, 2, 3)}
            assert last == {"enter"} if mechanism == "tombstone" else "concluded" in last
