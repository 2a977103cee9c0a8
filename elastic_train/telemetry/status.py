"""What the workers of a job are doing now: asked of its coordinator, or read from its run directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError
from elastic_train.telemetry.json_files import read_lines
from elastic_train.telemetry.kinds import of_events
from elastic_train.telemetry.records import is_written
from elastic_train.telemetry.run_files import read_job, read_secret, read_summary, require_run_directory

DEADLINE_S = 3.0
"""How long the coordinator may take to answer."""


def live_status(run_dir: Path) -> dict[str, Any]:
    """The state of the job in `run_dir`.

    - `status`: running, done, stopped, failed or gave_up; "broken_off" if it has ended without saying how
    - `generation`, `epoch`, `step`, `total_steps` (None if unknown), `members` (slots)
    - `workers`: a list of `slot`, `pid`, `host`, `incarnation`, `state` (starting, warming, ready, member or dead),
      `step`; from the coordinator also `shard_time_s`, the seconds its own work takes per shard, None if unknown;
      of a job that has ended also `state_at_end`, the last state before that: "dead" if it had died by then

    The coordinator is asked. If the job has ended, or nobody answers at its address, the files say what was
    last known, with all workers dead. If it is there but does not answer in time, their last known states.

    Raises:
      UsageError: `run_dir` is no run directory, belongs to another user, or a file in it was changed.
    """
    require_run_directory(run_dir)
    job = _read_job(run_dir)
    if (run_dir / "summary.json").exists() or not job.get("address"):
        return status_from_files(run_dir, is_alive=not job.get("address") and is_written(run_dir))
    try:
        secret = read_secret(run_dir)
    except OSError as error:
        raise UsageError(
            f"cannot read {run_dir / 'secret'}: {error.strerror}; only the user who started the job may ask"
        ) from error
    import grpc  # takes a fifth of a second; a job that has ended does not need it

    from elastic_train.coordinator import calls, control_pb2, control_pb2_grpc, wire

    with calls.open_channel(run_dir, job, DEADLINE_S) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        metadata = wire.secret_metadata(secret)
        try:
            reply = stub.Status(control_pb2.StatusRequest(), timeout=DEADLINE_S, metadata=metadata)
        except grpc.RpcError as error:
            # Another code than a missed deadline: nobody is at the address, or another program is.
            is_slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
            return status_from_files(run_dir, is_alive=is_slow)
    return _completed(json.loads(reply.json), "running", job)


def status_from_files(run_dir: Path, *, is_alive: bool = False) -> dict[str, Any]:
    """What events.jsonl and ledger.jsonl say, in the form of `live_status`.

    Args:
      run_dir: the run directory.
      is_alive: the job is running; otherwise all workers are dead.
    """
    ledger = read_lines(run_dir / "ledger.jsonl", lambda line: {"step": int, "workers": [int]})
    status = replay(read_lines(run_dir / "events.jsonl", of_events(_KINDS)), ledger)
    job = _read_job(run_dir)
    if not is_alive:
        _end_with_the_job(status["workers"])
    return _completed(status, "running" if is_alive else _end(run_dir), job)


def _end_with_the_job(workers: Iterable[dict[str, Any]]) -> None:
    for worker in workers:
        worker.setdefault("state_at_end", worker["state"])
        worker["state"] = "dead"


def _completed(status: dict[str, Any], word: str, job: Mapping[str, Any]) -> dict[str, Any]:
    members = [worker["slot"] for worker in status["workers"] if worker["state"] == "member"]
    return {"status": word, **status, "total_steps": job.get("steps"), "members": members}


def _end(run_dir: Path) -> str:
    return read_summary(run_dir, {"status": str}).get("status", "broken_off")


def replay(events: Iterable[Mapping[str, Any]], ledger: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state after `events`, in the form of `live_status`. Pure.

    A worker's step is the last one it took part in; 0 while it has not.
    """
    workers: dict[int, dict[str, Any]] = {}
    has_joined: set[int] = set()
    epoch = generation = 0
    for event in events:
        name = event["event"]
        if name == "generation_began":
            generation = event["generation"]
        if name in ("job_started", "generation_began"):  # the job goes on with new workers
            workers, has_joined = {}, set()
        if name == "view_changed" and event["epoch"] > epoch:
            epoch = event["epoch"]
            for slot in set(event["members"]) & set(workers):
                if workers[slot]["state"] != "dead":
                    workers[slot]["state"] = "member"
                    has_joined.add(slot)
        elif name == "end":
            _end_with_the_job(workers.values())
        if name not in _STATES:
            continue
        slot, incarnation = event["slot"], event["incarnation"]
        worker = workers.get(slot)
        if worker is None or incarnation > worker["incarnation"]:
            worker = {"slot": slot, "pid": 0, "host": "", "incarnation": incarnation, "state": "", "step": 0}
            workers[slot] = worker
            has_joined.discard(slot)
        if incarnation < worker["incarnation"]:
            continue  # an old start of this slot
        worker |= {key: event[key] for key in ("pid", "host") if key in event}
        if _ORDER.index(_STATES[name]) > _ORDER.index(worker["state"]):
            worker["state"] = _STATES[name]
    step, last_steps = 0, dict[int, int]()
    for line in ledger:
        step = line["step"]
        last_steps |= dict.fromkeys(line["workers"], step)
    for slot in has_joined:
        workers[slot]["step"] = last_steps.get(slot, 0)
    ordered = [workers[slot] for slot in sorted(workers)]
    return {"generation": generation, "epoch": epoch, "step": step, "workers": ordered}


def format_status(status: Mapping[str, Any]) -> str:
    """A table for people, without a newline at the end."""
    total = "" if status["total_steps"] is None else f"/{status['total_steps']}"
    head = f"{_WORDS.get(status['status'], status['status'])}: step {status['step']}{total}, epoch {status['epoch']}"
    head += f", generation {status['generation']}"
    if status["status"] == "running":
        head += f", {len(status['members'])} of {len(status['workers'])} workers are members"
    columns = ("slot", "state", "step", "incarnation", "pid", "host")
    workers = [{**worker, "state": _state_for_people(worker, status)} for worker in status["workers"]]
    rows = [columns, *([str(worker[column]) for column in columns] for worker in workers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([head, "", *(line.rstrip() for line in lines)])


_WORDS = {"done": "finished", "gave_up": "gave up", "broken_off": "broken off"}


def _state_for_people(worker: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Of a job that has ended, neither who took part to its end is a casualty, nor who was still on the way."""
    if status["status"] == "running":
        return worker["state"]
    at_end = worker.get("state_at_end", worker["state"])
    if at_end in ("starting", "warming", "ready"):
        return f"was {at_end}"
    took_part = at_end == "member" or worker["step"] == status["step"] > 0
    return "finished" if took_part and status["status"] in ("done", "stopped") else worker["state"]


# Agent and worker report over streams of their own, so a state never goes back within one start of a worker.
_ORDER = ("", "starting", "warming", "ready", "member", "dead")
_STATES = {
    "worker_starting": "starting",
    "worker_started": "starting",
    "worker_warming": "warming",
    "worker_ready": "ready",
    "worker_died": "dead",
    "worker_exited": "dead",
}

_KINDS = {
    "generation_began": {"generation": int},
    "view_changed": {"epoch": int, "members": [int]},
    **{name: {"slot": int, "incarnation": int, "pid?": int, "host?": str} for name in _STATES},
}
"""What `replay` reads of events."""


def _read_job(run_dir: Path) -> dict[str, Any]:
    try:
        return read_job(run_dir)
    except FileNotFoundError:  # it holds a run all the same, if it has a ledger
        return {}
