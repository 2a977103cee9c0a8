"""Checkpoints in an object store, where directories cannot be renamed in one moment.

The store is an emulator that speaks Google's protocol: package, Orbax and clients talk to it as to the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.job import FAULTY, ROOT, Job, undisturbed_after
from tests.multiprocess.object_store import BUCKET, ObjectStore

STEPS = 40
PLACE = f"gs://{BUCKET}/run"


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as there:
        yield there


def python(store: ObjectStore, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **store.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def checkpoint(store: ObjectStore, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(store, "-m", "elastic_train", "checkpoint", command, *arguments)


def test_rows_16_17_18_saved_killed_damaged_and_resumed(tmp_path: Path, store: ObjectStore) -> None:
    run_dir = tmp_path / "run"
    about = dict(environ=store.environ, workers=2)
    options = ("--steps", str(STEPS), "--set", f"checkpoint.path={PLACE}", "--set", "checkpoint.every_steps=10")
    hold = {"slot": 0, "incarnation": -1, "step": 22, "where": "data", "what": "slow", "seconds": 600.0}
    with Job(run_dir, FAULTY, *options, faults=[hold], **about) as running:
        running.wait_event("checkpoint_saved", step=20)
        running.note_processes()
        running.process.kill()
        running.process.wait()
        assert running.processes_left() == []
    assert not (run_dir / "checkpoints").exists()

    listed = checkpoint(store, "ls", str(run_dir))
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()[2:]] == ["10", "20"]
    damaged = "run/20/params/outer.kernel/c/0/0"
    store.flip_byte(damaged)
    verified = checkpoint(store, "verify", str(run_dir))
    assert verified.returncode == 1
    assert ["10: good" in verified.stdout, "20: DAMAGED" in verified.stdout] == [True, True]

    with Job(run_dir, FAULTY, *options, **about) as last:
        assert last.finish() == 0, last.logs()
        assert f"checkpoint 20 is damaged: it is kept as {PLACE}/20.damaged-1" in last.output
        assert f"resuming from {PLACE}/10: step 10" in last.output
        assert last.events("checkpoint_failed") == []
        assert last.summary["state_sha256"] == undisturbed_after(STEPS)["state_sha256"]
    listed = checkpoint(store, "ls", str(run_dir))
    assert [line.split()[0] for line in listed.stdout.splitlines()[2:5]] == ["20", "30", "40"]
    assert listed.stdout.endswith(f"set aside: {PLACE}/20.damaged-1\n")

    script = "import elastic_train as et, json, sys; print(json.dumps(sorted(et.load_params(sys.argv[1]))))"
    loaded = python(store, "-c", script, str(run_dir))
    assert loaded.returncode == 0, loaded.stderr
    assert "outer" in json.loads(loaded.stdout.splitlines()[-1])


def test_a_store_that_does_not_answer_is_an_error_before_any_worker_starts(tmp_path: Path, store: ObjectStore) -> None:
    options = ("--steps", "5", "--set", f"checkpoint.path=gs://{BUCKET}-of-others/run", "--resume", "must")
    with Job(tmp_path / "run", FAULTY, *options, workers=2, environ=store.environ) as running:
        assert running.finish() == 2
        assert f"gs://{BUCKET}-of-others/run" in running.output
