"""The records of a job whose coordinator died, in the hands of the next one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_train.telemetry.json_files import read_lines
from elastic_train.telemetry.records import RunDirectory
from elastic_train.telemetry.summary import summarize


def record(step: int, **more: Any) -> dict[str, Any]:
    position = {"first_sample": 4 * (step - 1), "num_samples": 4, "passes": [[0, 4 * (step - 1), 4]], "pass_size": 100}
    about = {"loss": 1.0 / step, "learning_rate": 0.1, "workers": [0, 1], "epoch": 1, "time": 10.0 + step}
    return {"step": step, "samples": 4 * step, "step_time_s": 0.1, **position, **about, **more}


def written(run_dir: Path, steps: int) -> None:
    with RunDirectory(run_dir) as records:
        records.write_job({"address": "here"})
        records.event("job_started", workers=3)
        records.event("generation_began", generation=0, pid=1)
        records.event("worker_starting", slot=1, incarnation=4, node=9)
        records.event("view_changed", epoch=1, members=[0, 1], came=[0, 1])
        for step in range(1, steps + 1):
            recovered = {"recovered": {"epoch": 1, "kind": "formed", "came": [0, 1], "gone": []}} if step == 1 else {}
            records.commit(record(step, **recovered))


@pytest.mark.parametrize(("ledger", "metrics"), [(8, 8), (8, 5), (5, 8)])
def test_lines_that_were_broken_off_come_again_from_the_members(tmp_path: Path, ledger: int, metrics: int) -> None:
    run_dir = tmp_path / "run"
    written(run_dir, 8)
    for name, kept in (("ledger", ledger), ("metrics", metrics)):
        path = run_dir / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:kept]) + '{"step": 9, "sam')
    with RunDirectory(run_dir, continues=True) as records:
        # Two members send what they do not know to be on disk.
        for step in (*range(1, 10), *range(4, 11)):
            recovered = {"recovered": {"epoch": 1, "kind": "formed", "came": [0, 1], "gone": []}} if step == 1 else {}
            records.commit(record(step, **recovered))
    for name in ("ledger", "metrics"):
        assert [line["step"] for line in read_lines(run_dir / f"{name}.jsonl")] == list(range(1, 11)), name
    names = [event["event"] for event in read_lines(run_dir / "events.jsonl")]
    assert names.count("recovered") == 1 and "steps_repeated" not in names and "ledger_gap" not in names


def test_what_the_last_coordinator_knew(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    written(run_dir, 2)
    with RunDirectory(run_dir, continues=True) as records:
        records.event("drain_asked", slot=2, reason="asked")
        records.event("resized", before=3, workers=5, reason="asked")
        records.event("resized", before=5, workers=4, reason="asked")
        records.event("slot_given_up", slot=0, failures=9, exit_code=1)
        records.event("restart_scheduled", slot=1, failures=2, delay_s=0.0)
        records.event("checkpoint_saved", step=2)
        records.event("stop_asked", reason="SIGTERM")
    with RunDirectory(run_dir, continues=True) as records:
        past = records.past
        assert (past.generation, past.epoch, past.starts, past.step) == (0, 1, {1: 5}, 2)
        assert (past.workers, past.drained, past.given_up) == (4, {2, 4}, {0})
        assert (past.failures, past.saved_step, past.stop_asked, past.end) == ({1: 2}, 2, "SIGTERM", None)
        records.event("end", status="done", exit_code=0, message="done")
    with RunDirectory(run_dir, continues=True) as records:
        assert records.past.end is not None and records.past.end["exit_code"] == 0
    with RunDirectory(run_dir, resume=1) as records:  # another part begins with budgets of its own
        past = records.past
        assert (past.generation, past.drained, past.failures, past.stop_asked, past.end) == (
            0,
            frozenset(),
            {},
            "",
            None,
        )


def test_the_death_of_a_coordinator_is_a_fault_with_a_cost() -> None:
    events = [
        {"event": "job_started", "time": 0.0},
        {"event": "coordinator_lost", "time": 12.0, "reported_time": 10.0, "generation": 0, "exit_code": -9},
        {"event": "generation_began", "time": 12.0, "generation": 1},
        {"event": "recovered", "time": 20.0, "epoch": 2, "kind": "generation", "step": 8, "came": [], "gone": []}
        | {"rebuild_s": 0.5, "heal_s": 0.0},
    ]
    summary = summarize(events, [], {"status": "done", "exit_code": 0, "time": 30.0})
    assert json.loads(json.dumps(summary["faults"])) == [
        {"kind": "coordinator", "slot": None, "step": 7, "cause": None, "detect_s": 2.0, "rebuild_s": 0.5}
        | {"heal_s": 0.0, "total_s": 10.0}
    ]
    assert summary["time_lost_s"] == 10.0
