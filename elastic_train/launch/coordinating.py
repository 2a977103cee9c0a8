"""What the coordinator's process does: the run's records, the coordinator, and telling the command of both."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from elastic_train.checkpoint.resume import Resume
from elastic_train.config import FaultConfig
from elastic_train.coordinator import control_pb2
from elastic_train.coordinator.security import Tls
from elastic_train.coordinator.service import ROOM, Before, Coordinator, Endpoint
from elastic_train.launch.coordinator_process import (
    EXIT_NEXT,
    LAST_WORD_LIMIT_S,
    OTHER_HOSTS_LIMIT_S,
    TELL_INTERVAL_S,
    Task,
    node_ids,
)
from elastic_train.membership.roster import Limits, apply
from elastic_train.membership.roster_events import End
from elastic_train.telemetry.progress import Pace
from elastic_train.telemetry.records import RunDirectory
from elastic_train.telemetry.report import format_summary
from elastic_train.telemetry.trackers import open_trackers


class Messages(Protocol):
    """What the command is told."""

    def send(self, **message: Any) -> None: ...
    def note(self, text: str) -> None: ...
    def record(self, record: Mapping[str, Any]) -> None: ...
    def show(self, **status: Any) -> None: ...
    def close(self) -> None: ...


def serve(task: Task, messages: Messages, orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Serves one job until it has ended and the order to close comes.

    Raises ElasticTrainError: it cannot begin.
    """
    faults, run_dir = FaultConfig(**task.faults), Path(task.run_dir)
    resume = Resume.from_json(task.resume) if task.resume is not None else None
    with ExitStack() as stack:
        records = stack.enter_context(
            RunDirectory(
                run_dir,
                log_every=task.log_every,
                resume=resume.step if resume else None,
                continues=task.continues,
                trackers=open_trackers(task.tensorboard, run_dir),
                on_note=messages.note,
            )
        )
        past = records.past
        workers = past.workers or task.workers
        job = _JobRecords(records, messages, run_dir, task)
        _write_beginning(records, task, resume, messages)
        limits = Limits(
            workers,
            task.min_workers,
            faults,
            num_nodes=max(workers, faults.node_ids or node_ids(workers)) + 1,
            max_slots=task.max_workers,
            capacity=max(workers, ROOM),
        )
        coordinator = Coordinator(
            limits,
            job,
            Endpoint(secret=task.secret, bind=task.bind, host=task.host, tls=Tls(**task.tls), jax_tls=task.jax_tls),
            apply=apply,
            before=Before(
                past=past,
                has_checkpoints=task.has_checkpoints or past.saved_step > 0,
                returning=task.continues,
                stop_wanted=task.stop_wanted,
            ),
            on_note=messages.note,
            on_end=job.end,
            on_next_generation=lambda reason: _leave(records, messages),
            on_resized=lambda number: job.write_job(coordinator, number),
        )
        stack.callback(coordinator.close)
        job.write_job(coordinator, workers)
        if task.lost and past.end is None:
            about = {"exit_code": task.lost["exit_code"], "reported_time": task.lost["time"]}
            records.event("coordinator_lost", generation=past.generation, **about)
        num_ids = limits.num_nodes - 1
        about = {"generation": coordinator.generation, "pid": os.getpid(), "workers": workers, "node_ids": num_ids}
        if past.end is None:  # otherwise it is there to tell of the end
            records.event("generation_began", **about)
        messages.send(started={"address": coordinator.address, "generation": coordinator.generation})
        _serve(coordinator, job, messages, orders)


def _write_beginning(records: RunDirectory, task: Task, resume: Resume | None, messages: Messages) -> None:
    if task.continues:
        return
    records.write_config(task.config_toml)
    records.write_secret(task.secret)
    about = {"recipe": task.recipe, "trainer": task.trainer, "workers": task.workers, "platform": task.platform}
    records.event("job_started", **about)
    if resume:
        resume.tell(records.event, messages.note)
        records.fill_up(resume.step, resume.records)


def _serve(
    coordinator: Coordinator, job: _JobRecords, messages: Messages, orders: queue.SimpleQueue[dict[str, Any]]
) -> None:
    """Carries out orders and tells of the job, until the order to close comes."""
    has_told = False
    while True:
        try:
            order = orders.get(timeout=TELL_INTERVAL_S)
        except queue.Empty:
            order = {}
        match order:
            case {"close": _}:
                break
            case {"stop": {"now": now, "reason": reason}}:
                coordinator.ask_stop(now, reason)
            case {"event": [name, fields]}:
                job.event(name, **fields)
            case {"finish": _}:
                job.has_last_word.set()
        _show(coordinator, messages)
        if not has_told and (end := coordinator.wait(0)) is not None:
            has_told = True
            _tell_end(messages, end.exit_code, end.message, end.traceback, job.text)
    coordinator.wait_left(OTHER_HOSTS_LIMIT_S)


def _show(coordinator: Coordinator, messages: Messages) -> None:
    roster = coordinator.roster
    members = [worker.identity.slot for worker in roster.members]
    # A joiner is in the view before it has a state: if only such were left, all would be lost.
    able = {worker.identity for worker in roster.members if worker.first_step is not None}
    messages.show(
        step=coordinator.step,
        epoch=roster.view.epoch,
        workers=members,
        ready=members + [worker.identity.slot for worker in roster.ready],
        num_workers=roster.limits.num_slots,
        able=[list(member) for member in roster.view.members if member in able],
    )


def _tell_end(messages: Messages, exit_code: int, message: str, traceback: str, text: str = "") -> None:
    messages.send(ended={"exit_code": exit_code, "text": text or f"{message}\n{traceback}"})


def _leave(records: RunDirectory, messages: Messages) -> None:
    """Nobody is told: for workers and agents this is a coordinator that has died."""
    records.flush()
    messages.close()
    os._exit(EXIT_NEXT)


class _JobRecords:
    """Where the coordinator writes: the run directory, and what of it is shown."""

    def __init__(self, records: RunDirectory, messages: Messages, run_dir: Path, task: Task) -> None:
        self._records, self._messages, self._run_dir, self._task = records, messages, run_dir, task
        self._pace = Pace()
        self.text = ""
        """The summary, for a person; empty until the job has ended."""
        self.has_last_word = threading.Event()

    @property
    def flushed_step(self) -> int:
        return self._records.flushed_step

    @property
    def gap(self) -> tuple[int, int] | None:
        return self._records.gap

    def event(self, name: str, /, **fields: Any) -> None:
        self._records.event(name, **fields)

    def commit(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        written = self._records.commit(record)
        # A step that is taken again is shown, too, although it is not written again.
        self._show(written or ([record] if self._records.newest is record else []))
        return written

    def skip_gap(self) -> list[Mapping[str, Any]]:
        written = self._records.skip_gap()
        self._show(written)
        return written

    def write_job(self, coordinator: Coordinator, workers: int) -> None:
        """Writes how this coordinator is found, and with how many workers the job goes on."""
        task = self._task
        self._records.write_job(
            {
                "address": coordinator.address,
                "generation": coordinator.generation,
                "versions": task.versions,
                "tls": task.tls,
                "start_time": time.time(),
                "recipe": task.recipe,
                "workers": workers,
                "workers_asked": task.workers_asked,
                "alone": task.alone,
                "steps": task.steps,
                "pid": task.pid,
            }
        )

    def end(self, end: End, finished: Mapping[int, control_pb2.Finished]) -> None:
        """Writes the summary. The final state is that of the lowest slot among those that went furthest.

        One is there already if only those who were to be told of the end have lost their coordinator.
        """
        if (self._run_dir / "summary.json").exists():
            return
        if self._task.chaos:
            self._messages.send(ending={})
            self.has_last_word.wait(LAST_WORD_LIMIT_S)
        about: dict[str, Any] = {
            "status": end.status,
            "exit_code": end.exit_code,
            "message": end.message,
            "traceback": end.traceback,
            "versions": self._task.versions,
        }
        orderly = [report for _, report in sorted(finished.items()) if report.status in ("done", "stopped")]
        if orderly:
            final = max(orderly, key=lambda report: report.step)
            about |= {
                "step": final.step,
                "samples": final.samples,
                "params_sha256": final.params_sha256,
                "state_sha256": final.state_sha256,
                "metrics": json.loads(final.result or "{}"),
            }
        self.text = format_summary(self._records.summary(about), self._run_dir)

    def _show(self, records: list[Mapping[str, Any]]) -> None:
        for record in records:
            about = {"time_lost_s": self._records.time_lost_s, **self._pace.committed(record)}
            self._messages.record({**record, **about})
