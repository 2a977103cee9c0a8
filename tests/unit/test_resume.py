"""Where a run goes on, what it says, and what its files hold then."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_train.checkpoint import places, store
from elastic_train.checkpoint.differences import Kind, classify, differences
from elastic_train.checkpoint.manifest import Position, Run
from elastic_train.checkpoint.planning import plan
from elastic_train.checkpoint.resume import Resume
from elastic_train.checkpoint.snapshot import NamedArray
from elastic_train.config import CheckpointConfig, Config
from elastic_train.config_files import to_values
from elastic_train.errors import UsageError
from elastic_train.telemetry.json_files import read_lines
from elastic_train.telemetry.records import RunDirectory

VALUES = {"seed": 0, "batch_size": 8, "steps": 10, "width": 4}
KINDS = {"params/x": "float32[2]"}


def record(step: int, epoch: int = 1, **fields: Any) -> dict[str, Any]:
    about = {"samples": 4 * step, "first_sample": 4 * step - 4, "num_samples": 4, "passes": [[0, 4 * step - 4, 4]]}
    about |= {"loss": 1 / step, "workers": [0], "epoch": epoch, "time": 100.0 + step, "pass_size": 1000}
    return {"step": step, **about, **fields}


def save(run_dir: Path, step: int, records: tuple[str, ...] = ()) -> None:
    position = Position(
        step=step,
        samples=4 * step,
        pass_size=1000,
        epoch=1,
        generation=0,
        workers=(0,),
        metrics={},
        records=records,
    )
    run = Run(trainer="T", config=VALUES, config_digest="d", versions={})
    leaf = NamedArray(("params", "x"), np.full(2, step, np.float32))
    store.save(places.Path(run_dir / "checkpoints"), [leaf], position, run)


def a_run(run_dir: Path, steps: int) -> None:
    with RunDirectory(run_dir) as records:
        records.write_job({"address": None})
        records.event("job_started", recipe="r")
        records.event("worker_starting", slot=1, incarnation=2)
        records.event("view_changed", epoch=3, members=[1], came=[1], left=[], step=0)
        for step in range(1, steps + 1):
            records.commit(record(step))


def planned(run_dir: Path, mode: Any = "auto", values: dict[str, Any] = VALUES, kinds: Any = KINDS) -> Resume | None:
    return plan(run_dir, mode, CheckpointConfig(), values, lambda: kinds)


def test_a_new_run_begins(tmp_path: Path) -> None:
    assert planned(tmp_path) is None
    with pytest.raises(UsageError, match=r"no good checkpoint.*--resume must"):
        planned(tmp_path, "must")


def test_a_client_of_an_object_store_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match=r"gs://nowhere/run needs a package.*pip install 'elastic-train\[gcs\]'"):
        plan(tmp_path, "auto", CheckpointConfig(path="gs://nowhere/run"), VALUES, lambda: KINDS)


def test_it_goes_on_from_the_newest_good_checkpoint_and_says_so(tmp_path: Path) -> None:
    a_run(tmp_path, 9)
    for step in (3, 6, 9):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "9" / "manifest.json").write_text("")
    resume = planned(tmp_path, values={**VALUES, "steps": 20, "width": 5})
    assert resume is not None and (resume.step, resume.samples) == (6, 24)
    assert "checkpoint 9 is damaged" in resume.message and "manifest.json" in resume.message
    assert f"resuming from {tmp_path}/checkpoints/6: step 6, 24 samples seen" in resume.message
    assert "steps: 10 -> 20: safe" in resume.message
    assert "width: 4 -> 5: changes the numbers" in resume.message


def test_a_run_without_checkpoint_begins_again_unless_it_has_ended(tmp_path: Path) -> None:
    a_run(tmp_path, 5)
    resume = planned(tmp_path)
    assert resume == Resume() and "begins again at step 0" in resume.message
    (tmp_path / "summary.json").write_text(json.dumps({"status": "done"}))
    with pytest.raises(UsageError, match="a run that has ended"):
        planned(tmp_path)


def test_another_seed_and_another_model_are_refused(tmp_path: Path) -> None:
    a_run(tmp_path, 5)
    save(tmp_path, 5)
    with pytest.raises(UsageError, match=r"seed: 0 -> 1: refused \(the order"):
        planned(tmp_path, values={**VALUES, "seed": 1})
    with pytest.raises(UsageError, match=r"params/x: saved as float32\[2\]; float32\[3\]"):
        planned(tmp_path, kinds={"params/x": "float32[3]"})
    assert planned(tmp_path, kinds=None) is not None  # cannot be told before the model is built


def test_checkpoints_of_no_run_here_are_used_only_on_demand(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(UsageError, match="--resume must"):
        planned(tmp_path)
    resume = planned(tmp_path, "must")
    assert resume is not None and resume.step == 5


def test_every_setting_of_the_framework_has_a_class() -> None:
    kinds = {key: classify(key) for key in to_values(Config())}
    assert kinds["seed"] is Kind.REFUSED
    numbers = {key for key, kind in kinds.items() if kind is Kind.NUMBERS}
    nonfinite = {"faults.nonfinite", "faults.max_nonfinite_retries", "faults.max_skipped_steps"}
    assert numbers == {"batch_size", "batch_policy", "shards", "deterministic", "exchange_dtype"} | nonfinite


def test_differences_come_in_the_order_of_their_weight() -> None:
    found = differences({"seed": 1, "steps": 2, "lr": 3, "same": 4}, {"seed": 2, "steps": 3, "new": 1, "same": 4})
    assert [(d.key, d.kind) for d in found] == [
        ("seed", Kind.REFUSED),
        ("lr", Kind.NUMBERS),
        ("new", Kind.NUMBERS),
        ("steps", Kind.SAFE),
    ]


def go_on(run_dir: Path, resume: int, records: tuple[str, ...] = (), last: int = 10) -> None:
    with RunDirectory(run_dir, resume=resume) as run:
        run.event("job_started", recipe="r")
        run.fill_up(resume, records)
        assert run.past.epoch == 3 and run.past.starts == {1: 3}
        for step in range(resume + 1, last + 1):
            run.commit(record(step, epoch=4))
        run.summary({"status": "done", "exit_code": 0})


def test_no_step_is_missing_or_twice_after_a_resume(tmp_path: Path) -> None:
    a_run(tmp_path, 8)
    for name in ("events", "ledger", "metrics"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 9, "ev')  # the writer was killed
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "report.html").write_text("of the summary before")
    go_on(tmp_path, 5)
    for name in ("ledger", "metrics"):
        assert [line["step"] for line in read_lines(tmp_path / f"{name}.jsonl")] == list(range(1, 11))
        assert [line["step"] for line in read_lines(tmp_path / "replaced" / f"{name}-1.jsonl")] == [6, 7, 8]
    assert [line["epoch"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1] * 5 + [4] * 5
    (repeated,) = [event for event in read_lines(tmp_path / "events.jsonl") if event["event"] == "steps_repeated"]
    assert (repeated["first_step"], repeated["last_step"]) == (6, 8)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps_lost"] == 3 and summary["resumes"] == 1
    assert (tmp_path / "replaced" / "summary-1.json").read_text() == "{}"
    assert (tmp_path / "replaced" / "report-1.html").read_text() == "of the summary before"
    assert not (tmp_path / "report.html").exists()


def test_steps_that_only_the_checkpoint_knows_are_filled_in(tmp_path: Path) -> None:
    a_run(tmp_path, 3)
    go_on(tmp_path, 6, tuple(json.dumps(record(step)) for step in range(2, 7)))
    assert [line["step"] for line in read_lines(tmp_path / "ledger.jsonl")] == list(range(1, 11))
    assert not [event for event in read_lines(tmp_path / "events.jsonl") if event["event"] == "ledger_gap"]


def test_steps_that_nobody_knows_are_noted(tmp_path: Path) -> None:
    a_run(tmp_path, 3)
    go_on(tmp_path, 6, (json.dumps(record(6)),))
    (gap,) = [event for event in read_lines(tmp_path / "events.jsonl") if event["event"] == "ledger_gap"]
    assert (gap["first_step"], gap["last_step"]) == (4, 5)
    assert [line["step"] for line in read_lines(tmp_path / "ledger.jsonl")] == [1, 2, 3, 6, 7, 8, 9, 10]


def test_a_run_directory_can_begin_with_a_checkpoint(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, resume=6) as run:
        run.fill_up(6, (json.dumps(record(5)), json.dumps(record(6))))
        run.commit(record(7))
    assert [line["step"] for line in read_lines(tmp_path / "ledger.jsonl")] == [7]
