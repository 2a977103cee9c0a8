"""`elastic-train run --chaos FILE`: real faults where the file says, on record, and the same again from the record."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from job import FAULTY, UNSAVED, Job, plain_run, undisturbed_after

from elastic_train.chaos.schedule import parse_schedule

pytestmark = pytest.mark.timeout(300)

EXACT = """
[[fault]]
kind = "kill"
step = 20
slot = 1
where = "exchange"

[[fault]]
kind = "raise"
step = 30
slot = "last"
where = "compute"

[[fault]]
kind = "stop"
step = 40
slot = "first"
where = "barrier"
duration_s = 0.3
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def struck(job: Job) -> list[dict[str, Any]]:
    return [event["fault"] for event in job.events("fault_injected")]


def test_rows_01_07_08_strike_where_the_file_says_and_the_record_of_them_strikes_there_again(tmp_path):
    expected = [
        {"kind": "kill", "where": "exchange", "step": 20, "slot": 1},
        {"kind": "raise", "where": "compute", "step": 30, "slot": 2},
        {"kind": "stop", "where": "barrier", "step": 40, "slot": 0, "duration_s": 0.3},
    ]
    chaos = write(tmp_path / "chaos.toml", EXACT)
    digests = [undisturbed_after(60)["state_sha256"]]
    for name in ("first", "second"):
        options = ("--steps", "60", *UNSAVED, "--chaos", str(chaos))
        with Job(tmp_path / name, FAULTY, *options, workers=3) as job:
            assert job.finish() == 0, job.logs()
            assert struck(job) == expected, job.logs()
            assert [(event["slot"], event["exit_code"]) for event in job.events("worker_died")][:1] == [(1, -9)]
            assert [event["slot"] for event in job.events("user_code_failed")] == [2]
            assert job.events("faults_missed") == []
            assert job.processes_left() == []
            digests.append(job.summary["state_sha256"])
            chaos = tmp_path / name / "chaos" / "injected.toml"
    assert len(set(digests)) == 1
    assert [fault.as_table() for fault in parse_schedule(chaos.read_text()).faults] == expected


QUIETER = """
[[fault]]
kind = "nonfinite"
step = 10
slot = 1

[[fault]]
kind = "flip"
step = 20
slot = 2

[[fault]]
kind = "slow"
step = 22
slot = 0

[[fault]]
kind = "endless"
step = 80
slot = "last"
"""
"""Nobody dies of these at once."""

WATCHFUL = ("--set", "faults.keepalive_s=1.0", "faults.doubt_timeout_s=2.5", "faults.step_timeout_s=5.0")


def test_rows_11_13_14_22_wrong_numbers_slow_and_endless_workers_are_found_and_the_run_stays_exact(tmp_path):
    """The flipped bit is found in the step at which it was flipped, before anything was trained on it."""
    shards = ("--set", "shards=4")  # fewer of them are slow
    alone = plain_run(tmp_path / "alone", 90, *shards)
    chaos = write(tmp_path / "chaos.toml", QUIETER)
    options = (
        "--steps",
        "90",
        *UNSAVED,
        *shards,
        *WATCHFUL,
        "--set",
        "faults.fingerprint_every=20",
        "--chaos",
        str(chaos),
    )
    with Job(tmp_path / "run", FAULTY, *options, workers=3) as job:
        assert job.finish() == 0, job.logs()
        assert [(fault["kind"], fault["step"]) for fault in struck(job)] == [
            ("nonfinite", 10),
            ("flip", 20),
            ("slow", 22),
            ("endless", 80),
        ], job.logs()
        assert job.events("faults_missed") == []
        (bad,) = job.events("gradient_not_finite")
        assert (bad["step"], bad["slots"], bad["num_shards"], bad["action"]) == (10, [1], 1, "retry")
        (differs,) = job.events("state_differs")
        assert (differs["step"], differs["slots"], differs["num_key_paths"]) == (20, [2], 1)
        assert [event["slots"] for event in job.events("state_repaired")] == [[2]]
        (straggler,) = job.events("straggler")
        assert straggler["slot"] == 0, job.logs()
        (stuck,) = job.events("worker_stuck")
        assert (stuck["slot"], stuck["phase"], stuck["rule"]) == (2, "compute", "works")
        assert "in at" in (job.run_dir / stuck["log"]).read_text()
        assert [event["slot"] for event in job.events("worker_died")] == [2]
        assert job.summary["state_sha256"] == alone["state_sha256"]
        assert job.processes_left() == []


@pytest.mark.soak
def test_those_who_come_back_are_struck_too(tmp_path):
    """Slot 1 is killed; its successor receives a flipped bit, which is found, and it receives again; slot 2 leaves,
    and whoever comes for it is killed while the communicator with it is formed."""
    chaos = """
        [[fault]]
        kind = "kill"
        step = 10
        slot = 1
        [[fault]]
        kind = "corrupt"
        step = 10
        slot = "joiner"
    """
    options = ("--steps", "1000000", "--set", "faults.first_backoff_s=0.1")
    options = (*options, "--chaos", str(write(tmp_path / "chaos.toml", chaos)))
    with Job(tmp_path / "run", FAULTY, *options, workers=3, pace_s=0.03) as job:
        job.wait_event("fault_injected", kind="corrupt", slot=1, incarnation=1)
        job.wait_members(0, 1, 2)
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130, job.logs()
        assert job.events("digests_differ") == []
        assert len(job.events("worker_died")) == 1, job.logs()
        summary = job.summary
        assert summary["state_sha256"] == undisturbed_after(summary["step"])["state_sha256"]


@pytest.mark.soak
def test_faults_that_found_no_occasion_are_told(tmp_path):
    chaos = '[[fault]]\nkind = "kill"\nstep = 5\nslot = 0\nwhere = "heal"\n'
    options = ("--steps", "20", "--chaos", str(write(tmp_path / "chaos.toml", chaos)))
    with Job(tmp_path / "run", FAULTY, *options, workers=2) as job:
        assert job.finish() == 0, job.logs()
        ((missed,),) = [event["faults"] for event in job.events("faults_missed")]
        assert missed == {"kind": "kill", "where": "heal", "step": 5, "slot": 0}
        assert job.summary["faults_missed"] == [missed]
        assert "not tried   the fault kill (slot 0, heal, due at step 5) found no occasion" in job.output
