"""Checkpoints in an object store, where directories cannot be renamed in one moment.

The store is an emulator that speaks Google's protocol: package, Orbax and clients talk to it as to the real one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.job import DEADLINE_S, FAULTY, ROOT, Job, undisturbed_after
from tests.multiprocess.object_store import BUCKET, REFUSAL, ObjectStore

STEPS = 40
PLACE = f"gs://{BUCKET}/run"


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as there:
        yield there


def python(store: ObjectStore, *arguments: str) -> subprocess.CompletedProcess[str]:
    about = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, **store.environ, **about},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it writes the stacks of its threads
        stdout, stderr = process.communicate()
        raise AssertionError(f"{command} did not end within {DEADLINE_S:g} s\n{stdout}\n{stderr}") from None
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def checkpoint(store: ObjectStore, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(store, "-m", "elastic_train", "checkpoint", command, *arguments)


def test_rows_16_17_18_saved_killed_damaged_and_resumed(tmp_path: Path, store: ObjectStore) -> None:
    run_dir = tmp_path / "run"
    about = dict(environ=store.environ, workers=2)
    options = ("--steps", str(STEPS), "--set", f"checkpoint.path={PLACE}", "--set", "checkpoint.every_steps=10")
    hold = {"slot": 0, "incarnation": -1, "step": 22, "where": "data", "what": "slow", "seconds": 600.0}
    with Job(run_dir, FAULTY, *options, faults=[hold], **about) as running:
        running.wait_step(1)  # the start, which takes longest, has a wait of its own: the saves must not pay for it
        running.wait_event("checkpoint_saved", step=20)
        running.note_processes()
        running.process.kill()
        running.process.wait()
        assert running.processes_left() == []
    assert not (run_dir / "checkpoints").exists()

    listed = checkpoint(store, "ls", str(run_dir))
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()[2:]] == ["10", "20"]
    without = {**store.environ, "DISARM": "gcsfs"}
    with Job(run_dir, FAULTY, *options, workers=1, environ=without) as refused:
        assert refused.finish() == 3
        assert f"cannot start: elastic_train.errors.UsageError: {PLACE} needs a package that is" in refused.output
        assert "pip install 'elastic-train[gcs]'" in refused.output and "Traceback" not in refused.output

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


def run_in_store(run_dir: Path) -> Path:
    """A run directory, as far as commands that read checkpoints need it."""
    run_dir.mkdir()
    (run_dir / "job.json").write_text("{}")
    (run_dir / "config.toml").write_text(f'[checkpoint]\npath = "{PLACE}"\n')
    return run_dir


def test_a_store_that_refuses_is_an_error_before_any_worker_starts(tmp_path: Path, store: ObjectStore) -> None:
    run_dir = run_in_store(tmp_path / "read")
    script = "import elastic_train as et, sys; et.load_params(sys.argv[1])"
    store.refuse_all()
    reason = f"the checkpoints in {PLACE} cannot be read: HttpError: {REFUSAL}"
    options = ("--steps", "5", "--set", f"checkpoint.path={PLACE}")
    with Job(tmp_path / "run", FAULTY, *options, workers=2, environ=store.environ) as running:
        assert running.finish() == 2
        assert f"elastic-train: {reason}" in running.output and "Traceback" not in running.output
    for command in ("ls", "verify"):
        ended = checkpoint(store, command, str(run_dir))
        assert ended.returncode == 2
        assert f"elastic-train: {reason}" in ended.stderr and "Traceback" not in ended.stderr
    loaded = python(store, "-c", script, str(run_dir))
    assert f"elastic_train.errors.UsageError: {reason}" in loaded.stderr


def test_a_bucket_that_is_not_there_is_an_error_before_any_worker_starts(tmp_path: Path, store: ObjectStore) -> None:
    place = f"gs://{BUCKET}-of-others/run"
    options = ("--steps", "5", "--set", f"checkpoint.path={place}", "--resume", "must")
    with Job(tmp_path / "run", FAULTY, *options, workers=2, environ=store.environ) as running:
        assert running.finish() == 2
        assert f"elastic-train: there is no good checkpoint in {place}" in running.output


def test_a_client_that_stalls_in_a_request_holds_up_no_other_one(store: ObjectStore) -> None:
    """Of the emulator: a test that hangs in it says nothing about the package."""
    with socket.create_connection(("127.0.0.1", store.port)) as stalled:
        start = f"POST /upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=slow HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
        stalled.sendall(start.encode() + b"1")
        store.wait_for_log("name=slow: comes")
        store.put("quick", b"content")
        assert store.get("quick") == b"content"
        stalled.sendall(b"23456789")
        assert stalled.recv(15).startswith(b"HTTP/1.0 200 OK")


def test_what_other_processes_write_is_seen(store: ObjectStore) -> None:
    """The client keeps in memory what it has listed. A worker may look long before it loads."""
    script = """
import subprocess, sys
from elastic_train.checkpoint import places

root = places.Path(sys.argv[1])
write = "import sys; from etils import epath; [epath.Path(name).write_text('x') for name in sys.argv[1:]]"
for step in (10, 20):
    names = (str(root / str(step) / name) for name in ("manifest.json", "params"))
    subprocess.run([sys.executable, "-c", write, *names], check=True)
    print(places.saved_steps(root))
places.delete(root, 10)
print(places.saved_steps(root))
"""
    seen = python(store, "-c", script, PLACE)
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.splitlines() == ["[10]", "[10, 20]", "[20]"]
