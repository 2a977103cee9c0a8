"""The run directory: who may write it, what its lines say, and in which order."""

from __future__ import annotations

import json
import math
import os
import random
import stat
import threading
import time
from pathlib import Path

import pytest

from elastic_train.errors import UsageError
from elastic_train.telemetry import records
from elastic_train.telemetry.json_files import read_lines
from elastic_train.telemetry.records import RunDirectory, is_run_directory, prepare_run_directory


def record(step: int, **fields: object) -> dict[str, object]:
    first = (step - 1) * 10
    values: dict[str, object] = {
        "step": step,
        "samples": step * 10,
        "loss": 1.0 / step,
        "learning_rate": 0.1,
        "workers": [0, 1],
        "epoch": 1,
        "step_time_s": 0.01,
        "time": 1000.0 + step,
        "first_sample": first,
        "num_samples": 10,
        "passes": [[0, first, 10]],
        "pass_size": 1000,
    }
    return values | fields


def ledger_steps(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path / "ledger.jsonl")]


def metric_steps(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path / "metrics.jsonl")]


def events(path: Path, name: str) -> list[dict[str, object]]:
    return [line for line in read_lines(path / "events.jsonl") if line["event"] == name]


def test_files_and_their_permissions(tmp_path):
    path = tmp_path / "runs" / "one"
    before = os.umask(0o077)
    try:
        with RunDirectory(path) as run:
            assert not is_run_directory(path)
            run.write_config("steps = 3\n")
            run.write_secret("word")
            run.write_job({"address": "127.0.0.1:1", "workers": 2})
            assert is_run_directory(path)
    finally:
        os.umask(before)
    assert (path / "logs").is_dir()
    assert (path / "secret").read_text() == "word"
    assert json.loads((path / "job.json").read_text())["workers"] == 2
    assert stat.S_IMODE((path / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((path / "job.json").stat().st_mode) == 0o644
    assert {entry.name for entry in path.iterdir()} == {
        "logs", "secret", "job.json", "config.toml", "events.jsonl", "metrics.jsonl", "ledger.jsonl",
    }  # fmt: skip


def test_events_are_on_disk_at_once(tmp_path):
    times = iter([5.0, 4.0, 6.0])
    with RunDirectory(tmp_path, clock=lambda: next(times)) as run:
        run.event("worker_ready", slot=1)
        run.event("worker_died", slot=1, reported_time=3.0)
        run.event("end")
        assert read_lines(tmp_path / "events.jsonl") == [
            {"time": 5.0, "event": "worker_ready", "slot": 1},
            # The clock was set back. Times ascend all the same.
            {"time": 5.0, "event": "worker_died", "slot": 1, "reported_time": 3.0},
            {"time": 6.0, "event": "end"},
        ]


def test_a_commit_makes_a_line_of_metrics_and_one_of_the_ledger(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.commit(record(1, accuracy=0.5, evaluation={"accuracy": 0.25}, loss=math.nan))
    assert read_lines(tmp_path / "ledger.jsonl") == [
        {"step": 1, "pass": 0, "first_sample": 0, "num_samples": 10, "pass_size": 1000, "workers": [0, 1]}
    ]
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {
            "step": 1, "samples": 10, "loss": None, "learning_rate": 0.1, "workers": [0, 1], "epoch": 1,
            "step_time_s": 0.01, "time": 1001.0, "accuracy": 0.5, "eval_accuracy": 0.25,
        }
    ]  # fmt: skip


def test_a_batch_that_crosses_passes_says_so(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.commit(record(1, passes=[[3, 95, 5], [4, 0, 5]]))
    (line,) = read_lines(tmp_path / "ledger.jsonl")
    assert (line["pass"], line["crosses"]) == (3, [[3, 95, 5], [4, 0, 5]])


def test_log_every_thins_metrics_but_not_the_ledger(tmp_path):
    with RunDirectory(tmp_path, log_every=5, resume=2) as run:
        run.fill_up(2, ())
        for step in range(3, 15):
            run.commit(record(step, **({"evaluation": {"loss": 1.0}} if step == 7 else {})))
            if step == 11:
                run.event("user_code_failed", slot=0, step=step)  # so the next one was tried again
    assert metric_steps(tmp_path) == [3, 5, 7, 10, 12, 14]
    assert ledger_steps(tmp_path) == list(range(3, 15))


def test_the_last_logged_step_is_not_written_twice(tmp_path):
    with RunDirectory(tmp_path, log_every=5) as run:
        for step in range(1, 11):
            run.commit(record(step))
    assert metric_steps(tmp_path) == [1, 5, 10]


@pytest.mark.parametrize("seed", range(5))
def test_order_is_restored_and_repeats_are_dropped(tmp_path, seed):
    steps = [*range(1, 101), *random.Random(seed).choices(range(1, 101), k=50)]
    random.Random(seed).shuffle(steps)
    with RunDirectory(tmp_path) as run:
        returned = [r["step"] for step in steps for r in run.commit(record(step))]
        assert run.gap is None
    assert returned == ledger_steps(tmp_path) == list(range(1, 101))
    assert events(tmp_path, "ledger_gap") == events(tmp_path, "steps_repeated") == []


def test_a_gap_is_given_up_when_too_many_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_HELD", 3)
    with RunDirectory(tmp_path) as run:
        run.commit(record(1))
        for step in (4, 5, 6):
            assert run.commit(record(step)) == []
        assert run.gap == (2, 3)
        assert [r["step"] for r in run.commit(record(7))] == [4, 5, 6, 7]
        (gap,) = events(tmp_path, "ledger_gap")
        assert (gap["first_step"], gap["last_step"]) == (2, 3)
        assert run.commit(record(2)) == []
    assert ledger_steps(tmp_path) == [1, 4, 5, 6, 7]


def test_a_gap_can_be_given_up_and_is_at_the_end(tmp_path):
    with RunDirectory(tmp_path) as run:
        assert run.skip_gap() == []
        run.commit(record(2))
        assert [r["step"] for r in run.skip_gap()] == [2]
        run.commit(record(4))
    assert ledger_steps(tmp_path) == [2, 4]
    assert [(e["first_step"], e["last_step"]) for e in events(tmp_path, "ledger_gap")] == [(1, 1), (3, 3)]


def test_recovered_becomes_an_event_once_per_epoch(tmp_path):
    recovered = {"epoch": 2, "kind": "death", "gone": [1], "came": [], "step": 0, "rebuild_s": 0.1}
    with RunDirectory(tmp_path) as run:
        run.commit(record(1, epoch=2, recovered=recovered))
        run.commit(record(1, epoch=2, recovered=recovered))
        run.commit(record(3, epoch=3, recovered={**recovered, "epoch": 3}))
    found = events(tmp_path, "recovered")
    # The step is the first one that was committed then.
    assert [(e["epoch"], e["step"], e["reported_time"]) for e in found] == [(2, 1, 1001.0), (3, 3, 1003.0)]
    assert "recovered" not in read_lines(tmp_path / "metrics.jsonl")[0]


def test_steps_trained_again_are_noted_not_written(tmp_path):
    with RunDirectory(tmp_path) as run:
        for step in range(1, 6):
            run.commit(record(step))
        for step in range(3, 8):
            run.commit(record(step, epoch=2))
    (repeat,) = events(tmp_path, "steps_repeated")
    assert (repeat["first_step"], repeat["last_step"], repeat["epoch"]) == (3, 5, 2)
    assert ledger_steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_steps_that_are_lost_more_than_once(tmp_path):
    with RunDirectory(tmp_path) as run:
        for epoch, first, last in [(1, 1, 5), (2, 1, 3), (3, 4, 4), (4, 2, 8)]:
            for step in range(first, last + 1):
                run.commit(record(step, epoch=epoch))
            run.commit(record(last, epoch=epoch))
    # Epoch 3 went on where epoch 2 was.
    repeats = [(e["first_step"], e["last_step"], e["epoch"]) for e in events(tmp_path, "steps_repeated")]
    assert repeats == [(1, 5, 2), (2, 4, 4)]
    assert ledger_steps(tmp_path) == list(range(1, 9))


def test_time_lost_is_known_while_the_job_runs(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.event("view_changed", epoch=1, members=[0, 1], came=[0, 1], step=0)
        died = {"step": 1, "state": "member", "exit_code": -9, "reported_time": 1000.5}
        run.event("worker_died", slot=1, incarnation=0, node=2, **died)
        run.event("view_changed", epoch=2, members=[0], came=[], step=0)
        assert run.time_lost_s == 0
        recovered = {"epoch": 2, "kind": "death", "gone": [1], "came": []}
        run.commit(record(1, epoch=2, recovered=recovered))
        assert run.time_lost_s == pytest.approx(0.5)


def test_lines_reach_the_disk_soon_without_further_calls(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.commit(record(1))
        deadline = time.monotonic() + 20
        while run.flushed_step < 1 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert run.flushed_step == 1
        assert ledger_steps(tmp_path) == [1]


def test_many_threads(tmp_path):
    with RunDirectory(tmp_path) as run:

        def send(offset: int) -> None:
            for step in range(1 + offset, 401, 4):
                run.commit(record(step))
                run.event("tick", step=step)

        threads = [threading.Thread(target=send, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert ledger_steps(tmp_path) == metric_steps(tmp_path) == list(range(1, 401))
    assert len(events(tmp_path, "tick")) == 400


def test_summary(tmp_path):
    times = iter([999.0, 1010.0])
    with RunDirectory(tmp_path, log_every=100, clock=lambda: next(times)) as run:
        run.event("job_started")
        for step in range(1, 6):
            run.commit(record(step))
        returned = run.summary({"status": "done", "exit_code": 0, "params_sha256": "ab"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == returned
    assert (summary["step"], summary["samples"], summary["final_loss"]) == (5, 50, 0.2)
    assert (summary["status"], summary["params_sha256"], summary["wall_s"]) == ("done", "ab", 11.0)
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_closing_twice_is_fine_and_ends_the_thread(tmp_path):
    run = RunDirectory(tmp_path)
    run.close()
    run.close()
    assert not run._flusher.is_alive()


@pytest.mark.parametrize("name", ["job.json", "ledger.jsonl"])
def test_a_directory_with_a_run_is_refused(tmp_path, name):
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(UsageError, match=r"holds a run already, and --resume never was given; give another --run-dir"):
        RunDirectory(tmp_path)


def test_what_a_failed_start_left_is_no_run(tmp_path):
    RunDirectory(tmp_path).close()
    assert not is_run_directory(tmp_path)
    RunDirectory(tmp_path).close()


def test_a_directory_in_use_is_refused(tmp_path):
    with RunDirectory(tmp_path), pytest.raises(UsageError, match="another job is writing"):
        RunDirectory(tmp_path)
    RunDirectory(tmp_path).close()


def test_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UsageError, match="it is a file"):
        prepare_run_directory(file)
    with pytest.raises(UsageError, match="cannot write"):
        prepare_run_directory(file / "below")


def test_an_unwritable_directory_is_refused():
    with pytest.raises(UsageError, match=r"cannot write the run directory /proc/none.*--run-dir"):
        prepare_run_directory(Path("/proc/none"))


def test_an_error_while_flushing_is_raised_by_the_next_call(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError("disk full")

    monkeypatch.setattr(run, "flush", fail)
    run.commit(record(1))
    assert failed.wait(20)
    run._flusher.join(timeout=20)
    with pytest.raises(OSError, match="disk full"):
        run.commit(record(2))
    monkeypatch.undo()
    with pytest.raises(OSError, match="disk full"):
        run.close()


def test_a_cut_off_last_line_is_left_out(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"a"')
    assert read_lines(file) == [{"a": 1}]
    file.write_text('{"a"\n{"a": 1}\n')
    with pytest.raises(UsageError, match=r"lines\.jsonl, line 1: not JSON"):
        read_lines(file)
    assert read_lines(tmp_path / "missing.jsonl") == []


def test_what_a_person_should_know_at_once(tmp_path):
    said: list[str] = []
    with RunDirectory(tmp_path, on_note=said.append) as run:
        for step in (1, 2, 3):
            run.commit(record(step))
        run.event("worker_started", slot=1, incarnation=1, node=3)
        run.event("view_changed", epoch=2, members=[0, 1], came=[1], step=3, reported_time=1003.1)
        recovered = {"epoch": 2, "kind": "admission", "gone": [], "came": [1], "rebuild_s": 0.1, "heal_s": 0.1}
        run.commit(record(4, epoch=2, recovered=recovered))
        assert said == ["worker 1 (incarnation 1) is a member again at step 4; the others waited 0.9 s"]
        run.commit(record(1, epoch=3))
    assert said[1] == "steps 1 to 4 are trained again: no member that had them is left"


def test_a_run_that_ends_while_steps_are_taken_again(tmp_path):
    with RunDirectory(tmp_path) as run:
        for step in (1, 2, 3, 4):
            run.commit(record(step))
        assert run.newest["step"] == 4
        again = record(1, epoch=2, loss=7.0)
        assert run.commit(again) == [] and run.newest is again
        summary = run.summary({"status": "stopped", "exit_code": 130})
    assert (summary["step"], summary["samples"], summary["final_loss"]) == (1, 10, 7.0)
